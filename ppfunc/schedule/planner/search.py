"""Search for the shortest order: double justification of many orders, then of the best one with random
delays.

A *replay* is a list schedule in an order: operations may overtake where data and memory let them. In time
order, a rank that is free takes the first operation of its remaining order that is ready. One that comes
later in the order may overtake only if the rest of the order then still keeps the cap, so a replay never gets
stuck, and its result is again an order that fits. A rank runs ahead while the head of its order is ready,
which nothing could overtake. Replaying an order backwards and forwards in turn is *double justification*: it
pushes every operation to the end and then to the start.

So every order that is tried fits its caps and never deadlocks. Work is counted in operations replayed, not in
seconds, so that a search gives the same order everywhere.

References:
    Li and Willis, An iterative scheduling technique for resource-constrained project scheduling, EJOR 1992.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import cycle
from math import inf
from operator import attrgetter
from random import Random
from typing import NamedTuple

from ..costs import Number
from .orders import WEIGHT, Direction, Order, Word, choices_of, directions, evaluate
from .problem import Problem

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


_CLOSE = 1 + 1e-9
_GIVEN = 0.25  # share of the work for the given orders
_PATIENCE = (0.0, 1.6), (0.2, 1.2)  # of replays of the second best order and of the best, which are delayed
_WARM, _COLD_AFTER = 0.004, 300


Rules = tuple[Direction, Direction]


class _Start(NamedTuple):
    """Hold an order to improve, its value, the name of its source, and the rules of its choices."""

    value: Number
    order: Order
    name: str
    rules: Rules


class Search:
    """Owns the work that is left and the best order so far.

    Args:
        problem: what to plan.
        bound: the value that ends the search.
        operations: how many operations may be replayed.
        given: orders to start from by name, the most promising first; not empty.
        stop: asked after every replay whether to end.
    """

    def __init__(
        self,
        problem: Problem,
        bound: Number,
        operations: float,
        given: Iterable[tuple[str, Order]],
        stop: Callable[[], bool],
    ) -> None:
        self.problem = problem
        self.bound = bound
        self.operations = operations
        self.spent = 0
        self.stopped = False
        self.best = Replayed(inf, ())
        self.found = ""
        self._trying = ""
        self._stop = stop
        self._random = Random(0)
        self._steps = self._run(given)

    @property
    def elapsed(self) -> float:
        """Return the share of the work that is done."""
        return min(1.0, self.spent / self.operations)

    @property
    def over(self) -> bool:
        """Tell whether the bound is met, or the caller has stopped the search."""
        return self.stopped or self.best.value <= self.bound * _CLOSE

    def advance(self, operations: float) -> None:
        """Go on for about so many operations."""
        target = self.spent + operations
        while self.spent < target and not self.over and next(self._steps, self) is None:
            pass

    def _run(self, given: Iterable[tuple[str, Order]]) -> Iterator[None]:
        """Improve the given orders, then delay the best ones at random in turn; yield now and then."""
        pool: list[_Start] = []
        for name, order in given:
            if pool and self.elapsed > _GIVEN:
                break
            self._trying = f"{name}, justified"
            rules = directions(self.problem, choices_of(self.problem, order))
            pool.append(_Start(*self.improve(order, rules), name, rules))
            yield
        starts = {start.value: start for start in sorted(pool, key=attrgetter("value"), reverse=True)}
        best = [*starts.values()][-len(_PATIENCE) :]
        for walk in cycle(map(self.disturb, best, _PATIENCE[-len(best) :])):
            yield next(walk)

    def improve(self, order: Order, rules: Rules) -> Replayed:
        """Justify an order backwards and forwards while its value falls, also with weight gradients last."""
        timing = evaluate(rules[0], order)
        assert timing, "an order to start from deadlocks"
        value = max(end - begin for end, begin in zip(timing.ends, rules[0].begin, strict=True))
        best = Replayed(value, order)
        last = order
        while True:
            before = best.value
            for patience in (0, 0.6):
                replayed = last if not patience else best.order
                for lazy in (False, True):
                    turned = self._justify(rules, replayed, Manner(patience), Manner(patience, lazy))
                    replayed = turned.order
                    best = min(best, turned, key=lambda r: r.value)
                last = last if patience else replayed
            if self.over or not best.value < before:
                return best

    def disturb(self, start: _Start, patience: tuple[float, float]) -> Iterator[None]:
        """Delay some operations at random and justify the order, again and again; yield after each try."""
        name = f"{start.name}, justified and delayed at random"
        best = current = Replayed(start.value, start.order)
        failures = 0
        while True:
            self._trying = name
            tried = self._neighbour(start.rules, current.order, patience)
            if tried.value <= current.value * (1 + _WARM * self._random.random() * (1 - self.elapsed)):
                current = tried
            failures += 1
            if current.value < best.value:
                best, failures = current, 0
            elif failures == _COLD_AFTER:
                current, failures = best, 0
            yield

    def _neighbour(self, rules: Rules, order: Order, patience: tuple[float, float]) -> Replayed:
        """Return the best of an order replayed with delays and of two justifications of that.

        Ranks have a random patience in all replays: without any, a replay changes nearly every order.
        """

        def manner(hold: Hold = NO_HOLD) -> Manner:
            return Manner(self._random.uniform(*patience), hold=hold)

        tried = [self._counted(1, replay(rules[0], order, manner(self._delays(rules[0]))))]
        for _ in range(2):
            tried.append(self._justify(rules, tried[-1].order, manner(), manner()))
        return min(tried, key=lambda r: r.value)

    def _delays(self, d: Direction) -> Hold:
        """Delay some operations: one code for a run of microbatches, or half of one microbatch's codes."""
        draw, m = self._random, self.problem.microbatches
        there = [code for code, item in enumerate(d.first) if item >= 0]
        codes = len(there)
        mean = sum(d.duration) / codes / m
        kind = draw.randrange(3)
        if kind == 0:
            count = draw.randint(1, 16)
            return {
                there[draw.randrange(codes)] * m + draw.randrange(m): mean * draw.uniform(0.2, 3)
                for _ in range(count)
            }
        if kind == 1:
            code, first, late = there[draw.randrange(codes)], draw.randrange(m), mean * draw.uniform(0.1, 2)
            return {code * m + k: late for k in range(first, min(m, first + draw.randint(2, max(2, m))))}
        k, late = draw.randrange(m), mean * draw.uniform(0.1, 2)
        return {code * m + k: late for code in there if draw.random() < 0.5}

    def _justify(self, rules: Rules, order: Order, back: Manner, forth: Manner) -> Replayed:
        return self._counted(2, justify(rules, order, back, forth))

    def _counted(self, replays: int, found: Replayed) -> Replayed:
        """Charge the work of so many replays, note ``found`` if it is the best so far, and return it."""
        self.spent += replays * sum(map(len, found.order))
        if found.value < self.best.value:
            self.best, self.found = found, self._trying
        self.stopped = self._stop()
        return found
