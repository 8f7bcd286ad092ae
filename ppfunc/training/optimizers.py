"""Optimizers as pairs of pure functions over trees of tensors, run by torch's fused kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from ..stage.signature import differentiable
from ..stage.tree import tree_flatten, tree_map, tree_paths

Tree = Any
LearningRate = float | Callable[[int], float]


class Optimizer(NamedTuple):
    """A pair of functions; any such pair serves as an optimizer.

    Unlike in optax, ``update`` returns the new parameters, not differences to add to them: torch's fused
    kernels make both in one pass. For the same reason it does not run under ``torch.func.vmap``.

    Args:
        init: ``init(params) -> state``, a tree of tensors, in which ``torch.save`` and ``torch.load`` meet nothing but
            dictionaries and tensors where the parameters are such.
        update: ``update(grads, state, params) -> (params, state)``, where ``grads`` has the
            structure, shapes, dtypes and devices of ``params``. Leaves that are neither floating nor
            complex are returned unchanged. The results carry no autograd graph.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


class AdamWState(TypedDict):
    """The number of updates made, int64[] on the CPU, and both moments of every gradient: a plain dictionary, as checkpoints want.

    The moments have the structure of the parameters, None for leaves that are neither floating nor complex.
    """

    updates: Tensor
    mean: Tree
    square: Tree


class SGDState(TypedDict):
    """The number of updates made, int64[] on the CPU, and a buffer for every gradient, or None without momentum."""

    updates: Tensor
    momentum: Tree


