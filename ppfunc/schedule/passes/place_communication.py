"""Place the messages of a compute-only schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ..earliest import Times, earliest
from ..dataflow import PRODUCT, Dataflow, dataflow
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op
from ..schedule import Program, Schedule, Step
from .remove_slots import remove_slots

# Any positive durations give a valid order; these are the usual proportions.
_DURATION = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}


class Message(NamedTuple):
    """One message; tuples sort in the order of production, the same at both ends.

    Args:
        produced: end of the producer in a run as early as possible.
        sender: the sending rank.
        number: distinguishes the products of one instruction.
        consumed: end of the consumer.
        send_gap: index of the sender's instruction before which the send is posted.
        receive_gap: likewise the receive, on the receiving rank.
        send: the instruction that sends.
        receive: the instruction that receives.
    """

    produced: int
    sender: int
    number: int
    consumed: int
    send_gap: int
    receive_gap: int
    send: Instruction
    receive: Instruction


# A posting is (gap, batch within the gap, produced, sender, number, instruction).
Posting = tuple[int, int, int, int, int, Instruction]


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
    if schedule.ops & COMMUNICATION:
        return schedule
    schedule = remove_slots(schedule)
    flow = dataflow(schedule)
    times = earliest(schedule, lambda op, stage: _DURATION[op], lambda f, b: 3, lambda a, b: 0)
    where, before = _indices(schedule, flow, times)
    postings: list[list[Posting]] = [[] for _ in schedule.programs]
    early = [_earlier(program, lookahead) for program in schedule.programs] if lookahead else []
    for (low, high), edges in _pairs(schedule).items():
        messages = sorted(m for edge, ms in edges for m in _along(edge, ms, schedule, flow, times.done, where))
        gaps = _ordered_gaps(messages, low)
        if lookahead:
            gaps = _hoisted(messages, gaps, low, (early[low], early[high]))
        _post(messages, gaps, low, high, before, postings, lookahead > 0)
    programs = tuple(_emit(p, sorted(q)) for p, q in zip(schedule.programs, postings, strict=True))
    return replace(schedule, programs=programs)


def _indices(schedule: Schedule, flow: Dataflow, times: Times) -> tuple[dict[int, int], list[list[int]]]:
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
                        where[2 * (stage * m + microbatch) + product] = index
            gaps.append(last)
        before.append(gaps)
    return where, before


def _pairs(schedule: Schedule) -> dict[tuple[int, int], list[tuple[tuple[int, int], range]]]:
    """Between each two ranks, lower one first: the edges and the microbatches that travel them."""
    pairs: dict[tuple[int, int], list[tuple[tuple[int, int], range]]] = {}
    walks = {stage: chain.microbatches for chain in schedule.chains for stage in chain.stages}
    for a, b in schedule.crossing_edges:
        ranks = schedule.placement[a], schedule.placement[b]
        pairs.setdefault((min(ranks), max(ranks)), []).append(((a, b), walks[a]))
    return pairs


def _along(
    edge: tuple[int, int],
    microbatches: range,
    schedule: Schedule,
    flow: Dataflow,
    done: dict[int, int],
    where: dict[int, int],
) -> Iterator[Message]:
    """Both messages of every microbatch along one edge, those that have a consumer."""
    home, skip = schedule.placement, edge in schedule.skips
    ends = (edge, edge[::-1])
    for (a, b), product, send, receive in zip(ends, (0, 1), (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B), strict=True):
        to, back = (b, a) if skip else (None, None)
        for m in microbatches:
            made = flow.output(a, m) + product
            used = flow.output(b, m) + product
            if made in where and used in where:
                yield Message(
                    done[made],
                    home[a],
                    made * len(home) + b,
                    done[used],
                    where[made] + 1,
                    where[used],
                    Instruction(send, a, m, to),
                    Instruction(receive, b, m, back),
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


def _hoisted(
    messages: list[Message], gaps: list[tuple[int, int]], low: int, early: tuple[list[int], list[int]]
) -> list[tuple[int, int]]:
    """The gaps with receives moved to an earlier compute, but never before a message that comes first in the order."""
    last, moved = [0, 0], []
    for message, pair in zip(messages, gaps, strict=True):
        here = [pair[0], pair[1]]
        receiver = int(message.sender == low)
        here[receiver] = min(here[receiver], early[receiver][message.receive_gap])
        last = [max(a, b) for a, b in zip(last, here, strict=True)]
        moved.append((last[0], last[1]))
    return moved


def _post(
    messages: list[Message],
    gaps: list[tuple[int, int]],
    low: int,
    high: int,
    before: list[list[int]],
    postings: list[list[Posting]],
    apart: bool,
) -> None:
    """Give both ends of each message of one pair their gap and batch, keeping the order of the list.

    With ``apart`` no two receives share a batch, so that a compute does not wait for what a later one consumes.
    """
    ends = {low: [-1, 0, (inf,)], high: [-1, 0, (inf,)]}  # gap, batch, first compute that waits for the batch
    for message, gap in zip(messages, gaps, strict=True):
        produced, sender, number, consumed, _, _, send, receive = message
        receiver = high if sender == low else low
        receive_gap = gap[receiver == high]
        peer_posts = {sender: (before[receiver][receive_gap], receiver), receiver: (produced, sender)}
        for rank, instruction in ((sender, send), (receiver, receive)):
            here = gap[rank == high]
            state = ends[rank]
            if here != state[0]:
                state[:] = here, 0, (inf,)
            elif not peer_posts[rank] < state[2] or (apart and rank == receiver and state[2] != (inf,)):
                state[1:] = state[1] + 1, (inf,)
            if rank == receiver:
                state[2] = min(state[2], (consumed, receiver))
            postings[rank].append((here, state[1], produced, sender, number, instruction))


def _ordered_gaps(messages: list[Message], low: int) -> list[tuple[int, int]]:
    """For each message its gap at the lower and at the higher rank, never after that of a later message."""
    gaps: list[tuple[int, int]] = []
    at_low = at_high = inf
    for _, sender, _, _, send_gap, receive_gap, _, _ in reversed(messages):
        here, there = (send_gap, receive_gap) if sender == low else (receive_gap, send_gap)
        if here < at_low:
            at_low = here
        if there < at_high:
            at_high = there
        gaps.append((at_low, at_high))
    gaps.reverse()
    return gaps


def _emit(program: Program, postings: list[Posting]) -> Program:
    """The program with its communications: each batch begins a step."""
    steps: list[Step] = []
    index, at = 0, 0
    for step in program:
        loads: list[Instruction] = []
        rest: list[Instruction] = []
        batches: list[list[Instruction]] = []
        for instruction in step:
            if at < len(postings) and postings[at][0] == index:
                if rest:
                    _close(steps, batches, loads, rest)
                    loads, rest, batches = [], [], []
                found, at = _batches(postings, at)
                batches += found
            (loads if instruction[0] is Op.LOAD else rest).append(instruction)
            index += 1
        _close(steps, batches, loads, rest)
    if at < len(postings):
        steps += (tuple(b) for b in _batches(postings, at)[0])
    return tuple(steps)


def _batches(postings: list[Posting], at: int) -> tuple[list[list[Instruction]], int]:
    """The batches of the gap that begins at ``postings[at]``, and where the next gap begins."""
    gap, batches, number = postings[at][0], [], -1
    while at < len(postings) and postings[at][0] == gap:
        if postings[at][1] != number:
            number = postings[at][1]
            batches.append([])
        batches[-1].append(postings[at][5])
        at += 1
    return batches, at


def _close(
    steps: list[Step], batches: list[list[Instruction]], loads: list[Instruction], rest: list[Instruction]
) -> None:
    """End a step: its last batch goes with its loads and its compute, earlier batches alone."""
    steps += (tuple(b) for b in batches[:-1])
    last = (*(batches[-1] if batches else ()), *loads, *rest)
    if last:
        steps.append(last)
