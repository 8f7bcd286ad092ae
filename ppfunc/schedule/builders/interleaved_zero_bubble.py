"""Interleaved zero bubble: interleaved 1F1B with input and weight gradients apart."""

from __future__ import annotations

from ...parallel.placement import loop
from ..schedule import Schedule, single_chain
from ._delayed_weights import delayed_weights
from ._interleaved import group_size, walk
from ._parts import F, require_counts


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with a shorter warm-up; weight gradients start r input gradients late.

    Rank r warms up with ``p - 1 - r + (v - 1)N`` forwards, N the size of a group, and does the
    weight gradients in the order of the input gradients. Bubble time ``(p - 1)(F + I - W)/v``
    where ``m >= p`` divides in groups of equal size and W <= I; at most ``p + (v - 1)N`` chunk
    activations wait for their W.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(interleaved_zero_bubble(ranks=2, microbatches=4)), end="")
    rank 0  0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; rank r holds stages r, r + p, ...

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2;
        Narayanan et al., Megatron-LM, SC 2021, section 2.2.
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    size = group_size(ranks, microbatches, chunks)
    order = walk(microbatches, chunks, size)
    programs = (
        delayed_weights(
            [F(chunk * ranks + r, m) for chunk, m in order],
            [((chunks - 1 - chunk) * ranks + r, m) for chunk, m in order],
            warm_up=ranks - 1 - r + (chunks - 1) * size,
            delay=r,
        )
        for r in range(ranks)
    )
    return single_chain("interleaved_zero_bubble", loop(ranks, chunks), microbatches, programs)
