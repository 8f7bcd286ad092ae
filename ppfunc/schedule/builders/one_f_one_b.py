"""1F1B: as few forwards in flight as keep the pipeline full, then one forward, one backward."""

from __future__ import annotations

from collections.abc import Iterator

from ..instruction import Instruction
from ..schedule import Schedule, single_chain
from ._parts import B, F, require_counts


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Warm-up forwards by distance from the last rank, then forward and backward in turn.

    Bubble time ``(p - 1)(F + B)``, of the makespan ``(p - 1) / (m + p - 1)``; at most
    ``min(p - r, m)`` live activations on rank r.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(one_f_one_b(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1 0F4 0B2  .  0B3  .  0B4
    rank 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2 1F4 1B3  .  1B4  .
    rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Narayanan et al., PipeDream-flush (arXiv:2006.09503), section 2; Fan et al., DAPPLE, PPoPP 2021.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = (_program(r, min(ranks - 1 - r, microbatches), microbatches) for r in range(ranks))
    return single_chain("one_f_one_b", range(ranks), microbatches, programs)


def _program(rank: int, warm_up: int, microbatches: int) -> Iterator[Instruction]:
    yield from (F(rank, m) for m in range(warm_up))
    for m in range(microbatches - warm_up):
        yield F(rank, warm_up + m)
        yield B(rank, m)
    yield from (B(rank, m) for m in range(microbatches - warm_up, microbatches))
