"""V-Min: a third of the activations of 1F1B, and two thirds of its bubble at equal costs."""

from __future__ import annotations

from ..schedule import Schedule
from ._parts import require_counts
from ._stable_pattern import from_pattern


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs stages r and 2p - 1 - r, each microbatch through the V without a stop.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``4p - 7``, ``4p - 5`` or
    ``4p - 6`` for p of remainder 0, 1 or 2 by 3 (0 for one rank), two thirds of 1F1B's
    ``6(p - 1)``; at most ``2((p + 4) // 3)`` chunk activations wait for their W. Unequal costs
    cost more here than in any other schedule.

    >>> for program in v_min(ranks=2, microbatches=3).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    p, shift = ranks, 0 if ranks % 3 else 2
    return from_pattern("v_min", ranks, microbatches, lambda r: (r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1))
