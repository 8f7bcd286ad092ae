"""Keep only the compute of a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import COMPUTE
from ..passes import remove_slots
from ..schedule import Schedule


def compute_only(schedule: Schedule) -> Schedule:
    """Keep the compute of ``schedule``, as builders write it; a step without any becomes an idle one.

    >>> from ppfunc.schedule.builders import deepspeed_train
    >>> print(*compute_only(deepspeed_train(ranks=2, microbatches=1)).instructions(1))
    1F0 1B0
    """
    programs = tuple(tuple(tuple(i for i in step if i.op in COMPUTE) for step in program) for program in schedule.programs)
    return remove_slots(replace(schedule, programs=programs))
