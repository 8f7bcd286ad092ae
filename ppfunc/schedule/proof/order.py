"""Prove the order of each rank on its own: inputs before uses, everything once, nothing missing."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from ..dataflow import Dataflow
from ..errors import ScheduleError, fault_at, last_place, schedule_error
from ..instruction import COMMUNICATION, KINDS, SENDS, Instruction, Op, parts_of
from ..schedule import Schedule, Step

Position = tuple[int, int, int]  # rank, step, place

Numbers = dict[int, dict[int, int]]
"""By value or message of microbatch 0, and by microbatch: the number of an instruction on its rank."""


class OrderRecord(NamedTuple):
    """Record the instructions that compute values and post messages, by the numbers of Dataflow."""

    made: Numbers  # by value
    weights: Numbers  # by input gradient, the B or the W that computes the weight gradient
    sends: Numbers  # by message
    receives: Numbers  # by message


@dataclass(frozen=True)
class _Some(Container[int]):
    """Look up an input that not all microbatches have, see :meth:`Dataflow.takes`."""

    numbers: dict[int, int]
    flow: Dataflow
    origin: int
    shift: int

    def __contains__(self, microbatch: Any) -> bool:
        takes = self.flow.takes(microbatch, self.origin, self.shift)
        return not takes or microbatch + self.shift in self.numbers


_Needs = tuple[tuple[Container[int], int, str], ...]
_Makes = tuple[dict[int, int], ...]
_Rule = tuple[_Needs, _Makes]
"""What instructions of one kind need, each with its value and what to say without it; and what they make."""


def in_order(step: Step) -> Iterable[tuple[int, Any]]:
    """Return the instructions of a step with their places, in the order of its meaning.

    Communications come first, then loads, then the rest.
    """
    before = 0
    for instruction in step:
        phase = _PHASE.get(instruction[0], 2)
        if phase < before:
            return sorted(enumerate(step), key=lambda item: _PHASE.get(item[1][0], 2))
        before = phase
    return enumerate(step)


_PHASE = {**dict.fromkeys(COMMUNICATION, 0), Op.LOAD: 1}


def walk(schedule: Schedule) -> Iterator[tuple[Position, Any]]:
    """Iterate over all instructions and their positions; within a step in the order of its meaning."""
    for rank, program in enumerate(schedule.programs):
        for step, instructions in enumerate(program):
            for place, instruction in in_order(instructions):
                yield (rank, step, place), instruction


def check_order(flow: Dataflow) -> OrderRecord:
    """Walk through each program and refuse faults that no other rank can mend.

    Every value that a rank itself must provide is there before it is used or sent, every value
    from elsewhere has its receive posted (in a schedule with communications), nothing happens
    twice, and at the end nothing is missing.

    Raises:
        ScheduleError: naming the first place of the first rank where this does not hold.
    """
    schedule = flow.schedule
    record = OrderRecord(defaultdict(dict), defaultdict(dict), defaultdict(dict), defaultdict(dict))
    kinds = _kinds(flow, record)
    for rank, program in enumerate(schedule.programs):
        begin = 0
        for step, instructions in enumerate(program):
            for place, instruction in in_order(instructions):
                op, stage, microbatch, peer, _, parts = instruction
                needs, makes = kinds.get((op, stage, peer), ((), ()))
                if makes and microbatch not in makes[0] and not parts:
                    for there, _, _ in needs:
                        if microbatch not in there:
                            break
                    else:  # the usual instruction, for which what follows does the same in twice the time
                        for numbers in makes:
                            numbers[microbatch] = begin + place
                        continue
                fault, products = "", []
                for part in instruction[5] or (instruction,):
                    op, stage, microbatch, peer, _, _ = part
                    needs, makes = kinds.get((op, stage, peer), ((), ()))
                    for there, value, lack in needs:
                        if microbatch not in there:
                            fault = fault or lack.format(flow.name(value + 2 * microbatch))
                    for numbers in makes:
                        products.append((numbers, microbatch))
                    if makes and microbatch in makes[0]:
                        fault = fault or _twice(flow, part, makes[0][microbatch])
                    elif not makes and op in COMMUNICATION:
                        fault = _no_route(schedule, instruction)
                if fault:
                    raise fault_at(schedule, (rank, step, place), fault)
                for numbers, microbatch in products:
                    numbers[microbatch] = begin + place
            begin += len(instructions)
    _check_complete(flow, record)
    return record


def _kinds(flow: Dataflow, record: OrderRecord) -> dict[tuple[Op, int, int | None], _Rule]:
    """Map ``(op, stage, peer)`` of computes and messages to the values that they need and make."""
    kinds: dict[tuple[Op, int, int | None], _Rule] = {}
    home = flow.schedule.placement
    for (op, stage, peer), (first, _, links) in flow.routes.items():
        value, rank = flow.content(first)
        lack = "it sends {}, which this rank has not computed in an earlier step"
        needs: _Needs = ((record.made[value], value, lack),) if op in SENDS else ()
        sent = [flow.sent(link) for link in links]
        if not any(some is flow.schedule.numbers[stage] for some in sent):
            lack = (
                f"no stage of rank {rank} takes {{}} by this name: its microbatch goes another way, or is the"
                " last slice of its sequence"
            )
            needs += ((frozenset(chain.from_iterable(sent)), value, lack),)
        kinds[op, stage, peer] = needs, ((record.sends if op in SENDS else record.receives)[first],)
    for (op, stage), values in flow.needs.items():
        needs = ()
        for value, origin, shift in values:
            if home[origin] == home[stage]:
                lack, numbers = "it needs {}, which this rank has not computed before", record.made[value]
            elif flow.schedule.ops & COMMUNICATION:
                lack = "it needs {}, but its receive has not been posted before"
                numbers = record.receives[flow.message(value, home[stage])]
            else:
                continue
            always = flow.always(stage, origin, shift)
            there: Container[int] = numbers if always else _Some(numbers, flow, origin, shift)
            needs += ((there, value + 2 * shift, lack),)
        product = flow.output(stage, 0) + KINDS[op].product
        makes: _Makes = (record.made[product],) if KINDS[op].makes else ()
        makes += (record.weights[product],) if op in (Op.B, Op.W) else ()
        kinds[op, stage, None] = needs, makes
    return kinds


def position_of(schedule: Schedule, rank: int, number: int) -> Position:
    """Return the position of an instruction, given its number on its rank."""
    steps = enumerate(schedule.programs[rank])
    places = ((rank, step, place) for step, instructions in steps for place in range(len(instructions)))
    return next(islice(places, number, None))


def _twice(flow: Dataflow, part: Instruction, earlier: int) -> str:
    """Say that the product of an instruction is there already."""
    schedule = flow.schedule
    rank, step, place = position_of(schedule, schedule.placement[part.stage], earlier)
    if part.op in COMMUNICATION:
        what = f"this message is {'sent' if part.op in SENDS else 'received'}"
    elif part.op is not Op.W:
        what = f"{flow.name(*flow.products(part))} is computed"
    elif parts_of(schedule.programs[rank][step][place])[-1].op is Op.B:
        return f"the full backward at step {step}, place {place} has computed the weight gradient already"
    else:
        what = "this weight gradient is computed"
    return f"{what} twice, first at step {step}, place {place}"


def _no_route(schedule: Schedule, instruction: Instruction) -> str:
    """Say why a message that has no route cannot exist."""
    stage, other = instruction.stage, schedule.other_end(instruction)
    onward = instruction.op in (Op.SEND_F, Op.RECV_B)
    if other is None and any(stage == edge[not onward] for edge in schedule.edges):
        way = "from" if onward else "to"
        return f"there are several edges {way} stage {stage}, or a skip connection: expected the peer's name"
    if other is None:
        end = "last" if onward else "first"
        return (
            f"stage {stage} is the {end} of its flow, so there is no stage for the other end of this message"
        )
    if instruction.peer is None:
        return (
            f"stages {stage} and {other} are both on rank {schedule.placement[stage]}: no message passes"
            " between them"
        )
    return (
        f"no skip connection that leaves the rank joins stages {stage} and {instruction.peer!r:.40} in this"
        " direction, or the value goes to that rank under the name of the stage that needs it first"
    )


def _check_complete(flow: Dataflow, record: OrderRecord) -> None:
    """Refuse a stage that lacks a microbatch of its flow, and a message with one end."""
    schedule = flow.schedule
    per_stage = 1 if schedule.forward_only else 2
    # Not their len(), which knows no range beyond the word size of the machine.
    expected = per_stage * sum(
        len(f.stages) * (m.stop - m.start if isinstance(m := f.microbatches, range) else len(m))
        for f in schedule.flows
    )
    if sum(map(len, record.made.values())) != expected:
        raise _missing(flow, record, per_stage)
    home = schedule.placement
    for gradient, weights in record.weights.items():
        for microbatch, number in record.made[gradient].items():
            if microbatch not in weights:
                position = position_of(schedule, home[flow.place(gradient)[0]], number)
                reason = "its weight gradient W is missing: after I there must be one W"
                raise fault_at(schedule, position, reason)
    for (op, stage, _), (first, other, _) in flow.routes.items():
        here, there = (record.sends, record.receives)[:: 1 if op in SENDS else -1]
        for microbatch, number in here[first].items():
            if microbatch not in there[first]:
                verb = "receives" if op in SENDS else "sends"
                reason = f"rank {other}, at the other end, never {verb} this message"
                raise fault_at(schedule, position_of(schedule, home[stage], number), reason)


def _missing(flow: Dataflow, record: OrderRecord, per_stage: int) -> ScheduleError:
    """Make the error for the first stage and microbatch that lack a forward or a backward."""
    for way in flow.schedule.flows:
        for microbatch in way.microbatches:
            for stage in way.stages:
                for product, name in ((0, "forward F"), (1, "backward, B or I"))[:per_stage]:
                    output = flow.output(stage, 0)
                    if microbatch not in record.made[output + product]:
                        rank = flow.schedule.placement[stage]
                        forward = record.made[output].get(microbatch)
                        place = last_place(flow.schedule, rank)
                        if forward is not None:
                            place = position_of(flow.schedule, rank, forward)[1:]
                        reason = f"the {name} of stage {stage} for microbatch {microbatch} is missing"
                        return schedule_error(flow.schedule, rank, place, reason)
    raise AssertionError("a value is missing, yet none is")
