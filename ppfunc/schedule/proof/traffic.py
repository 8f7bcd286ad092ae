"""List the batches that ranks post and wait for: a schedule without its arithmetic."""

from collections.abc import Hashable
from typing import NamedTuple

from ..dataflow import Dataflow, Routes, message_number
from ..instruction import COMMUNICATION, COMPUTE, RECEIVES, TAIL, Instruction, Op, parts_of
from ..schedule import Schedule
from .order import in_order

Event = tuple[int, int, int]  # batch, step, place; the place is -1 where the batch is posted


class Traffic(NamedTuple):
    """The batches of a schedule, numbered, and what each rank does with them."""

    owner: list[int]  # rank of each batch
    step: list[int]  # step of each batch in the program of its rank
    queue: list[int]  # number of the queue that each batch is in
    messages: list[list[int]]  # the messages of each batch; negative numbers are sums over replicas
    ends: dict[int, list[int]]  # the batches that each message is in; it moves once all of them are at the head
    events: list[list[Event]]  # per rank, in order, the batches that it posts and those that it waits for


def traffic(schedule: Schedule, flow: Dataflow, routes: Routes, queue: str) -> Traffic:
    """List the batches of ``schedule``, with a queue per pair of ranks (``"pair"``) or one per rank (``"rank"``)."""
    found = Traffic([], [], [], [], {}, [[] for _ in schedule.programs])
    queues: dict[Hashable, int] = {}
    received: dict[int, int] = {}
    slotted, remote = schedule.has_slots, _remote(schedule, flow)
    for rank, program in enumerate(schedule.programs):
        buffers: dict[tuple[int, int], _Buffer] = {}
        sums: dict[int, int] = {}
        events = found.events[rank]
        for step, instructions in enumerate(program):
            batches: dict[Hashable, int] = {}
            begin = len(events)
            for place, instruction in in_order(instructions):
                op, stage = instruction[:2]
                if slotted:
                    _take_buffers(found, begin, buffers, instruction, (rank, step, place))
                if op in COMMUNICATION:
                    route = routes[op, stage, instruction[3]]
                    key = (rank, route[2]) if queue == "pair" else rank
                    if key not in batches:
                        batches[key] = _open(found, rank, step, queues.setdefault(key, len(queues)))
                    message = message_number(schedule, flow, instruction, route[0], route[1])
                    _join(found, batches[key], message)
                    if op in RECEIVES:
                        received[message] = batches[key]
                    elif instruction[4] is not None:
                        buffers[stage, instruction[4]].sends.append(batches[key])
                elif op in COMPUTE:
                    for part in parts_of(instruction):
                        for distance in remote[part[0]][part[1]]:
                            message = message_number(schedule, flow, part, distance, part[1])
                            events.append((received[message], step, place))
                # A sum over replicas is begun by REDUCE_TIED and waited for before what follows it, or at the end.
                elif op is Op.REDUCE_TIED:
                    for group in (g for g, stages in enumerate(schedule.replicas) if stage in stages):
                        sums[stage] = _open(found, rank, step, queues.setdefault(("sum", stage), len(queues)))
                        _join(found, sums[stage], -1 - group)
                elif op in TAIL and stage in sums:
                    events.append((sums.pop(stage), step, place))
        events += ((batch, len(program) - 1, 0) for batch in sums.values())
    return found


class _Buffer(NamedTuple):
    """The microbatch in a slot, the sends that read the slot, and those of its last holder in the step of the change."""

    microbatch: int | None
    sends: list[int]
    late: list[int]


def _open(found: Traffic, rank: int, step: int, queue: int) -> int:
    batch = len(found.owner)
    found.events[rank].append((batch, step, -1))
    found.owner.append(rank)
    found.step.append(step)
    found.queue.append(queue)
    found.messages.append([])
    return batch


def _join(found: Traffic, batch: int, message: int) -> None:
    found.messages[batch].append(message)
    found.ends.setdefault(message, []).append(batch)


def _remote(schedule: Schedule, flow: Dataflow) -> dict[Op, list[tuple[int, ...]]]:
    """Distances of the inputs that come from other ranks, by op and stage."""
    home = schedule.placement
    return {
        op: [tuple(d for d, origin in needs if home[origin] != home[stage]) for stage, needs in enumerate(rows)]
        for op, rows in flow.needs.items()
    }


def _take_buffers(
    found: Traffic,
    begin: int,
    buffers: dict[tuple[int, int], _Buffer],
    instruction: Instruction,
    position: tuple[int, int, int],
) -> None:
    """A slot is taken only after the sends of earlier steps that read it, and computed into only after all of them.

    What a rank sends and what it receives in one batch are different parts of a slot.
    """
    rank, step, place = position
    events = found.events[rank]
    for part in instruction[5] or (instruction,):
        if part[4] is None:
            continue
        held = buffers.get((part[1], part[4]))
        if held is None or held.microbatch != part[2]:
            before = held.sends if held else ()
            events[begin:begin] = [(batch, step, place) for batch in before if found.step[batch] < step]
            held = _Buffer(part[2], [], [batch for batch in before if found.step[batch] == step])
            buffers[part[1], part[4]] = held
        if held.late and part[0] in COMPUTE:
            events += ((batch, step, place) for batch in held.late)
            held.late.clear()
