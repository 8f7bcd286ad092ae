"""Collect the orders that a search starts from: builders of the same placement, one microbatch after another,
blocks.
"""

import inspect
from collections.abc import Iterator

from ..builders import BUILDERS
from ..costs import Costs
from ..schedule import Schedule
from .orders import Direction, Order, fits, order_of
from .problem import Cap, Problem


def builder_orders(p: Problem, forwards: Direction, costs: Costs, cap: Cap) -> Iterator[tuple[str, Order]]:
    """Yield ``(name, order)`` of every builder with this placement whose schedule fits the caps."""
    if len(p.place) % p.ranks:
        return
    options = {"chunks": len(p.place) // p.ranks, "costs": costs, "cap": cap}
    for name in BUILDERS:
        sample = build(
            name, p.ranks, 1, **options
        )  # the placement does not depend on the number of microbatches
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


def one_by_one(p: Problem) -> Order:
    """Order all of one microbatch before the next, which needs the least memory."""
    words: Order = tuple([] for _ in range(p.ranks))
    chain = [3 * s for s in range(len(p.place))] + [
        3 * s + k for s in reversed(range(len(p.place))) for k in (1, 2)
    ]
    for _ in range(p.microbatches):
        for code in chain:
            words[p.place[code // 3]].append(code)
    return words
