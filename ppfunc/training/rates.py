"""Learning rates as functions of the number of updates made, a tensor that the host does not read."""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor

Rate = Callable[[Tensor], Tensor]
"""``rate(updates)``: from the number of updates made before, int64[], to the learning rate of the next, float64[]."""


def constant(lr: float) -> Rate:
    """Make a rate that never changes.

    >>> constant(0.1)(torch.tensor(7)).item()
    0.1
    """
    return lambda updates: torch.full((), lr, dtype=torch.float64, device=updates.device)


def linear(start: float, end: float, steps: int) -> Rate:
    """Make a rate that goes from ``start`` to ``end`` in so many updates, and stays there.

    >>> [linear(1.0, 0.0, 4)(torch.tensor(n)).item() for n in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _require_steps(steps=steps)
    return lambda updates: start + (end - start) * _share(updates, steps)


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Rate:
    """Make a rate that rises from ``peak / warmup`` to ``peak``, then falls along half a cosine to ``end``.

    Args:
        peak: the rate of update number ``warmup``, counted from 1.
        warmup: updates of the rise; 0 for none.
        steps: updates after which the rate is ``end``; more than ``warmup``.
        end: the last rate.

    Raises:
        ValueError: numbers of updates that make no sense.

    References:
        Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.

    >>> [round(warmup_cosine(1.0, 2, 6)(torch.tensor(n)).item(), 4) for n in (0, 1, 2, 4, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}, expected at least 0")
    _require_steps(**{"steps - warmup": steps - warmup})

    def rate(updates: Tensor) -> Tensor:
        falling = end + (peak - end) * 0.5 * (1 + torch.cos(pi * _share(updates - warmup, steps - warmup)))
        return falling if not warmup else torch.where(updates < warmup, peak * (updates + 1).double() / warmup, falling)

    return rate


def _share(updates: Tensor, steps: int) -> Tensor:
    return (updates.double() / steps).clamp(0.0, 1.0)


def _require_steps(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}, expected at least 1")
