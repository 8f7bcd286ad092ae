"""Replay an order as a list schedule: operations may overtake where data and memory let them.

In time order, a rank that is free takes the first operation of its remaining order that is ready. One that
comes later in the order may overtake only if the rest of the order then still keeps the cap, so a replay
never gets stuck, and its result is again an order that fits. A rank runs ahead while the head of its order is
ready, which nothing could overtake. Replaying an order backwards and forwards in turn is *double
justification*: it pushes every operation to the end and then to the start.

References:
    Li and Willis, An iterative scheduling technique for resource-constrained project scheduling, EJOR 1992.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ..costs import Number
from .orders import Direction, Order, Word

Hold = Mapping[tuple[int, int], Number]
"""``{(code, k): time}``: how much later than it arrives the k-th operation of a code counts as ready."""

NO_HOLD: Hold = {}


class Manner(NamedTuple):
    """Choose how a replay picks the next operation.

    Args:
        patience: a rank waits for an operation that the order has earlier than the first ready one, if it
            arrives within this share of the time of that one.
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
    duration, change, local, readers = d.duration, d.change, d.local, d.readers
    lazy, hold = manner.lazy, manner.hold
    rests = [word[:] for word in order]
    words: Order = tuple([] for _ in order)
    arrivals = _first_arrivals(d, hold)
    due, done = [times[0] for times in arrivals], [0] * len(arrivals)
    free, held = list(d.release), [0] * d.ranks
    wake: list[Number] = [0] * d.ranks  # where a rank sleeps: until when
    events = sorted((time, rank) for rank, time in enumerate(free))  # a heap of the times at which ranks look
    while events:
        now, rank = heappop(events)
        if not free[rank] <= now >= wake[rank]:
            continue
        rest, word, wake[rank], started = rests[rank], words[rank], 0, False
        while rest:
            code = rest[0]
            ready = due[code] <= now and (local[code] < 0 or done[code] < done[local[code]])
            if ready and not (lazy and code % 3 == 2):
                del rest[0]
            elif started:
                heappush(events, (now, rank))
                break
            else:
                place, soon = _choose(d, rank, rest, due, done, held[rank], now, manner)
                if place < 0:
                    wake[rank] = soon
                    if soon < inf:
                        heappush(events, (soon, rank))
                    break
                code = rest.pop(place)
            word.append(code)
            held[rank] += change[code]
            free[rank] = now = now + duration[code]
            started, number = True, done[code]
            done[code] = number + 1
            due[code] = arrivals[code][number + 1]
            for reader, reading_rank, latency in readers[code]:
                arrival = now + latency
                if hold:
                    arrival += hold.get((reader, number), 0)
                arrivals[reader][number] = arrival
                if done[reader] == number:
                    due[reader] = arrival
                    if arrival < wake[reading_rank]:
                        wake[reading_rank] = arrival
                        heappush(events, (arrival, reading_rank))
    assert not any(rests), "a replay got stuck: its order does not fit"
    return Replayed(max(end - begin for end, begin in zip(free, d.begin, strict=True)), words)


def justify(rules: tuple[Direction, Direction], order: Order, back: Manner, forth: Manner) -> Replayed:
    """Replay an order backwards in time, and the result forwards."""
    forwards, backwards = rules
    late = replay(backwards, _reversed(order), back)
    return replay(forwards, _reversed(late.order), forth)


def _reversed(order: Order) -> Order:
    return tuple(word[::-1] for word in order)


def _first_arrivals(d: Direction, hold: Hold) -> list[list[Number]]:
    """Return when each operation is ready, per code; infinity if it depends on another or ends the list."""
    m = d.microbatches
    return [
        [inf] * (m + 1) if source >= 0 else [*(hold.get((code, k), 0) for k in range(m)), inf]
        for code, source in enumerate(d.source)
    ]


def _choose(
    d: Direction,
    rank: int,
    rest: Word,
    due: list[Number],
    done: list[int],
    held: int,
    now: Number,
    manner: Manner,
) -> tuple[int, Number]:
    """Choose the place in ``rest`` to start now, -1 to sleep, and the time of the next known arrival.

    ``due`` is when the next operation of each code arrives, infinity where that is not known or none is left.
    """
    patience, lazy, _ = manner
    change, local = d.change, d.local
    ready, soon = [], inf
    for code in d.codes[rank]:
        time = due[code]
        if time <= now:
            ready.append(code)
        elif time < soon:
            soon = time
    count, room = len(rest), d.cap[rank] - held
    found = none = 2 * count
    for code in ready:
        if local[code] < 0 or done[code] < done[local[code]]:
            place = rest.index(code)
            turn = place + count if lazy and code % 3 == 2 else place
            if turn < found and _may_overtake(change, rest, place, room, change[code]):
                found = turn
    if found == none:
        return -1, soon
    if found and soon - now <= (wait := patience * d.duration[rest[found % count]]):
        for code in d.codes[rank]:
            if (
                0 < due[code] - now <= wait
                and (place := rest.index(code)) < found
                and _may_overtake(change, rest, place, room, change[code])
            ):
                return -1, soon
    return found % count, soon


def _may_overtake(change: list[int], rest: Word, place: int, room: int, extra: int) -> bool:
    """Tell whether the order keeps the cap after the operation at ``place`` goes first."""
    if extra <= 0:
        return True
    room -= extra
    if room >= 0:
        for code in rest[:place]:
            room -= change[code]
            if room < 0:
                return False
    return room >= 0
