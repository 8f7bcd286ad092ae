"""Take the slots out of a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import Instruction
from ..schedule import Schedule


def remove_slots(schedule: Schedule) -> Schedule:
    """Return the schedule as it was before slots were allocated. Passes that add instructions begin with this.

    >>> from ppfunc.schedule import allocate_slots, gpipe
    >>> remove_slots(allocate_slots(gpipe(ranks=2, microbatches=2))) == gpipe(ranks=2, microbatches=2)
    True
    """
    if not schedule.has_slots:
        return schedule
    programs = tuple(tuple(tuple(map(_bare, step)) for step in program) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _bare(instruction: Instruction) -> Instruction:
    return instruction._replace(slot=None, parts=tuple(map(_bare, instruction.parts)))
