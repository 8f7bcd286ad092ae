"""Take the messages out of a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import COMMUNICATION
from ..schedule import Schedule


def remove_communication(schedule: Schedule) -> Schedule:
    """Cross out every SEND and RECV; a step that held nothing else is dropped.

    For a compute-only schedule without idle steps it undoes ``place_communication``.

    >>> from ppfunc.schedule import gpipe, place_communication
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> remove_communication(place_communication(schedule)) == schedule
    True
    """
    programs = ([(step, tuple(i for i in step if i.op not in COMMUNICATION)) for step in program] for program in schedule.programs)
    return replace(schedule, programs=tuple(tuple(new for old, new in p if new or not old) for p in programs))
