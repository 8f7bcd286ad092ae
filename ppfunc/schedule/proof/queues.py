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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise, repeat
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ..dataflow import Dataflow
from ..errors import ScheduleError, circle_of, fault_at, last_place, text_of
from ..instruction import COMMUNICATION, COMPUTE, KINDS, SENDS, TAIL, Op
from ..schedule import Schedule
from .order import OrderRecord, Position, position_of, walk
from .timeline import take_turns

Wait = tuple[int, int, int, int, int]
"""A rank waits behind an instruction: its number; the one on whose behalf it waits; the other rank; the
instruction that this one has to begin; the message. Instructions are numbered by rank; messages as in
:class:`Dataflow`, sums over replicas by negative numbers.
"""

_Last = dict[tuple[int, int], dict[int, int]]
_Streams = dict[tuple[int, int], list[tuple[int, int, int]]]
_Sent = tuple[int, int, int]  # step, rank at the other end, message


class QueueRun(NamedTuple):
    """A run of all ranks, each step as early as possible, until nothing moves any more.

    Args:
        first: number of the first instruction, per rank and step; then the number of all.
        steps: step of an instruction, per rank and instruction.
        last: instruction that begins the last step of a rank with a message of a batch; by two ranks, of
            which this is the second, and by the step in which the first posts the batch.
        waits: waits of each rank, in order.
        late: steps of time that a rank has lost at first, and after each of its waits.
    """

    first: list[list[int]]
    steps: list[list[int]]
    last: _Last
    waits: list[list[Wait]]
    late: list[list[int]]

    @property
    def step_atomic(self) -> bool:
        """Tell whether no rank waits for a message that another rank posts in a later step."""
        return all(
            self.steps[other][awaited] <= steps[at]
            for steps, waits in zip(self.steps, self.waits, strict=True)
            for _, at, other, awaited, _ in waits
        )

    def begin(self, rank: int, number: int) -> float:
        """Return when an instruction of a rank begins; behind the last instruction, infinity."""
        if number == len(self.steps[rank]):
            return inf
        return self.steps[rank][number] + self.late[rank][bisect_left(self.waits[rank], (number,))]

    def completion(self, rank: int, other: int, step: int) -> float:
        """Return when the batch that ``rank`` posts for ``other`` in ``step`` is complete."""
        here, there = self.first[rank][step], self.last[rank, other][step]
        return max(self.begin(rank, here), self.begin(other, there))


def check_queues(flow: Dataflow, record: OrderRecord) -> QueueRun:
    """Prove that the messages of a schedule whose order on each rank is sound come to an end.

    Raises:
        ScheduleError: two messages of a pair of ranks are in different orders at its two ends, or some
            ranks wait for each other for ever; names all of them.
    """
    schedule = flow.schedule
    first = [list(accumulate(map(len, program), initial=0)) for program in schedule.programs]
    steps = [[step for step, row in enumerate(program) for _ in row] for program in schedule.programs]
    last = _last_steps(flow, first, steps, _streams(flow, record))
    waits: list[list[Wait]] = [[] for _ in schedule.programs]
    for rank, some in chain(
        _message_waits(flow, record, steps, last),
        _sum_waits(schedule, first) if Op.REDUCE_TIED in schedule.ops else (),
        _slot_waits(flow, first, last) if schedule.has_slots else (),
    ):
        waits[rank] += some
    for of_rank in waits:
        of_rank.sort()
    late = _run(steps, waits)
    blocked = [next(iter(of_rank[len(past) - 1 :]), None) for of_rank, past in zip(waits, late, strict=True)]
    if any(blocked):
        raise _deadlock(flow, steps, blocked)
    return QueueRun(first, steps, last, waits, late)


def _streams(flow: Dataflow, record: OrderRecord) -> _Streams:
    """List the messages by sender and receiver: numbers of both ends, and the message, in the order sent.

    Refuse a pair of ranks whose receives are in another order than the sends: messages carry no names.
    """
    streams: _Streams = {}
    for (op, stage, _), (first, receiver, _) in flow.routes.items():
        if op in SENDS:
            messages = streams.setdefault((flow.schedule.placement[stage], receiver), [])
            received = record.receives[first]
            for microbatch, number in record.sends[first].items():
                messages.append((number, received[microbatch], first + flow.stride * microbatch))
    for (sender, receiver), messages in streams.items():
        messages.sort()
        in_turn = sorted(messages, key=itemgetter(1))
        for number, (sent, taken) in enumerate(zip(messages, in_turn, strict=True)):
            if sent != taken:
                reason = (
                    f"it is message {number} that rank {receiver} receives from rank {sender}, "
                    f"but rank {sender} sends {describe(flow, sent[2])} there: both must be in one order"
                )
                raise fault_at(flow.schedule, position_of(flow.schedule, receiver, taken[1]), reason)
    return streams


