"""Inference: forwards only."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._parts import F, require_counts


def inference(ranks: int, microbatches: int) -> Schedule:
    """The forwards of all microbatches in order, and no backward.

    Bubble time ``(p - 1)F``; nothing is kept for a backward.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(inference(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .
    rank 1   .  1F0 1F1 1F2 1F3  .
    rank 2   .   .  2F0 2F1 2F2 2F3

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = ([F(r, m) for m in range(microbatches)] for r in range(ranks))
    return single_chain("inference", range(ranks), microbatches, programs)
