"""Prove that a schedule is well formed: the right types, numbers in range, stages on their ranks."""

from itertools import pairwise
from typing import Any, TypeGuard

from ..errors import ScheduleError, require_schedule, schedule_error
from ..instruction import COMMUNICATION, WHOLE_STAGE, Instruction, Op
from ..schedule import Chain, Schedule

Ranges = list[tuple[int, int]]


def check_structure(schedule: Schedule) -> None:
    """Refuse a value that is no well-formed schedule.

    Raises:
        ScheduleError: a field of the wrong type, chains that are not disjoint or not of equal
            length, an instruction out of range or on a rank that does not hold its stage.
    """
    require_schedule(schedule)
    _check_fields(schedule)
    ranges = _check_chains(schedule)
    _check_slices(schedule)
    _check_skips(schedule)
    for rank, program in enumerate(schedule.programs):
        _check_program(schedule, rank, program, ranges)
    back = next((skip for skip in schedule.skips if schedule.shift(*skip)), None)
    if back and not schedule.forward_only:
        raise _plain(f"skip {back} leads back, to the next slice of a sequence: expected no backward")


def _plain(reason: str, rank: int | None = None) -> ScheduleError:
    return ScheduleError(rank, None, None, reason)


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _check_fields(schedule: Schedule) -> None:
    for field in ("placement", "chains", "programs", "skips"):
        value = getattr(schedule, field)
        if type(value) is not tuple:
            raise _plain(f"{field} is a {type(value).__name__}, expected a tuple")
    if not schedule.programs:
        raise _plain("the schedule has no rank: expected at least one program")
    for rank, program in enumerate(schedule.programs):
        if type(program) is not tuple:
            raise _plain(f"the program is a {type(program).__name__}, expected a tuple of steps", rank)
    if not schedule.placement:
        raise _plain("the schedule has no stage: expected a placement with at least one")
    for stage, rank in enumerate(schedule.placement):
        if not _is_number(rank) or rank >= schedule.ranks:
            raise _plain(
                f"stage {stage} is placed on rank {rank!r}, expected a rank from 0 to {schedule.ranks - 1};"
                f" give a program for each rank, there are {schedule.ranks}, or place it on one of these"
            )


def _check_chains(schedule: Schedule) -> Ranges:
    """Return the microbatches of every stage, as (first, one past the last)."""
    stages = len(schedule.placement)
    ranges: list[tuple[int, int] | None] = [None] * stages
    for number, chain in enumerate(schedule.chains):
        _check_chain(number, chain)
        for stage in chain.stages:
            if not _is_number(stage) or stage >= stages:
                raise _plain(f"chain {number} names stage {stage!r}, expected a stage from 0 to {stages - 1}")
            if ranges[stage] is not None:
                raise _plain(f"stage {stage} occurs twice in the chains, expected it once")
            ranges[stage] = (chain.microbatches.start, chain.microbatches.stop)
    if None in ranges:
        raise _plain(f"stage {ranges.index(None)} is in no chain, expected each stage in one")
    if len({len(c.stages) for c in schedule.chains}) > 1:
        raise _plain("the chains differ in length: equal positions of two chains hold replicas of one stage")
    spans = sorted((c.microbatches.start, c.microbatches.stop) for c in schedule.chains)
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise _plain(f"microbatch {start} walks two chains, expected it in one")
    return [r for r in ranges if r is not None]


def _check_chain(number: int, chain: Any) -> None:
    if not isinstance(chain, Chain) or len(chain) != 2:
        raise _plain(f"chain {number} is a {type(chain).__name__}, expected a Chain")
    if type(chain.stages) is not tuple or not chain.stages:
        raise _plain(
            f"chain {number} has stages {chain.stages!r:.60}, expected a tuple with at least one stage"
        )
    m = chain.microbatches
    if type(m) is not range or m.step != 1 or m.start < 0 or m.stop <= m.start:
        raise _plain(
            f"chain {number} has microbatches {m!r:.60}, expected a range with at least one, in steps of one"
        )


def _check_slices(schedule: Schedule) -> None:
    slices = schedule.slices
    if not _is_number(slices):
        raise _plain(f"slices is {slices!r:.40}, expected the number of slices of a sequence, from 0")
    for number, chain in enumerate(schedule.chains):
        begin, end = chain.microbatches.start, chain.microbatches.stop
        if slices and (begin % slices or end % slices):
            raise _plain(
                f"chain {number} has microbatches {begin} to {end - 1}, expected whole sequences of {slices}"
                " slices"
            )


