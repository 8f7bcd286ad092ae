"""Prove that a schedule is well formed: the right types, numbers in range, stages on their ranks."""

from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, TypeGuard

from ..errors import ScheduleError, require_schedule, schedule_error
from ..instruction import COMMUNICATION, WHOLE_STAGE, Instruction, Op
from ..schedule import Flow, Schedule

Numbers = Sequence[range | frozenset[int]]
"""By stage: the microbatches that go through it."""


def check_structure(schedule: Schedule) -> None:
    """Refuse a value that is no well-formed schedule.

    Raises:
        ScheduleError: a field of the wrong type, flows that share microbatches or contradict each other, an
            instruction out of range or on a rank that does not hold its stage.
    """
    require_schedule(schedule)
    _check_fields(schedule)
    _check_flows(schedule)
    _check_replicas(schedule)
    _check_slices(schedule)
    _check_skips(schedule)
    for rank, program in enumerate(schedule.programs):
        _check_program(schedule, rank, program, schedule.walked)
    back = next((skip for skip in schedule.skips if schedule.shift(*skip)), None)
    if back and not schedule.forward_only:
        raise _plain(f"skip {back} leads back, to the next slice of a sequence: expected no backward")


def _plain(reason: str, rank: int | None = None) -> ScheduleError:
    return ScheduleError(rank, None, None, reason)


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _check_fields(schedule: Schedule) -> None:
    for field in ("placement", "flows", "programs", "skips"):
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


def _check_flows(schedule: Schedule) -> None:
    stages = len(schedule.placement)
    flows_of: list[list[int]] = [[] for _ in range(stages)]
    for number, flow in enumerate(schedule.flows):
        check_flow(number, flow)
        for stage in flow.stages:
            if not _is_number(stage) or stage >= stages:
                raise _plain(f"flow {number} names stage {stage!r}, expected a stage from 0 to {stages - 1}")
            if number in flows_of[stage]:
                raise _plain(f"stage {stage} occurs twice in flow {number}, expected it once")
            flows_of[stage].append(number)
        _check_edges(number, flow)
    if [] in flows_of:
        raise _plain(f"stage {flows_of.index([])} is in no flow, expected each stage in one or more")
    instructions = sum(len(step) for program in schedule.programs for step in program if type(step) is tuple)
    spans = []
    for number, flow in enumerate(schedule.flows):
        m = flow.microbatches
        spans += [(m.start, m.stop)] if isinstance(m, range) else [(n, n + 1) for n in m]
        walked = schedule.slices or any(len(flows_of[stage]) > 1 for stage in flow.stages)
        if walked and m[-1] - m[0] > instructions:
            raise _plain(f"flow {number} has microbatches up to {m[-1]}, and there are fewer instructions")
    spans.sort()
    for (_, stop), (start, _) in pairwise([(0, 0), *spans]):
        if start != stop:
            wrong, flows = (start, "two flows") if start < stop else (stop, "no flow")
            raise _plain(f"microbatch {wrong} is in {flows}, expected it in one")
    if any(len(numbers) > 1 for numbers in flows_of):
        _check_common(schedule.flows)


def check_flow(number: int, flow: Any) -> None:
    """Refuse a value that is no flow of numbered microbatches."""
    if not isinstance(flow, Flow) or len(flow) != 3:
        raise _plain(f"flow {number} is a {type(flow).__name__}, expected a Flow")
    if type(flow.stages) is not tuple or not flow.stages:
        raise _plain(
            f"flow {number} has stages {flow.stages!r:.60}, expected a tuple with at least one stage"
        )
    m = flow.microbatches
    if type(m) is range and m.step == 1 and 0 <= m.start < m.stop:
        return
    ascends = type(m) is tuple and all(map(_is_number, m)) and all(a < b for a, b in pairwise(m))
    if not ascends or m[-1:] == m[:1] or m[-1] - m[0] < len(m):
        raise _plain(
            f"flow {number} has microbatches {m!r:.60}, expected a range with at least one, in steps of one,"
            " such as range(8), or an ascending tuple of numbers that are not consecutive"
        )


