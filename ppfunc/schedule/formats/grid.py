"""Draw a schedule as a grid of text: one row per rank, time to the right.

A schedule of nothing but compute stands on a scale of time: an instruction takes as many columns as
units of time, ``.`` is an idle unit, and ``-`` fills what an instruction takes beyond its name. Any
other one stands step by step, the instructions of a step joined by ``+``, so that nothing is left out;
so does one that cannot run, which has no times. Given a timeline, any schedule stands on its scale.
Instruction streams in the words of DeepSpeed name every instruction, step by step.
"""

from collections.abc import Container
from math import ceil, floor
from typing import NamedTuple

from ppfunc._checks import naming_arguments, require_counts

from ..costs import Costs
from ..errors import ScheduleError, require_schedule
from ..instruction import COMPUTE, KINDS, Instruction, Op
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule

_MOST = 50_000_000  # characters
_LEAST = 20  # columns of a grid that is drawn smaller


class Bar(NamedTuple):
    """Place an instruction in time: its start and end."""

    instruction: Instruction
    start: float
    end: float


@naming_arguments
def to_grid(schedule: Schedule | Timeline, *, width: int | None = None) -> str:
    """Return the grid of a schedule, one line per rank.

    Every compute instruction takes one unit; but where backwards are split in their two parts or
    overlapped, a whole one takes two units and a pair three.

    Args:
        schedule: schedule, or a timeline of a schedule, simulated or measured, whose shortest instruction is
            the unit.
        width: the most characters of a line. A longer grid on a scale of time is drawn smaller: an
            instruction has its name where that fits, else the letter of its kind, ``O`` for an overlapped
            pair, in every column.

    Raises:
        ValueError: a line would be longer and has no scale of time, or an instruction takes no time and has
            no place.

    >>> from ppfunc.schedule import gpipe, zb_h1
    >>> print(to_grid(gpipe(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  0B0 0B1 0B2
    rank 1   .  1F0 1F1 1F2 1B0 1B1 1B2  .
    >>> print(to_grid(zb_h1(ranks=2, microbatches=2)), end="")
    rank 0  0F0 0F1  .  0I0 0W0 0I1 0W1
    rank 1   .  1F0 1I0 1F1 1I1 1W0 1W1
    """
    if not isinstance(schedule, Timeline):
        require_schedule(schedule)
    if width is not None:
        require_counts(width=width)
    lines = _lines(schedule, width)
    longest = max(map(len, lines))
    if width is not None and longest > width:
        raise ValueError(
            f"the grid has {longest} columns, expected at most width = {width}; an SVG has any width"
        )
    return "".join(line + "\n" for line in lines)


def _lines(schedule: Schedule | Timeline, width: int | None) -> list[str]:
    if isinstance(schedule, Timeline):
        return _in_time(bars_of(schedule), width)
    if schedule.ops <= COMPUTE:
        whole = None if schedule.ops & {Op.I, Op.W, Op.OVERLAP_F_B} else 1
        try:
            return _in_time(bars_of(simulate(schedule, Costs(backward=whole))), width)
        except ScheduleError:
            pass  # saying what is wrong with it is the work of check
    rows = [["+".join(map(str, step)) or "." for step in program] for program in schedule.programs]
    steps = max(map(len, rows))
    widths = [max((len(row[step]) for row in rows if step < len(row)), default=0) for step in range(steps)]
    return _labelled(
        ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    )


def _in_time(rows: list[list[Bar]], width: int | None) -> list[str]:
    """Draw the lines of a grid on a scale of time, smaller if they would be longer than ``width``."""
    makespan = max(bar.end for row in rows for bar in row)
    try:
        lines = _in_units(rows)
        if width is None or max(map(len, lines)) <= width:
            return lines
    except ValueError:
        if width is None or not makespan:
            raise
    columns = width - len(f"rank {len(rows) - 1}  ")
    if columns < _LEAST:
        raise ValueError(
            f"width is {width}, expected at least {_LEAST + width - columns} for a grid of {len(rows)} ranks"
        )
    return _labelled([_in_columns(row, columns / makespan, columns) for row in rows])


