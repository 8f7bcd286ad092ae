"""Make optimizers that work element by element: by torch's fused kernels, and by formulas of one leaf."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppfunc._checks import naming_arguments, require_number
from ppfunc.stage.frozen import Mask

from ._torch import fused_adamw, fused_sgd
from .protocols import Optimizer
from .rates import LearningRate
from .updates import by_formula, optimizer_of, require_betas, written_into


@naming_arguments
def adamw(
    lr: LearningRate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    mask: Mask | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: Adam with decoupled weight decay.

    Equivalent to, for update number t = 1, 2, ...:
        mean = betas[0] * mean + (1 - betas[0]) * g
        square = betas[1] * square + (1 - betas[1]) * g**2
        p = p - lr * weight_decay * p
        p = p - lr * (mean / (1 - betas[0]**t)) / (sqrt(square / (1 - betas[1]**t)) + eps)

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and ``mean`` and ``square``,
    both moments of every gradient, with None for leaves that are neither floating nor complex.

    Args:
        lr: the learning rate, or a function of the number of updates made before this one, int64[], such as
            :func:`warmup_cosine`. If it returns a tensor, the host reads no value.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: share of each parameter removed per update, times ``lr``.
        mask: ``mask(params) -> tree of booleans``: True for the parameters of a stage, or the branches, that
            decay. It sees the names, ``ndim`` and ``dtype`` of parameters only: sizes and values may be those
            of a shard. It is called once for parameters of one form. By default all decay.
        donate: let an update write into its parameters and state: tensors in row-major memory are updated in
            place and returned, without a copy. By default the arguments of an update stay as they are: it is
            a function, and earlier states can be used again, also after a step that failed once some of its
            state was updated. The copies about double the time of an update.

    Raises:
        ValueError, TypeError: not a number, or one that is negative or not finite; betas of 1 or more.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
        The numbers are those of ``torch.optim.AdamW(..., fused=True)``.

    >>> import torch
    >>> optimizer = adamw(lr=0.5, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> updated, state = optimizer.update({"w": torch.tensor([3.0, -3.0])}, state, params)
    >>> updated["w"], params["w"], state["updates"]
    (tensor([0.5000, 2.5000]), tensor([1., 2.]), tensor(1))
    >>> matrices = adamw(lr=0.5, mask=lambda params: {name: p.ndim > 1 for name, p in params.items()})
    """
    require_betas(betas)
    require_number("eps", eps)
    options: dict[str, Any] = {
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "amsgrad": False,
        "maximize": False,
    }

    def kernel(
        params: list[Tensor],
        grads: list[Tensor],
        mean: list[Tensor],
        square: list[Tensor],
        step: Tensor,
        **numbers: Any,
    ) -> None:
        fused_adamw(params, grads, mean, square, [], [step] * len(params), **options, **numbers)

    numbers = f"betas ({betas[0]}, {betas[1]}), eps {eps}"
    pure = partial(by_formula, partial(_adamw, betas=(betas[0], betas[1]), eps=eps))
    return optimizer_of("adamw", numbers, pure, ("mean", "square"), lr, weight_decay, mask, kernel, donate)


@naming_arguments
def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    mask: Mask | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: stochastic gradient descent, with momentum if asked for.

    Equivalent to:
        g = g + weight_decay * p
        buffer = g at the first update, then momentum * buffer + g
        p = p - lr * (g + momentum * buffer if nesterov else buffer)

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and with momentum the buffer
    of every gradient.

    Args:
        lr: as in :func:`adamw`.
        momentum: decay of the buffer; 0 keeps none.
        weight_decay: share of each parameter added to its gradient.
        nesterov: look ahead along the momentum.
        mask: as in :func:`adamw`.
        donate: as in :func:`adamw`.

    Raises:
        ValueError, TypeError: a number that is negative or not finite, or none; ``nesterov`` without
            momentum.

    >>> import torch
    >>> optimizer = sgd(lr=0.1)
    >>> params = [torch.tensor(1.0)]
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)[0]
    [tensor(0.8000)]
    """
    require_number("momentum", momentum, below=1.0)
    if nesterov and not momentum:
        raise ValueError("nesterov needs momentum > 0, got momentum=0; pass nesterov=False")
    numbers = f"momentum {momentum}, nesterov {nesterov}"
    formula = partial(_sgd, momentum=momentum, nesterov=nesterov)
    options: dict[str, Any] = {
        "momentum": momentum,
        "dampening": 0.0,
        "nesterov": nesterov,
        "maximize": False,
    }

    def kernel(params: list[Tensor], grads: list[Tensor], *rest: Any, **numbers: Any) -> None:
        # torch 2.13 mixes up the vectors of halves on the CPU.
        if params[0].dtype.itemsize < 4 and params[0].is_cpu:
            return written_into(formula, params, grads, *rest, **numbers)
        # A buffer of zeros becomes the gradient, as it does in torch at the first update.
        fused_sgd(params, grads, rest[0] if momentum else [], **options, is_first_step=False, **numbers)

    names = ("momentum",) if momentum else ()
    pure = partial(by_formula, formula)
    return optimizer_of("sgd", numbers, pure, names, lr, weight_decay, mask, kernel, donate)


def _adamw(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    mean = mean + (1 - betas[0]) * (g - mean)
    square = betas[1] * square + (1 - betas[1]) * g * g
    none = square == 0  # where the derivative of the root would be infinite
    root = torch.where(none, square, torch.where(none, 1.0, square).sqrt()) / (1 - betas[1] ** step).sqrt()
    direction = mean / (1 - betas[0] ** step) / (root + eps)
    return p - lr * weight_decay * p - lr * direction, mean, square


def _sgd(
    p: Tensor, g: Tensor, *buffers: Tensor,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    momentum: float, nesterov: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    change = g + weight_decay * p
    if not buffers:
        return (p - lr * change,)
    total = momentum * buffers[0] + change
    return p - lr * (change + momentum * total if nesterov else total), total
