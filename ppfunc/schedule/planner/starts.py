"""Collect the orders that a search starts from: builders of the same placement, a microbatch that repeats."""

import inspect
from collections.abc import Iterator

from ..builders import BUILDERS
from ..costs import Costs, Number
from ..schedule import Schedule
from .orders import INPUT, WEIGHT, Direction, Order, Word, fits, order_of
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
