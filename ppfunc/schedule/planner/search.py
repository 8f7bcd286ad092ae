"""Search for the shortest order: double justification of many orders, then of the best ones with random delays.

Every order that is tried fits its caps and never deadlocks, because replays keep both. Work is counted in operations
replayed, not in seconds, so that a search gives the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from random import Random

from ..costs import Number
from .orders import Direction, Order
from .problem import Problem
from .replay import Hold, Replayed, Rules, replay

Progress = Callable[[float, Number, Number], bool | None]
"""``progress(share of the work done, best value, bound)``; the search stops where it returns True."""
_CLOSE = 1 + 1e-9
_GIVEN, _SEEDS, _STARTS = 0.25, 0.4, 3
_WARM, _COLD_AFTER = 0.004, 300


class Search:
    """Owns the work that is left and the best order so far.

    Args:
        problem: what to plan.
        rules: the rules forwards and backwards in time.
        bound: the value that ends the search.
        operations: how many operations may be replayed.
        progress: called after every replay; True ends the search.
    """

    def __init__(
        self, problem: Problem, rules: tuple[Direction, Direction], bound: Number, operations: int, progress: Progress | None = None
    ) -> None:
        self.problem = problem
        self.bound = bound
        self.operations = operations
        self.progress = progress
        self.spent = 0
        self.stopped = False
        self.best = Replayed(inf, ())
        self.found = ""
        self._trying = ""
        self._forwards, self._backwards = rules
        self._random = Random(0)

    @property
    def elapsed(self) -> float:
        """The share of the work that is done."""
        return min(1.0, self.spent / self.operations)

    @property
    def over(self) -> bool:
        """Whether the bound is met, the work is used up, or the caller has stopped it."""
        return self.stopped or self.best.value <= self.bound * _CLOSE or self.spent >= self.operations

    def run(self, given: Iterable[tuple[str, Order]], seeds: Iterable[tuple[int, Order | None]]) -> None:
        """Improve the given orders, then seeds, then delay operations of the best ones at random.

        Args:
            given: orders by name, the most promising first.
            seeds: the work that each took, in operations, and an order if there is one.
        """
        pool: list[tuple[Number, str, Order]] = []
        for name, order in given:
            if self.over or self.elapsed > _GIVEN:
                break
            pool.append(self._improved(name, order))
        for work, seed in seeds:
            self.spent += work
            if self.over or self.elapsed > _SEEDS:
                break
            if seed:
                pool.append(self._improved("a block", seed))
        starts = list({start[0]: start for start in sorted(pool, key=lambda start: start[0])}.values())[:_STARTS]
        share = (1 - self.elapsed) / (2 * len(starts)) if starts else 0
        while starts and not self.over:
            starts = [self._disturbed(*start, min(1.0, self.elapsed + share)) for start in starts]

    def _improved(self, name: str, order: Order) -> tuple[Number, str, Order]:
        self._trying = f"{name}, justified"
        value, order = self.improve(order)
        return value, name, order

    def _disturbed(self, value: Number, name: str, order: Order, until: float) -> tuple[Number, str, Order]:
        self._trying = f"{name}, justified and delayed at random"
        value, order = self.disturb(Replayed(value, order), until)
        return value, name, order

    def improve(self, order: Order) -> Replayed:
        """Justify an order while its value falls: backwards, forwards, backwards, forwards with weight gradients last."""
        best = Replayed(inf, order)
        last = order
        while True:
            before = best.value
            for patience in (0, 0.6):
                replayed = last if not patience else best.order
                for lazy in (False, True):
                    turned = self._justify(replayed, Rules(patience), Rules(patience, lazy))
                    replayed = turned.order
                    best = min(best, turned, key=lambda r: r.value)
                last = last if patience else replayed
            if self.over or not best.value < before:
                return best

    def disturb(self, start: Replayed, until: float) -> Replayed:
        """Delay some operations at random and justify, from one order to the next, until a share of the work is done."""
        best = current = start
        failures = 0
        while not self.over and self.elapsed < until:
            found = self._neighbour(current.order)
            if found.value <= current.value * (1 + _WARM * self._random.random() * (1 - self.elapsed)):
                current = found
            failures += 1
            if current.value < best.value:
                best, failures = current, 0
            elif failures == _COLD_AFTER:
                current, failures = best, 0
        return best

    def _neighbour(self, order: Order) -> Replayed:
        """The best of an order replayed with delays and of what two justifications make of it."""
        draw = self._random
        found = best = self._replay(self._forwards, order, Rules(hold=self._delays()))
        for _ in range(2):
            patience = draw.choice((0, 0, 0.3, 0.6, 1, 1.6))
            found = self._justify(found.order, Rules(patience), Rules(patience, draw.random() < 0.3))
            best = min(best, found, key=lambda r: r.value)
        return best

    def _delays(self) -> Hold:
        """Some operations, one code for a run of microbatches, or half of the codes of one microbatch, held back."""
        draw, m, codes = self._random, self.problem.microbatches, len(self._forwards.rank)
        mean = sum(self._forwards.duration) / codes
        kind = draw.randrange(3)
        if kind == 0:
            count = draw.randint(1, 16)
            return {(draw.randrange(codes), draw.randrange(m)): mean * draw.uniform(0.2, 3) for _ in range(count)}
        if kind == 1:
            code, first, late = draw.randrange(codes), draw.randrange(m), mean * draw.uniform(0.1, 2)
            return {(code, k): late for k in range(first, min(m, first + draw.randint(2, max(2, m))))}
        k, late = draw.randrange(m), mean * draw.uniform(0.1, 2)
        return {(code, k): late for code in range(codes) if draw.random() < 0.5}

    def _justify(self, order: Order, back: Rules, forth: Rules) -> Replayed:
        """Replay an order backwards in time, and the result forwards."""
        late = self._replay(self._backwards, _reversed(order), back)
        return self._replay(self._forwards, _reversed(late.order), forth)

    def _replay(self, direction: Direction, order: Order, rules: Rules) -> Replayed:
        found = replay(direction, order, rules)
        self.spent += sum(map(len, order))
        if direction is self._forwards and found.value < self.best.value:
            self.best, self.found = found, self._trying
        if self.progress and self.progress(self.elapsed, self.best.value, self.bound):
            self.stopped = True
        return found


def _reversed(order: Order) -> Order:
    return tuple(word[::-1] for word in order)
