"""Minimise the range of the loads: the heaviest load minus the lightest."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from .balance import exact_weights, least_maximum, partition_balanced
from .partition import Partition


def partition_min_range(weights: Sequence[float], stages: int, *, allow_empty: bool = False) -> Partition:
    """Cut layers into stages with the least range of loads, heaviest minus lightest, exactly.

    Where several have it, later cuts are preferred, the last cut first.

    Args:
        weights: one per layer, in any unit.
        stages: number of stages.
        allow_empty: whether there may be fewer layers than stages; the last are then empty.

    Raises:
        ValueError: for fewer layers than stages, or weights that are negative or not finite.

    References:
        The objective of DeepSpeed's ``partition_balanced``. Its dynamic programme keeps one
        partition per prefix of the layers, which is not always part of a best one.

    >>> partition_min_range([1, 1, 1, 1, 1], 4).boundaries
    (0, 2, 3, 4, 5)
    """
    balanced = partition_balanced(weights, stages, allow_empty=allow_empty)
    if len(weights) <= stages:
        return balanced
    prefix = list(accumulate(exact_weights(weights), initial=0))
    width, (low, high) = _least_range(prefix, stages, balanced)
    return Partition(tuple(_best_of_prefixes(prefix, stages, width) or _within(prefix, stages, low, high)))


def _least_range(prefix: Sequence[int], stages: int, start: Partition) -> tuple[int, tuple[int, int]]:
    """Find the least width, heaviest minus lightest load, and bounds of the loads that reach it.

    For every upper bound, the largest lower bound with which the loads can lie between the two. Upper
    bounds are ruled out many at once: where not even the largest goes with the lower bound with which
    the smallest would be better than the best so far.
    """
    loads = [prefix[b] - prefix[a] for a, b in start.intervals]
    best, bounds = max(loads) - min(loads), (min(loads), max(loads))
    share, least = prefix[-1] // stages, least_maximum(prefix, stages)
    lows = _run_sums(prefix, max(0, least - best), share)
    highs = _run_sums(prefix, least, share + best)
    waiting = [range(len(highs))]
    while waiting:
        tried = waiting.pop()
        first = bisect_right(lows, highs[tried[0]] - best) if tried else len(lows)
        if first == len(lows) or _counts(prefix, stages, lows[first], highs[tried[-1]]) is None:
            continue
        if len(tried) > 1:
            middle = len(tried) // 2
            waiting += (tried[middle:], tried[:middle])
            continue
        high, following = highs[tried[0]], range(first + 1, len(lows))
        # A lower bound that is too large stays so, and sorts after those that fit.
        more = bisect_left(following, True, key=lambda i: _counts(prefix, stages, lows[i], high) is None)
        best, bounds = high - lows[first + more], (lows[first + more], high)
    return best, bounds


def _run_sums(prefix: Sequence[int], low: int, high: int) -> list[int]:
    """List the different sums of runs of layers in ``low..high``, ascending."""
    sums: set[int] = set()
    for end, total in enumerate(prefix[1:], start=1):
        first = bisect_left(prefix, total - high, 0, end)
        final = bisect_right(prefix, total - low, first, end)
        sums.update(total - before for before in prefix[first:final])
    return sorted(sums)


def _counts(prefix: Sequence[int], stages: int, low: int, high: int) -> list[range] | None:
    """Find the numbers of stages with loads in ``low..high`` that each prefix can be cut into.

    They are a range: every number between the fewest and the most is possible too, and neither falls from
    one prefix that can be cut to a longer one. (Of two cuts, where a stage of one lies inside a stage
    of the other, one can go over from the first to the second: the joined stage is between them.)

    Returns:
        One range per prefix, empty where it cannot be cut; None where all layers cannot be cut into
        ``stages``.
    """
    counts = [range(1)]
    starts: deque[int] = deque()  # where the last stage can start: ends of prefixes that can be cut
    entering = 0
    for end in range(1, len(prefix)):
        while entering < end and prefix[end] - prefix[entering] >= low:
            if counts[entering]:
                starts.append(entering)
            entering += 1
        while starts and prefix[end] - prefix[starts[0]] > high:
            starts.popleft()
        counts.append(range(counts[starts[0]].start + 1, counts[starts[-1]].stop + 1) if starts else range(0))
    return counts if stages in counts[-1] else None


def _within(prefix: Sequence[int], stages: int, low: int, high: int) -> list[int]:
    """Find the boundaries with all loads in ``low..high`` whose cuts are latest, the last cut first."""
    counts = _counts(prefix, stages, low, high)
    assert counts is not None, "the bounds are those of a partition"
    boundaries = [len(prefix) - 1]
    for left in reversed(range(stages)):
        end = boundaries[-1]
        boundaries.append(
            next(
                cut
                for cut in reversed(range(end))
                if left in counts[cut] and low <= prefix[end] - prefix[cut] <= high
            )
        )
    return boundaries[::-1]


def _best_of_prefixes(prefix: Sequence[int], stages: int, width: int) -> list[int] | None:
    """Build boundaries from the best partition of every prefix, ties to the later cut.

    Return None if their range is above ``width``.

    The heaviest load is at least the least maximum, so the others are within ``width`` of that, and
    none is further above the average.
    """
    total = prefix[-1]
    low = max(0, least_maximum(prefix, stages) - width)
    high = total // stages + width
    reached = {0: (0, 0, total)}  # end of a prefix: width, heaviest and lightest load of its partition
    cuts: list[dict[int, int]] = []
    for left in reversed(range(stages)):
        states: dict[int, tuple[int, int, int]] = {}
        cut_at: dict[int, int] = {}
        for cut, (_, heaviest, lightest) in sorted(reached.items()):
            first = max(cut + 1, bisect_left(prefix, max(prefix[cut] + low, total - left * high), cut))
            final = bisect_right(prefix, min(prefix[cut] + high, total - left * low), first)
            for end in range(first, final):
                load = prefix[end] - prefix[cut]
                up, down = max(heaviest, load), min(lightest, load)
                if up - down <= min(width, states[end][0] if end in states else width):
                    states[end], cut_at[end] = (up - down, up, down), cut
        reached = states
        cuts.append(cut_at)
    if len(prefix) - 1 not in reached:
        return None
    boundaries = [len(prefix) - 1]
    for cut_at in reversed(cuts):
        boundaries.append(cut_at[boundaries[-1]])
    return boundaries[::-1]
