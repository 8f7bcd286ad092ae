"""Optimizers of torch's fused kernels, as pairs of pure functions over trees of tensors."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._text import limited, shown
from ..stage import Signature
from ..stage.errors import raised
from ..stage.tree import NAMESPACE, tree_flatten, tree_leaves, tree_map
from ._torch import divide_into_each, fused_adamw, fused_sgd
from .checks import require_number
from .leaves import LeafPlan, gradients_of, leaves_of, owned, plan_of, zeros_like
from .parts import Kernel, as_columns, run_on_parts, vector_width
from .protocols import Optimizer, Tree, UpdateOptions, updating

LearningRate = float | Callable[[Tensor], Tensor | float]
"""A number, or a function of the number of updates made before, such as :func:`warmup_cosine`."""

Mask = Callable[[Tree], Tree]
"""From the parameters of a stage to a tree of booleans, or one whose leaves stand for whole branches."""

_PROBED = (0, 1, 10, 100, 1_000, 10_000, 100_000)  # numbers of updates at which ranks compare a rate of which only a name is known


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

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and ``mean`` and ``square``, both moments of
    every gradient, with None for leaves that are neither floating nor complex.

    Args:
        lr: the learning rate, or a function of the number of updates made before this one, int64[], such as
            :func:`warmup_cosine`. Where it returns a tensor, the host reads no value.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: share of each parameter removed per update, times ``lr``.
        mask: ``mask(params) -> tree of booleans``: which parameters of a stage decay, by their names, ``ndim`` and ``dtype``; True stands
            for all of a branch. It is given nothing else of a parameter, whose sizes and values may be those of a shard. It decides once
            for parameters of one form. All decay where there is none.
        donate: give up the parameters, the state, and with ``grad_scale`` the gradients: tensors in row-major memory are
            updated in place and returned, so that no copy is made. Otherwise the arguments of an update stay as they are.

    Raises:
        ValueError, TypeError: a number that is negative or not finite, or none; betas of 1 or more.

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
    options: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "amsgrad": False, "maximize": False}

    def kernel(params: list[Tensor], grads: list[Tensor], mean: list[Tensor], square: list[Tensor], step: Tensor, **given: Any) -> None:
        fused_adamw(params, grads, mean, square, [], [step] * len(params), **options, **given)

    text = f"adamw({_text_of_rate(lr)}, betas ({betas[0]}, {betas[1]}), eps {eps}, weight decay {weight_decay}{_text_of_mask(mask)})"
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

    Its state is a dictionary: ``updates``, the number of updates made, int64[], and with momentum the buffer of every gradient.

    Args:
        lr: as in :func:`adamw`.
        momentum: decay of the buffer; 0 keeps none.
        weight_decay: share of each parameter added to its gradient.
        dampening: share of each gradient that is kept out of the buffer; no fused kernel knows it without reading a value.
        nesterov: look ahead along the momentum.
        mask: as in :func:`adamw`.
        donate: as in :func:`adamw`.

    Raises:
        ValueError, TypeError: a number that is negative or not finite, or none; ``nesterov`` without momentum, or with dampening.

    >>> optimizer = sgd(lr=0.1)
    >>> params = [torch.tensor(1.0)]
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)[0]
    [tensor(0.8000)]
    """
    for name, number in (("momentum", momentum), ("weight_decay", weight_decay), ("dampening", dampening)):
        require_number(name, number)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got momentum={momentum} and dampening={dampening}")
    decay = f"weight decay {weight_decay}{_text_of_mask(mask)}"
    text = f"sgd({_text_of_rate(lr)}, momentum {momentum}, {decay}, dampening {dampening}, nesterov {nesterov})"
    if momentum and dampening:
        kernel_of_both = partial(_dampened, momentum=momentum, dampening=dampening)
        return _fused(kernel_of_both, ("momentum",), lr, donate, text, weight_decay, mask)
    options: dict[str, Any] = {"momentum": momentum, "dampening": 0.0, "nesterov": nesterov, "maximize": False}

    def kernel(params: list[Tensor], grads: list[Tensor], *rest: Any, grad_scale: Tensor | None, **given: Any) -> None:
        if grad_scale is not None and grads[0].is_cuda:  # where the kernel divides itself, it rounds an element by its place
            divide_into_each(grads, grad_scale)
            grad_scale = None
        # A buffer of zeros becomes the gradient, as it does in torch at the first update.
        fused_sgd(params, grads, rest[0] if momentum else [], **options, is_first_step=False, grad_scale=grad_scale, **given)

    return _fused(kernel, ("momentum",) if momentum else (), lr, donate, text, weight_decay, mask)


