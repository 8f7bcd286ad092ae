"""Give every microbatch a buffer for the time in which its stage needs one."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..dataflow import Dataflow
from ..instruction import COMMUNICATION, SENDS, WHOLE_STAGE, Instruction, Op
from ..proof.order import check_order
from ..proof.queues import check_queues
from ..proof.states import Holder, uses
from ..proof.structure import check_structure
from ..schedule import Program, Schedule
from .rewrite import remove_slots


class Range(NamedTuple):
    """Bound the time in which one holder uses a slot: first to last use. Ranges sort by their begin."""

    begin: int  # number of the first use among those of the rank
    end: int  # number of the last use
    step: int  # step of the first use
    holder: Holder  # stage, microbatch, and how often it has been offloaded


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
    gone = _sends_gone(bare) if bare.ops & COMMUNICATION else lambda rank, holder, step: True
    programs = []
    for rank, program in enumerate(bare.programs):
        slots = _colour(_ranges(program), partial(gone, rank))
        programs.append(_written(program, slots))
    return replace(bare, programs=tuple(programs))


def _sends_gone(schedule: Schedule) -> Callable[[int, Holder, int], bool]:
    """Return a function that tells if the sends of a holder are over when a step of its rank begins.

    It speaks of one run. Sends of that step itself have to be over when it ends.
    """
    flow = Dataflow(schedule)
    run = check_queues(flow, check_order(flow))
    sends: dict[Holder, list[tuple[int, float]]] = defaultdict(list)  # step and completion
    for rank, program in enumerate(schedule.programs):
        for step, _, part, holder in uses(program):
            if part.op in SENDS:
                other = flow.routes[part.op, part.stage, part.peer].other
                sends[holder].append((step, run.completion(rank, other, step)))

    def gone(rank: int, holder: Holder, step: int) -> bool:
        return all(
            end < run.begin(rank, run.first[rank][step + (sent == step)]) for sent, end in sends[holder]
        )

    return gone


def _ranges(program: Program) -> Iterable[Range]:
    ranges: dict[Holder, Range] = {}
    for number, (step, _, _, holder) in enumerate(uses(program)):
        first = ranges.get(holder, Range(number, number, step, holder))
        ranges[holder] = first._replace(end=number)
    return ranges.values()


def _colour(ranges: Iterable[Range], gone: Callable[[Holder, int], bool]) -> dict[Holder, int]:
    """Choose the slot of every holder; ``ranges`` come in the order of their begins."""
    last: dict[int, list[Range]] = {}
    slots: dict[Holder, int] = {}
    for r in ranges:
        mine = last.setdefault(r.holder[0], [])
        free = (n for n, before in enumerate(mine) if before.end < r.begin and gone(before.holder, r.step))
        slot = next(free, len(mine))
        mine[slot : slot + 1] = [r]
        slots[r.holder] = slot
    return slots


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
