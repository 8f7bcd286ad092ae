"""Prove the usual lowered schedule on whole columns of positions, one per kind of instruction.

The proofs in the other modules walk instruction by instruction and name the place of a fault. This one
answers for a schedule of a million instructions in a second. It accepts nothing that they refuse;
what it does not accept they decide. It leaves to them slots, loads, offloads, and sums over replicas
that are not the end of each program. Other instructions of whole stages wait for no rank of the schedule.

Between two ranks with one queue each way round, let a message have the step in which each end posts it.

* All messages move once everything is posted, unless of two messages each is first at one end.
* A batch is complete once the other rank has begun the last step in which it posts a message of the batch.

So a rank only ever waits for another to begin a step, and one run over these waits decides.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, compress, count, repeat
from math import inf
from operator import le, lt
from typing import Any, NamedTuple

from ..dataflow import edge_flows
from ..instruction import COMMUNICATION, COMPUTE, SHARDING, TAIL, WHOLE_STAGE, Op
from ..schedule import Program, Schedule

_SPLIT = {Op.I, Op.W}  # which make one backward

Column = list[int]
Kind = tuple[Op, int, int | None]
Wait = tuple[int, int, int]  # step of the consumer, the other rank, the step that this one has to begin


class Columns(NamedTuple):
    """The program of one rank by kind."""

    at: dict[Kind, Column]  # positions in the program by microbatch, per (op, stage, peer); those of I under B
    step: Column  # the step of each position


class EdgeColumns(NamedTuple):
    """The messages along one edge in one direction, by microbatch."""

    source: int  # the sending rank
    target: int  # the receiving rank
    sent: Column  # positions of the sends in the program of ``source``
    received: Column  # positions of the receives in the program of ``target``
    consumed: Column  # positions of what consumes them there


def prove_columns(schedule: Schedule) -> bool | None:
    """Whether a schedule that is proved here, with a queue per pair of ranks, is step-atomic; None where it is not proved.

    Args:
        schedule: well formed, with communication.
    """
    if not schedule.ops <= {*COMPUTE, *COMMUNICATION, *WHOLE_STAGE} or schedule.has_slots:
        return None
    if _sums(schedule) and schedule.counts[Op.REDUCE_TIED] != schedule.stages:
        return None
    try:
        ranks = [_columns(schedule, rank) for rank in range(schedule.ranks)]
        links = _links(schedule, ranks)
        ends = sum(len(column) for columns in ranks for (op, _, _), column in columns.at.items() if op in COMMUNICATION)
        _require(sum(len(link.sent) for link in links) * 2 == ends)
        waits = _waits(links, [columns.step for columns in ranks])
        _require(_ends(waits))
    except _UnprovedError:
        return None
    summed = schedule.replicas if _sums(schedule) else ()
    aligned = all(len({len(schedule.programs[schedule.placement[s]]) for s in group}) == 1 for group in summed)
    return aligned and all(awaited <= step for todo in waits for step, _, awaited in todo)


class _UnprovedError(Exception):
    """Something is wrong, or not as usual: the other proofs decide."""


def _require(holds: bool) -> None:
    if not holds:
        raise _UnprovedError


def _columns(schedule: Schedule, rank: int) -> Columns:
    """The columns of one rank, which has everything once and in the usual order."""
    program = schedule.programs[rank]
    ops, stages, microbatches, peers, _, parts = schedule.columns[rank]
    places: dict[Kind, Column] = defaultdict(list)
    for place, kind in enumerate(zip(ops, stages, peers, strict=True)):
        places[kind].append(place)
    walks = {stage: c.microbatches for c in schedule.chains for stage in c.stages}
    at: dict[Kind, Column] = {}  # the usual columns: complete and in the order of the microbatches
    found: dict[Kind, dict[int | None, int]] = defaultdict(dict)
    entries = 0
    for kind, column in places.items():
        if kind[0] is Op.OVERLAP_F_B:
            entries += 2 * len(column)
            for place in column:
                for op, stage, microbatch, *_ in parts[place]:
                    found[op, stage, None][microbatch] = place
        elif kind[0] not in _SPLIT and _of(microbatches, column) == list(walks[kind[1]][: len(column) + 1]):
            at[kind] = column
        elif kind[0] not in SHARDING:
            entries += len(column)
            found[kind].update(zip(_of(microbatches, column), column, strict=True))
    _require(sum(map(len, found.values())) == entries and _in_phases(schedule, program, ops))
    whole = [found.pop(kind) for kind in list(found) if kind[0] in TAIL]
    if _sums(schedule):
        _require(sum(map(len, whole)) == (sum(i[0] in TAIL for i in program[-1]) if program else 0))
    others = _complete(found, walks)
    _require(at.keys().isdisjoint(others))
    return Columns(at | others, list(chain.from_iterable(map(repeat, count(), map(len, program)))))


def _sums(schedule: Schedule) -> bool:
    """Whether ranks wait for each other in sums over replicas."""
    return Op.REDUCE_TIED in schedule.ops and bool(schedule.replicas)


def _in_phases(schedule: Schedule, program: Program, ops: Sequence[Op]) -> bool:
    """Whether each step has its messages first, and a last step with a tail the sums over replicas before all else."""
    talks = list(map(COMMUNICATION.__contains__, ops))
    starts = set(accumulate(map(len, program)))
    if not starts.issuperset(compress(count(1), map(lt, talks, talks[1:]))):
        return False
    tail = [i[0] for i in program[-1]] if program else []
    if set(tail).isdisjoint(TAIL) or not _sums(schedule):
        return True
    return set(tail) <= set(TAIL) and Op.REDUCE_TIED not in tail[tail.count(Op.REDUCE_TIED) :]


def _complete(found: dict[Kind, dict[int | None, int]], walks: Mapping[int, range]) -> dict[Kind, Column]:
    """The column of each kind, which has every microbatch of its chain once; W follows its I."""
    for op, stage, _ in [kind for kind in found if kind[0] is Op.I]:
        gradients, weights = found.pop((op, stage, None)), found.pop((Op.W, stage, None), {})
        _require(len(weights) == len(gradients) and all(place < weights.get(m, -1) for m, place in gradients.items()))
        whole = found.get((Op.B, stage, None), {})
        _require(whole.keys().isdisjoint(gradients))
        found[Op.B, stage, None] = whole | gradients
    at: dict[Kind, Column] = {}
    for kind, places in found.items():
        walk = walks[kind[1]]
        _require(kind[0] is not Op.W and len(places) == walk.stop - walk.start)
        at[kind] = [places[m] for m in walk]
    return at


def _require_before(first: Column, second: Column) -> None:
    """Neither column is empty, and everything in the first comes before the same microbatch in the second."""
    _require(0 < len(first) == len(second) and all(map(lt, first, second)))


def _links(schedule: Schedule, ranks: Sequence[Columns]) -> list[EdgeColumns]:
    """The messages of all edges; nothing is used or sent before it is there."""
    home = schedule.placement
    at = [ranks[rank].at for rank in home]  # by stage
    backward = not schedule.forward_only
    for stage in range(schedule.stages):
        _require((Op.F, stage, None) in at[stage])
        if backward:
            _require_before(at[stage][Op.F, stage, None], at[stage].get((Op.B, stage, None), []))
    links = []
    for a, b, op, send, receive, far, near in edge_flows(schedule):
        if op is Op.B and not backward:
            continue
        made, used = at[a][op, a, None], at[b][op, b, None]
        if home[a] == home[b]:
            _require_before(made, used)
        else:
            sent, received = at[a].get((send, a, far), []), at[b].get((receive, b, near), [])
            _require_before(made, sent)
            _require_before(received, used)
            links.append(EdgeColumns(home[a], home[b], sent, received, used))
    return links


def _waits(links: Sequence[EdgeColumns], step: Sequence[Column]) -> list[list[Wait]]:
    """Per rank, in order, the steps that it waits for other ranks to begin; both ends agree on the order of messages."""
    between: dict[tuple[int, int], list[EdgeColumns]] = defaultdict(list)
    for link in links:
        between[min(link[:2]), max(link[:2])].append(link)
    waits: list[list[Wait]] = [[] for _ in step]
    for (low, high), both in between.items():
        for source in (low, high):
            stream = sorted(chain.from_iterable(zip(link.sent, link.received, strict=True) for link in both if link.source == source))
            received = [there for _, there in stream]
            _require(all(map(lt, received, received[1:])))
        posted: list[tuple[int, int]] = []  # steps on the lower and on the higher rank
        for source, target, sent, received, _ in both:
            ends = _of(step[source], sent), _of(step[target], received)
            posted += zip(*(ends if source == low else ends[::-1]), strict=True)
        posted.sort()
        highs = [there for _, there in posted]
        _require(all(map(le, highs, highs[1:])))
        # Of messages in one batch the last one stays: that of the latest step at the other end.
        complete = {high: {there: here for here, there in posted}, low: dict(posted)}
        for source, target, _, received, consumed in both:
            awaited = _of(complete[target], _of(step[target], received))
            waits[target] += zip(_of(step[target], consumed), repeat(source), awaited)
    for todo in waits:
        todo.sort()
    return waits


def _of(values: Sequence[Any] | dict[int, int], places: Column) -> list[Any]:
    return list(map(values.__getitem__, places))


def _ends(waits: Sequence[Sequence[Wait]]) -> bool:
    """Whether all ranks come to their ends."""
    begun: list[float] = [0] * len(waits)
    left = list(map(iter, waits))
    blocked: list[list[tuple[int, int]]] = [[] for _ in waits]  # per rank, the steps that others wait for it to begin
    ready = [(0, rank) for rank in range(len(waits))]
    while ready:
        _, rank = ready.pop()  # where it was blocked, that wait is over
        now: float = inf
        for step, other, awaited in left[rank]:
            if begun[other] < awaited:
                now = step
                blocked[other].append((awaited, rank))
                break
        begun[rank] = now
        if waiters := blocked[rank]:
            still: list[tuple[int, int]] = []
            blocked[rank] = still
            for waiter in waiters:
                (ready if waiter[0] <= now else still).append(waiter)
    return all(now == inf for now in begun)
