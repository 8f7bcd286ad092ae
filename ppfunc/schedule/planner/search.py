"""Search for the shortest order: double justification of many orders, then of the best one with random
delays.

Every order that is tried fits its caps and never deadlocks, because replays keep both. Work is counted in
operations replayed, not in seconds, so that a search gives the same order everywhere.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from math import inf
from operator import attrgetter
from random import Random
from typing import NamedTuple

from ..costs import Number
from .orders import Direction, Order, choices_of, directions, evaluate
from .problem import Problem
from .replay import NO_HOLD, Hold, Manner, Replayed, justify, replay

_CLOSE = 1 + 1e-9
_GIVEN, _WALKS = 0.25, 2  # share of the work for the given orders; how many of them are delayed at random
_PATIENCE = 0.2, 1.2
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
        for walk in cycle(map(self.disturb, [*starts.values()][-_WALKS:])):
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

    def disturb(self, start: _Start) -> Iterator[None]:
        """Delay some operations at random and justify the order, again and again; yield after each try."""
        name = f"{start.name}, justified and delayed at random"
        best = current = Replayed(start.value, start.order)
        failures = 0
        while True:
            self._trying = name
            tried = self._neighbour(start.rules, current.order)
            if tried.value <= current.value * (1 + _WARM * self._random.random() * (1 - self.elapsed)):
                current = tried
            failures += 1
            if current.value < best.value:
                best, failures = current, 0
            elif failures == _COLD_AFTER:
                current, failures = best, 0
            yield

    def _neighbour(self, rules: Rules, order: Order) -> Replayed:
        """Return the best of an order replayed with delays and of two justifications of that.

        Ranks have a random patience in all replays: without any, a replay changes nearly every order.
        """

        def manner(hold: Hold = NO_HOLD) -> Manner:
            return Manner(self._random.uniform(*_PATIENCE), hold=hold)

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
