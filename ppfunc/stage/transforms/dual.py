"""Carry, beside every value of a stage, its derivative along a direction: forward mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..output import Output, Received
from .tangents import push

Stage = Callable[..., Any]
Loss = Callable[[Any, Any], torch.Tensor]


def dual(fn: Stage) -> Stage:
    """The stage on pairs of a value and its tangent.

    Equivalent to, for any trees::

        def stage(params, x, *extras):
            (params, tangents), (x, tx) = params, x
            return torch.func.jvp(lambda p, a: fn(p, a, *extras), (params, x), (tangents, tx))

    A tangent has the structure of its value, with None for the leaves that do not move: integers,
    and whatever is held constant; None alone where nothing moves.

    Args:
        fn: a stage, ``fn(params, x, *extras) -> y``. All of its operators need a forward derivative;
            ``scaled_dot_product_attention`` runs unfused, since fused it has none, and layer, batch and
            instance norm decomposed, since torch differentiates the derivative of theirs wrongly.

    Returns:
        ``stage((params, tangents), (x, tx), *extras) -> (y, ty)``, a stage like any other. An
        auxiliary loss becomes a tensor[2], the loss and its derivative; skip connections become pairs.

    >>> dual(lambda w, x: w * x)((torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(3.0), None))
    (tensor(6.), tensor(3.))
    """

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        (params, tangents), (x, tx) = params, _unzipped(x)
        y, ty = push(lambda p, a: fn(p, a, *extras), (params, x), (tangents, tx), ("params", "x"))
        return _zipped(y, ty)

    return stage


def dual_loss(loss_fn: Loss) -> Loss:
    """The loss of what dual stages return: itself, and its derivative along the direction.

    Args:
        loss_fn: ``loss(y, target) -> scalar``.

    Returns:
        ``loss((y, ty), target) -> tensor[2]``.

    >>> dual_loss(lambda y, target: (y - target) ** 2)((torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(1.0))
    tensor([4., 4.])
    """

    def loss(y: Any, target: Any) -> torch.Tensor:
        y, ty = y
        return _pair(*push(lambda a: loss_fn(a, target), (y,), (ty,), ("y",)))

    return loss


def _pair(value: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([value, torch.zeros_like(value) if slope is None else slope])


def _unzipped(x: Any) -> tuple[Any, Any]:
    """Split the input of a dual stage into its value and its tangent."""
    if not isinstance(x, Received):
        return x
    (value, tangent), skips = x
    values, tangents = ({s: pair[n] for s, pair in skips.items()} for n in (0, 1))
    return Received(value, values), Received(tangent, tangents)


def _zipped(y: Any, ty: Any) -> Any:
    """Join the outputs of a stage and their tangents to the output of a dual stage."""
    if not isinstance(y, Output):
        return y, ty
    ty = Output(None) if ty is None else ty
    skips = None if y.skips is None else {s: (v, None if ty.skips is None else ty.skips[s]) for s, v in y.skips.items()}
    return Output((y.y, ty.y), None if y.loss is None else _pair(y.loss, ty.loss), y.metrics, y.state, skips)
