"""Prove quickly that messages come to an end, for a queue per pair of ranks at each end.

Where of no two messages between two ranks each is posted first at one end, a batch is complete once the
other rank has begun the last step in which it posts a message of the batch. So a rank only ever waits for
another to begin a step, and one run over these waits decides. It takes a third of the time of
:class:`ppfunc.schedule.proof.queues.QueueRun`, which says what is wrong where this finds no end.
"""

from collections import defaultdict
from itertools import pairwise
from math import inf

from ..dataflow import Dataflow
from ..instruction import Op
from .order import OrderRecord

Wait = tuple[int, int, int]  # step of the consumer, the other rank, the step that this one has to begin


def find_step_atomic(flow: Dataflow, record: OrderRecord) -> bool | None:
    """Return whether a schedule that comes to its end is step-atomic; None where that is not proved here.

    Slots, and sums over replicas, are left to the run of the queues.
    """
    if flow.schedule.has_slots or Op.REDUCE_TIED in flow.schedule.ops:
        return None
    waits = _waits(flow, record)
    if waits is None or not _come_to_an_end(waits):
        return None
    return all(awaited <= step for rank in waits for step, _, awaited in rank)


def _waits(flow: Dataflow, record: OrderRecord) -> list[list[Wait]] | None:
    """List the waits of each rank in order; None where two ranks post two messages in opposite orders."""
    steps: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for message, (sender, step, _) in record.sends.items():
        receiver, there, _ = record.receives[message]
        if sender < receiver:
            steps[sender, receiver].append((step, there))
        else:
            steps[receiver, sender].append((there, step))
    # By two ranks, and by step of the first, the last step of the other with a message of that batch.
    last: dict[tuple[int, int], dict[int, int]] = {}
    for (low, high), posted in steps.items():
        posted.sort()
        if any(a > b for (_, a), (_, b) in pairwise(posted)):
            return None
        last[low, high] = dict(posted)
        last[high, low] = {there: step for step, there in posted}
    waits: list[list[Wait]] = [[] for _ in flow.schedule.programs]
    for message, (rank, step, _) in record.receives.items():
        sender = record.sends[message][0]
        value, target = divmod(message, flow.schedule.stages)
        product = flow.output(target, flow.place(value)[1]) + value % 2
        waits[rank].append((record.made[product][1], sender, last[rank, sender][step]))
    for of_rank in waits:
        of_rank.sort()
    return waits


def _come_to_an_end(waits: list[list[Wait]]) -> bool:
    """Run all ranks from wait to wait."""
    begun: list[float] = [0] * len(waits)
    left = list(map(iter, waits))
    blocked: list[list[tuple[int, int]]] = [[] for _ in waits]  # by rank, the steps that others wait for
    ready = list(range(len(waits)))
    while ready:
        rank = ready.pop()  # where it was blocked, that wait is over
        begun[rank] = inf
        for step, other, awaited in left[rank]:
            if begun[other] < awaited:
                begun[rank] = step
                blocked[other].append((awaited, rank))
                break
        ready += [waiter for awaited, waiter in blocked[rank] if awaited <= begun[rank]]
        blocked[rank] = [entry for entry in blocked[rank] if entry[0] > begun[rank]]
    return all(step == inf for step in begun)
