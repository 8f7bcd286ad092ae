"""Keep only the forwards of a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import Op, parts_of
from ..schedule import Schedule, Step

_KEPT = {Op.F, Op.LOAD}


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the loads and forwards in their order, without communication: the schedule for evaluation.

    Equivalent to: cross out every backward, reduction and message; an overlapped pair leaves its forward.
    """
    programs = tuple(tuple(filter(None, map(_forwards, program))) for program in schedule.programs)
    return replace(schedule, name=f"{schedule.name} (forward only)", programs=programs)


def _forwards(step: Step) -> Step:
    return tuple(part for i in step for part in parts_of(i) if part.op in _KEPT)
