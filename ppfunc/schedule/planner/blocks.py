"""Make first orders from blocks: one microbatch laid out so that its copies, a period apart, never collide.

Every rank is a circle whose circumference is the period. A beam walks the chain of a microbatch, F of stages
0, 1, ... and then I of stages ..., 1, 0, and lays each operation into a free arc of its rank such that all
the others of the rank, weight gradients too, still pack into the arcs that are left, and such that what the
rank holds on average, at best, fits in its cap; weight gradients follow. The block repeated for
each microbatch and sorted by time is an order that cannot deadlock. Times are rounded to ticks here: only the
order is used.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import NamedTuple

from .orders import Direction, Order, fits
from .problem import Problem

Arc = tuple[int, int]
"""Start and length of a free stretch of a circle."""

_TICKS = 20_000
_RATIOS = (1, 1.015, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.45, 1.65, 2, 2.5, 3.5, 6)
_NARROW, _WIDE, _TRIES = 4, 24, 8
# operations replayed in the time in which one operation is laid in one layout; 2 per chunk where that is more
_WORK = 8
_EXACT = 12  # operations of one rank that are packed by trying all ways
_NOISE = 0.25  # of a period, in the time by which layouts are ranked


class _Shape(NamedTuple):
    """Describe the operations of one microbatch in ticks.

    Args:
        chain: (rank, code, ticks, latency before it) of each operation of the chain.
        ends: the end of each operation of the chain where nothing else runs.
        weights: per rank, (code, ticks) of its W.
        work: ticks of the rank that has most.
    """

    chain: list[tuple[int, int, int, int]]
    ends: list[int]
    weights: list[list[tuple[int, int]]]
    work: int


class _Layout(NamedTuple):
    """Hold a block that is being built.

    Args:
        time: the end of its last operation.
        arcs: the free arcs of every rank.
        rest: the ticks of every rank that are still to be laid.
        starts: the start of every operation.
    """

    time: int
    arcs: tuple[tuple[Arc, ...], ...]
    rest: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]


def block_orders(p: Problem, d: Direction) -> Iterator[tuple[int, Order | None]]:
    """Yield ``(effort, order)`` of blocks without end; None for an order that is not new or exceeds a cap.

    A narrow beam climbs the periods until an order fits. Wide beams then try periods around it, exactly at
    first, and then with noise in the order of the time that the chain reaches.
    """
    shape, draw = _shape(p), Random(0)
    seen = set()
    work = max(_WORK, 2 * max(map(len, shape.weights)))

    def attempt(ratio: float, width: int, noise: float) -> tuple[int, Order | None]:
        block = _block(p, shape, max(shape.work, round(shape.work * ratio)), width, noise, draw)
        order = None if block is None else _repeat(p, d, *block)
        key = tuple(map(tuple, order or ()))
        new = order is not None and key not in seen and fits(d, order)
        seen.add(key)
        return width * len(shape.chain) * work, order if new else None

    first, order = -1, None
    while order is None and first < len(_RATIOS) - 1:
        first += 1
        effort, order = attempt(_RATIOS[first], _NARROW, 0)
        yield effort, order
    near = _RATIOS[max(0, first - 3) : first + 3]
    for ratio in near:
        yield attempt(ratio, _WIDE, 0)
    while True:
        yield attempt(draw.uniform(near[0], near[-1]), _WIDE, draw.uniform(0, _NOISE))


def _shape(p: Problem) -> _Shape:
    """List the operations of one microbatch, their times rounded to ticks, at least one each."""
    tick = max(p.work) / p.microbatches / _TICKS or 1
    ticks = [[max(1, round(time / tick)) for time in times] for times in (p.forward, p.backward, p.weight)]
    stages = range(len(p.place))
    chain = [(p.place[s], 3 * s, ticks[0][s], round(p.down[s - 1] / tick) if s else 0) for s in stages]
    chain += [
        (p.place[s], 3 * s + 1, ticks[1][s], round(p.up[s + 1] / tick) if s + 1 < len(stages) else 0)
        for s in reversed(stages)
    ]
    weights = [[(3 * s + 2, ticks[2][s]) for s in mine] for mine in p.stages_by_rank]
    work = max(sum(ticks[k][s] for k in range(3) for s in mine) for mine in p.stages_by_rank)
    ends = list(accumulate(t + latency for _, _, t, latency in chain))
    return _Shape(chain, ends, weights, work)


def _block(
    p: Problem, shape: _Shape, period: int, width: int, noise: float, draw: Random
) -> tuple[dict[int, int], int] | None:
    """Lay out one microbatch; return the start of every code and the period, None if the beam runs dry."""
    rest: list[list[int]] = [[ticks for _, ticks in weights] for weights in shape.weights]
    for rank, _, ticks, _ in shape.chain:
        rest[rank].append(ticks)
    beam = [_Layout(0, (((0, period),),) * len(rest), tuple(tuple(sorted(r)) for r in rest), ())]
    for rank, _, ticks, latency in shape.chain:
        tries: list[tuple[float, int, int, _Layout, tuple[int, ...]]] = []
        for layout in beam:
            arcs, others = layout.arcs[rank], _without(layout.rest[rank], ticks)
            for start in _starts(arcs, layout.time + latency, ticks, others, period):
                rank_by = start + noise * period * draw.random() if noise else start
                tries.append((rank_by, start, len(tries), layout, others))
        tries.sort()
        beam = []
        for _, start, _, layout, others in tries:
            arcs = _cut(layout.arcs[rank], start, ticks, period)
            if _packs(arcs, others) and _held(p, shape, (*layout.starts, start)) <= period * p.cap[rank]:
                beam.append(_lay(layout, rank, arcs, others, start, ticks))
                if len(beam) == width:
                    break
        if not beam:
            return None
    starts = {code: start for (_, code, _, _), start in zip(shape.chain, beam[0].starts, strict=True)}
    for rank, weights in enumerate(shape.weights):
        _lay_weights(starts, weights, beam[0].arcs[rank], shape, period)
    return starts, period


def _lay(
    layout: _Layout, rank: int, arcs: tuple[Arc, ...], others: tuple[int, ...], start: int, ticks: int
) -> _Layout:
    """Return the layout with one more operation, which leaves ``arcs`` and ``others`` to its rank."""
    all_arcs = (*layout.arcs[:rank], arcs, *layout.arcs[rank + 1 :])
    all_rest = (*layout.rest[:rank], others, *layout.rest[rank + 1 :])
    return _Layout(start + ticks, all_arcs, all_rest, (*layout.starts, start))


def _held(p: Problem, shape: _Shape, starts: tuple[int, ...]) -> int:
    """Bound from below what the last operation's rank holds, times the period.

    Each activation is held from its F to its I and W.
    """
    last = len(starts) - 1
    rank, _, ticks, _ = shape.chain[last]
    ahead = starts[last] + ticks - shape.ends[last]
    held = 0
    for code, weight in shape.weights[rank]:
        stage = code // 3
        back = len(shape.chain) - 1 - stage
        begin = starts[stage] if stage <= last else shape.ends[stage] - shape.chain[stage][2] + ahead
        end = starts[back] + shape.chain[back][2] if back <= last else shape.ends[back] + ahead
        held += p.held[stage] * (end - begin) + p.kept[stage] * weight
    return held


def _without(ticks: tuple[int, ...], one: int) -> tuple[int, ...]:
    at = ticks.index(one)
    return ticks[:at] + ticks[at + 1 :]


def _starts(arcs: tuple[Arc, ...], ready: int, ticks: int, others: tuple[int, ...], period: int) -> list[int]:
    """List candidate starts within the arcs, those soonest after ``ready`` first.

    An operation starts as early or as late as an arc allows, or leaves before or behind it exactly the time
    of one of ``others``.
    """
    found = set()
    for begin, length in arcs:
        slack = length - ticks
        if slack < 0:
            continue
        offset = (ready - begin) % period
        found.add(ready if offset <= slack else ready + period - offset)
        for place in {slack, *others, *(slack - other for other in others)}:
            if 0 <= place <= slack:
                found.add(ready + (begin + place - ready) % period)
    return sorted(found)[:_TRIES]


def _cut(arcs: tuple[Arc, ...], start: int, ticks: int, period: int) -> tuple[Arc, ...]:
    """Return the free arcs after an operation has been laid into one of them."""
    cut: list[Arc] = []
    for begin, length in arcs:
        before = (start - begin) % period
        if before + ticks <= length:
            pieces = ((begin, before), ((start + ticks) % period, length - before - ticks))
            cut += [piece for piece in pieces if piece[1]]
        else:
            cut.append((begin, length))
    return tuple(cut)


def _packs(arcs: tuple[Arc, ...], items: tuple[int, ...]) -> bool:
    """Tell if ascending items are seen to fit into arcs; of many, not all ways are tried."""
    return _packs_into(tuple(sorted(length for _, length in arcs)), items, len(items) <= _EXACT)


@lru_cache(maxsize=200_000)
def _packs_into(room: tuple[int, ...], items: tuple[int, ...], exactly: bool) -> bool:
    """Tell if ascending items fit into arcs of these lengths, the longest item first.

    Each item is tried in every arc if ``exactly``, else in the tightest alone.
    """
    if not items:
        return True
    *rest, item = items
    fitting = sorted({length for length in room if length >= item})
    for length in fitting if exactly else fitting[:1]:
        at = room.index(length)
        left = room[:at] + room[at + 1 :]
        if _packs_into(tuple(sorted((*left, length - item))), tuple(rest), exactly):
            return True
    return False


def _lay_weights(
    starts: dict[int, int], weights: list[tuple[int, int]], arcs: tuple[Arc, ...], shape: _Shape, period: int
) -> None:
    """Start each W of a rank as soon after its I as an arc is free, such that the others still pack."""
    ends = {code: starts[code] + ticks for _, code, ticks, _ in shape.chain if code in starts}
    waiting = sorted(weights, key=lambda weight: ends[weight[0] - 1])
    for number, (code, ticks) in enumerate(waiting):
        others = tuple(sorted(t for _, t in waiting[number + 1 :]))
        for start in _starts(arcs, ends[code - 1], ticks, others, period):
            cut = _cut(arcs, start, ticks, period)
            if _packs(cut, others):
                starts[code], arcs = start, cut
                break


def _repeat(p: Problem, d: Direction, starts: dict[int, int], period: int) -> Order | None:
    """Repeat the block for every microbatch; None if a weight gradient finds no place."""
    if len(starts) < len(d.rank):
        return None
    words = []
    for stages in p.stages_by_rank:
        codes = [code for s in stages for code in (3 * s, 3 * s + 1, 3 * s + 2)]
        timed = sorted((starts[code] + k * period, code) for code in codes for k in range(p.microbatches))
        words.append([code for _, code in timed])
    return tuple(words)
