"""Prove that all messages and waits come to an end, by one simulated run.

A rank posts the communications of a step as one batch and goes on; its compute waits for the
batches whose receives it consumes. A message moves once both its ends are posted and each is in
the batch at the head of its queue; a batch leaves its queue when all its messages have moved. Nothing
is buffered: this is a rendezvous, and a batch counts as received only as a whole. Queues are one
per pair of ranks at each end, or one per rank. What ends here also ends without the queues.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from math import inf
from typing import NamedTuple

from ..dataflow import Dataflow
from ..errors import ScheduleError, cycle_text, schedule_error, text_of
from ..instruction import COMMUNICATION, COMPUTE, RECEIVES, TAIL, Instruction, Op
from ..schedule import Schedule, Step
from .begins import find_step_atomic
from .order import OrderRecord, Position, in_order, walk


class Batch:
    """Messages that a rank posts together to one queue. Negative numbers are sums over replicas."""

    __slots__ = ("complete", "latest", "messages", "pending", "queue", "rank", "step")

    def __init__(self, rank: int, step: int, queue: deque[Batch]) -> None:
        self.rank = rank
        self.step = step
        self.queue = queue  # those posted before it and not complete come first
        self.messages: list[int] = []
        self.pending = -1  # messages that have not moved; -1 before it is posted
        self.latest = step  # last step in which an end of one of its messages is posted
        self.complete: float = inf  # number of the event with which its last message moved


Event = tuple[Batch, int]
"""A batch, and the place of the instruction that waits for it; -1 where the batch is posted."""


class _Buffer(NamedTuple):
    """A slot: the microbatch that holds it, its sends, and those of the one before in the same step."""

    microbatch: int | None
    sends: list[Batch]
    late: list[Batch]


class QueueRun:
    """Runs all ranks, a step of each in turn, until nothing moves any more.

    Attributes:
        waits: by blocked rank, the batch that it waits for, and the step and place of the wait.
        queues: by rank and key, the batches that are posted and not complete, the head first.
        at_head: by message that has not moved, the batches with it that are at the head of their queues.
        sent: by message, the batch with its send.
        began: by rank and step, the number of the step's first event; infinity where it has none.
        step_atomic: whether each batch that is waited for is posted at all ends by the step of the wait.
    """

    def __init__(self, flow: Dataflow, queue: str = "pair") -> None:
        schedule = flow.schedule
        self.waits: dict[int, tuple[Batch, int, int]] = {}
        self.queues: dict[tuple[int, Hashable], deque[Batch]] = defaultdict(deque)
        self.at_head: dict[int, tuple[Batch, ...]] = {}
        self.sent: dict[int, Batch] = {}
        self.began: list[list[float]] = [[inf] * len(program) for program in schedule.programs]
        self.step_atomic = True
        self._flow = flow
        self._queue_per_pair = queue == "pair"
        self._received: dict[int, Batch] = {}
        self._ends = {-1 - number: len(ends) for number, ends in enumerate(sum_positions(schedule))}
        self._clock = 0
        self._ready = deque(range(schedule.ranks))
        ranks = [self._rank(rank) for rank in self._ready]
        while self._ready:
            self._clock += 1
            next(ranks[self._ready.popleft()], None)

    def _rank(self, rank: int) -> Iterator[None]:
        """Run the program of one rank, pausing after each step and where it is blocked."""
        sums: dict[int, Batch] = {}
        buffers: dict[tuple[int, int], _Buffer] | None = {} if self._flow.schedule.has_slots else None
        program, began = self._flow.schedule.programs[rank], self.began[rank]
        for step, instructions in enumerate(program):
            events = self._events(rank, step, instructions, buffers, sums)
            if step == len(program) - 1:
                events += ((batch, 0) for batch in sums.values())
            for batch, place in events:
                if place < 0:
                    self._post(batch)
                else:
                    if batch.pending:
                        self.waits[rank] = batch, step, place
                        yield
                    if batch.latest > step:
                        self.step_atomic = False
                if began[step] == inf:
                    began[step] = self._clock
            if events:
                self._ready.append(rank)
                yield

    def _events(
        self,
        rank: int,
        step: int,
        instructions: Step,
        buffers: dict[tuple[int, int], _Buffer] | None,
        sums: dict[int, Batch],
    ) -> list[Event]:
        """List what a rank posts and waits for in one step."""
        routes, inputs, stride = self._flow.routes, self._flow.inputs, self._flow.stride
        events: list[Event] = []
        batches: dict[Hashable, Batch] = {}
        for place, instruction in in_order(instructions):
            op, stage, microbatch, peer, slot, parts = instruction
            if buffers is not None:
                _take_buffers(events, buffers, instruction, step, place)
            if op in COMMUNICATION:
                first, other = routes[op, stage, peer]
                key = other if self._queue_per_pair else None
                batch = batches.get(key)
                if batch is None:
                    batch = batches[key] = Batch(rank, step, self.queues[rank, key])
                    events.append((batch, -1))
                message = first + stride * microbatch
                batch.messages.append(message)
                if op in RECEIVES:
                    self._received[message] = batch
                else:
                    self.sent[message] = batch
                    if slot is not None and buffers is not None:
                        buffers[stage, slot].sends.append(batch)
            elif op in COMPUTE:
                for op, stage, microbatch, *_ in parts or (instruction,):
                    for first in inputs[op, stage][1]:
                        events.append((self._received.pop(first + stride * microbatch), place))
            # A sum over replicas is begun by REDUCE_TIED, and waited for before what follows it or at the
            # end.
            elif op is Op.REDUCE_TIED:
                for number, group in enumerate(self._flow.schedule.replicas):
                    if stage in group:
                        batch = sums[stage] = Batch(rank, step, self.queues[rank, ("sum", stage)])
                        batch.messages.append(-1 - number)
                        events.append((batch, -1))
            elif op in TAIL and stage in sums:
                events.append((sums.pop(stage), place))
        return events

    def _post(self, batch: Batch) -> None:
        """Put a batch into its queue; move what can move then, and wake the ranks that waited for it."""
        batch.queue.append(batch)
        batch.pending = len(batch.messages)
        heads = [batch] if batch.queue[0] is batch else []
        for head in heads:
            for message in head.messages:
                ends = (*self.at_head.pop(message, ()), head)
                if len(ends) < self._ends.get(message, 2):
                    self.at_head[message] = ends
                    continue
                latest = max([end.step for end in ends])
                for end in ends:
                    if latest > end.latest:
                        end.latest = latest
                    end.pending -= 1
                    if not end.pending:
                        self._complete(end)
                        if end.queue:
                            heads.append(end.queue[0])

    def _complete(self, batch: Batch) -> None:
        """Take a batch out of its queue, and wake its rank if that waits for it."""
        batch.complete = self._clock
        batch.queue.popleft()
        if batch.rank in self.waits and self.waits[batch.rank][0] is batch:
            del self.waits[batch.rank]
            self._ready.append(batch.rank)


def check_queues(flow: Dataflow, record: OrderRecord, queue: str = "pair") -> bool:
    """Prove that the messages of a schedule whose order on each rank is sound come to an end.

    Args:
        flow: of the schedule.
        record: of its order.
        queue: ``"pair"`` for a queue per pair of ranks at each end, ``"rank"`` for one per rank.

    Returns:
        Whether a barrier may stand between any two steps, with a queue per pair of ranks.

    Raises:
        ScheduleError: two messages of a pair are in different orders at its two ends, or some
            ranks wait for each other for ever; names all of them.
    """
    _check_streams(flow, record)
    atomic = find_step_atomic(flow, record)
    if queue == "pair" and atomic is not None:
        return atomic
    run = QueueRun(flow, queue)
    if run.waits:
        raise _deadlock(flow, record, run)
    if queue == "rank":  # what comes to its end there comes to its end with more queues, too
        return QueueRun(flow).step_atomic if atomic is None else atomic
    return run.step_atomic


def sum_positions(schedule: Schedule) -> list[list[Position]]:
    """Return the positions of REDUCE_TIED for each group of replicas."""
    if Op.REDUCE_TIED not in schedule.ops:
        return []
    tied = [(position, i.stage) for position, i in walk(schedule) if i.op is Op.REDUCE_TIED]
    return [[position for position, stage in tied if stage in group] for group in schedule.replicas]


def _take_buffers(
    events: list[Event],
    buffers: dict[tuple[int, int], _Buffer],
    instruction: Instruction,
    step: int,
    place: int,
) -> None:
    """Wait for the sends that read a slot before it is taken, and for those of its step before a compute.

    What a rank sends and what it receives in one batch are different parts of a slot.
    """
    for part in instruction[5] or (instruction,):
        if part[4] is None:
            continue
        held = buffers.get((part[1], part[4]))
        if held is None or held.microbatch != part[2]:
            before = held.sends if held else ()
            events[:0] = [(batch, place) for batch in before if batch.step < step]
            held = _Buffer(part[2], [], [batch for batch in before if batch.step == step])
            buffers[part[1], part[4]] = held
        if held.late and part[0] in COMPUTE:
            events += ((batch, place) for batch in held.late)
            held.late.clear()


def _check_streams(flow: Dataflow, record: OrderRecord) -> None:
    """Refuse a pair of ranks whose receives are in another order than the sends: messages carry no names."""
    home, stages = flow.schedule.placement, flow.schedule.stages
    sent: dict[tuple[int, int], list[int]] = {}
    for message, position in record.sends.items():
        sent.setdefault((position[0], home[message % stages]), []).append(message)
    taken = dict.fromkeys(sent, 0)
    span = 2 * flow.microbatches * stages
    for message, (rank, step, place) in record.receives.items():
        key = (home[message // span], rank)
        expected = sent[key][taken[key]]
        taken[key] += 1
        if expected != message:
            wanted = describe(flow, expected)
            reason = (
                f"it is message {taken[key] - 1} that rank {rank} receives from rank {key[0]}, "
                f"but rank {key[0]} sends {wanted} there: both must be in one order"
            )
            raise schedule_error(flow.schedule, rank, (step, place), reason)


def describe(flow: Dataflow, message: int) -> str:
    """Return a message in words."""
    if message < 0:
        return f"the sum over the replicas {flow.schedule.replicas[-1 - message]}"
    value, target = divmod(message, flow.schedule.stages)
    return f"{flow.name(value)} to stage {target}"


def _deadlock(flow: Dataflow, record: OrderRecord, run: QueueRun) -> ScheduleError:
    """Follow who waits for whom until the circle closes, and name all in it."""
    rank = min(run.waits)
    batch: Batch | None = None
    seen: dict[tuple[int, Batch | None], int] = {}
    sentences: list[str] = []
    while (rank, batch) not in seen:
        seen[rank, batch] = len(sentences)
        if batch is None:
            wanted, step, place = run.waits[rank]
            waiting = text_of(flow.schedule.programs[rank][step][place])
            sentence = f"rank {rank} at step {step}, place {place} ({waiting}) waits for "
        else:
            wanted = batch
            sentence = f"rank {rank} has first in its queue what it posted at step {batch.step}, "
        message, rank, batch, why = _blocker(flow, record, run, wanted)
        sentences.append(f"{sentence}{describe(flow, message)}, {why}")
    cycle = sentences[seen[rank, batch] :]
    # The place to mark is a wait of the circle, or else a batch of it.
    rank, batch = min(list(seen)[seen[rank, batch] :], key=lambda node: node[1] is not None)
    position = run.waits[rank][1:] if batch is None else (batch.step, 0)
    return schedule_error(flow.schedule, rank, position, "deadlock: " + cycle_text(cycle))


def _blocker(
    flow: Dataflow, record: OrderRecord, run: QueueRun, batch: Batch
) -> tuple[int, int, Batch | None, str]:
    """Return a message of ``batch`` that cannot move, the rank in its way, the batch in its way, and why."""
    head = batch.queue[0]
    if head is not batch:
        why = f"which is behind what rank {batch.rank} posted at step {head.step}"
        return batch.messages[0], batch.rank, head, why
    message = next(m for m in batch.messages if m in run.at_head)
    if message < 0:
        positions = sum_positions(flow.schedule)[-1 - message]
    else:
        positions = [record.sends[message], record.receives[message]]
    for rank, step, _ in positions:
        posted = (b for (owner, _), queue in run.queues.items() if owner == rank for b in queue)
        end = next((b for b in posted if b.step == step and message in b.messages), None)
        if end is None:
            return message, rank, None, f"which rank {rank} posts only at step {step}"
        head = end.queue[0]
        if head is not end:
            return message, rank, head, f"which on rank {rank} is behind what it posted at step {head.step}"
    raise AssertionError("a message with both ends at the head of their queues has not moved")