def _check_skips(schedule: Schedule) -> None:
    at = {s: (number, place) for number, c in enumerate(schedule.chains) for place, s in enumerate(c.stages)}
    seen = set()
    for skip in schedule.skips:
        if type(skip) is not tuple or len(skip) != 2 or not all(_is_number(s) and s in at for s in skip):
            raise _plain(
                f"skip {skip!r:.60} is not a pair (source stage, destination stage) of stages that exist"
            )
        (chain, source), (other, destination) = at[skip[0]], at[skip[1]]
        if chain != other or 0 <= destination - source < 2:
            raise _plain(
                f"skip {skip}: expected a destination two stages or more after its source, in one chain; a"
                " stage gives its neighbour what it needs in its output"
            )
        if destination < source and not schedule.slices:
            raise _plain(f"skip {skip} leads back, to the next slice of a sequence: expected slices")
        if skip in seen:
            raise _plain(f"skip {skip} is there twice, expected each once")
        seen.add(skip)


def _check_program(schedule: Schedule, rank: int, program: tuple, ranges: Ranges) -> None:
    for step, instructions in enumerate(program):
        if type(instructions) is not tuple:
            raise _plain(
                f"step {step} is a {type(instructions).__name__}, expected a tuple of instructions", rank
            )
        for place, instruction in enumerate(instructions):
            if type(instruction) is not Instruction or len(instruction) != 6:
                kind = type(instruction).__name__
                raise ScheduleError(
                    rank, (step, place), None, f"got a value of type {kind}, expected an Instruction"
                )
            if fault := _fault(instruction, rank, schedule, ranges):
                raise schedule_error(schedule, rank, (step, place), fault)


def _is_pair(instruction: Instruction, rank: int, schedule: Schedule, ranges: Ranges) -> bool:
    """Tell whether the parts are a forward and a backward of stages of this rank."""
    op, stage, m, _, _, parts = instruction
    if (
        op is not Op.OVERLAP_F_B
        or type(parts) is not tuple
        or len(parts) != 2
        or not all(type(part) is Instruction and len(part) == 6 for part in parts)
    ):
        return False
    forward, backward = parts
    return (
        forward[0] is Op.F
        and (backward[0] is Op.B or backward[0] is Op.I)
        and not any(_fault(part, rank, schedule, ranges) for part in parts)
        and forward[1:3] == (stage, m)
    )


def _fault(instruction: Instruction, rank: int, schedule: Schedule, ranges: Ranges) -> str:
    """Put the fault of one instruction in words; a sound instruction has the empty text."""
    op, stage, m, peer, slot, parts = instruction
    placement = schedule.placement
    if type(op) is not Op:
        return f"the op is {op!r:.40}, expected an Op"
    if type(stage) is not int or not 0 <= stage < len(placement):  # without calls: in every instruction
        return f"stage {stage!r:.40} is out of range, expected a stage from 0 to {len(placement) - 1}"
    if placement[stage] != rank:
        return f"stage {stage} is on rank {placement[stage]}, this is rank {rank}"
    first, stop = ranges[stage]
    if op in WHOLE_STAGE:
        if m is not None:
            return f"{op} is for a whole stage, but got microbatch {m!r:.40}"
    elif type(m) is not int or not first <= m < stop:
        return (
            f"microbatch {m!r:.40} is out of range, expected one from {first} to {stop - 1} in stage {stage}"
        )
    if peer is not None and op not in COMMUNICATION:
        return f"peer is {peer!r:.40}, but only messages have a peer"
    if peer is not None and not _is_number(peer):
        return f"peer is {peer!r:.40}, expected None or a stage"
    if slot is not None and schedule.slices:
        return "it has a slot, which holds one microbatch, but carries of slices live on: expected no slots"
    if slot is not None and not _is_number(slot):
        return f"slot is {slot!r:.40}, expected None or a number from 0"
    if op is Op.OVERLAP_F_B or parts != ():
        if _is_pair(instruction, rank, schedule, ranges):
            return ""
        return (
            "expected an overlapped pair of one forward F, named first, and one backward B or I, both of"
            " stages of this rank"
        )
    return ""
