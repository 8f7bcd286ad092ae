"""Compute Gauss-Newton-vector products: stages that hold their tangents, and a loss whose gradient is one."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from ..output import Output, Received
from ..signature import flatten
from ..tree import tree_map
from .dual import Loss, Stage, dual
from .tangents import flatten_tangents, replaced


def held_dual(fn: Stage) -> Stage:
    """As :func:`dual`, with tangents that are constants: no gradient of them is computed or travels back."""
    stage = dual(fn)

    @wraps(fn)
    def held(params: Any, x: Any, *extras: Any) -> Any:
        params, x = (params[0], _held(params[1])), _hold(x)
        return _hold(stage(params, x, *extras))

    return held


def gauss_newton_loss(loss_fn: Loss) -> Loss:
    """The loss whose gradient over :func:`held_dual` stages is the Gauss-Newton matrix of ``loss_fn`` times the tangents.

    With ``J`` the Jacobian of the model and ``H`` the Hessian of the loss in the outputs ``y``, the
    gradient of ``<y, H ty>``, in which ``H ty = H J tangents`` is a constant, is ``J' H J tangents``.

    Returns:
        ``loss((y, ty), target) -> tensor[2]``: the loss, without a gradient, and ``<y, H ty>``, moved to
        the value ``<ty, H ty>``, which is the curvature ``<tangents, J' H J tangents>``.

    References:
        Schraudolph, Fast curvature matrix-vector products for second-order gradient descent, 2002.

    >>> y = (torch.tensor(3.0), torch.tensor(2.0))
    >>> loss = gauss_newton_loss(lambda y, target: (y - target) ** 3)
    >>> torch.func.grad_and_value(lambda y: loss(y, torch.tensor(1.0))[1])(y)
    ((tensor(24.), tensor(0.)), tensor(48.))
    """

    def loss(y: Any, target: Any) -> torch.Tensor:
        y, ty = y
        leaves, treedef = flatten(y, "y")
        tangents = flatten_tangents(y, ty, "y")
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        if not moving:
            value = loss_fn(y, target).detach()
            return torch.stack([value, torch.zeros_like(value)])

        def of(*moved: torch.Tensor) -> torch.Tensor:
            return loss_fn(treedef.unflatten(replaced(leaves, moving, moved)), target)

        gradient = torch.func.grad_and_value(of, tuple(range(len(moving))))
        at, along = tuple(leaves[i].detach() for i in moving), tuple(t.detach() for t in tangents if t is not None)
        pushed: tuple[Any, ...] = torch.func.jvp(gradient, at, along)
        (_, value), (products, _) = pushed
        parts = [_inner(leaves[i] - y0 + t, product) for i, y0, t, product in zip(moving, at, along, products, strict=True)]
        return torch.stack([value, sum(parts[1:], parts[0])]).to(value.dtype)

    return loss


def _inner(a: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """The real scalar product with a constant."""
    product = a * constant.detach().conj()
    return (product.real if product.is_complex() else product).sum()


def _hold(pairs: Any) -> Any:
    """Stop the gradients of the tangents that a dual stage takes or returns."""
    if isinstance(pairs, Received):
        return Received(_hold(pairs.x), {s: _hold(pair) for s, pair in pairs.skips.items()})
    if isinstance(pairs, Output):
        if pairs.loss is not None:
            raise ValueError(
                "got a stage with an auxiliary loss, which has no Gauss-Newton matrix; give it to the loss function of the last stage"
            )
        skips = None if pairs.skips is None else {s: _hold(pair) for s, pair in pairs.skips.items()}
        return pairs._replace(y=_hold(pairs.y), skips=skips)
    value, tangent = pairs
    return value, _held(tangent)


def _held(tangents: Any) -> Any:
    return tree_map(torch.Tensor.detach, tangents)
