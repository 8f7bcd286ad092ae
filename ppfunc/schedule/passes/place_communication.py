"""Place the messages of a compute-only schedule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, compress, count, repeat
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ppfunc._checks import naming_arguments, require_counts

from ..collector import collector_paused
from ..costs import Costs
from ..dataflow import Dataflow, Link, links
from ..errors import require_schedule
from ..instruction import COMMUNICATION, COMPUTE, KINDS, Instruction, Op
from ..proof.timeline import earliest
from ..schedule import Program, Schedule, Step
from .rewrite import remove_slots

_instruction = partial(tuple.__new__, Instruction)  # from its fields; a million times

# Plain tuples, because there are as many as messages: gap (index of the instruction before which it is
# posted), batch within the gap, end of the producer, sending rank, number of the message, send or receive.
# They sort in the order of the program.
Posting = tuple[int, int, int, int, int, Instruction]


class Messages(NamedTuple):
    """The messages between two ranks in columns, in the order of production, the same at both ends."""

    made: tuple[int, ...]  # end of the producer in a run as early as possible
    sender: tuple[int, ...]  # sending rank
    number: tuple[int, ...]
    used: tuple[int, ...]  # end of the consumer
    send: tuple[Instruction, ...]
    receive: tuple[Instruction, ...]


class Computes(NamedTuple):
    """Where the computes of a rank stand among its instructions. No two of them end at the same time."""

    at: dict[int, int]  # by its end, the index of each
    early: dict[int, int] | None  # likewise of that ``lookahead`` computes before it; None where it is 0
    before: list[int]  # by gap, the end of the last one before it


@naming_arguments
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
        lookahead: number of computes by which a receive is posted before its consumer, as far as the order
            of the pair lets it. A message then crosses while the rank computes; its buffer lives longer by
            as much.

    Raises:
        ValueError: a negative lookahead.
        ScheduleError: the compute order waits for something that can never come.
    """
    require_schedule(schedule)
    require_counts(0, lookahead=lookahead)
    if schedule.ops & COMMUNICATION:
        return schedule
    schedule = remove_slots(schedule)
    flow = Dataflow(schedule)
    times = earliest(schedule, Costs())  # any positive times give a valid order
    computes = [_computes(*of_rank, lookahead) for of_rank in zip(schedule.programs, times.ends, strict=True)]
    pairs = _pairs(schedule)
    postings: list[list[Posting]] = [[] for _ in schedule.programs]
    programs = []
    for low, program in enumerate(schedule.programs):
        for high, some in pairs.get(low, {}).items():
            if rows := sorted(chain.from_iterable(_along(flow, link, times.done) for link in some)):
                messages = Messages(*zip(*rows, strict=True))
                gaps = {rank: _gaps(messages, rank, computes[rank]) for rank in (low, high)}
                for rank, other in ((low, high), (high, low)):
                    before = map(computes[other].before.__getitem__, gaps[other])
                    postings[rank] += _posted(messages, rank, other, gaps[rank], before, lookahead > 0)
        programs.append(_emit(program, sorted(postings[low])))  # the pairs that follow are of higher ranks
        postings[low].clear()
    return replace(schedule, programs=tuple(programs))


def _computes(program: Program, ends: Sequence[int], lookahead: int) -> Computes:
    """Find the places of the computes of a program, given the times at which they end."""
    computes = list(map(COMPUTE.__contains__, map(itemgetter(0), chain.from_iterable(program))))
    indices = list(compress(count(), computes))
    before = map((-1, *ends).__getitem__, accumulate(computes, initial=0))
    early = dict(zip(ends, chain(repeat(0, lookahead), indices), strict=False)) if lookahead else None
    return Computes(dict(zip(ends, indices, strict=True)), early, list(before))


def _pairs(schedule: Schedule) -> dict[int, dict[int, list[Link]]]:
    """Group the links between each two ranks, by the lower and then by the higher rank."""
    pairs: dict[int, dict[int, list[Link]]] = {}
    for link in links(schedule):
        low, high = sorted((schedule.placement[link.source], schedule.placement[link.targets[0][0]]))
        pairs.setdefault(low, {}).setdefault(high, []).append(link)
    return pairs


