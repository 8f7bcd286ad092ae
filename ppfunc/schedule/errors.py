"""Name the place and the reason of a wrong schedule, with a picture and a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        reason: one sentence or two: what was got, what was expected.
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


def schedule_error(schedule: Schedule, rank: int | None, position: tuple[int, int] | None, reason: str) -> ScheduleError:
    """Make the error for one place of ``schedule``, with its instruction and its picture. The caller raises it."""
    if rank is None or position is None:
        return ScheduleError(rank, position, None, reason)
    step, place = position
    instruction = schedule.programs[rank][step][place]
    return ScheduleError(rank, position, instruction, reason, excerpt(schedule, rank, position))


def last_place(schedule: Schedule, rank: int) -> tuple[int, int] | None:
    """Return the position of the last instruction of a rank, the latest place for a missing one; None if it has none."""
    steps = enumerate(schedule.programs[rank])
    return max(((step, len(instructions) - 1) for step, instructions in steps if instructions), default=None)


def excerpt(schedule: Schedule, rank: int, position: tuple[int, int]) -> str:
    """Draw a few ranks and steps around one instruction, with a mark under it.

    The columns are step numbers of each rank's own program; they are not moments in time.
    """
    step, place = position
    columns = range(max(0, step - _STEPS_AROUND), step + _STEPS_AROUND + 1)
    rows = range(max(0, rank - _RANKS_AROUND), min(len(schedule.programs), rank + _RANKS_AROUND + 1))
    columns = range(columns.start, min(columns.stop, max(_length(schedule, r) for r in rows)))
    cells = {(r, k): _cell(schedule, r, k) for r in rows for k in columns}
    mark_start, mark_stop = _span_of(schedule, rank, step, place)
    cells[rank, step], mark = _window(cells[rank, step], mark_start, mark_stop)
    cells = {at: _shorten(text) if at != (rank, step) else text for at, text in cells.items()}
    width = {k: max(len(f"step {k}"), *(len(cells[r, k]) for r in rows)) for k in columns}
    margin = len(f"rank {rows[-1]}") + 2
    lines = [" " * margin + "  ".join(f"step {k}".ljust(width[k]) for k in columns)]
    for r in rows:
        lines.append(f"rank {r}".ljust(margin) + "  ".join(cells[r, k].ljust(width[k]) for k in columns))
        if r == rank:
            before = margin + sum(width[k] + 2 for k in columns if k < step)
            lines.append(" " * (before + mark[0]) + "^" * mark[1])
    return "\n".join(line.rstrip() for line in lines)


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


def _length(schedule: Schedule, rank: int) -> int:
    return len(schedule.programs[rank])


def _cell(schedule: Schedule, rank: int, step: int) -> str:
    program = schedule.programs[rank]
    if step >= len(program) or not isinstance(program[step], tuple):
        return ""
    return " ".join(text_of(i) for i in program[step][: _CELL * 4]) or "-"


def _span_of(schedule: Schedule, rank: int, step: int, place: int) -> tuple[int, int]:
    """Begin and end of the text of one instruction in the text of its step."""
    texts = [text_of(i) for i in schedule.programs[rank][step][: place + 1]]
    start = sum(len(t) + 1 for t in texts[:-1])
    return start, start + len(texts[-1])


def _window(text: str, start: int, stop: int) -> tuple[str, tuple[int, int]]:
    """At most a cell's width of ``text`` around ``start``, and where the mark goes in it."""
    if len(text) <= _CELL * 2:
        return text, (start, max(1, stop - start))
    left = max(0, start - _CELL // 2)
    cut = text[left : left + _CELL * 2]
    lead = ".." if left else ""
    tail = ".." if left + _CELL * 2 < len(text) else ""
    return lead + cut + tail, (len(lead) + start - left, max(1, min(stop - start, _CELL)))


def _shorten(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 2] + ".."