def _last_steps(flow: Dataflow, first: list[list[int]], steps: list[list[int]], streams: _Streams) -> _Last:
    """Return ``last`` of the run; refuse two ranks that post two messages in opposite orders."""
    last = {}
    for low, high in streams:
        if low > high:
            continue
        to, fro = steps[low], steps[high]
        rows = [(to[here], fro[there], here, message) for here, there, message in streams[low, high]]
        rows += [(to[here], fro[there], here, message) for there, here, message in streams[high, low]]
        rows.sort()
        for (step, there, here, one), (later, earlier, _, other) in pairwise(rows):
            if there > earlier:
                reason = (
                    f"deadlock: rank {low} posts {describe(flow, one)} at step {step}, before"
                    f" {describe(flow, other)} at step {later}, which rank {high} posts at step {earlier},"
                    f" before the first at step {there}: each is behind the other in its queue"
                )
                raise fault_at(flow.schedule, position_of(flow.schedule, low, here), reason)
        last[low, high] = {step: first[high][there] for step, there, _, _ in rows}
        last[high, low] = {there: first[low][step] for step, there, _, _ in rows}
    return last


def _message_waits(
    flow: Dataflow, record: OrderRecord, steps: list[list[int]], last: _Last
) -> Iterator[tuple[int, Iterable[Wait]]]:
    """Yield the waits of computes for the batches of their inputs."""
    home, stride = flow.schedule.placement, flow.stride
    for (op, stage), needs in flow.needs.items():
        rank = home[stage]
        for value, origin, shift in needs if op in (Op.F, Op.I) else ():
            if (sender := home[origin]) == rank:
                continue
            message = flow.message(value, rank)
            received, batches = record.receives[message], last[rank, sender]
            numbers = record.made[flow.output(stage, 0) + KINDS[op].product]
            if not flow.always(stage, origin, shift):
                taken = (m for m in numbers if flow.takes(m, origin, shift))
                numbers = {m + shift: numbers[m] for m in taken}
            posted = map(steps[rank].__getitem__, map(received.__getitem__, numbers))
            awaited = map(batches.__getitem__, posted)
            messages = [message + stride * microbatch for microbatch in numbers]
            yield rank, zip(numbers.values(), numbers.values(), repeat(sender), awaited, messages)


def _sum_waits(schedule: Schedule, first: list[list[int]]) -> Iterator[tuple[int, Iterable[Wait]]]:
    """Yield the waits for sums over replicas that REDUCE_TIED begins, before their next use or at the end."""
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
            _, step, place = used.get(stage, (rank, *(last_place(schedule, rank) or (0, 0))))
            for other, there, beside in map(begun.__getitem__, summed):
                number = first[rank][step] + place
                yield rank, [(number, number, other, first[other][there] + beside, -1 - group)]


def _slot_waits(flow: Dataflow, first: list[list[int]], last: _Last) -> Iterator[tuple[int, Iterable[Wait]]]:
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
                yield rank, [(number, begin + place, other, last[rank, other][sent], message)]
            if op in SENDS:
                sends[key].append((step, flow.routes[op, stage, peer].other, flow.carried(instruction)))


def _run(steps: list[list[int]], waits: list[list[Wait]]) -> list[list[int]]:
    """Run all ranks from wait to wait, as far as they come; return ``late`` of the run."""
    numbers = [[wait[0] for wait in of_rank] for of_rank in waits]
    late: list[list[int]] = [[0] for _ in waits]
    blocked: list[list[tuple[int, int]]] = [[] for _ in waits]  # by rank: the waits to end, and who waits

    def run(rank: int) -> Iterator[None]:
        mine, here, lost = late[rank], steps[rank], 0
        for _, at, other, awaited, _ in waits[rank]:
            before, past = bisect_left(numbers[other], awaited), late[other]
            if before >= len(past):
                heappush(blocked[other], (before, rank))
                yield
            if (more := steps[other][awaited] + past[before] - here[at]) > lost:
                lost = more
            mine.append(lost)

    def resume(rank: int) -> None:
        next(runs[rank], None)
        while blocked[rank] and blocked[rank][0][0] < len(late[rank]):
            ready.append(heappop(blocked[rank])[1])

    ready = list(range(len(waits)))
    runs = [run(rank) for rank in ready]
    take_turns(resume, ready, late)
    return late


def describe(flow: Dataflow, message: int) -> str:
    """Return a message in words."""
    if message < 0:
        return f"the sum over the replicas {flow.schedule.replicas[-1 - message]}"
    value, rank = flow.content(message)
    return f"{flow.name(value)} to rank {rank}"


def _deadlock(flow: Dataflow, steps: list[list[int]], blocked: list[Wait | None]) -> ScheduleError:
    """Follow who waits for whom until the circle closes, and name all in it."""
    programs = flow.schedule.programs
    positions: dict[int, Position] = {}

    def sentence(rank: int) -> tuple[str, int]:
        wait = blocked[rank]
        assert wait, "a rank is waited for that has come to its end"
        _, at, other, awaited, message = wait
        positions[rank] = _, step, place = position_of(flow.schedule, rank, at)
        there = steps[other][awaited]
        posted = [flow.carried(i) for i in programs[other][there] if i.op in COMMUNICATION]
        alone = message < 0 or message in posted
        return (
            f"rank {rank} at step {step}, place {place} ({text_of(programs[rank][step][place])})"
            f" waits for {describe(flow, message)}, {'which' if alone else 'in a batch with what'}"
            f" rank {other} posts only at step {there}"
        ), other

    rank, cycle = circle_of(next(rank for rank, wait in enumerate(blocked) if wait), sentence)
    return fault_at(flow.schedule, positions[rank], "deadlock: " + cycle)
