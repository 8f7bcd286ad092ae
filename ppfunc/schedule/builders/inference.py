"""Inference: forwards only."""

from __future__ import annotations

from ..schedule import Schedule, single_chain
from ._parts import F, require_counts


def inference(ranks: int, microbatches: int) -> Schedule:
    """The forwards of all microbatches in order, and no backward.

    Bubble time ``(p - 1)F``; nothing is kept for a backward.

    >>> for program in inference(ranks=2, microbatches=3).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 0F1 0F2
    1F0 1F1 1F2

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
