"""Forward mode: stages that carry, beside every value, its derivative along a direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .tangents import push

Stage = Callable[..., Any]
Loss = Callable[[Any, Any], torch.Tensor]


def dual(fn: Stage) -> Stage:
    """The stage on pairs of a value and its tangent.

    Equivalent to::

        def stage(params, x, *consts):
            (params, tangents), (x, tx) = params, x
            return torch.func.jvp(lambda p, a: fn(p, a, *consts), (params, x), (tangents, tx))

    for any trees. A tangent has the structure of its value, with None for the leaves that do not
    move: integers, and whatever is held constant; None alone where nothing moves.

    Args:
        fn: a stage, ``fn(params, x, *consts) -> y``. All of its operators need a forward derivative;
            fused attention has none, ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` does.

    Returns:
        ``stage((params, tangents), (x, tx), *consts) -> (y, ty)``, a stage like any other.

    >>> dual(lambda w, x: w * x)((torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(3.0), None))
    (tensor(6.), tensor(3.))
    """

    def stage(params: Any, x: Any, *consts: Any) -> tuple[Any, Any]:
        (params, tangents), (x, tx) = params, x
        return push(lambda p, a: fn(p, a, *consts), (params, x), (tangents, tx), ("params", "x"))

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
        value, slope = push(lambda a: loss_fn(a, target), (y,), (ty,), ("y",))
        return torch.stack([value, torch.zeros_like(value) if slope is None else slope])

    return loss
