"""Schedules written as text, and whether they are accepted."""

from __future__ import annotations

from ppfunc.schedule import Flow, Schedule, ScheduleError, check
from ppfunc.schedule.instruction import parse_instruction


def made_from(*rows, microbatches=1, placement=None, skips=()):
    """A schedule of one chain, one stage per rank unless told, from texts such as ``0F0 | 0SEND_F0``."""
    programs = tuple(
        tuple(tuple(map(parse_instruction, step.split())) for step in row.split("|")) for row in rows
    )
    placement = tuple(range(len(rows))) if placement is None else placement
    chain = Flow(tuple(range(len(placement))), range(microbatches))
    return Schedule("text", placement, (chain,), programs, skips)


def is_accepted(schedule):
    try:
        check(schedule)
    except ScheduleError as error:
        assert str(error)
        return False
    return True
