"""Place the messages of a compute-only schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from math import inf

from ..collector import collector_paused
from ..dataflow import PRODUCT, Dataflow, EdgeFlow, dataflow, edge_flows
from ..earliest import EarliestTimes, earliest
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, instructions_of
from ..proof.structure import require_schedule
from ..schedule import Program, Schedule, Step
from .remove import remove_slots

# Any positive durations give a valid order; these are the usual proportions.
_DURATION = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}

# Plain tuples, because there are as many as messages. They sort in the order of production, the same at both ends:
# end of the producer in a run as early as possible, sending rank, number of the message, end of the consumer, index of the
# sender's instruction before which the send is posted, likewise of the receive on the receiving rank, send, receive.
Message = tuple[int, int, int, int, int, int, Instruction, Instruction]
# Gap (index of the instruction before which it is posted), batch within the gap, then the first three fields of the message.
Posting = tuple[int, int, int, int, int, Instruction]


@collector_paused()
def place_communication(schedule: Schedule, *, lookahead: int = 0) -> Schedule:
    """Write every message that the data flow needs between ranks into the programs.

    Equivalent to: run the compute order as early as possible; between two ranks put the messages
    of both directions in the order in which they are produced; post each send in the step after
    its producer and each receive in the step of its consumer, or before that where the order of
    the pair demands it. Idle steps are dropped, all other instructions stay in their order, and
    a schedule that has communications already is returned as it is; slots are taken away.

    The result is free of deadlock under an in-order queue per pair even where a batch is waited
    for as a whole: a message shares the batch of a receive before it in the order only if its
    other end is posted before the consumer of that receive has to run.

    Args:
        lookahead: how many computes before its consumer a receive is posted, as far as the order of the
            pair lets it. A message then crosses while the rank computes; its buffer lives longer by as much.

    Raises:
        ScheduleError: the compute order waits for something that can never come.
    """
    require_schedule(schedule)
    if schedule.ops & COMMUNICATION:
        return schedule
    schedule = remove_slots(schedule)
    flow = dataflow(schedule)
    times = earliest(schedule, lambda op, stage: _DURATION[op], lambda f, b: 3, lambda a, b: 0)
    where, before = _indices(schedule, flow, times)
    postings: list[list[Posting]] = [[] for _ in schedule.programs]
    early = [_earlier(program, lookahead) if lookahead else None for program in schedule.programs]
    for (low, high), edges in _pairs(schedule).items():
        messages = sorted(message for edge in edges for message in _along(schedule, flow, edge, times.done, where))
        gaps = {rank: _gaps(messages, rank, early[rank]) for rank in (low, high)}
        for rank, other in ((low, high), (high, low)):
            postings[rank] += _posted(messages, rank, other, gaps, before[other], lookahead > 0)
    programs = tuple(_emit(p, sorted(q)) for p, q in zip(schedule.programs, postings, strict=True))
    return replace(schedule, programs=programs)


def _indices(schedule: Schedule, flow: Dataflow, times: EarliestTimes) -> tuple[dict[int, int], list[list[int]]]:
    """The index of the instruction that makes each value, and the end of the last compute before each index."""
    where: dict[int, int] = {}
    before: list[list[int]] = []
    m = flow.microbatches
    for program, ends in zip(schedule.programs, times.ends, strict=True):
        last, computes, gaps = -1, iter(ends), [-1]
        for index, instruction in enumerate(i for step in program for i in step):
            if instruction[0] in COMPUTE:
                last = next(computes)
                for op, stage, microbatch, *_ in instruction[5] or (instruction,):
                    product = PRODUCT[op]
                    if product is not None:
                        assert microbatch is not None
                        where[2 * (stage * m + microbatch) + product] = index
            gaps.append(last)
        before.append(gaps)
    return where, before


def _pairs(schedule: Schedule) -> dict[tuple[int, int], list[EdgeFlow]]:
    """The edges between each two ranks, lower one first."""
    pairs: dict[tuple[int, int], list[EdgeFlow]] = {}
    for edge in edge_flows(schedule):
        low, high = sorted((schedule.placement[edge.source], schedule.placement[edge.target]))
        if low != high:
            pairs.setdefault((low, high), []).append(edge)
    return pairs


def _along(schedule: Schedule, flow: Dataflow, edge: EdgeFlow, done: dict[int, int], where: dict[int, int]) -> Iterable[Message]:
    """The messages of all microbatches along one edge that have a consumer."""
    a, b, op, send, receive, far, near = edge
    first, distance = flow.output(a, 0) + (PRODUCT[op] or 0), flow.output(b, 0) - flow.output(a, 0)
    walk = next(chain.microbatches for chain in schedule.chains if a in chain.stages)
    numbers = [m for m in walk if first + 2 * m in where and first + 2 * m + distance in where]
    made = [first + 2 * m for m in numbers]
    used = [value + distance for value in made]
    return zip(
        map(done.__getitem__, made),
        repeat(schedule.placement[a]),
        [value * len(schedule.placement) + b for value in made],
        map(done.__getitem__, used),
        [where[value] + 1 for value in made],
        map(where.__getitem__, used),
        instructions_of(send, a, numbers, far),
        instructions_of(receive, b, numbers, near),
    )


def _earlier(program: Program, lookahead: int) -> list[int]:
    """For every index of an instruction, that of the compute ``lookahead`` computes before it, at least 0."""
    computes: list[int] = [0] * (lookahead + 1)
    found: list[int] = []
    for index, instruction in enumerate(i for step in program for i in step):
        if instruction[0] in COMPUTE:
            computes.append(index)
        found.append(computes[-1 - lookahead])
    return found


def _gaps(messages: Sequence[Message], rank: int, early: list[int] | None) -> list[int]:
    """The gap of each message on ``rank``: never after that of a later message, and receives at ``early`` if the order lets them."""
    wanted = [m[4] if m[1] == rank else m[5] for m in messages]
    latest = list(accumulate(reversed(wanted), min))[::-1]
    if early is None:
        return latest
    hoisted = [gap if m[1] == rank else min(gap, early[m[5]]) for m, gap in zip(messages, latest, strict=True)]
    return list(accumulate(hoisted, max))


def _posted(
    messages: Sequence[Message], rank: int, other: int, gaps: dict[int, list[int]], before: list[int], apart: bool
) -> Iterable[Posting]:
    """The end of each message on ``rank``, with its gap and batch, in the order of the list.

    Args:
        messages: all between ``rank`` and ``other``.
        rank: the rank that posts.
        other: the rank at the other end.
        gaps: the gap of each message on both ranks.
        before: end of the last compute of ``other`` before each gap.
        apart: whether no two receives share a batch, so that a compute does not wait for what a later one consumes.
    """
    never = (inf, rank)
    last, batch, wait = -1, 0, never  # gap, batch, first compute that waits for the batch
    for message, gap, there in zip(messages, gaps[rank], gaps[other], strict=True):
        produced, sender, number, consumed, _, _, send, receive = message
        receives = sender != rank
        if gap != last:
            last, batch, wait = gap, 0, never
        elif (apart and receives and wait is not never) or ((produced, sender) if receives else (before[there], other)) >= wait:
            batch, wait = batch + 1, never
        if receives:
            wait = min(wait, (consumed, rank))
        yield gap, batch, produced, sender, number, receive if receives else send


def _emit(program: Program, postings: Sequence[Posting]) -> Program:
    """The program with its communications: each batch begins a step."""
    batches = _batches(postings)
    steps: list[Step] = []
    index = 0
    for step in program:
        if len(step) == 1:  # the usual step, for which what follows does the same in three times the time
            _close(steps, batches.get(index, ()), step)
            index += 1
            continue
        posted: list[Step] = []
        loads: Step = ()
        rest: Step = ()
        for instruction in step:
            if index in batches:
                if rest:
                    _close(steps, posted, loads + rest)
                    posted, loads, rest = [], (), ()
                posted += batches[index]
            if instruction[0] is Op.LOAD:
                loads += (instruction,)
            else:
                rest += (instruction,)
            index += 1
        _close(steps, posted, loads + rest)
    return (*steps, *batches.get(index, ()))


def _batches(postings: Sequence[Posting]) -> dict[int, list[Step]]:
    """The batches of each gap."""
    found: dict[int, list[Step]] = {}
    for gap, batch, _, _, _, instruction in postings:
        if gap not in found:
            found[gap] = [(instruction,)]
        elif batch < len(found[gap]):
            found[gap][batch] += (instruction,)
        else:
            found[gap].append((instruction,))
    return found


def _close(steps: list[Step], batches: Sequence[Step], rest: Step) -> None:
    """End a step: its last batch goes with its loads and its compute, earlier batches alone."""
    if batches:
        steps += batches[:-1]
        steps.append(batches[-1] + rest)
    elif rest:
        steps.append(rest)
