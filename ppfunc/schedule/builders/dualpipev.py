"""DualPipeV: DualPipe cut in half, one pipeline in a V that overlaps with itself."""

from __future__ import annotations

from ...parallel.placement import v_shape
from ..schedule import Schedule, single_chain
from ._eight_phases import eight_phases, stream
from ._parts import require, require_counts


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs stages r and 2p - 1 - r; forwards of one overlap with backwards of the other.

    With F&B the time of an overlapped pair of chunks, the bubble time is
    ``(p - 1)(F&B + B - 3W)`` where F = I and W <= F, with ``2p + 1`` live chunk activations.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(dualpipev(ranks=2, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----  .  3F2;0B0---- 3B2----  .  3F3;0B1---- 3B3---- 0I2 0W2 0I3 0W3
    rank 1   .  1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1B2----  .  2I3 1I3 2W3 1W3

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches, at least 2p.

    Raises:
        ValueError: an argument below 1, or fewer than 2p microbatches.

    References:
        deepseek-ai/DualPipe, ``dualpipev.py``; Sea AI Lab, "Cut-in-half", 2025.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    fits = microbatches >= 2 * ranks
    require("microbatches", microbatches, fits, f"at least 2 * ranks = {2 * ranks}", "split the batch finer")
    walked = range(microbatches)
    programs = (eight_phases(stream(r, walked), stream(2 * ranks - 1 - r, walked), ranks, r, microbatches) for r in range(ranks))
    return single_chain("dualpipev", v_shape(ranks), microbatches, programs)