def _check_edges(number: int, flow: Flow) -> None:
    """Refuse edges that are not between stages of the flow in its order."""
    if flow.edges is None:
        return
    if type(flow.edges) is not tuple:
        raise _plain(f"flow {number} has edges {flow.edges!r:.60}, expected a tuple of pairs, or None")
    place = {stage: n for n, stage in enumerate(flow.stages)}
    for edge in flow.edges:
        if type(edge) is not tuple or len(edge) != 2 or not all(_is_number(s) and s in place for s in edge):
            raise _plain(f"flow {number} has the edge {edge!r:.60}, expected a pair of its stages")
        if place[edge[1]] <= place[edge[0]]:
            raise _plain(f"flow {number} has the edge {edge} against the order of its stages {flow.stages}")
    if len({*flow.edges}) < len(flow.edges):
        raise _plain(f"flow {number} has an edge twice, expected each once")
    if flow.edges == tuple(pairwise(flow.stages)):
        raise _plain(f"flow {number} has the edges of a chain: expected None for them")


def _check_common(flows: tuple[Flow, ...]) -> None:
    """Refuse flows that contradict each other in the stages that they share."""
    after: dict[int, list[int]] = {}
    for flow in flows:
        for a, b in pairwise(flow.stages):
            after.setdefault(b, []).append(a)
    pairs = [frozenset(flow.pairs) for flow in flows]
    into = [Counter(b for _, b in of_flow) for of_flow in pairs]
    for number, flow in enumerate(flows):
        for other in range(number):
            common = {*flow.stages}.intersection(flows[other].stages)
            for a, b in pairs[number] ^ pairs[other]:
                if a in common and b in common:
                    has, lacks = (number, other) if (a, b) in pairs[number] else (other, number)
                    raise _plain(
                        f"flow {has} has the edge {(a, b)}, and flow {lacks}, with both stages, has not:"
                        f" expected it in both; a microbatch that goes another way to stage {b} takes a copy"
                        " of it, replicas"
                    )
            for stage in common:
                if into[number][stage] != into[other][stage]:
                    raise _plain(
                        f"{into[other][stage]} edges lead to stage {stage} in flow {other}, and"
                        f" {into[number][stage]} in flow {number}: expected as many; a skip connection may be"
                        " in some flows only"
                    )
                if (stage == flow.stages[-1]) != (stage == flows[other].stages[-1]):
                    ends = number if stage == flow.stages[-1] else other
                    raise _plain(
                        f"flow {ends} ends in stage {stage}, and flow {number + other - ends} goes on:"
                        " expected it last in both, or in neither; end in a copy of it, replicas"
                    )
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        raise _plain(f"flows have the stages {error.args[1]} in different orders, expected one") from None


def _check_replicas(schedule: Schedule) -> None:
    if type(schedule.replicas) is not tuple or not all(
        type(group) is tuple and group and all(_is_number(s) and s < schedule.stages for s in group)
        for group in schedule.replicas
    ):
        raise _plain(
            f"replicas are {schedule.replicas!r:.60}, expected a tuple of groups of stages that exist"
        )
    stages = [stage for group in schedule.replicas for stage in group]
    if len({*stages}) < len(stages):
        raise _plain(f"replicas are {schedule.replicas!r:.60}, expected each stage in one group at most")


def _check_slices(schedule: Schedule) -> None:
    slices = schedule.slices
    if not _is_number(slices):
        raise _plain(f"slices is {slices!r:.40}, expected the number of slices of a sequence, from 0")
    for number, flow in enumerate(schedule.flows if slices else ()):
        m = flow.microbatches
        if isinstance(m, range):
            whole = m.start % slices == m.stop % slices == 0
        else:
            whole = all({*range(n - n % slices, n - n % slices + slices)} <= {*m} for n in m)
        if not whole:
            raise _plain(
                f"flow {number} has microbatches {m[0]} to {m[-1]}, expected whole sequences of {slices}"
                " slices"
            )


