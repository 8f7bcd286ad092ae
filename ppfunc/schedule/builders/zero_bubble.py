"""Build schedules for any costs and any cap of memory, by replaying orders on ranks."""

from collections.abc import Iterator
from itertools import chain, product

from ppfunc._checks import naming_arguments
from ppfunc.parallel.topology import Placement, loop, stages_of, v_shape

from ..costs import Costs, Number, require_costs
from ..planner.problem import Problem, problem_of
from ..planner.replay import (
    FORWARD,
    INPUT,
    Manner,
    Order,
    Replayed,
    Word,
    directions,
    fits,
    justify,
    order_of,
    replay,
    schedule_of,
)
from ..schedule import Schedule
from .patterns import v_half, v_min, zbv


@naming_arguments
def zero_bubble(
    ranks: int, microbatches: int, cap: Number | None = None, costs: Costs | None = None
) -> Schedule:
    """Run forwards and input gradients as they arrive, weight gradients in gaps or when memory is full.

    Orders of three warm-ups are replayed, with more or less patience and with weight gradients last or not,
    and again backwards and forwards in time; the run with the shortest span is kept. At equal costs of all
    stages and with ``cap >= p`` the span is at most a few percent above the lower bounds of
    the problem, and equal to them where F = I = W: ``(p - 1)(F + I - W)`` of bubble with the cap
    p of 1F1B, none with ``2p - 1``. Activations, as far as they wait for their W, take at most ``cap``.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zero_bubble(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3  .
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.
        cap: memory of a rank, in the unit of the costs; by default that of p activations, as in 1F1B.
        costs: times of F, I, W and of messages per stage, activations and the share of them held on to W; by
            default all 1, and 0 for messages.

    Raises:
        ValueError: an argument is below 1, a cap below one activation, or costs for another number of stages.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 3.1; Li and Willis
        1992 for the replays.
    """
    p = _problem(loop(ranks), ranks, microbatches, cap, costs)
    rules = directions(p)
    runs: list[Replayed] = []
    for order, patience, lazy in product(_alternated(p), (0, 0.3, 0.6, 1), (True, False)):
        runs.append(replay(rules[0], order, Manner(patience, lazy)))
        runs.append(justify(rules, runs[-1].order, Manner(patience), Manner(patience, lazy)))
    return schedule_of(p, min(runs, key=lambda run: run.value).order, "zero_bubble")


@naming_arguments
def zbv_greedy(
    ranks: int, microbatches: int, cap: Number | None = None, costs: Costs | None = None
) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r, first ready operation first, in the order of a pattern.

    The pattern is the first of ``zbv``, ``v_half`` and ``v_min`` that keeps the cap. An operation may
    overtake where the rest of the order still keeps it. Of four runs, which differ in whether ranks wait for
    what is about to arrive and in whether weight gradients come last, the one with the shortest span is kept.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zbv_greedy(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.
        cap: memory of a rank, in the unit of the costs; by default that of p activations of each of its
            stages, as in 1F1B.
        costs: times of F, I, W and of messages per stage, activations and the share of them held on to W; by
            default all 1, and 0 for messages.

    Raises:
        ValueError: an argument is below 1, a cap that none of the patterns keeps, or costs for another number
            of stages.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 6.
    """
    p = _problem(v_shape(ranks), ranks, microbatches, cap, costs)
    forwards, _ = directions(p)
    orders = (order_of(build(ranks, microbatches)) for build in (zbv, v_half, v_min))
    order = next((order for order in orders if fits(forwards, order)), None)
    if order is None:
        raise ValueError(
            f"cap = {cap!r}, expected the memory of v_min at least: raise it, or use plan, which keeps"
            " any cap"
        )
    runs = (replay(forwards, order, Manner(*rules)) for rules in product((0, 0.6), (False, True)))
    return schedule_of(p, min(runs, key=lambda run: run.value).order, "zbv_greedy")


def _problem(
    place: Placement, ranks: int, microbatches: int, cap: Number | None, costs: Costs | None
) -> Problem:
    """Make the problem of a builder. By default a rank has room for p activations of each of its stages."""
    costs = require_costs(Costs(weight_share=1) if costs is None else costs).fitting(len(place))
    room = [
        sum(ranks * costs.of("activation", s) + costs.of("parameters", s) for s in stages_of(place, rank))
        for rank in range(ranks)
    ]
    return problem_of(costs, place, microbatches, room if cap is None else cap, "span")


def _alternated(p: Problem) -> Iterator[Order]:
    """Alternate F with I and W after warm-ups as in 1F1B, by the round trip of a message, and by memory."""
    m, ranks = p.microbatches, p.ranks
    room = [min(m, cap // held) if held else m for cap, held in zip(p.cap, p.held, strict=True)]
    as_1f1b = [min(n, ranks - r) for r, n in enumerate(room)]
    round_trip = [max(1, min(n - r, 2 * (ranks - r) - 1)) for r, n in enumerate(room)]
    for warm_ups in (as_1f1b, round_trip, room):
        yield tuple(_one_after_another(5 * r * m, m, n) for r, n in enumerate(warm_ups))


def _one_after_another(first: int, m: int, n: int) -> Word:
    """Put I and W of each microbatch behind the ``n`` forwards after it; ``first`` is the first item."""
    forwards, rest = (range(first + letter * m, first + (letter + 1) * m) for letter in (FORWARD, INPUT))
    behind = ((i, i + m, *forwards[n + k : n + k + 1]) for k, i in enumerate(rest))
    return [*forwards[:n], *chain.from_iterable(behind)]
