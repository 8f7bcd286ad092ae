"""Prove that all messages and waits come to an end, by one simulated run.

A rank posts the communications of a step as one batch and goes on; its compute waits for the
batches whose receives it consumes. A message moves once both its ends are posted and each is in
the batch at the head of its queue; a batch leaves its queue when all its messages have moved. Nothing
is buffered: this is a rendezvous, and a batch counts as received only as a whole. Queues are one
per pair of ranks at each end, or one per rank. What ends here also ends without the queues.
"""

from collections import deque
from typing import NamedTuple

from ..dataflow import Dataflow
from ..errors import ScheduleError, cycle_text, schedule_error, text_of
from ..schedule import Schedule
from .order import OrderRecord
from .traffic import Traffic


class QueueState(NamedTuple):
    """The state of a run."""

    at: list[int]  # per rank, the index of its next event
    posted: list[deque[int]]  # per queue, the batches that are posted and not complete, the head first
    pending: list[int]  # per batch, how many of its messages have not moved; -1 before it is posted
    clocks: list[list[int]]  # per rank, the number of each event in the order in which all events happened
    complete: list[int]  # per batch, the number of the event with which its last message moved


def check_queues(schedule: Schedule, flow: Dataflow, record: OrderRecord, found: Traffic) -> QueueState:
    """Run the messages of a schedule whose order on each rank is sound.

    Raises:
        ScheduleError: two messages of a pair are in different orders at its two ends, or some
            ranks wait for each other for ever; names all of them.
    """
    _check_streams(schedule, flow, record)
    state = run(found)
    if any(at < len(events) for at, events in zip(state.at, found.events, strict=True)):
        raise _deadlock(schedule, flow, found, state)
    return state


def run(found: Traffic) -> QueueState:
    """Run all ranks, a step of each in turn, until nothing moves any more."""
    queues, ranks, batches = 1 + max(found.queue, default=-1), len(found.events), len(found.owner)
    state = QueueState([0] * ranks, [deque() for _ in range(queues)], [-1] * batches, [[] for _ in range(ranks)], [0] * batches)
    pending = state.pending
    arrived: dict[int, int] = {}
    ready = deque(range(ranks))
    waiting: dict[int, int] = {}
    clock = 0
    while ready:
        rank = ready.popleft()
        events, clocks = found.events[rank], state.clocks[rank]
        at, now = state.at[rank], -1
        while at < len(events):
            batch, step, place = events[at]
            if step != now:
                if now >= 0:
                    ready.append(rank)
                    break
                now = step
            clock += 1
            if place < 0:
                line = state.posted[found.queue[batch]]
                line.append(batch)
                pending[batch] = len(found.messages[batch])
                if line[0] == batch:
                    over = _arrive(found, state, arrived, batch, clock)
                    ready.extend(waiting.pop(end) for end in over if end in waiting)
            elif pending[batch]:
                waiting[batch] = rank
                break
            clocks.append(clock)
            at += 1
        state.at[rank] = at
    return state


def _arrive(found: Traffic, state: QueueState, arrived: dict[int, int], batch: int, clock: int) -> list[int]:
    """Move what can move when a batch comes to the head of its queue, and so on from there; return the batches that are complete."""
    heads, over = [batch], []
    while heads:
        for message in found.messages[heads.pop()]:
            arrived[message] = arrived.get(message, 0) + 1
            ends = found.ends[message] if arrived[message] == len(found.ends[message]) else ()
            for end in ends:
                state.pending[end] -= 1
                if not state.pending[end]:
                    state.complete[end] = clock
                    line = state.posted[found.queue[end]]
                    line.popleft()
                    if line:
                        heads.append(line[0])
                    over.append(end)
    return over


def _check_streams(schedule: Schedule, flow: Dataflow, record: OrderRecord) -> None:
    """Refuse a pair of ranks whose receives are in another order than the sends: messages carry no names."""
    home, stages = schedule.placement, schedule.stages
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
            wanted = describe(schedule, flow, expected)
            reason = (
                f"it is message {taken[key] - 1} that rank {rank} receives from rank {key[0]}, "
                f"but rank {key[0]} sends {wanted} there: both must be in one order"
            )
            raise schedule_error(schedule, rank, (step, place), reason)


def describe(schedule: Schedule, flow: Dataflow, message: int) -> str:
    """Return a message in words."""
    if message < 0:
        return f"the sum over the replicas {schedule.replicas[-1 - message]}"
    value, target = divmod(message, schedule.stages)
    return f"{flow.name(value)} to stage {target}"


def _deadlock(schedule: Schedule, flow: Dataflow, found: Traffic, state: QueueState) -> ScheduleError:
    """Follow who waits for whom until the circle closes, and name all in it."""
    rank = next(r for r, at in enumerate(state.at) if at < len(found.events[r]))
    batch: int | None = None
    seen: dict[tuple[int, int | None], int] = {}
    sentences: list[str] = []
    while (rank, batch) not in seen:
        seen[rank, batch] = len(sentences)
        if batch is None:
            wanted, step, place = found.events[rank][state.at[rank]]
            waiting = text_of(schedule.programs[rank][step][place])
            sentence = f"rank {rank} at step {step}, place {place} ({waiting}) waits for "
        else:
            wanted = batch
            sentence = f"rank {rank} has first in its queue what it posted at step {found.step[batch]}, "
        message, rank, batch, why = _blocker(found, state, wanted)
        sentences.append(f"{sentence}{describe(schedule, flow, message)}, {why}")
    cycle = sentences[seen[rank, batch] :]
    # The place to mark is a wait of the circle, or else a batch of it.
    rank, batch = min(list(seen)[seen[rank, batch] :], key=lambda node: node[1] is not None)
    _, step, place = found.events[rank][state.at[rank]] if batch is None else (batch, found.step[batch], 0)
    return schedule_error(schedule, rank, (step, place), "deadlock: " + cycle_text(cycle))


def _blocker(found: Traffic, state: QueueState, batch: int) -> tuple[int, int, int | None, str]:
    """A message of ``batch`` that cannot move, the rank in its way, the batch in its way if any, and why."""
    line = state.posted[found.queue[batch]]
    message = next(m for m in found.messages[batch] if any(state.pending[e] for e in found.ends[m]) and not _both_at_head(found, state, m))
    if line[0] != batch:
        return message, found.owner[batch], line[0], f"which is behind what rank {found.owner[batch]} posted at step {found.step[line[0]]}"
    for end in found.ends[message]:
        rank, step = found.owner[end], found.step[end]
        if state.pending[end] < 0:
            return message, rank, None, f"which rank {rank} posts only at step {step}"
        head = state.posted[found.queue[end]][0]
        if head != end:
            return message, rank, head, f"which on rank {rank} is behind what it posted at step {found.step[head]}"
    raise AssertionError("a message with both ends at the head of their queues has not moved")


def _both_at_head(found: Traffic, state: QueueState, message: int) -> bool:
    """Whether a message has moved: all its ends are, or were, at the head of their queues."""
    return all(state.pending[e] == 0 or (state.pending[e] > 0 and state.posted[found.queue[e]][0] == e) for e in found.ends[message])
