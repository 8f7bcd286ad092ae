"""DualPipe: two pipelines in opposite directions, forwards of one over backwards of the other."""

from __future__ import annotations

from ...parallel.placement import bidirectional
from ..schedule import Chain, Schedule
from ._eight_phases import eight_phases, stream
from ._parts import require, require_counts


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two chains over the same ranks, entering at both ends, with overlapped forward and backward.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a copy of stage k, go down and walk the second half. With F&B the time of an
    overlapped pair, the bubble time is ``(p/2 - 1)(F&B + B - 3W)`` where F = I and W <= F, with
    ``p + 1`` live activations; every rank holds the parameters of two stages.

    >>> for program in dualpipe(ranks=2, microbatches=4).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 3F2 0F1 3B2 (3F3;0B0)OVERLAP_F_B 3B3 0I1 0W1
    2F2 1F0 2F3 1B0 (1F1;2B2)OVERLAP_F_B 1B1 2I3 2W3

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
