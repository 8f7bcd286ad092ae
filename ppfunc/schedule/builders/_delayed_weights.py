"""The program of a zero-bubble rank: 1F1B whose weight gradients come some backwards late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..instruction import Instruction
from ._parts import I, W


def delayed_weights(
    forwards: Sequence[Instruction], backwards: Sequence[tuple[int, int]], warm_up: int, delay: int
) -> Iterator[Instruction]:
    """Warm-up forwards, then forward, input gradient, and the weight gradient ``delay`` backwards ago.

    Args:
        forwards: the forwards in order.
        backwards: ``(stage, microbatch)`` of the input gradients in order; the weight gradients follow it.
        warm_up: forwards before the first input gradient's own.
        delay: input gradients whose weight gradient is still to be done in the steady state.
    """
    yield from forwards[:warm_up]
    for k, backward in enumerate(backwards):
        yield from forwards[warm_up + k : warm_up + k + 1]
        yield I(*backward)
        if k >= delay:
            yield W(*backwards[k - delay])
    yield from (W(*backward) for backward in backwards[max(0, len(backwards) - delay) :])
