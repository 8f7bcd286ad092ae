"""V-Half: half the activations of 1F1B, and less than half its bubble at equal costs."""

from __future__ import annotations

from ..schedule import Schedule
from ._parts import require_counts
from ._stable_pattern import from_pattern


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs stages r and 2p - 1 - r in a pattern that keeps activations short-lived.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``3p - 7`` for p even,
    ``3p - 4`` for p odd (1 for two ranks, 0 for one), below half of 1F1B's ``6(p - 1)``; at most
    ``2((p + 2) // 2)`` chunk activations wait for their W, half as many as full ones.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(v_half(ranks=3, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1  .  0I0 0W0  .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
    rank 1   .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 4I1 1I0 1W0 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
    rank 2   .   .  2F0 3F0 2F1 3F1  .   .  3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    p, shift = ranks, 0 if ranks % 2 else 3
    return from_pattern("v_half", ranks, microbatches, lambda r: (2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2))
