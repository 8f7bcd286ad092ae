"""Leaving out what a plain file of torch has no word for."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import COMPUTE, Instruction
from ..schedule import Schedule


def compute_only(schedule: Schedule) -> Schedule:
    """The compute of ``schedule``, as builders write it; a step without any becomes an idle one.

    >>> from ppfunc.schedule.builders import deepspeed_train
    >>> print(*compute_only(deepspeed_train(ranks=2, microbatches=1)).instructions(1))
    1F0 1B0
    """
    programs = tuple(
        tuple(tuple(i for i in step if i.op in COMPUTE) for step in program) for program in schedule.programs
    )
    return without_slots(replace(schedule, programs=programs))


def without_slots(schedule: Schedule) -> Schedule:
    """``schedule`` before the allocation of slots.

    >>> from ppfunc.schedule.builders import deepspeed_train
    >>> print(*without_slots(deepspeed_train(ranks=2, microbatches=1)).instructions(1))
    1RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1REDUCE_TIED 1REDUCE_GRAD 1STEP
    """
    programs = tuple(tuple(tuple([_without_slot(i) for i in step]) for step in program) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _without_slot(instruction: Instruction) -> Instruction:
    if instruction.parts:
        return instruction._replace(slot=None, parts=tuple(map(_without_slot, instruction.parts)))
    return instruction if instruction.slot is None else instruction._replace(slot=None)
