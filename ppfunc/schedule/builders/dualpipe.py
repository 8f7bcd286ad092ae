"""DualPipe: two pipelines in opposite directions, forwards of one over backwards of the other."""

from __future__ import annotations

from ...parallel.placement import bidirectional
from ..schedule import Chain, Schedule
from ._eight_phases import eight_phases, stream
from ._parts import require, require_counts


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two chains over the same ranks, entering at both ends, with overlapped forward and backward.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. With F&B the time of an
    overlapped pair, the bubble time is ``(p/2 - 1)(F&B + B - 3W)`` where F = I and W <= F, with
    ``p + 1`` live activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(dualpipe(ranks=4, microbatches=8)), end="")
    rank 0  0F0 0F1 0F2 7F4 7I4 7W4 7F5 0F3;7B5----  .  7F6;0B0---- 7B6----  .  7F7;0B1---- 7B7---- 0I2 0W2 0I3 0W3
    rank 1   .  1F0 6F4 1F1 6F5 1F2 6B4---- 6F6;1B0---- 1F3;6B5---- 6F7;1B1---- 6B6---- 1B2----  .  6I7 1I3 6W7 1W3
    rank 2   .  5F4 2F0 5F5 2F1 5F6 2B0---- 2F2;5B4---- 5F7;2B1---- 2F3;5B5---- 2B2---- 5B6----  .  2I3 5I7 2W3 5W7
    rank 3  4F4 4F5 4F6 3F0 3I0 3W0 3F1 4F7;3B1----  .  3F2;4B4---- 3B2----  .  3F3;4B5---- 3B3---- 4I6 4W6 4I7 4W7

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches of both directions together, even, at least 2p.

    Raises:
        ValueError: p or m odd, or m below 2p.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.2.1;
        deepseek-ai/DualPipe, ``dualpipe.py``.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("ranks", ranks, ranks % 2 == 0, "an even number", "use an even number, or dualpipev")
    fits = microbatches % 2 == 0 and microbatches >= 2 * ranks
    require("microbatches", microbatches, fits, f"an even number of at least 2 * ranks = {2 * ranks}", "split the batch finer")
    half = microbatches // 2
    chains = (Chain(tuple(range(ranks)), range(half)), Chain(tuple(range(ranks, 2 * ranks)), range(half, microbatches)))
    programs = []
    for r in range(ranks):
        up, down = stream(r, chains[0].microbatches), stream(2 * ranks - 1 - r, chains[1].microbatches)
        entering, leaving = (up, down) if r < ranks // 2 else (down, up)
        phases = eight_phases(entering, leaving, ranks // 2, min(r, ranks - 1 - r), half)
        programs.append(tuple((i,) for i in phases))
    return Schedule("dualpipe", bidirectional(ranks), chains, tuple(programs))
