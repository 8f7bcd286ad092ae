"""ZB-H1: 1F1B whose weight gradients fill the bubble, in the memory of 1F1B."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._delayed_weights import delayed_weights
from ._parts import F, require_counts


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Forwards and input gradients as in 1F1B; rank r starts weight gradients after r + 1 of them.

    Bubble time ``(p - 1)(F + I - W)`` where ``m >= p`` and W <= I; on every rank at most p
    activations wait for their W.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(zb_h1(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    walk = [[(r, m) for m in range(microbatches)] for r in range(ranks)]
    programs = (delayed_weights([F(*x) for x in walk[r]], walk[r], warm_up=ranks - 1 - r, delay=r) for r in range(ranks))
    return single_chain("zb_h1", range(ranks), microbatches, programs)
