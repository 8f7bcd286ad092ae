"""Collect the orders that a search starts from.

Those of builders of the same placement, of a microbatch that repeats, and of plans whose residuals then stay,
move to the host, or are computed again.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ppfunc.parallel.placement import stages_of

from ..builders import BUILDERS
from ..costs import Costs, Number
from ..instruction import Op
from ..passes.rewrite import insert_offloads, insert_recomputes
from ..schedule import Schedule
from .orders import FORWARD, INPUT, LEAVE, RETURN, WEIGHT, Direction, Order, Word, fits, in_turn, order_of
from .problem import Cap, Problem

# Of the work of the rank that has most, between the starts of two microbatches.
_DISTANCES = (1, 1.015, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.45, 1.65, 2, 2.5, 3.5, 6)


def builder_orders(p: Problem, forwards: Direction, costs: Costs, cap: Cap) -> Iterator[tuple[str, Order]]:
    """Yield ``(name, order)`` of every builder with this placement whose schedule fits the caps."""
    if len(p.place) % p.ranks:
        return
    options = {"chunks": len(p.place) // p.ranks, "costs": costs, "cap": cap}
    for name in BUILDERS:
        # The placement does not depend on the number of microbatches.
        sample = build(name, p.ranks, 1, **options)
        schedule = (
            build(name, p.ranks, p.microbatches, **options)
            if sample is None or sample.placement == p.place
            else None
        )
        if (
            schedule
            and schedule.placement == p.place
            and len(schedule.chains) == 1
            and not schedule.forward_only
        ):
            order = order_of(schedule)
            if fits(forwards, order):
                yield name, order


def build(name: str, ranks: int, microbatches: int, **options: object) -> Schedule | None:
    """Call a builder with those of the options that it takes; None where it refuses these numbers."""
    builder = BUILDERS[name]
    taken = inspect.signature(builder).parameters
    try:
        return builder(
            ranks, microbatches, **{option: value for option, value in options.items() if option in taken}
        )
    except ValueError:
        return None


def spaced_orders(p: Problem, forwards: Direction) -> Iterator[tuple[str, Order]]:
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
        if fits(forwards, order):
            yield f"a microbatch every {name}", order


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
_LOOKAHEADS, _SPARE = range(4), (0, 1, 2)  # chunks for copies under way


def residual_orders(p: Problem, schedule: Schedule) -> Iterator[tuple[str, Order]]:
    """Yield a schedule as it is, with all residuals moved or computed again, and with what exceeds the cap.

    Yields:
        The name of the way, and the order.
    """
    stages = {way: [s for s in range(len(p.place)) if allowed(p, s, way)] for way in _WAYS}
    ways, order = [way for way in _WAYS if stages[way]], order_of(schedule)
    yield "", order
    for lookahead in _LOOKAHEADS if Op.OFFLOAD in ways else ():
        yield "all moved", order_of(insert_offloads(schedule, stages[Op.OFFLOAD], lookahead=lookahead))
    if Op.RECOMPUTE in ways:
        again = order_of(insert_recomputes(schedule, stages[Op.RECOMPUTE]))
        yield "all computed again", again
        yield "all computed again in whole backwards", tuple(_whole(p, word) for word in again)
    for some in [*([way] for way in ways), *([ways] if len(ways) > 1 else [])]:
        for spare in _SPARE:
            words = (_fitted(p, rank, word, some, spare) for rank, word in enumerate(order))
            if len(found := [in_turn(p.microbatches, word) for word in words if word]) == p.ranks:
                yield f"some {' or '.join(map(str.lower, some))}", tuple(found)


def all_again(costs: Costs, still: Costs, cap: Cap) -> Iterator[tuple[Costs, Cap, float]]:
    """Yield the costs of stages that compute all residuals again in a whole backward, with what memory it
    leaves.
    """
    values = vars(costs).values()
    numbers = [len(value) for value in values if isinstance(value, Sequence)]
    names = ("recompute", "backward_input", "backward_weight")
    if costs.recompute is None or any(isinstance(value, Mapping) for value in values):
        return
    rows = [[costs.of(name, s) for name in names] for s in range(max(numbers, default=1))]
    if not any(row[0] is None for row in rows):
        whole = [sum(row) for row in rows]
        most = max(costs.of("activation", s) for s in range(len(rows)))
        left = [x - most for x in cap] if isinstance(cap, Sequence) else None if cap is None else cap - most
        backward = whole if numbers else whole[0]
        yield replace(still, backward_input=backward, backward_weight=0, activation=costs.checkpoint), left, 1


def _whole(p: Problem, word: Word) -> Word:
    """Put each weight gradient right behind its input gradient."""
    return [
        x
        for item in word
        if (letter := item // p.microbatches % 5) != WEIGHT
        for x in (item, item + p.microbatches)[: 1 + (letter == INPUT)]
    ]


def allowed(p: Problem, stage: int, way: Op) -> bool:
    """Tell whether the residuals of a stage may go this way."""
    return (p.again if way is Op.RECOMPUTE else p.out)[stage] is not None


def _fitted(p: Problem, rank: int, word: Word, ways: list[Op], spare: int) -> Word | None:
    """Make a word fit, see :class:`_Fitting`. None if nothing fits.

    Args:
        spare: how many of the largest chunks of the cap are left free.
    """
    m, at = p.microbatches, {item: place for place, item in enumerate(word)}
    fitting = _Fitting(p, p.cap[rank] - spare * max(p.held[s] for s in stages_of(p.place, rank)), ways)
    for item in word:
        code, k = divmod(item, m)
        s, letter = divmod(code, 5)
        if letter == FORWARD:
            if not fitting.make_room(p.held[s]):
                return None
            fitting.run(item, p.held[s])
            fitting.here[s, k] = at[(5 * s + INPUT) * m + k]
        elif letter == INPUT:
            if not fitting.bring_back(s, k):
                return None
            fitting.run(item, p.kept[s] - p.held[s])
            fitting.waiting.append(item + m)
        elif item in fitting.waiting:
            fitting.waiting.remove(item)
            fitting.run(item, -p.kept[s])
    return fitting.word


class _Fitting:
    """Writes a word that fits a cap: where memory is short, weight gradients come first, then the residuals
    go that are not used for longest.

    They move while the link is free on average, else they are computed again.

    Attributes:
        here: by stage and microbatch of residuals, the place of their input gradient in the word to fit.
        gone: the ways of those that are elsewhere.
        waiting: weight gradients that may run.
    """

    def __init__(self, p: Problem, cap: int, ways: list[Op]) -> None:
        self.p, self.cap, self.ways = p, cap, ways
        self.word, self.waiting, self.held, self.now, self.link = Word(), Word(), 0, 0.0, 0.0
        self.here, self.gone = dict[tuple[int, int], int](), dict[tuple[int, int], Op]()
        self._times = {FORWARD: p.forward, INPUT: p.backward, WEIGHT: p.weight}

    def run(self, item: int, change: int) -> None:
        """Run an item of the word, which changes the memory held."""
        stage, letter = divmod(item // self.p.microbatches, 5)
        self.word.append(item)
        self.held += change
        self.now += self._times[letter][stage]

    def make_room(self, need: int) -> bool:
        """Free memory until there is room for so much; return False if nothing more can go."""
        p = self.p
        while self.held + need > self.cap:
            ready = [
                (at, key) for key, at in self.here.items() if any(allowed(p, key[0], w) for w in self.ways)
            ]
            if self.waiting and (kept := p.kept[self.waiting[0] // p.microbatches // 5]):
                self.run(self.waiting.pop(0), -kept)
            elif ready:
                self._leave(*max(ready)[1])
            else:
                return False
        return True

    def _leave(self, s: int, k: int) -> None:
        free = [way for way in self.ways if allowed(self.p, s, way)]
        moves = Op.OFFLOAD in free and (len(free) == 1 or self.link + (self.p.out[s] or 0) <= self.now)
        self.gone[s, k] = way = Op.OFFLOAD if moves else Op.RECOMPUTE
        del self.here[s, k]
        self.held -= self._saved(s, way)
        if moves:
            self.link += self.p.out[s] or 0
            self.word.append((5 * s + LEAVE) * self.p.microbatches + k)

    def bring_back(self, s: int, k: int) -> bool:
        """Bring residuals back that are used now; return False if there is no room."""
        self.here.pop((s, k), None)
        if way := self.gone.get((s, k)):
            if not self.make_room(self._saved(s, way)):
                return False
            self.held += self._saved(s, way)
            self.word.append((5 * s + RETURN) * self.p.microbatches + k)
        return True

    def _saved(self, s: int, way: Op) -> int:
        return self.p.held[s] - (0 if way is Op.OFFLOAD else self.p.stub[s])
