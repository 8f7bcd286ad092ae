"""Cut layers into several chunks per rank, which are dealt round the ranks like cards.

The partitions have ``ranks * chunks`` stages, placed by `loop`; `Partition.dealt` lists the intervals of each rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .balance import exact_weights, least_maximum
from .counts import require_counts
from .partition import Interval, Partition, partition_uniform


def chunks_uniform(layers: int, ranks: int, chunks: int = 1, *, allow_empty: bool = False) -> Partition:
    """Cut layers into equal chunks, and each chunk evenly over the ranks, the remainder to the last ranks.

    Args:
        layers: number of layers, a multiple of ``chunks``.
        ranks: number of ranks.
        chunks: stages per rank.
        allow_empty: whether a chunk may have fewer layers than there are ranks.

    References:
        ColossalAI, ``partition_uniform``.

    >>> chunks_uniform(10, ranks=2, chunks=2).dealt(2)
    (((0, 2), (5, 7)), ((2, 5), (7, 10)))
    """
    require_counts(ranks=ranks, chunks=chunks)
    require_counts(0, layers=layers)
    if layers % chunks:
        raise ValueError(
            f"{layers} layers do not divide into {chunks} equal chunks: use a number of chunks that divides {layers}, or chunks_balanced"
        )
    one = partition_uniform(layers // chunks, ranks, remainder="last", allow_empty=True)
    return Partition.from_sizes(one.sizes * chunks, allow_empty)


def chunks_balanced(weights: Sequence[float], ranks: int, chunks: int = 1, *, allow_empty: bool = False) -> Partition:
    """Cut layers into chunks of least maximum weight, a weight of zero counted as one.

    Stages are filled in order up to that maximum. Where this takes fewer stages than there are,
    the heaviest is split at its most even point until there are enough. No more layers than
    stages are dealt by `chunks_uniform`.

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
