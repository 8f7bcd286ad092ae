"""Partition layers with the least maximum load, into stages or into chunks dealt round the ranks.

The partitions into chunks have ``ranks * chunks`` stages, placed by `loop`; `Partition.dealt` lists the
intervals of each rank.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from .counts import require_counts
from .partition import Interval, Partition, partition_uniform


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


def chunks_uniform(layers: int, ranks: int, chunks: int = 1, *, allow_empty: bool = False) -> Partition:
    """Cut layers into equal chunks, and each chunk evenly over the ranks, the remainder to the last ranks.

    Args:
        layers: number of layers, a multiple of ``chunks``.
        ranks: number of ranks.
        chunks: stages per rank.
        allow_empty: whether a chunk may have fewer layers than there are ranks.

    Raises:
        ValueError: ``chunks`` does not divide the layers, or a stage would be empty without ``allow_empty``.

    References:
        ColossalAI, ``partition_uniform``.

    >>> chunks_uniform(10, ranks=2, chunks=2).dealt(2)
    (((0, 2), (5, 7)), ((2, 5), (7, 10)))
    """
    require_counts(ranks=ranks, chunks=chunks)
    require_counts(0, layers=layers)
    if layers % chunks:
        raise ValueError(
            f"{layers} layers do not divide into {chunks} equal chunks: use a number of chunks that divides"
            f" {layers}, or chunks_balanced"
        )
    one = partition_uniform(layers // chunks, ranks, remainder="last", allow_empty=True)
    return Partition.from_sizes(one.sizes * chunks, allow_empty)


def chunks_balanced(
    weights: Sequence[float], ranks: int, chunks: int = 1, *, allow_empty: bool = False
) -> Partition:
    """Cut layers into chunks of least maximum weight, a weight of zero counted as one.

    Stages are filled in order up to that maximum. If this makes too few stages, the heaviest is split at
    its most even point until there are enough. At most as many layers as stages are dealt by
    `chunks_uniform`.

    Args:
        weights: one per layer, not negative.
        ranks: number of ranks.
        chunks: stages per rank.
        allow_empty: whether there may be fewer layers than stages.

    References:
        ColossalAI, ``partition_balanced``.

    >>> chunks_balanced([1, 1, 4, 1, 1], ranks=2).dealt(2)
    (((0, 3),), ((3, 5),))
    """
    require_counts(ranks=ranks, chunks=chunks)
    stages = ranks * chunks
    exact = exact_weights(weights)
    if len(weights) <= stages:
        return chunks_uniform(len(weights), ranks, chunks, allow_empty=allow_empty)
    # A layer without parameters is still work: it counts as one, in the unit of the others.
    unit = exact_weights([*weights, 1])[-1]
    prefix = list(accumulate((weight or unit for weight in exact), initial=0))
    intervals = _split_heaviest(prefix, _filled(prefix, least_maximum(prefix, stages)), stages)
    return Partition((0, *(end for _, end in intervals)))


def count_layer_parameters(layers: Sequence[Any]) -> tuple[int, ...]:
    """Count the parameter elements of each layer: weights for a partition.

    Args:
        layers: each a module (what ``parameters()`` yields that requires a gradient), a tree of
            tensors in dictionaries, lists and tuples (all of them), or the number itself. A tensor
            that occurs twice in one layer is counted once.

    >>> count_layer_parameters([12, {}])
    (12, 0)
    """
    return tuple(layer if isinstance(layer, int) else _count(layer) for layer in layers)


def _count(layer: Any) -> int:
    tensors = (
        (p for p in layer.parameters() if p.requires_grad)
        if hasattr(layer, "parameters")
        else _tensors(layer)
    )
    return sum(tensor.numel() for tensor in {id(t): t for t in tensors}.values())


def _tensors(tree: Any) -> list[Any]:
    """List the tensors in a tree: its objects that have ``numel``."""
    if hasattr(tree, "numel"):
        return [tree]
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in _tensors(child)]


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
        boundaries.append(_nearest(prefix, start, left, first, final))
    return [*boundaries, last]


def _nearest(prefix: Sequence[int], start: int, left: int, first: int, final: int) -> int:
    """Find the cut in ``first..final`` whose stage from ``start`` is nearest to one share of ``left``."""
    rest = prefix[-1] - prefix[start]
    below = bisect_right(prefix, prefix[start] + rest // left) - 1
    above = bisect_right(prefix, prefix[min(below + 1, len(prefix) - 1)]) - 1
    below, above = (min(max(cut, first), final) for cut in (below, above))
    return min(above, below, key=lambda cut: abs((prefix[cut] - prefix[start]) * left - rest))


def _filled(prefix: Sequence[int], limit: int) -> list[Interval]:
    """Fill intervals one by one up to ``limit``."""
    intervals, start = [], 0
    while start < len(prefix) - 1:
        end = bisect_right(prefix, prefix[start] + limit, start) - 1
        intervals.append((start, end))
        start = end
    return intervals


def _split_heaviest(prefix: Sequence[int], intervals: list[Interval], stages: int) -> list[Interval]:
    """Split the heaviest interval that has several layers, until there are ``stages``."""
    single = [interval for interval in intervals if interval[1] - interval[0] == 1]
    heap = [(prefix[a] - prefix[b], a, b) for a, b in intervals if b - a > 1]
    heapq.heapify(heap)
    while len(single) + len(heap) < stages:
        _, start, end = heapq.heappop(heap)
        both = prefix[start] + prefix[end]
        middle = min(range(start + 1, end), key=lambda cut: abs(both - 2 * prefix[cut]))
        for a, b in ((start, middle), (middle, end)):
            if b - a == 1:
                single.append((a, b))
            else:
                heapq.heappush(heap, (prefix[a] - prefix[b], a, b))
    return sorted(single + [(a, b) for _, a, b in heap])