def _in_units(rows: list[list[Bar]]) -> list[str]:
    bars = [bar for row in rows for bar in row]
    none = next((bar for bar in bars if bar.end <= bar.start), None)
    if none is not None:
        raise ValueError(
            f"{none.instruction} takes no time, so it has no place in a grid; use an SVG, or costs above 0"
        )
    unit = min((bar.end - bar.start for bar in bars), default=1.0)
    exact = all(abs(time / unit - round(time / unit)) < 1e-6 for bar in bars for time in bar[1:])
    # The widest bar in relation to its time decides how wide a unit is; one that begins within a unit loses a
    # part of a column.
    wanted = (len(_name(bar)) + (1 if exact else 2) for bar in bars)
    cell = max(
        (ceil(n * unit / (bar.end - bar.start) - 1e-6) for n, bar in zip(wanted, bars, strict=True)),
        default=0,
    )
    length = ceil(max((bar.end for bar in bars), default=0) / unit - 1e-6)
    if length * cell * len(rows) > _MOST:
        raise ValueError(
            f"the grid would have {length * cell} columns: the shortest instruction is too short; use an SVG"
        )
    return _labelled(["".join(_row(row, unit, cell, length)) for row in rows])


def _row(row: list[Bar], unit: float, cell: int, length: int) -> list[str]:
    """Draw a line with ``cell`` characters for each unit of time."""
    line = [" "] * (length * cell)
    for bar in row:
        start, end = (floor(time / unit * cell + 1e-6) for time in bar[1:])
        line[start:end] = _name(bar).ljust(end - start - 1, "-") + " "
    for at in range(0, length * cell, cell):
        if line[at : at + cell] == [" "] * cell:
            line[at : at + cell] = ".".center(cell - 1).ljust(cell)
    return line


def _in_columns(row: list[Bar], scale: float, columns: int) -> str:
    """Draw a line with ``scale`` characters for each unit of time."""
    line = ["."] * columns
    for bar in row:
        start = min(floor(bar.start * scale), columns - 1)
        room, name = max(floor(bar.end * scale), start + 1) - start, _name(bar)
        letter = "O" if bar.instruction.parts else bar.instruction.op.value
        line[start : start + room] = f"{name:-<{room - 1}} " if len(name) < room else letter * room
    return "".join(line)


def _name(bar: Bar) -> str:
    return ";".join(map(str, bar.instruction.parts or (bar.instruction,)))


def _labelled(lines: list[str]) -> list[str]:
    margin = len(f"rank {len(lines) - 1}")
    return [f"{f'rank {rank}'.ljust(margin)}  {line}".rstrip() for rank, line in enumerate(lines)]


def bars_of(timeline: Timeline, ops: Container[Op] = COMPUTE) -> list[list[Bar]]:
    """Return the instructions of these kinds of every rank, in order, as ``timeline`` places them."""
    return [
        [
            Bar(instruction, float(start), float(end))
            for instruction, start, end in row
            if instruction.op in ops
        ]
        for row in timeline.rows()
    ]


@naming_arguments
def to_steps(schedule: Schedule) -> str:
    """Write a schedule in the form of DeepSpeed's instruction streams: every rank, step by step.

    A line ``rank R``, then a line per step, its instructions separated by blanks, or ``-`` for an empty step.
    An operation on a buffer names its slot, as in ``ForwardPass(buffer_id=0)``; one without a slot names its
    microbatch, ``ForwardPass(micro_batch_id=3)``. What belongs to a whole stage has empty parentheses,
    ``OptimizerStep()``. On a rank that holds several stages each names its own,
    ``ForwardPass(stage_id=2, micro_batch_id=3)``. An operation that DeepSpeed has no name for keeps its
    token, ``0W3``.

    >>> from ppfunc.schedule import gpipe
    >>> print(to_steps(gpipe(ranks=1, microbatches=1)), end="")
    rank 0
    ForwardPass(micro_batch_id=0)
    BackwardPass(micro_batch_id=0)
    """
    require_schedule(schedule)
    lines = []
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}")
        several = len(schedule.stages_of(rank)) > 1
        lines += [" ".join(_call(i, several) for i in step) or "-" for step in program]
    return "\n".join(lines) + "\n"


def _call(instruction: Instruction, several: bool) -> str:
    kind = KINDS[instruction.op]
    if not kind.deepspeed:
        return str(instruction)
    arguments = [f"stage_id={instruction.stage}"] if several else []
    if instruction.slot is not None:
        arguments.append(f"buffer_id={instruction.slot}")
    elif kind.microbatch:
        arguments.append(f"micro_batch_id={instruction.microbatch}")
    return f"{kind.deepspeed}({', '.join(arguments)})"
