"""Learning rates as functions of the number of updates made, a tensor that the host does not read."""

from collections.abc import Callable
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from ppfunc._text import naming_arguments
from ppfunc.parallel.counts import require_counts

from ..checks import require_number


class Rate(NamedTuple):
    """Compute a learning rate that changes: a function whose numbers can be read.

    Args:
        text: its name and numbers, which ranks that train together compare.
        of: from the number of updates made before, int64[], to the rate of the next, float64[].
    """

    text: str
    of: Callable[[Tensor], Tensor]

    def __call__(self, updates: Tensor) -> Tensor:
        return self.of(updates)


@naming_arguments
def linear(start: float, end: float, steps: int) -> Rate:
    """Make a rate that goes from ``start`` to ``end`` in ``steps`` updates, and stays there.

    Raises:
        ValueError, TypeError: a rate that is negative or not finite, or no number; fewer than one update.

    >>> [linear(1.0, 0.0, 4)(torch.tensor(n)).item() for n in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    require_number("start", start)
    require_number("end", end)
    require_counts(steps=steps)
    return Rate(
        f"linear({start}, {end}, {steps})", lambda updates: start + (end - start) * _share(updates, steps)
    )


@naming_arguments
def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Rate:
    """Make a rate that rises from ``peak / warmup`` to ``peak``, then falls along half a cosine to ``end``.

    Args:
        peak: the rate of update number ``warmup``, counted from 1.
        warmup: updates of the rise; 0 for none.
        steps: updates after which the rate is ``end``; more than ``warmup``.
        end: the last rate.

    Raises:
        ValueError, TypeError: a rate that is negative or not finite, or no number; ``steps`` not above
            ``warmup``.

    References:
        Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    >>> [round(warmup_cosine(1.0, 2, 6)(torch.tensor(n)).item(), 4) for n in (0, 1, 2, 4, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    require_number("peak", peak)
    require_number("end", end)
    require_counts(0, warmup=warmup)
    require_counts(steps=steps)
    if steps <= warmup:
        raise ValueError(
            f"steps: got {steps} with warmup={warmup}, expected more: steps counts all updates, those of the"
            f" rise too; pass steps={warmup + steps} for a fall of {steps}"
        )

    def rate(updates: Tensor) -> Tensor:
        falling = end + (peak - end) * 0.5 * (1 + torch.cos(pi * _share(updates - warmup, steps - warmup)))
        return (
            falling
            if not warmup
            else torch.where(updates < warmup, peak * (updates + 1).double() / warmup, falling)
        )

    return Rate(f"warmup_cosine({peak}, {warmup}, {steps}, {end})", rate)


def _share(updates: Tensor, steps: int) -> Tensor:
    return (updates.double() / steps).clamp(0.0, 1.0)
