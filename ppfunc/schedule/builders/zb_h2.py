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

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(zb_h2(ranks=3, microbatches=6)), end="")
    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5  .   .
    rank 1   .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5  .
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    walk = [[(r, m) for m in range(microbatches)] for r in range(ranks)]
    programs = (delayed_weights([F(*x) for x in walk[r]], walk[r], warm_up=2 * (ranks - 1 - r), delay=2 * r) for r in range(ranks))
    return single_chain("zb_h2", range(ranks), microbatches, programs)
