"""Compute Hessian-vector products: stages and a loss whose gradient holds one, beside the gradient itself."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from ..output import Output
from .dual import Loss, Stage, dual, dual_loss


def sloping(fn: Stage) -> Stage:
    """As :func:`dual`, with an auxiliary loss of which only the derivative along the direction is differentiated."""
    stage = dual(fn)

    @wraps(fn)
    def sloped(params: Any, x: Any, *extras: Any) -> Any:
        out = stage(params, x, *extras)
        return out._replace(loss=_slope_alone(out.loss)) if isinstance(out, Output) and out.loss is not None else out

    return sloped


def hessian_loss(loss_fn: Loss) -> Loss:
    """The loss whose gradient over :func:`sloping` stages has a Hessian-vector product and the gradient of ``loss_fn``.

    With ``g`` the gradient and ``H`` the Hessian of the loss, dual stages compute the slope
    ``<g(params), tangents>``. Its gradient with respect to ``params`` is ``H tangents``; with respect
    to ``tangents`` it is ``g``.

    Returns:
        ``loss((y, ty), target) -> tensor[2]``: the loss, without a gradient, and the slope.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> y = (torch.tensor(3.0), torch.tensor(1.0))
    >>> loss = hessian_loss(lambda y, target: (y - target) ** 3)
    >>> torch.func.grad(lambda y: loss(y, torch.tensor(1.0)).sum())(y)
    (tensor(12.), tensor(12.))
    """
    pair = dual_loss(loss_fn)
    return lambda y, target: _slope_alone(pair(y, target))


def _slope_alone(pair: torch.Tensor) -> torch.Tensor:
    value, slope = pair.unbind()
    return torch.stack([value.detach(), slope])
