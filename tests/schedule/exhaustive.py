"""Try every schedule of a tiny instance: every way of all residuals, and every order of every rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ppfunc.schedule import Costs, Op
from ppfunc.schedule.planner.problem import Problem, problem_of
from ppfunc.schedule.planner.replay import directions, evaluate, fits

FIELDS = ("forward", "backward_input", "backward_weight", "communication", "activation", "weight_share")
FIELDS += ("recompute", "checkpoint", "offload", "fetch")


def problem(row: dict) -> Problem:
    costs = Costs(**{name: row[name] for name in FIELDS})
    return problem_of(costs, row["placement"], row["microbatches"], row["cap"], row["objective"])


def least(p: Problem) -> float:
    """Return the value of the best schedule. One stage per rank."""
    best = float("inf")
    keys = [(s, k) for s in range(len(p.place)) for k in range(p.microbatches)]
    ways = [
        [
            None,
            *([Op.RECOMPUTE] if p.again[s] is not None else []),
            *([Op.OFFLOAD] if p.out[s] is not None else []),
        ]
        for s, _ in keys
    ]
    for chosen in product(*ways):
        choices = {key: way for key, way in zip(keys, chosen, strict=True) if way}
        forwards, _ = directions(p, choices)
        rows = []
        for rank in range(p.ranks):
            columns = [
                [(5 * rank + x) * p.microbatches + k for x in letters(choices.get((rank, k)))]
                for k in range(p.microbatches)
            ]
            kept = (
                [[] if r != rank else word for r in range(p.ranks)] for word in words(columns, p.microbatches)
            )
            rows.append([order[rank] for order in kept if fits(forwards, tuple(order))])
        for order in product(*rows):
            timing = evaluate(forwards, order)
            if timing and timing.value < best:
                best = timing.value
    return p.time_of(best)


def letters(way: Op | None) -> tuple[int, ...]:
    return (0, 1, 2, 3, 4) if way is Op.OFFLOAD else (0, 2, 3, 4) if way else (0, 3, 4)


def words(columns: list[list[int]], m: int) -> Iterator[list[int]]:
    """Merge the items of each microbatch in all ways in which microbatches take their turn in every code."""
    if not any(columns):
        yield []
        return
    for k, column in enumerate(columns):
        if column and not any(i // m == column[0] // m for other in columns[:k] for i in other):
            rest = [c[1:] if n == k else c for n, c in enumerate(columns)]
            for word in words(rest, m):
                yield [column[0], *word]
