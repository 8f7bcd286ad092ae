"""Prove the order of each rank on its own: inputs before uses, everything once, nothing missing."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..dataflow import PRODUCT, Dataflow
from ..errors import ScheduleError, fault_at, last_place, schedule_error
from ..instruction import COMMUNICATION, COMPUTE, SENDS, Instruction, Op, parts_of
from ..schedule import Schedule, Step

Position = tuple[int, int, int]  # rank, step, place


class OrderRecord(NamedTuple):
    """Record the position of every value and message, by the numbers of :class:`Dataflow`."""

    made: dict[int, Position]  # by value, the instruction that computes it
    weights: dict[int, Position]  # by input gradient, the B or the W that computes the weight gradient
    sends: dict[int, Position]  # by message
    receives: dict[int, Position]  # by message


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
    """Iterate over all instructions and their positions, those of a step in the order of its meaning."""
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
    schedule, routes, inputs, stride = flow.schedule, flow.routes, flow.inputs, flow.stride
    record = made, weights, sends, receives = OrderRecord({}, {}, {}, {})
    lowered = bool(schedule.ops & COMMUNICATION)
    for position, instruction in walk(schedule):
        op, stage, microbatch, peer, _, parts = instruction
        if op in COMMUNICATION:
            route = routes.get((op, stage, peer))
            if route is None:
                raise fault_at(schedule, position, _no_route(schedule, instruction))
            message = route[0] + stride * microbatch
            ends = sends if op in SENDS else receives
            if message in ends or (ends is sends and message // schedule.stages not in made):
                raise fault_at(schedule, position, _message_fault(flow, message, op, ends.get(message)))
            ends[message] = position
        elif op in COMPUTE:
            products = []
            for op, stage, microbatch, *_ in parts or (instruction,):
                values, messages = inputs[op, stage]
                for first in values:
                    if first + 2 * microbatch not in made:
                        name = flow.name(first + 2 * microbatch)
                        reason = f"it needs {name}, which this rank has not computed before"
                        raise fault_at(schedule, position, reason)
                for first in messages if lowered else ():
                    if first + stride * microbatch not in receives:
                        name = flow.name((first + stride * microbatch) // schedule.stages)
                        reason = f"it needs {name}, but its receive has not been posted before"
                        raise fault_at(schedule, position, reason)
                product = flow.output(stage, microbatch) + PRODUCT[op]
                if product in (weights if op is Op.W else made):
                    raise fault_at(schedule, position, _product_fault(flow, record, product, op))
                if op is not Op.W:
                    products.append((made, product))
                if op in (Op.B, Op.W):
                    products.append((weights, product))
            for positions, product in products:
                positions[product] = position
    _check_complete(flow, record)
    return record


def _message_fault(flow: Dataflow, message: int, op: Op, earlier: Position | None) -> str:
    """Say why a message cannot be sent or received here, or not again."""
    if earlier is None:
        name = flow.name(message // flow.schedule.stages)
        return f"it sends {name}, which this rank has not computed in an earlier step"
    _, step, place = earlier
    verb = "sent" if op in SENDS else "received"
    return f"this message is {verb} twice, first at step {step}, place {place}"


def _product_fault(flow: Dataflow, record: OrderRecord, product: int, op: Op) -> str:
    """Say that the product of an instruction has been computed before."""
    rank, step, place = (record.weights if op is Op.W else record.made)[product]
    if op is not Op.W:
        return f"{flow.name(product)} is computed twice, first at step {step}, place {place}"
    if parts_of(flow.schedule.programs[rank][step][place])[-1].op is Op.B:
        return f"the full backward at step {step}, place {place} has computed the weight gradient already"
    return f"this weight gradient is computed twice, first at step {step}, place {place}"


def _no_route(schedule: Schedule, instruction: Instruction) -> str:
    """Say why a message that has no route cannot exist."""
    stage, other = instruction.stage, schedule.other_end(instruction)
    if instruction.peer is None and other is None:
        end = "last" if instruction.op in (Op.SEND_F, Op.RECV_B) else "first"
        return (
            f"stage {stage} is the {end} of its chain, so there is no stage for the other end of this message"
        )
    if instruction.peer is None:
        return (
            f"stages {stage} and {other} are both on rank {schedule.placement[stage]}: no message passes"
            " between them"
        )
    return (
        f"no skip connection that leaves the rank joins stages {stage} and {instruction.peer!r:.40} in this"
        " direction"
    )


def _check_complete(flow: Dataflow, record: OrderRecord) -> None:
    """Refuse a stage that lacks a microbatch of its chain, and a message with one end."""
    schedule = flow.schedule
    per_stage = 1 if schedule.forward_only else 2
    # Not their len(), which knows no range beyond the word size of the machine.
    expected = sum(
        len(c.stages) * (c.microbatches.stop - c.microbatches.start) * per_stage for c in schedule.chains
    )
    if len(record.made) != expected:
        raise _missing(flow, record, per_stage)
    if not schedule.forward_only and len(record.weights) != expected // 2:
        position = next(p for value, p in record.made.items() if value % 2 and value not in record.weights)
        reason = "its weight gradient W is missing: after I there must be one W"
        raise fault_at(schedule, position, reason)
    for ends, others, verb in (
        (record.sends, record.receives, "receives"),
        (record.receives, record.sends, "sends"),
    ):
        for message, position in ends.items():
            if message not in others:
                rank, step, place = position
                op, stage, _, peer, _, _ = schedule.programs[rank][step][place]
                other = flow.routes[op, stage, peer].other
                reason = f"rank {other}, at the other end, never {verb} this message"
                raise fault_at(schedule, position, reason)


def _missing(flow: Dataflow, record: OrderRecord, per_stage: int) -> ScheduleError:
    """Make the error for the first stage and microbatch that lack a forward or a backward."""
    for chain in flow.schedule.chains:
        for microbatch in chain.microbatches:
            for stage in chain.stages:
                for product, name in ((0, "forward F"), (1, "backward, B or I"))[:per_stage]:
                    output = flow.output(stage, microbatch)
                    if output + product not in record.made:
                        rank = flow.schedule.placement[stage]
                        forward = record.made.get(output)
                        place = forward[1:] if forward else last_place(flow.schedule, rank)
                        reason = f"the {name} of stage {stage} for microbatch {microbatch} is missing"
                        return schedule_error(flow.schedule, rank, place, reason)
    raise AssertionError("a value is missing, yet none is")