def _along(flow: Dataflow, link: Link, done: Mapping[int, Mapping[int, int]]) -> Iterable[tuple]:
    """Iterate over the consumed messages of all microbatches of a link, as rows."""
    a, targets, op, send, receive, far, near, microbatches = link
    product, home = KINDS[op].product, flow.schedule.placement
    first, b = flow.output(a, 0) + product, targets[0][0]
    message, stride = flow.message(first, home[b]), flow.stride
    made, used = done.get(first, {}), done.get(flow.output(b, 0) + product, {})
    if len(targets) > 1 or not flow.always(b, a, -targets[0][1]):
        # By the microbatch that makes the value, when it is first consumed.
        used = {}
        for target, shift in targets:
            for m, end in done.get(flow.output(target, 0) + product, {}).items():
                if flow.takes(m, a, -shift):
                    used[m - shift] = min(end, used.get(m - shift, end))
    if len(flow.schedule.flows) > 1:
        among = microbatches if isinstance(microbatches, range) else frozenset(microbatches)
        made = {m: end for m, end in made.items() if m in among}
    numbers = [m for m in made if m in used]
    return zip(
        map(made.__getitem__, numbers),
        repeat(home[a]),
        [message + stride * m for m in numbers],
        map(used.__getitem__, numbers),
        map(_instruction, zip(repeat(send), repeat(a), numbers, repeat(far), repeat(None), repeat(()))),
        map(_instruction, zip(repeat(receive), repeat(b), numbers, repeat(near), repeat(None), repeat(()))),
    )


def _gaps(messages: Messages, rank: int, computes: Computes) -> list[int]:
    """Choose the gap of each message on ``rank``, in the order of the messages and receives early."""
    at, early, _ = computes
    ends = zip(messages.made, messages.sender, messages.used, strict=True)
    wanted = [at[made] + 1 if sender == rank else at[used] for made, sender, used in ends]
    latest = list(accumulate(reversed(wanted), min))[::-1]
    if early is None:
        return latest
    ends = zip(messages.made, messages.sender, messages.used, strict=True)
    hoisted = [
        gap if sender == rank or gap < early[used] else early[used]
        for gap, (_, sender, used) in zip(latest, ends, strict=True)
    ]
    return list(accumulate(hoisted, max))


def _posted(
    messages: Messages, rank: int, other: int, gaps: Sequence[int], before: Iterable[int], apart: bool
) -> Iterable[Posting]:
    """List the end of each message on ``rank``, with its gap and batch.

    Args:
        messages: all between ``rank`` and ``other``.
        rank: the rank that posts.
        other: the rank at the other end.
        gaps: the gap of each message on ``rank``.
        before: end of the last compute of ``other`` before it posts the message.
        apart: whether no two receives share a batch, so that a compute does not wait for what a later one
            consumes.
    """
    batches: list[int] = []
    ends: list[Instruction] = []
    tie = int(other < rank)  # of two computes that end at the same time, that of the lower rank is first
    last, batch, wait = -1, 0, inf  # gap, batch, end of the first compute that waits for the batch
    for gap, made, sender, used, there, send, receive in zip(
        gaps,
        messages.made,
        messages.sender,
        messages.used,
        before,
        messages.send,
        messages.receive,
        strict=True,
    ):
        receives = sender != rank
        if gap != last:
            last, batch, wait = gap, 0, inf
        elif (made if receives else there) >= wait + tie or (apart and receives and wait < inf):
            batch, wait = batch + 1, inf
        if receives and used < wait:
            wait = used
        batches.append(batch)
        ends.append(receive if receives else send)
    return zip(gaps, batches, messages.made, messages.sender, messages.number, ends, strict=True)


def _emit(program: Program, postings: Sequence[Posting]) -> Program:
    """Write the program with its communications: each batch begins a step."""
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
    batches: dict[int, list[Step]] = {}
    last = -1
    here: list[Step] = []  # the batches of the last gap
    for gap, batch, _, _, _, instruction in postings:
        if gap != last:
            last, here = gap, [(instruction,)]
            batches[gap] = here
        elif batch < len(here):
            here[batch] += (instruction,)
        else:
            here.append((instruction,))
    return batches


def _close(steps: list[Step], batches: Sequence[Step], rest: Step) -> None:
    """End a step: its last batch goes with its loads and its compute, earlier batches alone."""
    if batches:
        steps += batches[:-1]
        steps.append(batches[-1] + rest)
    elif rest:
        steps.append(rest)
