"""Make optimizers of torch's fused kernels, as pairs of pure functions over trees of tensors."""

import reprlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ppfunc._text import shown
from ppfunc.stage import Signature
from ppfunc.stage.device import accelerates
from ppfunc.stage.frozen import Mask, masked_leaves
from ppfunc.stage.tree import tree_leaves

from .._torch import fused_adamw, fused_sgd
from ..checks import require_number
from .leaves import LeafPlan, gradients_of, leaves_of, owned, plan_of, zeros_like
from .protocols import Optimizer, Tree

LearningRate = float | Callable[[Tensor], Tensor | float]
"""Number, or function of the number of updates made before, such as :func:`warmup_cosine`."""

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, weight_decay, found_inf)`` updates lists in place."""

# Numbers of updates at which ranks compare a rate of which only a name is known.
_PROBED = 0, 1, 10, 100, 1_000, 10_000, 100_000


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
            place and returned, without a copy. By default the arguments of an update stay as they are.

    Raises:
        ValueError, TypeError: not a number, or one that is negative or not finite; betas of 1 or more.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
        The numbers are those of ``torch.optim.AdamW(..., fused=True)``.

    >>> optimizer = adamw(lr=0.5, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> updated, state = optimizer.update({"w": torch.tensor([3.0, -3.0])}, state, params)
    >>> updated["w"], params["w"], state["updates"]
    (tensor([0.5000, 2.5000]), tensor([1., 2.]), tensor(1))
    >>> matrices = adamw(lr=0.5, mask=lambda params: {name: p.ndim > 1 for name, p in params.items()})
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas is {reprlib.repr(betas)}, expected two numbers, such as (0.9, 0.999)")
    for n, beta in enumerate(betas):
        require_number(f"betas[{n}]", beta, below=1.0)
    require_number("eps", eps)
    require_number("weight_decay", weight_decay)
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

    text = (
        f"adamw({_text_of_rate(lr)}, betas ({betas[0]}, {betas[1]}), eps {eps}, weight decay"
        f" {weight_decay}{_text_of_mask(mask)})"
    )
    return _fused(kernel, ("mean", "square"), lr, donate, text, weight_decay, mask)


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    mask: Mask | None = None,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: stochastic gradient descent, with momentum if asked for.

    Equivalent to:
        g = g + weight_decay * p
        buffer = g at the first update, then momentum * buffer + (1 - dampening) * g
        p = p - lr * (g + momentum * buffer if nesterov else buffer)

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and with momentum the buffer
    of every gradient.

    Args:
        lr: as in :func:`adamw`.
        momentum: decay of the buffer; 0 keeps none.
        weight_decay: share of each parameter added to its gradient.
        dampening: share of each gradient that is kept out of the buffer; no fused kernel knows it without
            reading a value.
        nesterov: look ahead along the momentum.
        mask: as in :func:`adamw`.
        donate: as in :func:`adamw`.

    Raises:
        ValueError, TypeError: a number that is negative or not finite, or none; ``nesterov`` without
            momentum, or with dampening.

    >>> optimizer = sgd(lr=0.1)
    >>> params = [torch.tensor(1.0)]
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)[0]
    [tensor(0.8000)]
    """
    for name, number in (("momentum", momentum), ("weight_decay", weight_decay), ("dampening", dampening)):
        require_number(name, number)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov needs momentum > 0 and dampening 0, got momentum={momentum} and dampening={dampening}"
        )
    decay = f"weight decay {weight_decay}{_text_of_mask(mask)}"
    text = (
        f"sgd({_text_of_rate(lr)}, momentum {momentum}, {decay}, dampening {dampening}, nesterov {nesterov})"
    )
    written_out = partial(_sgd_written_out, momentum=momentum, dampening=dampening, nesterov=nesterov)
    names = ("momentum",) if momentum else ()
    if momentum and dampening:
        return _fused(written_out, names, lr, donate, text, weight_decay, mask)
    options: dict[str, Any] = {
        "momentum": momentum,
        "dampening": 0.0,
        "nesterov": nesterov,
        "maximize": False,
    }

    def kernel(params: list[Tensor], grads: list[Tensor], *rest: Any, **numbers: Any) -> None:
        if params[0].dtype.itemsize < 4 and params[0].is_cpu:  # of which torch 2.13 mixes up the vectors
            return written_out(params, grads, *rest, **numbers)
        # A buffer of zeros becomes the gradient, as it does in torch at the first update.
        fused_sgd(params, grads, rest[0] if momentum else [], **options, is_first_step=False, **numbers)

    return _fused(kernel, names, lr, donate, text, weight_decay, mask)


def _sgd_written_out(
    params: list[Tensor],
    grads: list[Tensor],
    *rest: Any,
    lr: Tensor | float,
    momentum: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    found_inf: Tensor | None,
) -> None:
    """Update in place as SGD says, in float32 or wider: no dampening at the first update.

    Args:
        rest: the momentum buffers, if any, and the number of this update.
    """
    *buffers, step = rest
    for n, (p, g) in enumerate(zip(params, grads, strict=True)):
        wide = torch.promote_types(p.dtype, torch.float32)
        change = g.to(wide) + weight_decay * p
        before, after = [p], []
        if momentum:
            buffer = buffers[0][n]
            share = torch.where(step == 1, 1.0, 1.0 - dampening).to(wide)
            total = momentum * buffer.to(wide) + share * change
            change = change + momentum * total if nesterov else total
            before, after = [p, buffer], [total]
        for old, new in zip(before, [p - lr * change, *after], strict=True):
            old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))


