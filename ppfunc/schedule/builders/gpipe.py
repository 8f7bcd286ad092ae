"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._parts import B, F, require_counts


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the microbatches.

    Bubble time ``(p - 1)(F + B)``; ``m`` live activations on every rank.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(gpipe(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
    rank 1   .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
    rank 2   .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = ([op(r, m) for op in (F, B) for m in range(microbatches)] for r in range(ranks))
    return single_chain("gpipe", range(ranks), microbatches, programs)