def adamw(
    lr: LearningRate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: Adam with decoupled weight decay.

    Equivalent to, for update number t = 1, 2, ...:
        mean = betas[0] * mean + (1 - betas[0]) * g
        square = betas[1] * square + (1 - betas[1]) * g**2
        p = p - lr * weight_decay * p
        p = p - lr * (mean / (1 - betas[0]**t)) / (sqrt(square / (1 - betas[1]**t)) + eps)

    Args:
        lr: the learning rate, or a function of the number of updates made before this one.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: share of each parameter removed per update, times ``lr``.
        donate: give up the parameters and the state: tensors in row-major memory are updated in place
            and returned, so that no copy is made. Otherwise the arguments of an update stay as they are.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
        The numbers are those of ``torch.optim.AdamW(..., fused=True)``.

    >>> optimizer = adamw(lr=0.5, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> updated, state = optimizer.update({"w": torch.tensor([3.0, -3.0])}, state, params)
    >>> updated["w"], params["w"]
    (tensor([0.5000, 2.5000]), tensor([1., 2.]))
    """

    def init(params: Tree) -> AdamWState:
        return {"updates": _zero_count(), "mean": _zeros_like(params), "square": _zeros_like(params)}

    @torch.no_grad()
    def update(grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        count = int(state["updates"])
        gradients = _gradients(grads, params)
        new, trained = _owned(params, donate)
        mean, means = _owned(state["mean"], donate)
        square, squares = _owned(state["square"], donate)
        torch_adamw(
            trained,
            gradients,
            means,
            squares,
            [],
            _step_tensors(trained, count),
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=_rate(lr, count),
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return new, {"updates": state["updates"] + 1, "mean": mean, "square": square}

    return Optimizer(init, update)


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    donate: bool = False,
) -> Optimizer:
    """Make an optimizer: stochastic gradient descent, with momentum if asked for.

    Equivalent to:
        g = g + weight_decay * p
        buffer = g at the first update, then momentum * buffer + (1 - dampening) * g
        p = p - lr * (g + momentum * buffer if nesterov else buffer)

    Args:
        lr: the learning rate, or a function of the number of updates made before this one.
        momentum: decay of the buffer; 0 keeps none.
        weight_decay: share of each parameter added to its gradient.
        dampening: share of each gradient that is kept out of the buffer.
        nesterov: look ahead along the momentum.
        donate: as in :func:`adamw`.

    Raises:
        ValueError: if ``nesterov`` is asked for without momentum, or with dampening.

    >>> optimizer = sgd(lr=0.1)
    >>> params = [torch.tensor(1.0)]
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)[0]
    [tensor(0.8000)]
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got momentum={momentum} and dampening={dampening}")

    def init(params: Tree) -> SGDState:
        return {"updates": _zero_count(), "momentum": _zeros_like(params) if momentum else None}

    @torch.no_grad()
    def update(grads: Tree, state: SGDState, params: Tree) -> tuple[Tree, SGDState]:
        count = int(state["updates"])
        gradients = _gradients(grads, params)
        new, trained = _owned(params, donate)
        buffers, filled = _owned(state["momentum"], donate)
        # torch knows the first update by buffers that are None, and makes new ones for it.
        handed: list[Tensor | None] = list(filled) if filled and count else [None] * len(trained)
        torch_sgd(
            trained,
            gradients,
            handed,
            fused=True,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=_rate(lr, count),
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
        )
        if filled and not count:
            torch._foreach_copy_(filled, [buffer for buffer in handed if buffer is not None])
        return new, {"updates": state["updates"] + 1, "momentum": buffers}

    return Optimizer(init, update)


def _rate(lr: LearningRate, count: int) -> float:
    return float(lr(count) if callable(lr) else lr)


def _zero_count() -> Tensor:
    # On the CPU wherever the parameters are: reading it must not wait for a device.
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _step_tensors(leaves: list[Tensor], count: int) -> list[Tensor]:
    """Make one float32[] per leaf, on its device: the kernel increments each before it uses it."""
    if not leaves:
        return []
    first = leaves[0].device
    made = torch.full((len(leaves),), float(count), device=first).unbind()
    return [one if p.device == first else one.to(p.device) for one, p in zip(made, leaves, strict=True)]


def _as_real(leaf: Tensor) -> Tensor:
    """View the same memory in a real dtype: the kernels know no complex numbers."""
    return torch.view_as_real(leaf) if leaf.dtype.is_complex else leaf


def _dense(leaf: Tensor) -> Tensor:
    """Put a leaf into row-major memory, without history: the kernels walk the memory of several tensors side by side."""
    if leaf.requires_grad or leaf.is_conj() or leaf.is_neg() or not leaf.is_contiguous():
        return leaf.detach().resolve_conj().resolve_neg().contiguous()
    return leaf


def _zeros_like(params: Tree) -> Tree:
    def zeros(p: Tensor) -> Tensor | None:
        return torch.zeros(p.shape, dtype=p.dtype, device=p.device) if differentiable(p.dtype) else None

    return tree_map(zeros, params)


def _owned(tree: Tree, donate: bool) -> tuple[Tree, list[Tensor]]:
    """Copy a tree, or take it where it is donated, for the update to write to; also real views of the leaves it trains."""
    leaves, structure = tree_flatten(tree)
    copied = leaves if donate else [p.clone(memory_format=torch.contiguous_format) if differentiable(p.dtype) else p for p in leaves]
    own = [_dense(p) if differentiable(p.dtype) else p for p in copied]
    trained = [_as_real(leaf) for leaf in own if differentiable(leaf.dtype)]
    if donate and len({leaf.data_ptr() for leaf in trained if leaf.numel()}) < sum(leaf.numel() > 0 for leaf in trained):
        _refuse_shared_memory(tree)
    return structure.unflatten(own), trained


def _refuse_shared_memory(tree: Tree) -> None:
    """Raise ValueError with the paths of two leaves that share memory, which would be updated twice."""
    seen: dict[int, str] = {}
    leaves, structure = tree_flatten(tree)
    for path, leaf in zip(tree_paths(structure), leaves, strict=True):
        trained = differentiable(leaf.dtype) and leaf.numel()
        first = seen.setdefault(leaf.data_ptr(), path) if trained else path
        if first != path:
            raise ValueError(
                f"params{first} and params{path} share their memory, so that they cannot both be "
                "updated in place; pass donate=False or make them separate tensors"
            )


def _gradients(grads: Tree, params: Tree) -> list[Tensor]:
    """Check that the gradients match; return those of the leaves that an update changes, as real views in row-major memory."""
    wanted, structure = tree_flatten(params)
    got, got_structure = tree_flatten(grads)
    if structure != got_structure:
        raise ValueError(f"grads must have the structure of params, got {got_structure} and expected {structure}")
    for n, (g, p) in enumerate(zip(got, wanted, strict=True)):
        if g.shape != p.shape or g.dtype != p.dtype or g.device != p.device:
            raise ValueError(
                f"grads{tree_paths(structure)[n]} must match its parameter: got {g.dtype}{list(g.shape)} "
                f"on {g.device}, expected {p.dtype}{list(p.shape)} on {p.device}"
            )
    return [_as_real(_dense(g)) for g in got if differentiable(g.dtype)]
