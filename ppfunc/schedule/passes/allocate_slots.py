"""Give every microbatch a buffer for the time in which its stage needs one."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ..dataflow import Dataflow
from ..instruction import COMMUNICATION, WHOLE_STAGE, Instruction, Op
from ..proof.buffers import Holder, uses
from ..proof.order import check_order
from ..proof.queues import QueueRun, check_queues
from ..proof.structure import check_structure
from ..schedule import Program, Schedule
from .remove import remove_slots


class Range(NamedTuple):
    """Bound the time in which one holder uses a slot: first to last use. Ranges sort by their begin."""

    begin: int  # number of the first use among those of the rank
    end: int  # number of the last use
    step: int  # step of the first use
    holder: Holder  # stage, microbatch, and how often it has been offloaded


class Moments(NamedTuple):
    """The moments of messages in one run of the schedule."""

    latest: list[list[float]]  # per rank and step, the last moment at which the step may have begun
    sends: list[dict[Holder, list[tuple[int, float]]]]  # per rank and holder, (step, completion) of the sends


def allocate_slots(schedule: Schedule) -> Schedule:
    """Set the slot of every instruction that works on a microbatch.

    A slot is a place for all that one stage keeps of one microbatch: input, output, residuals,
    gradients. Stages differ in shape, so each has slots of its own, numbered from 0. Equivalent to::

        for holder in order of first use:
            slot = the lowest slot of its stage whose holder is done and whose messages are gone
            for instruction in uses of holder: instruction.slot = slot

    which is interval colouring of the live ranges: with few in flight it needs few slots. A
    slot is given on only if in one run of the schedule the messages that read it have gone by then
    anyway, so that waiting for them cannot hold anything up. What is offloaded frees its slot and
    comes back to any other. Slots that are there already are replaced. Allocate after placing
    communication: passes that add instructions take slots away.

    Raises:
        ScheduleError: a value that is no schedule, or messages that do not come to an end.

    >>> from ppfunc.schedule import gpipe
    >>> print(*allocate_slots(gpipe(ranks=1, microbatches=2)).instructions(0))
    0F0@0 0F1@1 0B0@0 0B1@1
    """
    check_structure(schedule)
    bare = remove_slots(schedule)
    found = _moments(bare) if bare.ops & COMMUNICATION else None
    programs = []
    for rank, program in enumerate(bare.programs):
        slots = _colour(_ranges(program), found, rank)
        programs.append(_written(program, slots))
    return replace(bare, programs=tuple(programs))


def _moments(schedule: Schedule) -> Moments:
    flow = Dataflow(schedule)
    record = check_order(flow)
    check_queues(flow, record)
    run = QueueRun(flow)
    latest = [list(accumulate([inf, *reversed(began)], min))[::-1] for began in run.began]
    holders = [
        {(step, place): holder for step, place, _, holder in uses(program)} for program in schedule.programs
    ]
    sends: list[dict[Holder, list[tuple[int, float]]]] = [{} for _ in schedule.programs]
    for message, (rank, step, place) in record.sends.items():
        sends[rank].setdefault(holders[rank][step, place], []).append((step, run.sent[message].complete))
    return Moments(latest, sends)


def _ranges(program: Program) -> Iterable[Range]:
    ranges: dict[Holder, Range] = {}
    for number, (step, _, _, holder) in enumerate(uses(program)):
        first = ranges.get(holder, Range(number, number, step, holder))
        ranges[holder] = first._replace(end=number)
    return ranges.values()


def _colour(ranges: Iterable[Range], found: Moments | None, rank: int) -> dict[Holder, int]:
    """Choose the slot of every holder; ``ranges`` come in the order of their begins."""
    last: dict[int, list[Range]] = {}
    slots: dict[Holder, int] = {}
    for r in ranges:
        mine = last.setdefault(r.holder[0], [])
        free = (
            n for n, before in enumerate(mine) if before.end < r.begin and _gone(found, rank, before, r.step)
        )
        slot = next(free, len(mine))
        mine[slot : slot + 1] = [r]
        slots[r.holder] = slot
    return slots


def _gone(found: Moments | None, rank: int, before: Range, step: int) -> bool:
    """Tell if the sends that read the slot are over when ``step`` begins, or ends if they are in it."""
    if found is None:
        return True
    sends = found.sends[rank].get(before.holder, ())
    return all(gone < found.latest[rank][step + (sent == step)] for sent, gone in sends)


def _written(program: Program, slots: dict[Holder, int]) -> Program:
    """Write the slots into the program."""
    at: dict[tuple[int, int], list[Instruction]] = {}
    for step, place, part, holder in uses(program):
        at.setdefault((step, place), []).append(part._replace(slot=slots[holder]))
    return tuple(
        tuple(
            i
            if i[0] in WHOLE_STAGE
            else i._replace(parts=tuple(at[s, p]))
            if i[0] is Op.OVERLAP_F_B
            else at[s, p][0]
            for p, i in enumerate(step)
        )
        for s, step in enumerate(program)
    )
