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
from .orders import WEIGHT, Direction, Order, Word

Hold = Mapping[int, Number]
"""``{item: time}``: how much later than it arrives an item counts as ready."""

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
    duration, change, readers, code_of, following = d.duration, d.change, d.readers, d.code, d.following
    lazy, hold = manner.lazy, manner.hold
    rests, words = [word[:] for word in order], tuple(Word() for _ in order)
    missing, nexts, free, held = d.missing[:], d.first[:], list(d.release), [0] * d.ranks
    arrivals: list[Number] = [inf if count else hold.get(i, 0) for i, count in enumerate(missing)] + [inf]
    so_far: dict[int, Number] = {}  # of items that wait for more
    links: list[Number] = [0] * (2 * d.ranks)  # when each is free
    due = [arrivals[item] for item in nexts]  # of no item, -1, never
    wake: list[Number] = [0] * d.ranks  # where a rank sleeps: until when
    events = sorted((time, rank) for rank, time in enumerate(free))  # a heap of the times at which ranks look
    while events:
        now, rank = heappop(events)
        if not free[rank] <= now >= wake[rank]:
            continue
        rest, word, wake[rank], started = rests[rank], words[rank], 0, False
        while rest:
            item, place = rest[0], 0
            if arrivals[item] > now or (lazy and code_of[item] % 5 == WEIGHT):
                place, soon = (-1, now) if started else _choose(d, rank, rest, due, nexts, held, now, manner)
                if place < 0:
                    wake[rank] = 0 if started else soon
                    if soon < inf:
                        heappush(events, (soon, rank))
                    break
            item = rest.pop(place)
            word.append(item)
            held[rank] += change[item]
            free[rank] = now = now + duration[item]
            started, code = True, code_of[item]
            nexts[code] = following[item]
            due[code] = arrivals[nexts[code]]
            for reader, reading_rank, latency, link in readers[item]:
                arrival = now + latency
                if link >= 0:
                    links[link] = arrival = max(now, links[link]) + latency
                missing[reader] -= 1
                if hold and reader in hold:
                    arrival += hold[reader]
                if missing[reader]:
                    so_far[reader] = max(arrival, so_far.get(reader, 0))
                    continue
                arrivals[reader] = arrival = max(arrival, so_far.get(reader, 0))
                if nexts[code_of[reader]] == reader:
                    due[code_of[reader]] = arrival
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


def _choose(
    d: Direction,
    rank: int,
    rest: Word,
    due: list[Number],
    nexts: list[int],
    held: list[int],
    now: Number,
    manner: Manner,
) -> tuple[int, Number]:
    """Choose the place in ``rest`` to start now, -1 to sleep, and the time of the next known arrival.

    ``nexts`` is the next item of each code, ``due`` when it arrives: infinity where that is not known or none
    is left.
    """
    patience, lazy, _ = manner
    ready, soon = [], inf
    for code in d.codes[rank]:
        time = due[code]
        if time <= now:
            ready.append(code)
        elif time < soon:
            soon = time
    count, room = len(rest), d.cap[rank] - held[rank]
    found = none = 2 * count
    for code in ready:
        place = rest.index(nexts[code])
        turn = place + count if lazy and code % 5 == WEIGHT else place
        if turn < found and _may_overtake(d, rest, place, room):
            found = turn
    if found == none:
        return -1, soon
    if found and soon - now <= (wait := patience * d.duration[rest[found % count]]):
        for code in d.codes[rank]:
            if (
                0 < due[code] - now <= wait
                and (place := rest.index(nexts[code])) < found
                and _may_overtake(d, rest, place, room)
            ):
                return -1, soon
    return found % count, soon


def _may_overtake(d: Direction, rest: Word, place: int, room: int) -> bool:
    """Tell whether the order keeps the cap after the item at ``place`` goes first."""
    change, need, item = d.change, d.need, rest[place]
    if need[item] > room:
        return False
    if change[item] <= 0:
        return True
    room -= change[item]
    for other in rest[:place]:
        if need[other] > room:
            return False
        room -= change[other]
    return True
