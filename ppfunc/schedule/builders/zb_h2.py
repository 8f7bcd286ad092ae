"""ZB-H2: no bubble, for twice the activations of 1F1B."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._delayed_weights import delayed_weights
from ._parts import F, require_counts


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the warm-up of 1F1B, and weight gradients twice as late as in ZB-H1: a parallelogram.

    Bubble time ``(p - 1)(F + I - 2W)`` of the span, none where F = I = W; at most ``2p - 1``
    activations wait for their W. The ranks end one after another: the optimizer step must not
    be a barrier, or the last rank's start is waited for.

    >>> for program in zb_h2(ranks=2, microbatches=3).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = (
        delayed_weights([F(r, m) for m in range(microbatches)], [(r, m) for m in range(microbatches)], warm_up=2 * (ranks - 1 - r), delay=2 * r)
        for r in range(ranks)
    )
    return single_chain("zb_h2", range(ranks), microbatches, programs)
