"""Name the place and the reason of a wrong schedule, with a picture and a mark."""

from collections.abc import Callable, Sequence
from typing import Any

from ppfunc._checks import shown

from .schedule import Schedule

_STEPS_AROUND = 3
_RANKS_AROUND = 2
_CELL = 40


class ScheduleError(ValueError):
    """A schedule that cannot be run, or would give a wrong result.

    Args:
        rank: the rank whose program is wrong, None where the whole schedule is.
        position: ``(step, place)`` of the instruction in the program of ``rank``, or None.
        instruction: the instruction there, or None.
        reason: got and expected, in one or two sentences.
        picture: an excerpt of the grid with a mark under the place, or nothing.
    """

    def __init__(
        self,
        rank: int | None,
        position: tuple[int, int] | None,
        instruction: Any,
        reason: str,
        picture: str = "",
    ) -> None:
        super().__init__(rank, position, instruction, reason, picture)
        self.rank = rank
        self.position = position
        self.instruction = instruction
        self.reason = reason
        self.picture = picture

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        if self.position is not None:
            where.append("step {}, place {}".format(*self.position))
        if self.instruction is not None:
            where.append(text_of(self.instruction))
        head = f"{', '.join(where)}: {self.reason}" if where else self.reason
        return f"{head}\n\n{self.picture}" if self.picture else head


def require_schedule(value: Any) -> None:
    """Refuse a value of any other type.

    Raises:
        ScheduleError: naming the value.
    """
    if not isinstance(value, Schedule):
        raise ScheduleError(
            None,
            None,
            None,
            f"schedule: got {shown(value)}, expected a Schedule, such as ppfunc.one_f_one_b(ranks=4,"
            " microbatches=8); programs of your own become one by ppfunc.schedule.single_chain",
        )


def schedule_error(
    schedule: Schedule, rank: int | None, position: tuple[int, int] | None, reason: str
) -> ScheduleError:
    """Make the error for one place of ``schedule``, with its instruction and picture."""
    if rank is None or position is None:
        return ScheduleError(rank, position, None, reason)
    instruction = schedule.programs[rank][position[0]][position[1]]
    return ScheduleError(rank, position, instruction, reason, excerpt(schedule, rank, position))


def fault_at(schedule: Schedule, position: tuple[int, int, int], reason: str) -> ScheduleError:
    """Make the error for one place, given as rank, step and place in the step."""
    return schedule_error(schedule, position[0], position[1:], reason)


def last_place(schedule: Schedule, rank: int) -> tuple[int, int] | None:
    """Return the position of a rank's last instruction, to place a missing instruction.

    Returns:
        Step and place, or None for a rank without instructions.
    """
    steps = enumerate(schedule.programs[rank])
    return max(((step, len(instructions) - 1) for step, instructions in steps if instructions), default=None)


def excerpt(schedule: Schedule, rank: int, position: tuple[int, int]) -> str:
    """Draw a few ranks and steps around one instruction, with a mark under it.

    The columns are step numbers of each rank's own program; they are not moments in time.
    """
    step = position[0]
    rows = range(max(0, rank - _RANKS_AROUND), min(len(schedule.programs), rank + _RANKS_AROUND + 1))
    longest = max(len(schedule.programs[r]) for r in rows)
    columns = range(max(0, step - _STEPS_AROUND), min(longest, step + _STEPS_AROUND + 1))
    cells = {(r, k): _cell(schedule, r, k) for r in rows for k in columns}
    cells[rank, step], mark, length = _marked_cell(schedule, rank, position)
    width = {k: max(len(f"step {k}"), *(len(cells[r, k]) for r in rows)) for k in columns}
    margin = len(f"rank {rows[-1]}") + 2
    lines = [" " * margin + "  ".join(f"step {k}".ljust(width[k]) for k in columns)]
    for r in rows:
        lines.append(f"rank {r}".ljust(margin) + "  ".join(cells[r, k].ljust(width[k]) for k in columns))
        if r == rank:
            before = margin + sum(width[k] + 2 for k in columns if k < step)
            lines.append(" " * (before + mark) + "^" * length)
    return "\n".join(line.rstrip() for line in lines)


def circle_of(rank: int, sentence: Callable[[int], tuple[str, int]]) -> tuple[int, str]:
    """Follow who waits for whom until the circle closes.

    Args:
        rank: rank that waits.
        sentence: function of a rank that waits; what it waits for in words, and the rank that has it.

    Returns:
        A rank of the circle, and a paragraph of readable length about the circle.
    """
    sentences: dict[int, str] = {}
    while rank not in sentences:
        sentences[rank], rank = sentence(rank)
    return rank, cycle_text([*sentences.values()][[*sentences].index(rank) :])


def cycle_text(sentences: Sequence[str]) -> str:
    """Join the sentences of a cycle in one paragraph of readable length."""
    shown = list(sentences[:6])
    if len(sentences) > len(shown):
        shown.append(f"and {len(sentences) - len(shown)} more ranks in the same cycle")
    return "; ".join(shown)


def text_of(instruction: Any) -> str:
    """Return a short text for an instruction. Values of any type have one."""
    try:
        return _shorten(str(instruction))
    except Exception:  # a garbled value must not hide the error that names it
        return f"<{type(instruction).__name__}>"


def _cell(schedule: Schedule, rank: int, step: int) -> str:
    program = schedule.programs[rank]
    if step >= len(program) or not isinstance(program[step], tuple):
        return ""
    return _shorten(" ".join(text_of(i) for i in program[step][:_CELL]) or "-")


def _marked_cell(schedule: Schedule, rank: int, position: tuple[int, int]) -> tuple[str, int, int]:
    """Return the text of a step around one instruction, where its own begins, and how long it is."""
    step, place = position
    instructions, first = schedule.programs[rank][step], max(0, place - 2)
    before = [".."] * (first > 0) + [text_of(i) for i in instructions[first:place]]
    after = [text_of(i) for i in instructions[place + 1 : place + 3]] + [".."] * (
        place + 3 < len(instructions)
    )
    text = text_of(instructions[place])
    return " ".join([*before, text, *after]), sum(len(t) + 1 for t in before), len(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 2] + ".."
