"""Hessian-vector products: a loss whose gradient, over dual stages, is one."""

from __future__ import annotations

from typing import Any

import torch

from .dual import Loss, dual_loss


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