def _dampened(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    step: Tensor,
    *,
    lr: Tensor | float,
    momentum: float,
    weight_decay: float,
    dampening: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """The kernel of SGD with dampening, which at the first update there is none of."""
    for p, g, buffer in zip(params, grads, buffers, strict=True):
        unscaled = g if grad_scale is None else g / grad_scale.to(g.dtype)
        share = torch.where(step == 1, 1.0, 1.0 - dampening).to(g.dtype)
        after = momentum * buffer + share * (unscaled + weight_decay * p)
        moved = p - lr * after
        p.copy_(moved if found_inf is None else torch.where(found_inf > 0, p, moved))
        buffer.copy_(after if found_inf is None else torch.where(found_inf > 0, buffer, after))


def _text_of_rate(lr: LearningRate) -> str:
    """A learning rate as ranks compare it: its numbers, or the name of its function with some of its values."""
    if not callable(lr):
        require_number("lr", lr, mend=", or a function of the number of updates, such as ppfunc.warmup_cosine")
        return f"lr {lr}"
    if text := getattr(lr, "text", None):
        return f"lr {text}"
    values = ", ".join(f"{_value_of(lr, updates)} at {updates}" for updates in _PROBED)
    return f"lr {getattr(lr, '__qualname__', type(lr).__name__)} ({values})"


def _text_of_mask(mask: Mask | None) -> str:
    return "" if mask is None else f" of {getattr(mask, '__qualname__', type(mask).__name__)}"


def _value_of(lr: Callable[[Tensor], Tensor | float], updates: int) -> str:
    """A rate after so many updates, or what it raises there, as one that is a table does behind its end."""
    try:
        return str(float(lr(torch.tensor(updates, device="cpu"))))
    except Exception as error:
        return type(error).__name__


class ParameterKind:
    """A parameter as a mask sees it: a rank may hold a shard of it.

    Args:
        ndim: the number of its dimensions.
        dtype: its dtype.
    """

    def __init__(self, ndim: int, dtype: torch.dtype) -> None:
        self.ndim, self.dtype = ndim, dtype

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"got {name!r} of a parameter, expected ndim or dtype; a rank may hold a shard of it, of another size")


def _decaying(mask: Mask | None, params: Tree) -> list[bool]:
    """Of every leaf, whether it decays.

    Raises:
        TypeError, ValueError: the mask gave something else than booleans for the parameters.
    """
    leaves, structure = tree_flatten(params)
    if mask is None:
        return [True] * len(leaves)
    try:
        made = mask(structure.unflatten(ParameterKind(leaf.ndim, leaf.dtype) for leaf in leaves))
    except Exception as error:
        raise ValueError(f"mask: {raised(error)}; it is called with the parameters of one stage, such as {_forms(params)}") from error
    try:
        found: list[Any] = structure.flatten_up_to(optree.tree_broadcast_prefix(made, params, namespace=NAMESPACE))
    except ValueError as error:
        raise ValueError(
            f"mask: got {reprlib.repr(made)}, expected booleans in the structure of the parameters of one stage, such as {_forms(params)}"
        ) from error
    if not all(isinstance(one, bool) for one in found):
        raise TypeError(f"mask: got {reprlib.repr(made)}, expected a boolean for every parameter, or for a branch of them")
    return found


def _forms(params: Tree) -> str:
    return limited(str(Signature.of(tree_map(lambda leaf: leaf.detach(), params))), 200)


