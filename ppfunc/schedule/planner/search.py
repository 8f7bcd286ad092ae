"""Search for the shortest order: collect orders to start from, justify them, delay the best at random.

Orders to start from are those of builders of the same placement, of a microbatch that repeats, and of plans
whose residuals then stay, move to the host, or are computed again. Every order that is tried fits its caps
and never deadlocks. Work is counted in operations replayed, not in seconds, so that a search gives the same
order everywhere.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from operator import attrgetter
from random import Random
from typing import NamedTuple

from ppfunc.parallel.topology import stages_of

from ..builders import BUILDERS
from ..costs import Costs, Number
from ..instruction import Op
from ..passes.rewrite import insert_offloads, insert_recomputes
from ..schedule import Schedule
from .problem import Cap, Problem
from .replay import (
    FORWARD,
    INPUT,
    LEAVE,
    NO_HOLD,
    RETURN,
    WEIGHT,
    Direction,
    Hold,
    Manner,
    Order,
    Replayed,
    Word,
    ahead,
    choices_of,
    directions,
    evaluate,
    fits,
    in_turn,
    justify,
    order_of,
    replay,
)

# Of the work of the rank that has most, between the starts of two microbatches.
_DISTANCES = (1, 1.1, 1.2, 1.45, 2, 3.5)


def builder_orders(p: Problem, costs: Costs, cap: Cap) -> Iterator[tuple[str, Order]]:
    """Yield ``(name, order)`` of every builder with this placement."""
    if len(p.place) % p.ranks:
        return
    options = {"chunks": len(p.place) // p.ranks, "costs": costs, "cap": cap, "slices": p.slices}
    for name, builder in BUILDERS.items():
        sliced = "slices" in inspect.signature(builder).parameters
        if sliced and not p.slices:
            continue  # the builder of whole sequences has the same order
        microbatches = p.microbatches // p.slices if sliced else p.microbatches
        # The placement does not depend on the number of microbatches.
        sample = build(name, p.ranks, 1, **options)
        if sample is None or sample.placement == p.place:
            schedule = build(name, p.ranks, microbatches, **options)
            trains = schedule and len(schedule.flows) == 1 and schedule.chained and not schedule.forward_only
            if schedule and trains and schedule.placement == p.place:
                yield name, order_of(schedule) if sliced else ahead(p, order_of(schedule))


def build(name: str, *numbers: int, **options: object) -> Schedule | None:
    """Call a builder with its numbers of ranks and microbatches, or sequences, and the options that it takes.

    Returns:
        The schedule; None where the builder refuses these numbers.
    """
    builder = BUILDERS[name]
    taken = inspect.signature(builder).parameters
    try:
        return builder(*numbers, **{option: value for option, value in options.items() if option in taken})
    except ValueError:
        return None


def spaced_orders(p: Problem) -> Iterator[tuple[str, Order]]:
    """Yield ``(name, order)`` of a microbatch that repeats, at several distances in time.

    Each operation of the microbatch starts as soon as its input is there, whatever else its rank does, and a
    weight gradient right after its input gradient. Sorted by these times, an order cannot deadlock. The last
    one runs all of a microbatch before the next, which fits in any cap.
    """
    starts: dict[int, Number] = {}
    now: Number = 0
    stages = range(len(p.place))
    for stage in stages:
        starts[5 * stage] = now
        now += p.forward[stage] + p.down[stage]
    for stage in reversed(stages):
        starts[5 * stage + INPUT], now = now, now + p.backward[stage]
        starts[5 * stage + WEIGHT], now = now, now + p.up[stage]
    work, alone = max(p.work) / p.microbatches, 2 * (now + sum(p.weight))
    for name, distance in [
        *((f"{r:g} of its work", r * work) for r in _DISTANCES),
        ("twice its length", alone),
    ]:
        order = tuple(_repeated(starts, mine, p.microbatches, distance) for mine in p.stages_by_rank)
        yield f"a microbatch every {name}", ahead(p, order)


def _repeated(starts: dict[int, Number], stages: list[int], microbatches: int, distance: Number) -> Word:
    """Sort the operations of a rank by their times; of equal times, by microbatch and place in the chain."""
    timed = (
        (start + k * distance, k, place, code)
        for place, (code, start) in enumerate(starts.items())
        if code // 5 in stages
        for k in range(microbatches)
    )
    return [code * microbatches + k for _, k, _, code in sorted(timed)]


_WAYS = (Op.RECOMPUTE, Op.OFFLOAD)
_LOOKAHEADS, _SPARE = range(2), (0, 1, 2)  # chunks for copies under way


def residual_orders(p: Problem, schedule: Schedule) -> Iterator[tuple[str, Order]]:
    """Yield orders of a schedule whose residuals stay, move, are computed again, or go beyond the cap.

    Yields:
        The name of the way, and the order.
    """
    stages = {way: [s for s in range(len(p.place)) if allowed(p, s, way)] for way in _WAYS}
    ways, order = [way for way in _WAYS if stages[way]], order_of(schedule)
    yield "", order
    for lookahead in _LOOKAHEADS if Op.OFFLOAD in ways else ():
        yield ", all moved", order_of(insert_offloads(schedule, stages[Op.OFFLOAD], lookahead=lookahead))
    if Op.RECOMPUTE in ways:
        yield ", all computed again", order_of(insert_recomputes(schedule, stages[Op.RECOMPUTE]))
    for some in [*([way] for way in ways), *([ways] if len(ways) > 1 else [])]:
        for spare in _SPARE:
            words = (_fitted(p, rank, word, some, spare) for rank, word in enumerate(order))
            if len(found := [in_turn(p.microbatches, word) for word in words if word]) == p.ranks:
                yield f", some {' or '.join(map(str.lower, some))}", tuple(found)


def allowed(p: Problem, stage: int, way: Op) -> bool:
    """Tell whether the residuals of a stage may go this way."""
    return (p.again if way is Op.RECOMPUTE else p.out)[stage] is not None


def _fitted(p: Problem, rank: int, word: Word, ways: list[Op], spare: int) -> Word | None:
    """Make a word fit its cap.

    Where memory is short, weight gradients come first, then the residuals go that are not used for longest.
    They move while the link is free on average, else they are computed again.

    Args:
        spare: number of largest chunks of the cap that are left free.

    Returns:
        The word; None if nothing fits.
    """
    m, uses = p.microbatches, {item: place for place, item in enumerate(word)}
    stages = stages_of(p.place, rank)
    cap = p.cap[rank] - spare * max(p.held[s] for s in stages)
    free = {s: [way for way in ways if allowed(p, s, way)] for s in stages}
    times = {FORWARD: p.forward, INPUT: p.backward, WEIGHT: p.weight}
    # By stage and microbatch of residuals: the place of their input gradient, or the way that they went.
    here, gone = dict[tuple[int, int], int](), dict[tuple[int, int], Op]()
    fitted, waiting = Word(), Word()
    held, now, link = 0, 0.0, 0.0

    def run(item: int, change: int) -> None:
        nonlocal held, now
        fitted.append(item)
        held += change
        now += times[item // m % 5][item // m // 5]

    def make_room(need: int) -> bool:
        nonlocal held, link
        while held + need > cap:
            ready = [(use, key) for key, use in here.items() if free[key[0]]]
            if waiting and (kept := p.kept[waiting[0] // m // 5]):
                run(waiting.pop(0), -kept)
            elif ready:
                s, k = key = max(ready)[1]
                out = p.out[s] or 0
                moves = Op.OFFLOAD in free[s] and (len(free[s]) == 1 or link + out <= now)
                gone[key] = Op.OFFLOAD if moves else Op.RECOMPUTE
                held -= p.held[s] - (0 if moves else p.stub[s])
                del here[key]
                if moves:
                    link += out
                    fitted.append((5 * s + LEAVE) * m + k)
            else:
                return False
        return True

    for item in word:
        code, k = divmod(item, m)
        s, letter = divmod(code, 5)
        if letter == FORWARD:
            if not make_room(p.held[s]):
                return None
            run(item, p.held[s])
            here[s, k] = uses[(5 * s + INPUT) * m + k]
        elif letter == INPUT:
            here.pop((s, k), None)
            if way := gone.get((s, k)):
                back = p.held[s] - (0 if way is Op.OFFLOAD else p.stub[s])
                if not make_room(back):
                    return None
                held += back
                fitted.append((5 * s + RETURN) * m + k)
            run(item, p.kept[s] - p.held[s])
            waiting.append(item + m)
        elif item in waiting:
            waiting.remove(item)
            run(item, -p.kept[s])
    return fitted


_CLOSE = 1 + 1e-9
_GIVEN = 0.25  # share of the work for the given orders
_PATIENCE = (0.0, 1.6), (0.2, 1.2)  # of replays of the second best order and of the best, which are delayed
Rules = tuple[Direction, Direction]


class Given(NamedTuple):
    """Hold an order to start from: its value, the name of its source, and the rules of its choices."""

    value: Number
    name: str
    order: Order
    rules: Rules


def given_orders(p: Problem, named: Iterable[tuple[str, Order]]) -> Iterator[Given]:
    """Time the orders that fit the caps."""
    plain = directions(p)
    for name, order in named:
        rules = directions(p, choices) if (choices := choices_of(p, order)) else plain
        if fits(rules[0], order) and (timing := evaluate(rules[0], order)):
            yield Given(timing.value, name, order, rules)


class Search:
    """Owns the work that is left and the best order so far.

    Args:
        problem: numbers of one placement.
        bound: the value that ends the search.
        operations: number of operations that may be replayed.
        given: orders to start from, the most promising first; not empty.
        stop: asked after every replay whether to end.
    """

    def __init__(
        self,
        problem: Problem,
        bound: Number,
        operations: float,
        given: Sequence[Given],
        stop: Callable[[], bool],
    ) -> None:
        self.problem = problem
        self.bound = bound
        self.operations = operations
        self.spent = 0
        self.stopped = False
        self.best = min(given, key=attrgetter("value"))
        self._trying = self.best
        self._stop = stop
        self._random = Random(0)
        self._given = iter(given)
        self._justified: list[Given] = []
        self._walks: Iterator[int] | None = None

    @property
    def over(self) -> bool:
        """Tell whether the bound is met, or the caller has stopped the search."""
        return self.stopped or self.best.value <= self.bound * _CLOSE

    def advance(self, operations: float) -> None:
        """Replay about ``operations`` more: justify given orders, then delay the best two at random."""
        target = self.spent + operations
        while self.spent < target and not self.over:
            early = self.spent <= _GIVEN * self.operations or not self._justified
            if start := next(self._given, None) if early and not self._walks else None:
                self._trying = start._replace(name=f"{start.name}, justified")
                value, order = self.improve(start.order, start.rules)
                self._justified.append(start._replace(value=value, order=order))
                continue
            if not self._walks:
                ordered = sorted(self._justified, key=attrgetter("value"), reverse=True)
                self._justified = [*{start.value: start for start in ordered}.values()][-len(_PATIENCE) :]
                self._walks = cycle(range(len(self._justified)))
            turn = next(self._walks)
            start = self._justified[turn]
            self._trying = start._replace(name=f"{start.name}, justified and delayed at random")
            tried = self._neighbour(start, _PATIENCE[turn - len(self._justified)])
            if tried.value <= start.value:
                self._justified[turn] = start._replace(value=tried.value, order=tried.order)

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

    def _neighbour(self, start: Given, patience: tuple[float, float]) -> Replayed:
        """Return the best of an order replayed with delays and of two justifications of that.

        Ranks have a random patience in all replays: without any, a replay changes nearly every order.
        """
        rules = start.rules

        def manner(hold: Hold = NO_HOLD) -> Manner:
            return Manner(self._random.uniform(*patience), hold=hold)

        tried = [self._counted(1, replay(rules[0], start.order, manner(self._delays(rules[0]))))]
        for _ in range(2):
            tried.append(self._justify(rules, tried[-1].order, manner(), manner()))
        return min(tried, key=lambda r: r.value)

    def _delays(self, d: Direction) -> Hold:
        """Delay one operation of a stage in a run of microbatches, by at most two mean durations."""
        draw, m = self._random, self.problem.microbatches
        there = [code for code, item in enumerate(d.first) if item >= 0]
        mean = sum(d.duration) / len(there) / m
        code, first, late = draw.choice(there), draw.randrange(m), mean * draw.uniform(0.1, 2)
        return {code * m + k: late for k in range(first, min(m, first + draw.randint(2, max(2, m))))}

    def _justify(self, rules: Rules, order: Order, back: Manner, forth: Manner) -> Replayed:
        return self._counted(2, justify(rules, order, back, forth))

    def _counted(self, replays: int, found: Replayed) -> Replayed:
        """Charge the work of ``replays`` replays, note ``found`` if it is the best so far, and return it."""
        self.spent += replays * sum(map(len, found.order))
        if found.value < self.best.value:
            self.best = self._trying._replace(value=found.value, order=found.order)
        self.stopped = self._stop()
        return found
