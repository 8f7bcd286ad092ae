"""Carry, beside every value of a stage, its derivative along a direction; of that, products with second
derivatives.
"""

from functools import wraps
from typing import Any

import torch

from ..carried import Output, Received
from ..layout import Boundary, declaring
from ..program import Loss, Stage, without_aux
from .tangents import push


def dual(fn: Stage) -> Stage:
    """Transform a stage into one on pairs of a value and its tangent: forward mode.

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

    @wraps(fn, updated=())  # its parameters have other names
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        (params, tangents), (x, tx) = params, _unzipped(x)
        y, ty = push(lambda p, a: fn(p, a, *extras), (params, x), (tangents, tx), ("params", "x"))
        if not isinstance(y, Output):
            return y, ty
        ty = ty or Output(None)
        slopes = ty.skips or {}
        skips = y.skips and {s: (value, slopes.get(s)) for s, value in y.skips.items()}
        loss = None if y.loss is None else _pair(y.loss, ty.loss)
        return Output((y.y, ty.y), loss, y.metrics, y.state, skips)

    return declaring(stage, Boundary.of(fn).map(lambda prefix: (prefix, prefix)))


def dual_loss(loss_fn: Loss) -> Loss:
    """Return ``loss((y, ty), target) -> tensor[2]``: the loss, and its derivative along the direction.

    >>> loss = dual_loss(lambda y, target: (y - target) ** 2)
    >>> loss((torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(1.0))
    tensor([4., 4.])
    """

    loss_fn = without_aux(loss_fn)

    def loss(y: Any, target: Any) -> torch.Tensor:
        y, ty = y
        return _pair(*push(lambda a: loss_fn(a, target), (y,), (ty,), ("y",)))

    return loss


def sloping(fn: Stage) -> Stage:
    """Return the :func:`dual` stage, whose auxiliary loss is differentiated in its slope alone."""
    stage = dual(fn)

    @wraps(stage)
    def sloped(params: Any, x: Any, *extras: Any) -> Any:
        out = stage(params, x, *extras)
        if isinstance(out, Output) and out.loss is not None:
            return out._replace(loss=_slope_alone(out.loss))
        return out

    return sloped


def hessian_loss(loss_fn: Loss) -> Loss:
    """Return the loss over :func:`sloping` stages whose gradient holds a Hessian-vector product.

    With ``g`` the gradient and ``H`` the Hessian of the loss, dual stages compute the slope
    ``<g(params), tangents>``. Its gradient with respect to ``params`` is ``H tangents``; with respect to
    ``tangents`` it is ``g``. Returns ``loss((y, ty), target) -> tensor[2]``: the loss, without a gradient,
    and the slope.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> loss = hessian_loss(lambda y, target: (y - target) ** 3)
    >>> torch.func.grad(lambda y: loss(y, torch.tensor(1.0)).sum())((torch.tensor(3.0), torch.tensor(1.0)))
    (tensor(12.), tensor(12.))
    """
    pair = dual_loss(loss_fn)
    return lambda y, target: _slope_alone(pair(y, target))


def _pair(value: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([value, torch.zeros_like(value) if slope is None else slope])


def _slope_alone(pair: torch.Tensor) -> torch.Tensor:
    value, slope = pair.unbind()
    return torch.stack([value.detach(), slope])


def _unzipped(x: Any) -> tuple[Any, Any]:
    """Split the input of a dual stage into its value and its tangent."""
    if not isinstance(x, Received):
        return x
    (value, tangent), skips = x
    values, tangents = ({s: pair[n] for s, pair in skips.items()} for n in (0, 1))
    return Received(value, values), Received(tangent, tangents)