def _fused(
    kernel: Kernel, names: tuple[str, ...], lr: LearningRate, donate: bool, text: str, weight_decay: float, mask: Mask | None
) -> Optimizer:
    """An optimizer that runs ``kernel`` on leaves of the parameters, their gradients, and the trees ``names`` of its state."""
    if mask is not None and not callable(mask):
        raise TypeError(f"mask: got {shown(mask)}, expected a function mask(params) -> tree of booleans")
    widths: dict[float, dict[torch.dtype, int]] = {}  # by decay
    # How the trees of the last update were taken apart, and groups of leaves by their decay; those of the next are mostly like them.
    last: tuple[LeafPlan, list[tuple[float, tuple[int, ...]]]] | None = None

    def init(params: Tree) -> dict[str, Tree]:
        _decaying(mask, params)  # raises for a mask of another form
        return {"updates": _zero_count(params), **{name: zeros_like(params) for name in names}}

    @updating
    def update(grads: Tree, state: dict[str, Tree], params: Tree, options: UpdateOptions) -> tuple[Tree, dict[str, Tree]]:
        nonlocal last
        _require_state(state, names)
        grad_scale, found_inf, parts = options
        states = {name: state[name] for name in names}
        known = last  # read once: another thread may set it
        leaves = None if known is None else leaves_of(known[0], (params, grads, *states.values()))
        if known is None or leaves is None:
            plan, leaves = plan_of(params, grads, states)
            last = known = plan, _groups(plan, weight_decay, mask, params)
        plan, groups = known
        new, own = owned(plan, (params, *states.values()), (leaves[0], *leaves[2:]), donate)
        if donate:  # the kernels do not count that they write
            increment_version([leaf for column in own for leaf in column])
        # The kernels write unscaled gradients over those that they are given.
        gradients = gradients_of(plan, leaves[1], copy=grad_scale is not None and not donate)
        whole = None if parts is None else as_columns([parts[n] for n in plan.trained], [leaves[0][n].dtype for n in plan.trained])
        count = state["updates"]
        rate = lr(count) if callable(lr) else lr
        for decay, group in groups:
            columns = [c if len(group) == len(c) else [c[n] for n in group] for c in (own[0], gradients, *own[1:])]
            places = None if whole is None else [whole[n] for n in group]
            run = partial(kernel, weight_decay=decay)
            _run_on(run, columns, places, (count + 1).float(), rate, options, widths.setdefault(decay, {}))
        after = count + 1 if found_inf is None else torch.where(found_inf.to(count.device) > 0, count, count + 1)
        return new[0], {"updates": after, **dict(zip(names, new[1:], strict=True))}

    return Optimizer(init, update, text=text)


def _run_on(
    run: Kernel, columns: Sequence[Sequence[Tensor]], whole: Sequence[Any] | None, step: Tensor, rate: Tensor | float,
    options: UpdateOptions, widths: dict[torch.dtype, int],
) -> None:  # fmt: skip
    """Run a kernel on leaves of one device, dtype and decay, which may be parts.

    Args:
        widths: the vector widths of the kernel that are known.
    """
    device, dtype = columns[0][0].device, columns[0][0].dtype
    given = {"grad_scale": _on(device, options.grad_scale), "found_inf": _on(device, options.found_inf), "lr": _rate(rate, device)}
    if whole is None or device.type != "cpu":
        run(*columns, step.to(device), **given)
    else:
        width = widths.get(dtype) or vector_width(run, len(columns), dtype)
        widths[dtype] = width
        run_on_parts(run, columns, whole, width, step, **given)


def _groups(plan: LeafPlan, weight_decay: float, mask: Mask | None, params: Tree) -> list[tuple[float, tuple[int, ...]]]:
    """The groups of a plan, each cut in what decays and what does not."""
    decaying = _decaying(mask, params)
    made = []
    for group in plan.groups:
        for decays, decay in ((True, weight_decay), (False, 0.0)):
            if own := tuple(n for n in group if decaying[plan.trained[n]] is decays):
                made.append((decay, own))
    return made


def _require_state(state: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError for the state of another optimizer."""
    if not isinstance(state, dict) or state.keys() != {"updates", *names}:
        got = ", ".join(map(repr, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        wanted = ", ".join(map(repr, ("updates", *names)))
        raise ValueError(f"state: got {got or 'nothing'}, expected {wanted}; it is that of another optimizer")


def _on(device: torch.device, number: Tensor | None) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32)


def _rate(rate: Tensor | float, device: torch.device) -> Tensor | float:
    """A learning rate as the kernels take it: on CUDA they read float32 alone."""
    if not isinstance(rate, Tensor):
        return float(rate)
    return rate.to(device, torch.float32 if device.type == "cuda" else rate.dtype)


def _zero_count(params: Tree) -> Tensor:
    leaves = tree_leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
