"""Bound from below the time of any schedule of one stage per rank."""

from __future__ import annotations

from .costs import Costs, Number


def lower_bound(costs: Costs, ranks: int, microbatches: int, cap: int) -> Number:
    """Return a lower bound of the span, and so of the makespan, of every schedule, whatever its order.

    It is the largest, over all ranks r, of four bounds. With n = min(m, cap), F, I and W the times
    on rank r, and RT the time from the end of an F on rank r until its I can start at best:

    * its work m (F + I + W), idle for RT - (n - 1) F until the first I, and, where not all forwards
      come before it, for RT - (cap - 1)(I + W) after the last F;
    * the way from rank q < r to r, m (F + I) there, the way back, and one W on q;
    * the cycle of memory: the (k + cap)-th forward starts after F + RT + I + W of an earlier one,
      so ceil(m / cap) of these follow each other.

    Args:
        costs: ``forward``, ``backward_input``, ``backward_weight`` and the messages are used; one stage per rank.
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        cap: largest number of forwards of a rank whose W is not done.

    Raises:
        ValueError: a count below 1, or costs for another number of stages.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 3.

    >>> lower_bound(Costs(1, 1, 1), ranks=4, microbatches=8, cap=4)
    27
    """
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("cap", cap)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    costs = costs.fitting(ranks)
    f, i, w = ([costs.of(n, r) for r in range(ranks)] for n in ("forward", "backward_input", "backward_weight"))
    # Once around from rank r to r + 1 and back: both messages, and the work of rank r + 1.
    turn = [costs.message_of(r) + costs.message_of(r + 1) for r in range(ranks - 1)]
    best: Number = 0
    for r in range(ranks):
        around = sum(f[s] + i[s] + turn[s - 1] for s in range(r + 1, ranks))
        head = max(0, around - (min(microbatches, cap) - 1) * f[r])
        tail = max(0, around - (cap - 1) * (i[r] + w[r])) if microbatches > cap else 0
        cycle = -(-microbatches // cap) * (f[r] + around + i[r] + w[r])
        best = max(best, microbatches * (f[r] + i[r] + w[r]) + head + tail, cycle)
        for q in range(r):
            forward_path = sum(f[s] + i[s] + turn[s] for s in range(q, r))
            best = max(best, forward_path + microbatches * (f[r] + i[r]) + w[q])
    return best
