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
from .orders import Direction, Order, evaluate
from .problem import Problem
from .replay import NO_HOLD, Hold, Manner, Replayed, justify, replay

_CLOSE = 1 + 1e-9
_GIVEN, _WALKS = 0.25, 2  # share of the work for the given orders; how many of them are delayed at random
_PATIENCE = 0.2, 1.2
_WARM, _COLD_AFTER = 0.004, 300


class _Start(NamedTuple):
    """Hold an order to improve, its value, and the name of its source."""

    value: Number
    order: Order
    name: str


class Search:
    """Owns the work that is left and the best order so far.

    Args:
        problem: what to plan.
        rules: the rules forwards and backwards in time.
        bound: the value that ends the search.
        operations: how many operations may be replayed.
        given: orders to start from by name, the most promising first; not empty.
        stop: asked after every replay whether to end.
    """

    def __init__(
        self,
        problem: Problem,
        rules: tuple[Direction, Direction],
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
        self._rules, self._forwards = rules, rules[0]
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
            pool.append(_Start(*self.improve(order), name))
            yield
        starts = {start.value: start for start in sorted(pool, key=attrgetter("value"), reverse=True)}
        for walk in cycle(map(self.disturb, [*starts.values()][-_WALKS:])):
            yield next(walk)

    def improve(self, order: Order) -> Replayed:
        """Justify an order backwards and forwards while its value falls, also with weight gradients last."""
        best = Replayed(self._value(order), order)
        last = order
        while True:
            before = best.value
            for patience in (0, 0.6):
                replayed = last if not patience else best.order
                for lazy in (False, True):
                    turned = self._justify(replayed, Manner(patience), Manner(patience, lazy))
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
            tried = self._neighbour(current.order)
            if tried.value <= current.value * (1 + _WARM * self._random.random() * (1 - self.elapsed)):
                current = tried
            failures += 1
            if current.value < best.value:
                best, failures = current, 0
            elif failures == _COLD_AFTER:
                current, failures = best, 0
            yield

    def _neighbour(self, order: Order) -> Replayed:
        """Return the best of an order replayed with delays and of two justifications of that.

        Ranks have a random patience in all replays: without any, a replay changes nearly every order.
        """

        def manner(hold: Hold = NO_HOLD) -> Manner:
            return Manner(self._random.uniform(*_PATIENCE), hold=hold)

        tried = [self._counted(1, replay(self._forwards, order, manner(self._delays())))]
        for _ in range(2):
            tried.append(self._justify(tried[-1].order, manner(), manner()))
        return min(tried, key=lambda r: r.value)

    def _delays(self) -> Hold:
        """Delay some operations: one code for a run of microbatches, or half of one microbatch's codes."""
        draw, m, codes = self._random, self.problem.microbatches, len(self._forwards.rank)
        mean = sum(self._forwards.duration) / codes
        kind = draw.randrange(3)
        if kind == 0:
            count = draw.randint(1, 16)
            return {
                (draw.randrange(codes), draw.randrange(m)): mean * draw.uniform(0.2, 3) for _ in range(count)
            }
        if kind == 1:
            code, first, late = draw.randrange(codes), draw.randrange(m), mean * draw.uniform(0.1, 2)
            return {(code, k): late for k in range(first, min(m, first + draw.randint(2, max(2, m))))}
        k, late = draw.randrange(m), mean * draw.uniform(0.1, 2)
        return {(code, k): late for code in range(codes) if draw.random() < 0.5}

    def _value(self, order: Order) -> Number:
        """Return the value of an order as replays count it."""
        timing = evaluate(self._forwards, order)
        assert timing, "an order to start from deadlocks"
        return max(end - begin for end, begin in zip(timing.ends, self._forwards.begin, strict=True))

    def _justify(self, order: Order, back: Manner, forth: Manner) -> Replayed:
        return self._counted(2, justify(self._rules, order, back, forth))

    def _counted(self, replays: int, found: Replayed) -> Replayed:
        """Charge the work of so many replays, note ``found`` if it is the best so far, and return it."""
        self.spent += replays * sum(map(len, found.order))
        if found.value < self.best.value:
            self.best, self.found = found, self._trying
        self.stopped = self._stop()
        return found
