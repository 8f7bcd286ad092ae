"""Draw a schedule as a grid of text: one row per rank, time to the right.

A schedule of nothing but compute stands on a scale of time: an instruction takes as many columns as
units of time, ``.`` is an idle unit, and ``-`` fills what an instruction takes beyond its name. Any
other one stands step by step, the instructions of a step joined by ``+``, so that nothing is left out;
so does one that cannot run, which has no times.
"""

from collections.abc import Container
from typing import NamedTuple

from ..costs import Costs
from ..errors import ScheduleError
from ..instruction import COMPUTE, Instruction, Op
from ..schedule import Schedule
from ..simulate import Timeline, simulate


class Bar(NamedTuple):
    """One instruction in time."""

    instruction: Instruction
    start: float
    end: float


def to_grid(schedule: Schedule) -> str:
    """Return the grid of ``schedule``, one line per rank.

    Every compute instruction takes one unit; but where backwards are split in their two parts or
    overlapped, a whole one takes two units and a pair three.

    >>> from ppfunc.schedule import gpipe, zb_h1
    >>> print(to_grid(gpipe(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  0B0 0B1 0B2
    rank 1   .  1F0 1F1 1F2 1B0 1B1 1B2  .
    >>> print(to_grid(zb_h1(ranks=2, microbatches=2)), end="")
    rank 0  0F0 0F1  .  0I0 0W0 0I1 0W1
    rank 1   .  1F0 1I0 1F1 1I1 1W0 1W1
    """
    if schedule.ops <= COMPUTE:
        whole = None if schedule.ops & {Op.I, Op.W, Op.OVERLAP_F_B} else 1
        try:
            return _in_time(compute_bars(schedule, simulate(schedule, Costs(backward=whole))))
        except ScheduleError:
            pass  # saying what is wrong with it is the work of check
    return _in_steps([["+".join(map(str, step)) or "." for step in program] for program in schedule.programs])


def _in_time(rows: list[list[Bar]]) -> str:
    bars = [bar for row in rows for bar in row]
    # The widest bar in relation to its time decides how wide a unit is.
    unit = max((-(-(len(_name(bar)) + 1) // int(bar.end - bar.start)) for bar in bars), default=0)
    length = int(max((bar.end for bar in bars), default=0))
    lines = []
    for row in rows:
        cells = [".".center(unit - 1) + " "] * length
        for bar in row:
            start, end = int(bar.start), int(bar.end)
            cells[start:end] = [_name(bar).ljust((end - start) * unit - 1, "-") + " ", *[""] * (end - start - 1)]
        lines.append("".join(cells))
    return _labelled(lines)


def _name(bar: Bar) -> str:
    return ";".join(map(str, bar.instruction.parts or (bar.instruction,)))


def _in_steps(rows: list[list[str]]) -> str:
    steps = max(map(len, rows))
    widths = [max((len(row[step]) for row in rows if step < len(row)), default=0) for step in range(steps)]
    return _labelled(["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows])


def _labelled(lines: list[str]) -> str:
    margin = len(f"rank {len(lines) - 1}")
    return "".join(f"{f'rank {rank}'.ljust(margin)}  {line}".rstrip() + "\n" for rank, line in enumerate(lines))


def compute_bars(schedule: Schedule, timeline: Timeline) -> list[list[Bar]]:
    """Return the compute instructions of every rank, in order, as ``timeline`` places them."""
    return bars_of(schedule, timeline, COMPUTE)


def bars_of(schedule: Schedule, timeline: Timeline, ops: Container[Op]) -> list[list[Bar]]:
    """Return the instructions of these kinds of every rank, in order, as ``timeline`` places them."""
    return [
        [
            Bar(instruction, float(start), float(end))
            for instruction, start, end in zip(schedule.instructions(rank), starts, ends, strict=True)
            if instruction.op in ops
        ]
        for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True))
    ]
