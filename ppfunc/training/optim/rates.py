"""Make learning rates: functions of the number of updates made, which the host does not read, or of a
metric.
"""

from collections.abc import Callable, Mapping
from math import inf, pi
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch

from ppfunc._checks import naming_arguments, require_counts, require_number, require_one_of, shown
from ppfunc.stage.device import accelerates

LearningRate = float | Callable[[Any], torch.Tensor | float]
"""Number, or function of the number of updates made before, such as :func:`warmup_cosine`, or of a state."""

# Numbers of updates at which ranks compare a rate of which only a name is known.
_PROBED = 0, 1, 10, 100, 1_000, 10_000, 100_000


class Rate(NamedTuple):
    """Compute a learning rate that changes: a function whose numbers can be read.

    Args:
        text: its name and numbers, which ranks that train together compare.
        of: from the number of updates made before, int64[], or from the state of the rate if it has one, to
            the rate of the next update, float64[].
        init: ``init(device) -> state``, a dictionary of tensors that an optimizer keeps beside its own.
        observe: ``observe(state, metric) -> state``, for a metric, float64[].
    """

    text: str
    of: Callable[[Any], torch.Tensor]
    init: Callable[[torch.device | None], dict[str, torch.Tensor]] | None = None
    observe: Callable[[dict[str, torch.Tensor], torch.Tensor], dict[str, torch.Tensor]] | None = None

    def __call__(self, at: Any) -> torch.Tensor:
        return self.of(at)


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


@naming_arguments
def plateau(
    lr: float,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    *,
    cooldown: int = 0,
    least: float = 0.0,
    mode: Literal["min", "max"] = "min",
) -> Rate:
    """Make a rate that falls when a metric has not become better for a while.

    An optimizer keeps the state of the rate beside its own. :meth:`ppfunc.Trainer.observe` gives it a metric,
    such as the loss of a validation after every epoch. Equivalent to::

        better = metric < best * (1 - threshold)  # mode "max": metric > best * (1 + threshold)
        best, bad = (metric, 0) if better else (best, bad + 1)
        if waits: waits, bad = waits - 1, 0
        if bad > patience: lr, waits, bad = min(lr, max(lr * factor, least)), cooldown, 0

    Args:
        lr: the first rate.
        factor: of the rate at a fall, less than 1.
        patience: number of metrics in turn that may be no better.
        threshold: share of the best metric by which a better one differs.
        cooldown: number of metrics after a fall that are not counted as bad.
        least: smallest rate.
        mode: ``"min"`` for metrics that are to fall, ``"max"`` for those that are to rise.

    Raises:
        ValueError, TypeError: numbers out of range.

    References:
        The numbers are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau`` with ``eps=0``.

    >>> rate = plateau(1.0, factor=0.5, patience=0)
    >>> state = rate.init(None)
    >>> for metric in (2.0, 3.0):
    ...     state = rate.observe(state, torch.tensor(metric))
    >>> state["lr"].item()
    0.5
    """
    require_number("lr", lr)
    require_number("factor", factor, below=1.0)
    require_counts(0, patience=patience, cooldown=cooldown)
    require_number("threshold", threshold)
    require_number("least", least)
    require_one_of("mode", mode, ("min", "max"))
    sign = 1.0 if mode == "min" else -1.0

    def init(device: torch.device | None) -> dict[str, torch.Tensor]:
        first = {"lr": float(lr), "best": sign * inf, "bad": 0, "waits": 0}
        wide = {float: torch.float64, int: torch.int64}
        return {name: torch.tensor(x, dtype=wide[type(x)], device=device) for name, x in first.items()}

    def observe(state: dict[str, torch.Tensor], metric: torch.Tensor) -> dict[str, torch.Tensor]:
        lr, best, bad, waits = (state[name] for name in ("lr", "best", "bad", "waits"))
        better = sign * metric.to(best) < sign * best * (1 - sign * threshold)
        bad = torch.where(better | (waits > 0), 0, bad + 1)
        falls = bad > patience
        return {
            "lr": torch.where(falls, torch.minimum(lr, (lr * factor).clamp(min=least)), lr),
            "best": torch.where(better, metric.to(best), best),
            "bad": torch.where(falls, 0, bad),
            "waits": torch.where(falls, cooldown, (waits - 1).clamp(min=0)),
        }

    numbers = f"{lr}, {factor}, {patience}, {threshold}, {cooldown}, {least}, {mode}"
    return Rate(f"plateau({numbers})", lambda state: state["lr"], init, observe)


class RateState:
    """Reads a rate from the state of an optimizer; one that depends on metrics has a state there."""

    def __init__(self, rate: LearningRate) -> None:
        self._rate: Any = rate
        self.names = ("rate",) if getattr(rate, "init", None) is not None else ()
        self.observes = getattr(rate, "observe", None) is not None

    def init(self, device: torch.device) -> dict[str, Any]:
        return {name: self._rate.init(device) for name in self.names}

    def at(self, state: Mapping[str, Any], updates: torch.Tensor) -> torch.Tensor | float:
        """Return the rate after so many updates."""
        rate, argument = self._rate, state["rate"] if self.names else updates
        return rate(argument) if callable(rate) else rate

    def since(self, state: dict[str, Any], more: torch.Tensor) -> torch.Tensor | float:
        count = state["updates"]
        return self.at(state, count + more.to(count) if callable(self._rate) else count)

    def observe(self, state: dict[str, Any], metric: torch.Tensor) -> dict[str, Any]:
        return {**state, "rate": self._rate.observe(state["rate"], metric)}


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
    """Compute a rate after so many updates, or name the error that it raises: a table ends somewhere."""
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
