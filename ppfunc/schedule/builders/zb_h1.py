"""ZB-H1: 1F1B whose weight gradients fill the bubble, in the memory of 1F1B."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._delayed_weights import delayed_weights
from ._parts import F, require_counts


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Forwards and input gradients as in 1F1B; rank r starts weight gradients after r + 1 of them.

    Bubble time ``(p - 1)(F + I - W)`` where ``m >= p`` and W <= I; on every rank at most p
    activations wait for their W.

    >>> for program in zb_h1(ranks=2, microbatches=3).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = (
        delayed_weights([F(r, m) for m in range(microbatches)], [(r, m) for m in range(microbatches)], warm_up=ranks - 1 - r, delay=r)
        for r in range(ranks)
    )
    return single_chain("zb_h1", range(ranks), microbatches, programs)
