"""Curvature of the loss: losses whose gradient, over dual stages, is a product with a second derivative."""

from __future__ import annotations

from typing import Any

import optree
import torch

from ..signature import differentiable, flatten
from .dual import Loss, Stage, dual, dual_loss
from .tangents import flatten_tangents, push


def hessian_loss(loss_fn: Loss) -> Loss:
    """The loss whose gradient over :func:`dual` stages has the gradient and the Hessian-vector product of ``loss_fn``.

    With ``L`` the loss and ``g`` its gradient, dual stages compute the slope ``<g(params), tangents>``.
    Its gradient with respect to ``params`` is ``H tangents``, with respect to ``tangents`` it is ``g``.

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

    def loss(y: Any, target: Any) -> torch.Tensor:
        value, slope = pair(y, target)
        return torch.stack([value.detach(), slope])

    return loss


def tangents_held(fn: Stage) -> Stage:
    """As :func:`dual`, with nothing differentiated through the tangents: no gradient of them travels back."""
    stage = dual(fn)

    def held(params: Any, x: Any, *consts: Any) -> tuple[Any, Any]:
        (params, tangents), (x, tx) = params, x
        y, ty = stage((params, _held(tangents)), (x, _held(tx)), *consts)
        return y, _held(ty)

    return held


def gauss_newton_loss(loss_fn: Loss) -> Loss:
    """The loss whose gradient over :func:`tangents_held` stages is a product with the Gauss-Newton matrix of ``loss_fn``.

    With ``J`` the Jacobian of the model and ``H`` the Hessian of the loss in the outputs ``y``, this
    is ``<y, H ty>`` with ``H ty = H J tangents`` held constant; its gradient is ``J' H J tangents``.
    Its value is put to zero, and the curvature ``<tangents, J' H J tangents> = <ty, H ty>`` in its place.

    Returns:
        ``loss((y, ty), target) -> tensor[2]``: the loss, without a gradient, and the curvature.

    References:
        Schraudolph, Fast curvature matrix-vector products for second-order gradient descent, 2002.
    """

    def loss(y: Any, target: Any) -> torch.Tensor:
        y, ty = y
        leaves, treedef = flatten(y, "y")
        at = [i for i, leaf in enumerate(leaves) if differentiable(leaf.dtype)]

        def gradient(fixed: Any) -> tuple[Any, torch.Tensor]:
            """The gradient and the value of the loss, as a function of the whole tree ``y``."""
            values = optree.tree_leaves(fixed)

            def of(*moved: torch.Tensor) -> torch.Tensor:
                full = list(values)
                for i, value in zip(at, moved, strict=True):
                    full[i] = value
                return loss_fn(treedef.unflatten(full), target)

            return torch.func.grad_and_value(of, tuple(range(len(at))))(*(values[i] for i in at))

        (_, value), pushed = push(gradient, (_held(y),), (_held(ty),), ("y",))
        moves = [t for i, t in enumerate(flatten_tangents(y, ty, "y")) if i in at]
        products = (None,) * len(at) if pushed is None else pushed[0]
        value = value.detach()
        curvature = torch.zeros_like(value)
        for i, move, product in zip(at, moves, products, strict=True):
            if move is not None and product is not None:
                product = product.detach()
                curvature = curvature + _inner(leaves[i] - leaves[i].detach() + move.detach(), product)
        return torch.stack([value, curvature])

    return loss
