"""ZB-V: two chunks per rank in a V, weight gradients in the gaps, the memory of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ...parallel.placement import v_shape
from ..instruction import Instruction, Op, microbatch_of
from ..schedule import Schedule, single_chain
from ._parts import require_counts


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs stages r and 2p - 1 - r in a fixed pattern that has no gap at equal costs.

    No bubble in the span where F = I = W and ``m >= 2p - 1``, ``(p - 1)F`` per chunk of the
    makespan; at most ``2p`` chunk activations wait for their W.

    >>> from ppfunc.schedule.formats import to_grid
    >>> print(to_grid(zbv(ranks=2, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m; below ``2p - 1`` the pattern of ``2p - 1`` with
            the surplus left out.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 6.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = ((i for i in _program(r, ranks, max(2 * ranks - 1, microbatches)) if microbatch_of(i) < microbatches) for r in range(ranks))
    return single_chain("zbv", v_shape(ranks), microbatches, programs)


def _program(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """The letters of the pattern: capitals the first chunk, small ones the second."""
    warm_up = "F" * (2 * (ranks - rank) - 1) + "fF" * rank + "fiw" * (ranks - rank)
    steady = "FIWfiw" * (microbatches - 2 * ranks + rank + 1) + "IWfiw" * (ranks - rank - 1)
    cool_down = "Ii" * rank + "IW" * (ranks - rank) + "w" * rank + "W" * rank
    numbers = {letter: count() for letter in "FIWfiw"}
    for letter in warm_up + steady + cool_down:
        stage = rank if letter.isupper() else 2 * ranks - 1 - rank
        yield Instruction(Op(letter.upper()), stage, next(numbers[letter]))
