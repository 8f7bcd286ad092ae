"""Looped breadth first: every chunk runs all its microbatches before the next chunk starts."""

from __future__ import annotations

from ...parallel.placement import loop, stages_of
from ..schedule import Schedule, single_chain
from ._parts import B, F, require_counts


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All forwards chunk by chunk, then all backwards, chunks and microbatches reversed.

    Bubble time ``(p - 1)(F + B)/v`` where ``m >= p``; ``m v`` live chunk activations.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(looped_bfs(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 2F0 2F1 2F2  .   .  2B2 2B1 2B0 0B2 0B1 0B0
    rank 1   .  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0  .

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv:2211.05953), section 4.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = loop(ranks, chunks)
    forwards = ([F(s, m) for s in stages_of(placement, r) for m in range(microbatches)] for r in range(ranks))
    programs = ([*program, *(B(f.stage, f.microbatch) for f in reversed(program))] for program in forwards)
    return single_chain("looped_bfs", placement, microbatches, programs)
