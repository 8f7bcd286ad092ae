"""Make learning rates: functions of the number of updates made, which the host does not read."""

from collections.abc import Callable
from contextlib import suppress
from math import pi
from numbers import Real
from typing import Any, NamedTuple

import torch

from ppfunc._checks import naming_arguments, require_counts, require_number, shown
from ppfunc.stage.device import accelerates
from ppfunc.stage.tree import tree_leaves

LearningRate = float | Callable[[torch.Tensor], torch.Tensor | float]
"""Number, or function of the number of updates made before, such as :func:`warmup_cosine`."""

# Numbers of updates at which ranks compare a rate of which only a name is known.
_PROBED = 0, 1, 10, 100, 1_000, 10_000, 100_000


class Rate(NamedTuple):
    """Compute a learning rate that changes: a function whose numbers can be read.

    Args:
        text: the name and numbers, which ranks that train together compare.
        of: the function from the number of updates made before, int64[], to the rate of the next update,
            float64[].
    """

    text: str
    of: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, updates: torch.Tensor) -> torch.Tensor:
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

    def rate(updates: torch.Tensor) -> torch.Tensor:
        falling = end + (peak - end) * 0.5 * (1 + torch.cos(pi * _share(updates - warmup, steps - warmup)))
        return (
            falling
            if not warmup
            else torch.where(updates < warmup, peak * (updates + 1).double() / warmup, falling)
        )

    return Rate(f"warmup_cosine({peak}, {warmup}, {steps}, {end})", rate)


def _share(updates: torch.Tensor, steps: int) -> torch.Tensor:
    return (updates.double() / steps).clamp(0.0, 1.0)


def rate_after(lr: LearningRate, updates: torch.Tensor) -> torch.Tensor | float:
    """Return the rate after this number of updates."""
    return lr(updates) if callable(lr) else lr


def rates_of(rate: Callable[[Any, torch.Tensor], Any], state: Any) -> list[float]:
    """Compute the learning rates of an optimizer, of all groups, after some numbers of updates.

    Args:
        rate: see :class:`Optimizer`.
        state: the state of the optimizer for a stage.
    """
    found = list[float]()
    with suppress(Exception):  # a table ends somewhere
        for updates in _PROBED:
            found += map(float, tree_leaves(rate(state, torch.tensor(updates, device="cpu"))))
    return found


def text_of_rate(lr: LearningRate) -> str:
    """Write a learning rate as ranks compare it: its numbers, or the name and some values of its function."""
    if text := getattr(lr, "text", None):
        return f"lr {text}"
    if not callable(lr):
        require_number(
            "lr",
            lr,
            mend=", or a function of the number of updates, such as ppfunc.optim.warmup_cosine, or lambda n:"
            " lr of a tensor; an optimizer is given no parameters",
        )
        return f"lr {lr}"
    values = {updates: _value_of(lr, updates) for updates in _PROBED}
    if isinstance(values[0], float):
        require_number("lr(0)", values[0])
    texts = ", ".join(f"{value} at {updates}" for updates, value in values.items())
    return f"lr {getattr(lr, '__qualname__', type(lr).__name__)} ({texts})"


def _value_of(lr: Callable[[torch.Tensor], torch.Tensor | float], updates: int) -> float | str:
    """Compute a rate after a number of updates, or name the error that it raises: a table ends somewhere."""
    try:
        rate = lr(torch.tensor(updates, device="cpu"))
        if isinstance(rate, torch.Tensor) and rate.numel() == 1:
            return float(rate.detach())
        if isinstance(rate, Real):
            return float(rate)
    except Exception as error:
        return type(error).__name__
    raise TypeError(f"lr({updates}): got {shown(rate)}, expected a number, or a tensor of one")


def on_device(rate: torch.Tensor | float, device: torch.device) -> torch.Tensor | float:
    """Convert a learning rate for the kernels: those of an accelerator read float32 alone."""
    if not isinstance(rate, torch.Tensor):
        return float(rate)
    return rate.to(device, torch.float32 if accelerates(device) else rate.dtype).reshape(())
