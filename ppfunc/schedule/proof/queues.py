"""Prove that all messages and waits come to an end, by one run of all ranks.

A rank posts the communications of a step as one batch per peer and goes on; its compute waits for the
batches whose receives it consumes. A message moves once both its ends are posted and each is in the batch
at the head of its queue; a batch leaves its queue when all its messages have moved. Nothing is buffered:
this is a rendezvous, and a batch counts as received only as a whole. There is a queue per pair of ranks at
each end. What ends here also ends without the queues.

Two messages that two ranks post in opposite orders hold up each other for ever. Where there are none, a batch
is complete once the other rank has begun the last step in which it posts a message of the batch. So a rank
only ever waits for another to begin an instruction, and one run over these waits decides.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from ..dataflow import Dataflow
from ..errors import ScheduleError, cycle_text, fault_at, last_place, text_of
from ..instruction import COMPUTE, SENDS, TAIL, Op, microbatch_of
from ..schedule import Schedule
from .order import OrderRecord, Position, walk

Wait = tuple[int, int, int, int, Position]
"""The number of the instruction that waits, the other rank, the number of the instruction that this one has
to begin, the message, and the position of the wait. Instructions are numbered by rank; messages as in
:class:`Dataflow`, sums over replicas by negative numbers.
"""

_Sent = tuple[int, int, int]  # step, rank at the other end, message


class QueueRun(NamedTuple):
    """A run of all ranks, each step as early as possible, until nothing moves any more.

    Args:
        first: per rank and step, the number of its first instruction; then the number of all.
        last: by two ranks, and by step of the first, the last step of the second with a message of that
            batch.
        waits: per rank, in order.
        begins: per rank, the time at which each of its instructions begins.
    """

    first: list[list[int]]
    last: dict[tuple[int, int], dict[int, int]]
    waits: list[list[Wait]]
    begins: list[list[int]]

    @property
    def step_atomic(self) -> bool:
        """Tell if no rank waits for what another posts in a later step."""
        return all(
            awaited < self.first[other][min(step + 1, len(self.first[other]) - 1)]
            for waits in self.waits
            for _, other, awaited, _, (_, step, _) in waits
        )

    def completion(self, rank: int, other: int, step: int) -> int:
        """Return when the batch that ``rank`` posts for ``other`` in ``step`` is complete."""
        there = self.last[rank, other][step]
        return max(self.begins[r][self.first[r][s]] for r, s in ((rank, step), (other, there)))


def check_queues(flow: Dataflow, record: OrderRecord) -> QueueRun:
    """Prove that the messages of a schedule whose order on each rank is sound come to an end.

    Raises:
        ScheduleError: two messages of a pair of ranks are in different orders at its two ends, or some
            ranks wait for each other for ever; names all of them.
    """
    schedule = flow.schedule
    _check_streams(flow, record)
    first = [list(accumulate(map(len, program), initial=0)) for program in schedule.programs]
    last = _last_steps(flow, record)
    waits: list[list[Wait]] = [[] for _ in schedule.programs]
    for wait in chain(
        _message_waits(flow, record, first, last),
        _sum_waits(flow, first) if Op.REDUCE_TIED in schedule.ops else (),
        _slot_waits(flow, first, last) if schedule.has_slots else (),
    ):
        waits[wait[-1][0]].append(wait)
    for of_rank in waits:
        of_rank.sort()
    begins = _begins(schedule, waits)
    endless = ((wait for wait in of_rank if wait[2] >= len(begins[wait[1]])) for of_rank in waits)
    blocked = [next(of_rank, None) for of_rank in endless]
    if any(blocked):
        raise _deadlock(flow, record, first, blocked)
    return QueueRun(first, last, waits, begins)


def _check_streams(flow: Dataflow, record: OrderRecord) -> None:
    """Refuse a pair of ranks whose receives are in another order than the sends: messages carry no names."""
    home, stages = flow.schedule.placement, flow.schedule.stages
    sent: dict[tuple[int, int], list[int]] = {}
    for message, position in record.sends.items():
        sent.setdefault((position[0], home[message % stages]), []).append(message)
    taken = dict.fromkeys(sent, 0)
    span = 2 * flow.microbatches * stages
    for message, position in record.receives.items():
        key = (home[message // span], position[0])
        expected = sent[key][taken[key]]
        taken[key] += 1
        if expected != message:
            wanted = describe(flow, expected)
            reason = (
                f"it is message {taken[key] - 1} that rank {key[1]} receives from rank {key[0]}, "
                f"but rank {key[0]} sends {wanted} there: both must be in one order"
            )
            raise fault_at(flow.schedule, position, reason)


def _last_steps(flow: Dataflow, record: OrderRecord) -> dict[tuple[int, int], dict[int, int]]:
    """Return ``last`` of the run; refuse two ranks that post two messages in opposite orders."""
    posted: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for message, (sender, step, _) in record.sends.items():
        receiver, there, _ = record.receives[message]
        if sender < receiver:
            posted[sender, receiver].append((step, there, message))
        else:
            posted[receiver, sender].append((there, step, message))
    last = {}
    for (low, high), messages in posted.items():
        messages.sort()
        for (step, there, one), (later, earlier, other) in pairwise(messages):
            if there > earlier:
                position = record.receives[one if record.receives[one][0] == low else other]
                reason = (
                    f"deadlock: rank {low} posts {describe(flow, one)} at step {step}, before"
                    f" {describe(flow, other)} at step {later}, which rank {high} posts at step {earlier},"
                    f" before the first at step {there}: each is behind the other in its queue"
                )
                raise fault_at(flow.schedule, position, reason)
        last[low, high] = {step: there for step, there, _ in messages}
        last[high, low] = {there: step for step, there, _ in messages}
    return last


def _message_waits(
    flow: Dataflow, record: OrderRecord, first: list[list[int]], last: dict[tuple[int, int], dict[int, int]]
) -> Iterator[Wait]:
    """Yield the waits of computes for the batches of what they consume."""
    stages = flow.schedule.stages
    for message, (rank, step, _) in record.receives.items():
        sender = record.sends[message][0]
        value, target = divmod(message, stages)
        position = record.made[flow.output(target, flow.place(value)[1]) + value % 2]
        number = first[rank][position[1]] + position[2]
        yield number, sender, first[sender][last[rank, sender][step]], message, position


def _sum_waits(flow: Dataflow, first: list[list[int]]) -> Iterator[Wait]:
    """Yield the waits for sums over replicas, which REDUCE_TIED begins, before what follows or at the end."""
    schedule = flow.schedule
    begun: dict[int, Position] = {}
    used: dict[int, Position] = {}
    for position, instruction in walk(schedule):
        if instruction.op is Op.REDUCE_TIED:
            begun.setdefault(instruction.stage, position)
        elif instruction.op in TAIL and instruction.stage in begun:
            used.setdefault(instruction.stage, position)
    for group, stages in enumerate(schedule.replicas):
        summed = [stage for stage in stages if stage in begun]
        for stage in summed:
            rank = schedule.placement[stage]
            at = used.get(stage, (rank, *(last_place(schedule, rank) or (0, 0))))
            for other, step, place in map(begun.__getitem__, summed):
                yield first[rank][at[1]] + at[2], other, first[other][step] + place, -1 - group, at


def _slot_waits(
    flow: Dataflow, first: list[list[int]], last: dict[tuple[int, int], dict[int, int]]
) -> Iterator[Wait]:
    """Yield the waits for the sends that read a slot, before another microbatch takes it.

    What a rank sends and what it receives in one batch are different parts of a slot, so for the sends of the
    step itself only its compute waits.
    """
    holder: dict[tuple[int, int], int | None] = {}  # by stage and slot
    sends: dict[tuple[int, int], list[_Sent]] = defaultdict(list)  # of the holder
    late: dict[tuple[int, int], list[_Sent]] = {}  # of the one before, in the step in which the slot is taken
    for position, instruction in walk(flow.schedule):
        rank, step, place = position
        begin = first[rank][step]
        for op, stage, microbatch, peer, slot, _ in instruction.parts or (instruction,):
            if slot is None:
                continue
            key, ended = (stage, slot), []
            if holder.setdefault(key, microbatch) != microbatch:
                holder[key], before = microbatch, sends.pop(key, [])
                ended = [(begin - 1, sent) for sent in before if sent[0] < step]
                late[key] = [sent for sent in before if sent[0] == step]
            if op in COMPUTE:
                ended += [(begin + place, sent) for sent in late.pop(key, ())]
            for number, (sent, other, message) in ended:
                yield number, other, first[other][last[rank, other][sent]], message, position
            if op in SENDS:
                route = flow.routes[op, stage, peer]
                sends[key].append((step, route.other, route.first + flow.stride * microbatch_of(instruction)))


def _begins(schedule: Schedule, waits: list[list[Wait]]) -> list[list[int]]:
    """Run all ranks from wait to wait; return when each instruction begins, where a step takes a unit."""
    begins: list[list[int]] = [[] for _ in waits]
    blocked: list[list[tuple[int, int]]] = [[] for _ in waits]  # by rank: what is awaited of it, and by whom

    def run(rank: int) -> Iterator[None]:
        mine, late = begins[rank], 0
        steps = [step for step, instructions in enumerate(schedule.programs[rank]) for _ in instructions]
        for number, other, awaited, _, _ in waits[rank]:
            while number >= len(mine):
                mine.append(steps[len(mine)] + late)
            if awaited >= len(begins[other]):
                blocked[other].append((awaited, rank))
                yield
            if begins[other][awaited] > steps[number] + late:
                late = begins[other][awaited] - steps[number]
        mine += [step + late for step in steps[len(mine) :]]

    ready = list(range(len(waits)))
    runs = [run(rank) for rank in ready]
    while ready:
        rank = ready.pop()
        next(runs[rank], None)
        begun = len(begins[rank])
        ready += [waiter for awaited, waiter in blocked[rank] if awaited < begun]
        blocked[rank] = [entry for entry in blocked[rank] if entry[0] >= begun]
    return begins


def describe(flow: Dataflow, message: int) -> str:
    """Return a message in words."""
    if message < 0:
        return f"the sum over the replicas {flow.schedule.replicas[-1 - message]}"
    value, target = divmod(message, flow.schedule.stages)
    return f"{flow.name(value)} to stage {target}"


def _deadlock(
    flow: Dataflow, record: OrderRecord, first: list[list[int]], blocked: list[Wait | None]
) -> ScheduleError:
    """Follow who waits for whom until the circle closes, and name all in it."""
    wait = next(wait for wait in blocked if wait)
    sentences: dict[int, str] = {}
    while wait[-1][0] not in sentences:
        _, other, awaited, message, (rank, step, place) = wait
        there = bisect_right(first[other], awaited) - 1
        ends = (record.sends.get(message), record.receives.get(message))
        alone = message < 0 or (other, there) in [end[:2] for end in ends if end]
        waiting = text_of(flow.schedule.programs[rank][step][place])
        sentences[rank] = (
            f"rank {rank} at step {step}, place {place} ({waiting})"
            f" waits for {describe(flow, message)}, {'which' if alone else 'in a batch with what'}"
            f" rank {other} posts only at step {there}"
        )
        next_wait = blocked[other]
        assert next_wait, "a rank is waited for that has come to its end"
        wait = next_wait
    cycle = list(sentences.values())[list(sentences).index(wait[-1][0]) :]
    return fault_at(flow.schedule, wait[-1], "deadlock: " + cycle_text(cycle))
