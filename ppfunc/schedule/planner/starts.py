"""Collect the orders that a search starts from: builders of the same placement, one microbatch after another, blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from ..builders import BUILDERS
from ..costs import Costs
from ..schedule import Schedule
from .orders import Direction, Order, fits, order_of
from .problem import Problem


def builder_orders(p: Problem, forwards: Direction, costs: Costs, cap: object) -> Iterator[tuple[str, Order]]:
    """Yield ``(name, order)`` of every builder whose schedule has the placement of the problem and fits its caps."""
    for name, build in BUILDERS.items():
        schedule = _built(name, build, p, costs, cap)
        if schedule and schedule.placement == p.place and len(schedule.chains) == 1 and not schedule.forward_only:
            order = order_of(schedule)
            if fits(forwards, order):
                yield name, order


def _built(name: str, build: object, p: Problem, costs: Costs, cap: object) -> Schedule | None:
    """The schedule of a builder; None where it refuses these numbers."""
    taken = inspect.signature(build).parameters  # type: ignore[arg-type]
    offered = {"chunks": len(p.place) // p.ranks, "cap": cap, "costs": costs}
    if "chunks" in taken and p.ranks * offered["chunks"] != len(p.place):  # type: ignore[operator]
        return None
    try:
        return build(p.ranks, p.microbatches, **{k: v for k, v in offered.items() if k in taken})  # type: ignore[operator]
    except ValueError:
        return None


def one_by_one(p: Problem) -> Order:
    """The order that needs the least memory: all of one microbatch, then all of the next."""
    words: Order = tuple([] for _ in range(p.ranks))
    chain = [3 * s for s in range(len(p.place))] + [3 * s + k for s in reversed(range(len(p.place))) for k in (1, 2)]
    for _ in range(p.microbatches):
        for code in chain:
            words[p.place[code // 3]].append(code)
    return words