def _text_of_rate(lr: LearningRate) -> str:
    """Write a learning rate as ranks compare it: its numbers, or the name and some values of its function."""
    if not callable(lr):
        require_number(
            "lr", lr, mend=", or a function of the number of updates, such as ppfunc.optim.warmup_cosine"
        )
        return f"lr {lr}"
    if text := getattr(lr, "text", None):
        return f"lr {text}"
    values = ", ".join(f"{_value_of(lr, updates)} at {updates}" for updates in _PROBED)
    return f"lr {getattr(lr, '__qualname__', type(lr).__name__)} ({values})"


def _text_of_mask(mask: Mask | None) -> str:
    return "" if mask is None else f" of {getattr(mask, '__qualname__', type(mask).__name__)}"


def _value_of(lr: Callable[[Tensor], Tensor | float], updates: int) -> str:
    """Write a rate after so many updates, or the error that it raises: a table ends somewhere."""
    try:
        return str(float(lr(torch.tensor(updates, device="cpu"))))
    except Exception as error:
        return type(error).__name__


def _fused(
    kernel: Kernel,
    names: tuple[str, ...],
    lr: LearningRate,
    donate: bool,
    text: str,
    weight_decay: float,
    mask: Mask | None,
) -> Optimizer:
    """Make an optimizer that runs a kernel.

    Args:
        names: of the trees of its state.
    """
    if mask is not None and not callable(mask):
        raise TypeError(f"mask: got {shown(mask)}, expected a function mask(params) -> tree of booleans")
    # The plan of the last update, and groups of leaves by their decay: the next trees mostly have its form.
    last: tuple[LeafPlan, list[tuple[float, tuple[int, ...]]]] | None = None

    def init(params: Tree) -> dict[str, Tree]:
        if mask is not None:
            masked_leaves(mask, Signature.of(params))  # raises for a mask of another form
        return {"updates": _zero_count(params), **{name: zeros_like(params) for name in names}}

    @torch.no_grad()
    def update(
        grads: Tree,
        state: dict[str, Tree],
        params: Tree,
        *,
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, dict[str, Tree]]:
        nonlocal last
        _require_state(state, names)
        states = {name: state[name] for name in names}
        known = last  # read once: another thread may set it
        leaves = None if known is None else leaves_of(known[0], (params, grads, *states.values()))
        if known is None or leaves is None:
            plan, leaves = plan_of(params, grads, states)
            last = known = plan, _groups(plan, weight_decay, mask, params)
        plan, groups = known
        new, columns = owned(plan, {"params": params, **states}, (leaves[0], *leaves[2:]), donate)
        if donate:  # the kernels do not count that they write
            increment_version([leaf for column in columns for leaf in column])
        gradients = gradients_of(plan, leaves[1])
        count = state["updates"]
        rate = lr(count) if callable(lr) else lr
        for decay, group in groups:
            chosen = [
                column if len(group) == len(column) else [column[n] for n in group]
                for column in (columns[0], gradients, *columns[1:])
            ]
            device = chosen[0][0].device
            kernel(
                *chosen,
                (count + 1).float().to(device),
                lr=_rate(rate, device),
                weight_decay=decay,
                found_inf=None if found_inf is None else found_inf.to(device, torch.float32),
            )
        after = (
            count + 1 if found_inf is None else torch.where(found_inf.to(count.device) > 0, count, count + 1)
        )
        return new[0], {"updates": after, **dict(zip(names, new[1:], strict=True))}

    return Optimizer(init, update, text=text)


def _groups(
    plan: LeafPlan, weight_decay: float, mask: Mask | None, params: Tree
) -> list[tuple[float, tuple[int, ...]]]:
    """Divide each group of a plan into leaves that decay and leaves that do not."""
    decaying = masked_leaves(True if mask is None else mask, Signature.of(params))
    groups = []
    for group in plan.groups:
        for decays, decay in ((True, weight_decay), (False, 0.0)):
            if alike := tuple(n for n in group if decaying[plan.trained[n]] is decays):
                groups.append((decay, alike))
    return groups


def _require_state(state: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError for the state of another optimizer."""
    if not isinstance(state, dict) or state.keys() != {"updates", *names}:
        got = ", ".join(map(repr, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        wanted = ", ".join(map(repr, ("updates", *names)))
        raise ValueError(f"state: got {got or 'nothing'}, expected {wanted}; it is that of another optimizer")


def _rate(rate: Tensor | float, device: torch.device) -> Tensor | float:
    """Convert a learning rate for the kernels: those of an accelerator read float32 alone."""
    if not isinstance(rate, Tensor):
        return float(rate)
    return rate.to(device, torch.float32 if accelerates(device) else rate.dtype)


def _zero_count(params: Tree) -> Tensor:
    leaves = tree_leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
