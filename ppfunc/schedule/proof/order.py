"""Prove the order of each rank on its own: inputs before uses, everything once, nothing missing."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..dataflow import PRODUCT, Dataflow, Routes, message_number
from ..errors import ScheduleError, fault_at, last_place, schedule_error
from ..instruction import COMMUNICATION, COMPUTE, SENDS, Instruction, Op, parts_of
from ..schedule import Schedule, Step

Position = tuple[int, int, int]  # rank, step, place


class OrderRecord(NamedTuple):
    """The position of everything that happens. A message is numbered ``value * S + stage that consumes it``."""

    made: dict[int, Position]  # position of the instruction that makes each value
    weights: dict[int, Position]  # position of the weight gradient, by the number of the input gradient that it follows
    sends: dict[int, Position]  # position of each message's send
    receives: dict[int, Position]  # position of each message's receive


def in_order(step: Step) -> Iterable[tuple[int, Instruction]]:
    """Return the instructions of a step with their places, in the order of its meaning.

    Communications first, then loads, then the rest.
    """
    before = 0
    for instruction in step:
        phase = _PHASE.get(instruction[0], 2)
        if phase < before:
            return sorted(enumerate(step), key=lambda item: _PHASE.get(item[1][0], 2))
        before = phase
    return enumerate(step)


_PHASE = {**dict.fromkeys(COMMUNICATION, 0), Op.LOAD: 1}


def walk(schedule: Schedule) -> Iterator[tuple[Position, Instruction]]:
    """Iterate over all instructions and their positions, those of a step in the order of its meaning."""
    for rank, program in enumerate(schedule.programs):
        for step, instructions in enumerate(program):
            for place, instruction in in_order(instructions):
                yield (rank, step, place), instruction


def check_order(schedule: Schedule, flow: Dataflow, routes: Routes) -> OrderRecord:
    """Walk through each program and refuse faults that no other rank can mend.

    Every value that a rank itself must provide is there before it is used or sent, every value
    from elsewhere has its receive posted (in a schedule with communications), nothing happens
    twice, and at the end nothing is missing.

    Raises:
        ScheduleError: naming the first place of the first rank where this does not hold.
    """
    record = OrderRecord({}, {}, {}, {})
    lowered = bool(schedule.ops & COMMUNICATION)
    for position, instruction in walk(schedule):
        fault = ""
        if instruction[0] in COMPUTE:
            fault = _compute(schedule, flow, record, instruction, position, lowered)
        elif instruction[0] in COMMUNICATION:
            fault = _message(schedule, flow, routes, record, instruction, position)
        if fault:
            raise fault_at(schedule, position, fault)
    _check_complete(schedule, flow, routes, record)
    return record


def _compute(schedule: Schedule, flow: Dataflow, record: OrderRecord, instruction: Instruction, position: Position, lowered: bool) -> str:
    """Record a compute instruction; returns its fault in words, empty where there is none."""
    home = schedule.placement
    entered: list[tuple[dict[int, Position], int]] = []
    for op, stage, microbatch, *_ in instruction[5] or (instruction,):
        assert microbatch is not None
        output = 2 * (stage * flow.microbatches + microbatch)
        for distance, origin in flow.needs[op][stage]:
            value = output + distance
            if home[origin] == position[0]:
                if value not in record.made:
                    return f"it needs {flow.name(value)}, which this rank has not computed before"
            elif lowered and value * len(home) + stage not in record.receives:
                return f"it needs {flow.name(value)}, but its receive has not been posted before"
        product = PRODUCT.get(op)
        if product is None:
            fault = _weight_fault(schedule, record, output + 1)
            if fault:
                return fault
            entered.append((record.weights, output + 1))
        elif output + product in record.made:
            _, step, place = record.made[output + product]
            return f"{flow.name(output + product)} is computed twice, first at step {step}, place {place}"
        else:
            entered.append((record.made, output + product))
    for record_of, value in entered:
        record_of[value] = position
    return ""


def _weight_fault(schedule: Schedule, record: OrderRecord, gradient: int) -> str:
    if gradient in record.weights:
        _, step, place = record.weights[gradient]
        return f"this weight gradient is computed twice, first at step {step}, place {place}"
    rank, step, place = record.made[gradient]
    if schedule.programs[rank][step][place].op is Op.B:
        return f"the full backward at step {step}, place {place} has computed the weight gradient already"
    return ""


def _message(schedule: Schedule, flow: Dataflow, routes: Routes, record: OrderRecord, instruction: Instruction, position: Position) -> str:
    """Record one end of a message; returns its fault in words, empty where there is none."""
    route = routes.get((instruction[0], instruction[1], instruction[3]))
    if route is None:
        return _no_route(schedule, instruction)
    message = message_number(schedule, flow, instruction, route[0], route[1])
    sending = instruction[0] in SENDS
    ends = record.sends if sending else record.receives
    if message in ends:
        _, step, place = ends[message]
        return f"this message is {'sent' if sending else 'received'} twice, first at step {step}, place {place}"
    value = message // len(schedule.placement)
    if sending and value not in record.made:
        return f"it sends {flow.name(value)}, which this rank has not computed in an earlier step"
    ends[message] = position
    return ""


def _no_route(schedule: Schedule, instruction: Instruction) -> str:
    """Say why a message that has no route cannot exist."""
    stage, other = instruction.stage, schedule.other_end(instruction)
    if instruction.peer is None and other is None:
        end = "last" if instruction.op in (Op.SEND_F, Op.RECV_B) else "first"
        return f"stage {stage} is the {end} of its chain, so there is no stage for the other end of this message"
    if instruction.peer is None:
        return f"stages {stage} and {other} are both on rank {schedule.placement[stage]}: no message passes between them"
    return f"no skip connection that leaves the rank joins stages {stage} and {instruction.peer!r:.40} in this direction"


def _check_complete(schedule: Schedule, flow: Dataflow, routes: Routes, record: OrderRecord) -> None:
    """Every stage has computed everything for every microbatch of its chain, and every message has two ends."""
    per_stage = 1 if schedule.forward_only else 2
    # Not their len(), which knows no range beyond the word size of the machine.
    expected = sum(len(c.stages) * (c.microbatches.stop - c.microbatches.start) * per_stage for c in schedule.chains)
    if len(record.made) != expected:
        raise _missing(schedule, flow, record, per_stage)
    for value, (rank, step, place) in record.made.items():
        if value % 2 and value not in record.weights and parts_of(schedule.programs[rank][step][place])[-1].op is Op.I:
            raise schedule_error(schedule, rank, (step, place), "its weight gradient W is missing: after I there must be one W")
    for ends, others, verb in ((record.sends, record.receives, "receives"), (record.receives, record.sends, "sends")):
        for message, position in ends.items():
            if message not in others:
                rank, step, place = position
                instruction = schedule.programs[rank][step][place]
                other = routes[instruction.op, instruction.stage, instruction.peer].other
                raise fault_at(schedule, position, f"rank {other}, at the other end, never {verb} this message")


def _missing(schedule: Schedule, flow: Dataflow, record: OrderRecord, per_stage: int) -> ScheduleError:
    """The error for the first stage and microbatch that lack a forward or a backward."""
    for chain in schedule.chains:
        for microbatch in chain.microbatches:
            for stage in chain.stages:
                for product, name in ((0, "forward F"), (1, "backward, B or I"))[:per_stage]:
                    if flow.output(stage, microbatch) + product not in record.made:
                        rank = schedule.placement[stage]
                        partner = record.made.get(flow.output(stage, microbatch))
                        reason = f"the {name} of stage {stage} for microbatch {microbatch} is missing"
                        return schedule_error(schedule, rank, partner[1:] if partner else last_place(schedule, rank), reason)
    raise AssertionError("a value is missing, yet none is")
