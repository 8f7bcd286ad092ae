"""Take the reductions and the optimizer step out of a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import Op
from ..schedule import Schedule

_TAIL = frozenset({Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP})


def remove_tail(schedule: Schedule) -> Schedule:
    """The same schedule without REDUCE_TIED, REDUCE_GRAD and STEP: undoes `append_tail`.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> remove_tail(append_tail(gpipe(ranks=1, microbatches=1))) == gpipe(ranks=1, microbatches=1)
    True
    """
    programs = []
    for program in schedule.programs:
        steps = [(step, tuple(i for i in step if i.op not in _TAIL)) for step in program]
        programs.append(tuple(after for before, after in steps if after or not before))
    return replace(schedule, programs=tuple(programs))