def _check_skips(schedule: Schedule) -> None:
    flows = [{stage: place for place, stage in enumerate(flow.stages)} for flow in schedule.flows]
    along = {pair for flow in schedule.flows for pair in flow.pairs}
    model, seen = schedule.model_stages, set()
    for skip in schedule.skips:
        if (
            type(skip) is not tuple
            or len(skip) != 2
            or not all(_is_number(s) and s < schedule.stages for s in skip)
        ):
            raise _plain(
                f"skip {skip!r:.60} is not a pair (source stage, destination stage) of stages that exist"
            )
        source, destination = skip
        common = [at for at in flows if source in at and destination in at]
        if skip in along or source == destination or not common:
            raise _plain(
                f"skip {skip}: expected two stages of one flow without an edge between them; a stage gives"
                " its neighbour what it needs in its output"
            )
        back = {at[destination] < at[source] for at in common}
        for at in flows:
            if source in at and model[destination] not in {model[stage] for stage in at}:
                raise _plain(
                    f"skip {skip} leads out of the flow with the stages {(*at,)}: expected its end in it"
                )
        if back == {True} and not schedule.slices:
            raise _plain(f"skip {skip} leads back, to the next slice of a sequence: expected slices")
        if skip in seen:
            raise _plain(f"skip {skip} is there twice, expected each once")
        seen.add(skip)
    for at in flows:
        named: dict[tuple[int, int, bool], tuple[int, int]] = {}
        for a, b in schedule.skips:
            if a in at and b in at:
                for name in ((model[a], b, True), (a, model[b], False)):
                    if name in named:
                        raise _plain(
                            f"skips {named[name]} and {(a, b)} of one flow have copies of one stage of the"
                            " model at an end, and a stage has one value by that name: expected one skip"
                        )
                    named[name] = a, b


def _check_program(schedule: Schedule, rank: int, program: tuple, numbers: Numbers) -> None:
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
            if fault := _fault(instruction, rank, schedule, numbers):
                raise schedule_error(schedule, rank, (step, place), fault)


def _is_pair(instruction: Instruction, rank: int, schedule: Schedule, numbers: Numbers) -> bool:
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
        and not any(_fault(part, rank, schedule, numbers) for part in parts)
        and forward[1:3] == (stage, m)
    )


def _fault(instruction: Instruction, rank: int, schedule: Schedule, numbers: Numbers) -> str:
    """Put the fault of one instruction in words; a sound instruction has the empty text."""
    op, stage, m, peer, slot, parts = instruction
    placement = schedule.placement
    if type(op) is not Op:
        return f"the op is {op!r:.40}, expected an Op"
    if type(stage) is not int or not 0 <= stage < len(placement):  # without calls: in every instruction
        return f"stage {stage!r:.40} is out of range, expected a stage from 0 to {len(placement) - 1}"
    if placement[stage] != rank:
        return f"stage {stage} is on rank {placement[stage]}, this is rank {rank}"
    if op in WHOLE_STAGE:
        if m is not None:
            return f"{op} is for a whole stage, but got microbatch {m!r:.40}"
    elif type(m) is not int or m not in numbers[stage]:
        through = schedule.numbers[stage]
        some = "" if isinstance(through, range) else f" of {through!r:.60}"
        return (
            f"microbatch {m!r:.40} is out of range, expected one from {through[0]} to {through[-1]}{some} in"
            f" stage {stage}"
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
        if _is_pair(instruction, rank, schedule, numbers):
            return ""
        return (
            "expected an overlapped pair of one forward F, named first, and one backward B or I, both of"
            " stages of this rank"
        )
    return ""
