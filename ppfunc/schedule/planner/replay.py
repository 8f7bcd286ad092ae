"""Replay an order as a list schedule: operations may overtake where data and memory let them.

In time order, a rank that is free takes the first operation of its remaining order that is ready. One that comes later
in the order may overtake only if the rest of the order then still keeps the cap, so a replay never gets stuck, and
its result is again an order that fits. Replaying an order backwards and forwards in turn is *double justification*:
it pushes every operation to the end and then to the start.

References:
    Li and Willis, An iterative scheduling technique for resource-constrained project scheduling, EJOR 1992.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush, heappushpop
from math import inf
from typing import NamedTuple

from ..costs import Number
from .orders import Direction, Order, Word

Hold = Mapping[tuple[int, int], Number]
"""``{(code, k): time}``: how much later than it arrives the k-th operation of a code counts as ready."""

NO_HOLD: Hold = {}


class Manner(NamedTuple):
    """How a replay chooses.

    Args:
        patience: a rank waits for an operation that the order has earlier than the first ready one, if it arrives within
            this share of the time of that one.
        lazy: whether weight gradients come only where nothing else is ready.
        hold: operations that are held back.
    """

    patience: float = 0
    lazy: bool = False
    hold: Hold = NO_HOLD


class Replayed(NamedTuple):
    """The order that a replay took, and its value: the largest end less begin of a rank."""

    value: Number
    order: Order


def replay(d: Direction, order: Order, manner: Manner = Manner()) -> Replayed:  # noqa: B008 - a value
    """Replay ``order``, which fits its caps, in its own direction of time."""
    rests = [word[::-1] for word in order]
    words: Order = tuple([] for _ in order)
    arrivals = _first_arrivals(d, manner.hold)
    done = [0] * len(d.rank)
    free: list[Number] = list(d.release)
    held = [0] * d.ranks
    events = [(d.release[rank], rank) for rank in range(d.ranks)] + [(late, d.rank[code]) for (code, _), late in manner.hold.items()]
    events.sort()  # a heap
    duration, change, readers, hold = d.duration, d.change, d.readers, manner.hold
    now, rank = heappop(events)
    while True:
        rest = rests[rank]
        place = _choose(d, rest, arrivals, done, held[rank], now, manner) if rest and now >= free[rank] else None
        if place is None:
            if not events:
                break
            now, rank = heappop(events)
            continue
        code = rest.pop(place)
        words[rank].append(code)
        held[rank] += change[code]
        free[rank] = end = now + duration[code]
        number = done[code]
        for reader, reading_rank, latency in readers[code]:
            arrival = end + latency
            if hold:
                arrival += hold.get((reader, number), 0)
            arrivals[reader][number] = arrival
            if arrival >= free[reading_rank]:  # else it looks again when it is free
                heappush(events, (arrival, reading_rank))
        done[code] = number + 1
        now, rank = heappushpop(events, (end, rank))
    assert not any(rests), "a replay got stuck: its order does not fit"
    return Replayed(max(end - begin for end, begin in zip(free, d.begin, strict=True)), words)


def _first_arrivals(d: Direction, hold: Hold) -> list[list[Number]]:
    """Per code, when each of its operations is ready: infinity where that depends on another one."""
    m = d.microbatches
    return [[inf] * m if source >= 0 else [hold.get((code, k), 0) for k in range(m)] for code, source in enumerate(d.source)]


def _choose(d: Direction, rest: Word, arrivals: list[list[Number]], done: list[int], held: int, now: Number, manner: Manner) -> int | None:
    """The place in ``rest``, whose head is its last entry, of the operation to start now; None to sleep until the next arrival."""
    local, change, (patience, lazy, _) = d.local, d.change, manner
    code = rest[-1]
    number = done[code]
    if arrivals[code][number] <= now and not (lazy and code % 3 == 2) and (local[code] < 0 or number < done[local[code]]):
        return -1
    rank = d.rank[code]
    cap, codes = d.cap[rank], d.codes[rank]
    peak, soon, found = held, inf, None
    seen = set()
    for place in range(-1, -1 - len(rest), -1):
        code = rest[place]
        extra = change[code]
        if code not in seen:
            seen.add(code)
            if extra <= 0 or peak + extra <= cap or place == -1:
                number = done[code]
                arrival = arrivals[code][number]
                if arrival > now:
                    soon = arrival if arrival < soon else soon
                elif local[code] >= 0 and number >= done[local[code]]:
                    pass
                elif not (lazy and code % 3 == 2):
                    found = place
                    break
                elif found is None:
                    found = place
            if len(seen) == codes:
                break
        held += extra
        if held > peak:
            peak = held
    if found is not None and patience and soon - now <= patience * d.duration[rest[found]]:
        return None
    return found
