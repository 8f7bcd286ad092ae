"""Carry, beside every value of a stage, its derivative along a direction, a tangent; of that, products with
second derivatives. Of a tree there is one per leaf that moves, None for a leaf that stays.

The formulas of torch for tangents are not to be differentiated in reverse: some take a part of what they
compute for a constant, without an error (the mean in ``layer_norm``, the factors in ``linalg.solve``). The
gradient of a dual function is instead the dual of the function's gradient::

    jvp(fn)               (x, tx)         -> (y, ty)
    its pullback          (h, g)          -> (hx, gx),  where  gx, hx = jvp(pullback of fn, (x, g), (tx, h))
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch import jvp
from ..abstract.output import Output, Received
from ..abstract.purity import Repeated
from ..layout import Boundary, declaring, layout_of
from ..program import Gradients, Leaves, Loss, Stage, without_aux
from ..signature import differentiable, flatten
from ..tree import filled, tree_flatten, tree_map, tree_paths, tree_structure


def dual(fn: Stage, *, slope_alone: bool = False) -> Stage:
    """Transform a stage into one on pairs of a value and its tangent: forward mode.

    Equivalent to, for any trees::

        def stage(params, x, *extras):
            (params, tangents), (x, tx) = params, x
            return torch.func.jvp(lambda p, a: fn(p, a, *extras), (params, x), (tangents, tx))

    A tangent has the structure of its value, with None for the leaves that do not move: integers,
    and whatever is held constant; None alone where nothing moves.

    Args:
        fn: a stage, ``fn(params, x, *extras) -> y``. All of its operators need a forward derivative;
            ``scaled_dot_product_attention`` runs unfused, since fused it has none.
        slope_alone: whether an auxiliary loss is differentiated in its derivative alone, as by
            :func:`dual_loss`.

    Returns:
        ``stage((params, tangents), (x, tx), *extras) -> (y, ty)``, a stage like any other. An
        auxiliary loss becomes a tensor[2], the loss and its derivative; skip connections become pairs.

    >>> dual(lambda w, x: w * x)((torch.tensor(2.0), torch.tensor(1.0)), (torch.tensor(3.0), None))
    (tensor(6.), tensor(3.))
    """

    @wraps(fn, updated=())  # its parameters have other names
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        (params, tangents), (x, tx) = params, _unzipped(x)
        y, ty = push(fn, (params, x), (tangents, tx), ("params", "x"), extras)
        if not isinstance(y, Output):
            return y, ty
        ty = ty or Output(None)
        slopes = ty.skips or {}
        skips = y.skips and {s: (value, slopes.get(s)) for s, value in y.skips.items()}
        loss = None if y.loss is None else _pair(y.loss, ty.loss, slope_alone)
        return Output((y.y, ty.y), loss, y.metrics, y.state, skips)

    return declaring(stage, Boundary.of(fn).map(lambda prefix: (prefix, prefix)))


def dual_loss(loss_fn: Loss, *, slope_alone: bool = False) -> Loss:
    """Return ``loss((y, ty), target) -> tensor[2]``: the loss, and its derivative along the direction.

    Args:
        loss_fn: ``loss(y, target) -> scalar``.
        slope_alone: whether the loss comes without a gradient. With ``g`` the gradient of the loss and ``H``
            its Hessian, dual stages compute the slope ``<g(params), tangents>``. The gradient of that with
            respect to ``params`` is ``H tangents``; with respect to ``tangents`` it is ``g``.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> loss = dual_loss(lambda y, target: (y - target) ** 3, slope_alone=True)
    >>> loss((torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(1.0))
    tensor([ 8., 12.])
    >>> torch.func.grad(lambda y: loss(y, torch.tensor(1.0)).sum())((torch.tensor(3.0), torch.tensor(1.0)))
    (tensor(12.), tensor(12.))
    """

    def loss(pair: Any, target: Any) -> torch.Tensor:
        y, ty = pair
        value, slope = push(without_aux(loss_fn), (y,), (ty,), ("y",), (target,))
        return _pair(value, slope, slope_alone)

    return loss


def _pair(value: torch.Tensor, slope: torch.Tensor | None, slope_alone: bool) -> torch.Tensor:
    value = value.detach() if slope_alone else value
    return torch.stack([value, torch.zeros_like(value) if slope is None else slope])


def _unzipped(x: Any) -> tuple[Any, Any]:
    """Split the input of a dual stage into its value and its tangent."""
    if not isinstance(x, Received):
        return x
    (value, tangent), skips = x
    values, tangents = ({s: pair[n] for s, pair in skips.items()} for n in (0, 1))
    return Received(value, values), Received(tangent, tangents)


def flatten_tangents(primal: Any, tangent: Any, name: str) -> Gradients:
    """Return the tangents of the leaves of ``primal``, in their order; errors call the tree ``name``.

    None in the place of a leaf, or of everything, stands for a tangent of zero. Integer leaves have no other.

    Raises:
        ValueError: another structure, shape or dtype, or a tangent of an integer leaf.
        TypeError: a leaf of ``tangent`` is neither a tensor nor None.

    >>> params = {"ids": torch.zeros(2).int(), "w": torch.zeros(())}
    >>> flatten_tangents(params, {"ids": None, "w": torch.ones(())}, "params")
    (None, tensor(1.))
    """
    leaves, treedef = flatten(primal, name)
    if tangent is None:
        return (None,) * len(leaves)
    try:
        tangents: list[Any] = treedef.flatten_up_to(tangent)
    except (ValueError, TypeError) as error:
        got = tree_structure(tangent)
        raise ValueError(
            f"tangent of {name}: got the structure {got}, expected {treedef}, with None for zero tangents"
        ) from error
    for path, leaf, value in zip(tree_paths(treedef, name), leaves, tangents, strict=True):
        if value is not None:
            _require_tangent(leaf, value, f"tangent of {path}")
    return tuple(tangents)


def _require_tangent(leaf: torch.Tensor, tangent: Any, name: str) -> None:
    if not isinstance(tangent, torch.Tensor):
        raise TypeError(
            f"{name}: got {tangent!r} of type {type(tangent).__name__}, expected a tensor, or None for zero"
        )
    if not differentiable(leaf.dtype):
        raise ValueError(
            f"{name}: got {tangent.dtype}{list(tangent.shape)}, expected None: {leaf.dtype} has no tangents"
        )
    if tangent.shape != leaf.shape or tangent.dtype != leaf.dtype or layout_of(tangent) != layout_of(leaf):
        got, want = (
            f"{t.dtype}{list(t.shape)}{f' {layout}' if (layout := layout_of(t)) else ''}"
            for t in (tangent, leaf)
        )
        raise ValueError(f"{name}: got {got}, expected {want}")


def push(
    fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    names: tuple[str, ...],
    others: tuple[Any, ...] = (),
) -> tuple[Any, Any]:
    """Compute ``fn(*primals, *others)`` and its derivative along ``tangents``, of primals that are trees.

    The second has the structure of the first, None for leaves without derivative; it is None alone where
    every tangent is zero.
    """
    leaves, treedef = tree_flatten((*primals, *others))
    slopes = [
        t for p, v, name in zip(primals, tangents, names, strict=True) for t in flatten_tangents(p, v, name)
    ]
    slopes += [None] * (len(leaves) - len(slopes))
    if not any(slope is not None for slope in slopes):
        return fn(*primals, *others), None
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    structure: list[Any] = []

    def run(values: Sequence[torch.Tensor]) -> Leaves:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward derivative
            y, y_def = flatten(fn(*treedef.unflatten(filled(leaves, tensors, values))), "y")
        structure[:] = [y_def]
        return y

    y, ty = _pushed(run, [leaves[i] for i in tensors], [slopes[i] for i in tensors])
    return structure[0].unflatten(y), structure[0].unflatten(ty)


# -- tangents whose gradients are the tangents of gradients

Flat = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Tangents = Sequence[torch.Tensor | None]


def _pushed(fn: Flat, at: Sequence[torch.Tensor], along: Tangents) -> tuple[Any, Any]:
    """Compute ``fn(at)`` and its tangents, None for integers.

    Their gradient is right. Its own gradient is that of torch's third derivatives: wrong for layer norm.
    """
    pairs = enumerate(zip(at, along, strict=True))
    wanted = [i for i, pair in pairs if any(t is not None and t.requires_grad for t in pair)]
    if not wanted:
        return _tangents(fn, at, along)
    results: Any = _Pushed.apply(Repeated(fn), wanted, *at, *along)
    half = len(results) // 2
    return results[:half], results[half:]


def _tangents(fn: Flat, at: Sequence[torch.Tensor], along: Tangents) -> tuple[Any, Any]:
    moving = [i for i, slope in enumerate(along) if slope is not None]

    def moved(*values: torch.Tensor) -> tuple[Leaves, Sequence[torch.Tensor]]:
        y = fn(filled(at, moving, values))
        return tuple(t for t in y if differentiable(t.dtype)), y

    # Where it is off, some operators keep less for their backward, or compute that from constants.
    with torch.enable_grad():
        _, pushed, y = jvp(moved, *(tuple(values[i] for i in moving) for values in (at, along)), has_aux=True)
    rest = iter(pushed)
    return y, [next(rest) if differentiable(t.dtype) else None for t in y]


def _pullback(
    fn: Flat, at: Sequence[torch.Tensor], wanted: Sequence[int], of: Sequence[int] | None = None
) -> tuple[Sequence[torch.Tensor], Callable[..., Leaves]]:
    """Compute ``fn(at)``, and the pullback of the results ``of`` to the wanted arguments."""

    def some(*values: torch.Tensor) -> tuple[Leaves, Sequence[torch.Tensor]]:
        y = fn(filled(at, wanted, values))
        return tuple(y[i] for i in (range(len(y)) if of is None else of) if differentiable(y[i].dtype)), y

    pulled: Any = torch.func.vjp(some, *(at[i] for i in wanted), has_aux=True)
    return pulled[2], pulled[1]


class _Pushed(torch.autograd.Function):
    """Pushes tangents through a function. Its backward pushes them through the pullback of the function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(fn: Flat, wanted: Sequence[int], *values: Any) -> Any:
        values, n = tree_map(torch.Tensor.detach, values), len(values) // 2
        y, ty = _tangents(lambda at: _pullback(fn, at, wanted)[0], values[:n], values[n:])
        return *y, *ty

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.fn, ctx.wanted, *values = inputs
        ctx.save_for_backward(*values)
        ctx.mark_non_differentiable(*(t for t in output if t is not None and not differentiable(t.dtype)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        fn, wanted, values = ctx.fn, ctx.wanted, ctx.saved_tensors
        if not torch.is_grad_enabled():
            values, cotangents = (tree_map(torch.Tensor.detach, ts) for ts in (values, cotangents))
        n, half = len(values) // 2, len(cotangents) // 2
        pairs = list(zip(cotangents[:half], cotangents[half:], strict=True))
        of = [i for i, (h, g) in enumerate(pairs) if h is not None or g is not None]
        h = [pairs[i][0] for i in of]
        g = [torch.zeros_like(pairs[i][0]) if pairs[i][1] is None else pairs[i][1] for i in of]

        def pull(inside: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return _pullback(fn, inside[:n], wanted, of)[1](tuple(inside[n:]))

        gradients, moved = _pushed(pull, [*values[:n], *g], [*values[n:], *h])
        of_values, of_slopes = (filled([None] * n, wanted, found) for found in (moved, gradients))
        held = [None if slope is None else found for slope, found in zip(values[n:], of_slopes, strict=True)]
        return None, None, *of_values, *held
