"""A schedule as a grid of text: one row per rank, time to the right.

Compute-only schedules stand on a scale of time, in which an instruction takes as many columns as
units of time; ``.`` is an idle unit and ``-`` fills what an instruction takes beyond its name. Lowered
ones stand step by step, the instructions of a step joined by ``+``, so that nothing is left out.
"""

from __future__ import annotations

from math import ceil

from ..schedule import Schedule
from ..simulate import Timeline
from .bars import Bar, compute_bars, in_units


def to_grid(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The grid of ``schedule``, one line per rank.

    >>> from ppfunc.schedule.builders import one_f_one_b
    >>> print(to_grid(one_f_one_b(ranks=2, microbatches=3)), end="")
    rank 0 | 0F0 0F1 .   .   0B0 --- 0F2 .   0B1 --- .   0B2 ---
    rank 1 | .   1F0 1B0 --- 1F1 1B1 --- ...

    Args:
        schedule: what to print.
        timeline: start and end of every instruction in whole units; without one, the simulation in
            units of a forward (see :func:`ppfunc.schedule.formats.bars.in_units`).
    """
    if timeline is None and not schedule.is_compute_only:
        cells = [["+".join(map(str, step)) or "." for step in program] for program in schedule.programs]
    else:
        timeline = in_units(schedule) if timeline is None else timeline
        cells = [_units(row) for row in compute_bars(schedule, timeline)]
    return _aligned(cells)
