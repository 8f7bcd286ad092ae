"""Greedy ZB-V: a pattern on a V, run with real costs by ranks that take the first operation that is ready."""

from itertools import product

from ppfunc.parallel.placement import v_shape

from ..costs import Costs, Number, require_costs
from ..planner.orders import directions, fits, order_of, schedule_of
from ..planner.problem import problem_of
from ..planner.replay import Manner, replay
from ..schedule import Schedule
from ._parts import require_counts
from .v_shape import v_half, v_min, zbv

_PATIENCE = (0, 0.6)


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
    require_counts(ranks=ranks, microbatches=microbatches)
    place = v_shape(ranks)
    costs = (Costs(weight_share=1) if costs is None else require_costs(costs)).fitting(len(place))
    full = [
        sum(ranks * costs.of("activation", s) + costs.of("parameters", s) for s in (r, len(place) - 1 - r))
        for r in range(ranks)
    ]
    p = problem_of(costs, place, microbatches, full if cap is None else cap, "span")
    forwards, _ = directions(p)
    orders = (order_of(build(ranks, microbatches)) for build in (zbv, v_half, v_min))
    order = next((order for order in orders if fits(forwards, order)), None)
    if order is None:
        raise ValueError(
            f"cap = {cap!r}, expected the memory of v_min at least: raise it, or use plan, which keeps"
            " any cap"
        )
    runs = (replay(forwards, order, Manner(*rules)) for rules in product(_PATIENCE, (False, True)))
    return schedule_of(p, min(runs, key=lambda run: run.value).order, "zbv_greedy")
