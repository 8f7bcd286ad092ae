"""Partition layers with the least maximum load.

For several chunks on each rank, cut into ``ranks * chunks`` stages; `Partition.dealt` lists the intervals of
each rank.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ppfunc._checks import require_counts

from .partition import Partition, partition_uniform


def partition_balanced(weights: Sequence[float], stages: int, *, allow_empty: bool = False) -> Partition:
    """Cut layers into stages with the least maximum load, exactly, for any weights that are not negative.

    Of the partitions with that maximum, it takes one whose stages are near the average of the layers
    left for them; of two cuts that are equally near, the later.

    Args:
        weights: one per layer, in any unit.
        stages: number of stages.
        allow_empty: whether there may be fewer layers than stages; the last are then empty.

    Raises:
        ValueError: for fewer layers than stages, or weights that are negative or not finite.

    >>> partition_balanced([1, 2, 3], 2).boundaries
    (0, 2, 3)
    """
    require_counts(stages=stages)
    if len(weights) <= stages:
        exact_weights(weights)
        return partition_uniform(len(weights), stages, allow_empty=allow_empty)
    prefix = list(accumulate(exact_weights(weights), initial=0))
    return Partition(tuple(_even_cuts(prefix, stages, least_maximum(prefix, stages))))


def exact_weights(weights: Sequence[float]) -> list[int]:
    """Scale weights to whole numbers in one common unit, so that sums of them are exact.

    >>> exact_weights([0.5, 2, 0.25])
    [2, 8, 1]
    """
    for layer, weight in enumerate(weights):
        if not isinstance(weight, (int, float, Fraction)) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of layer {layer} is a finite number, zero or more; got {weight!r}")
    whole = [weight for weight in weights if isinstance(weight, int)]
    if len(whole) == len(weights):
        return whole
    fractions = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (unit // fraction.denominator) for fraction in fractions]


def least_maximum(prefix: Sequence[int], stages: int) -> int:
    """Find the least load of the heaviest stage, over all cuts of the layers into at most ``stages`` stages.

    Bisection between bounds that are loads of real stages, so it ends at the exact answer.

    Args:
        prefix: sums of the weights of the first 0, 1, ... layers.
        stages: number of stages.
    """
    lower = max(-(-prefix[-1] // stages), *(b - a for a, b in pairwise(prefix)))
    upper = prefix[-1]
    while lower < upper:
        limit = (lower + upper) // 2
        fits, bound = _pack(prefix, stages, limit)
        lower, upper = (lower, bound) if fits else (bound, upper)
    return upper


def _pack(prefix: Sequence[int], stages: int, limit: int) -> tuple[bool, int]:
    """Fill stages up to ``limit``, one by one; return whether they take all layers, and a bound.

    The bound is the heaviest load where they do, else the least limit that could change a stage.
    """
    last, start = len(prefix) - 1, 0
    heaviest, refused = 0, prefix[-1]
    for _ in range(stages):
        end = bisect_right(prefix, prefix[start] + limit, start) - 1
        heaviest = max(heaviest, prefix[end] - prefix[start])
        if end == last:
            return True, heaviest
        refused = min(refused, prefix[end + 1] - prefix[start])
        start = end
    return False, refused


def _even_cuts(prefix: Sequence[int], stages: int, limit: int) -> list[int]:
    """Choose boundaries with loads up to ``limit``, each near the average of the layers left.

    No stage is empty.
    """
    last = len(prefix) - 1
    earliest = [last]
    for _ in range(stages):
        earliest.append(bisect_left(prefix, prefix[earliest[-1]] - limit, 0, earliest[-1]))
    earliest.reverse()
    boundaries = [0]
    for stage in range(1, stages):
        start, left = boundaries[-1], stages - stage + 1
        first = max(earliest[stage], start + 1)
        final = min(bisect_right(prefix, prefix[start] + limit, start) - 1, last - left + 1)
        # The cut whose stage is nearest to one share of what is left.
        rest = prefix[-1] - prefix[start]
        below = bisect_right(prefix, prefix[start] + rest // left) - 1
        above = bisect_right(prefix, prefix[min(below + 1, len(prefix) - 1)]) - 1
        below, above = (min(max(cut, first), final) for cut in (below, above))
        boundaries.append(min(above, below, key=lambda cut: abs((prefix[cut] - prefix[start]) * left - rest)))
    return [*boundaries, last]
