"""Interleaved 1F1B: several chunks per rank, so that the pipeline fills in smaller pieces."""

from __future__ import annotations

from collections.abc import Iterator

from ...parallel.placement import loop
from ..instruction import Instruction
from ..schedule import Schedule, single_chain
from ._interleaved import group_size, walk
from ._parts import B, F, require_counts


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """1F1B over chunks: a rank runs a group of microbatches through one chunk, then the next.

    Bubble time ``(p - 1)(F + B)/v`` where m is a multiple of p; ``(v - 1)p + 2(p - 1) + 1``
    live chunk activations on rank 0.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(interleaved_one_f_one_b(ranks=2, microbatches=4)), end="")
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
    rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...
        group: microbatches of a group N; by default m in ``max(1, m // p)`` equal groups, or
            where m does not divide so, p, the last group being smaller, if that does not stall.

    Raises:
        ValueError: an argument below 1, or a group with which the pipeline would stall.

    References:
        Narayanan et al., Megatron-LM, SC 2021 (arXiv:2104.04473), section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    size = group_size(ranks, microbatches, chunks, group)
    order = walk(microbatches, chunks, size)
    warm_ups = (min(len(order), 2 * (ranks - 1 - r) + (chunks - 1) * size) for r in range(ranks))
    programs = (_program(r, ranks, order, chunks, w) for r, w in enumerate(warm_ups))
    return single_chain("interleaved_one_f_one_b", loop(ranks, chunks), microbatches, programs)


def _program(rank: int, ranks: int, order: list[tuple[int, int]], chunks: int, warm_up: int) -> Iterator[Instruction]:
    forwards = iter([F(chunk * ranks + rank, m) for chunk, m in order])
    yield from (next(forwards) for _ in range(warm_up))
    for chunk, m in order:
        yield from (f for f in [next(forwards, None)] if f)
        yield B((chunks - 1 - chunk) * ranks + rank, m)
