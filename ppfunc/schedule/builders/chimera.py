"""Chimera: two opposite 1F1B pipelines merged, each in the gaps of the other."""

from __future__ import annotations

from ...parallel.placement import bidirectional
from ..schedule import Chain, Schedule
from ._parts import B, F, require, require_counts


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two chains over the same ranks in opposite directions, in units of p microbatches, half of them each.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. Where F = B and m is a
    multiple of p, the bubble is ``(p - 2)/(2m + p - 2)`` of the makespan; at most p live
    activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(chimera(ranks=4, microbatches=4)), end="")
    rank 0  0F0 0F1  .  7F2 7B2 7F3 7B3 0B0  .  0B1
    rank 1   .  1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1  .
    rank 2   .  5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3  .
    rank 3  4F2 4F3  .  3F0 3B0 3F1 3B1 4B2  .  4B3

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches m of both directions together, even.

    Raises:
        ValueError: an argument below 1, or p or m odd.

    References:
        Li and Hoefler, Chimera, SC 2021 (arXiv:2107.06925), sections 3.1 and 3.5.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("ranks", ranks, ranks % 2 == 0, "an even number", "use an even number, or one_f_one_b")
    require("microbatches", microbatches, microbatches % 2 == 0, "an even number", "split the batch in one more or less")
    half = microbatches // 2
    chains = (Chain(tuple(range(ranks)), range(half)), Chain(tuple(range(ranks, 2 * ranks)), range(half, microbatches)))
    programs = []
    for r in range(ranks):
        slots = {}
        for chain, place in zip(chains, (r, ranks - 1 - r), strict=True):
            for k, m in enumerate(chain.microbatches):
                start = 2 * ranks * (k // (ranks // 2)) + 2 * (k % (ranks // 2))
                slots[start + place] = F(chain.stages[place], m)
                slots[start + 2 * ranks - 1 - place] = B(chain.stages[place], m)
        programs.append(tuple((slots[time],) for time in sorted(slots)))
    return Schedule("chimera", bidirectional(ranks), chains, tuple(programs))
