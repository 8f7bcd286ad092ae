"""Carry, beside every value of a stage, its derivative along a direction, a tangent; of that, products with
second derivatives. Of a tree there is one per leaf that moves, None for a leaf that stays.

The forward derivatives of ``layer_norm`` and, in training, of ``batch_norm`` and ``instance_norm`` take the
mean and the variance of the input for constants when they are differentiated themselves (torch 2.13):
gradients through them are wrong, without an error. Those of torch's decompositions are exact, which are
pushed in their place.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch import DECOMPOSITIONS, jvp, require_batch, require_spatial
from ..layout import Boundary, declaring, layout_of
from ..output import Output, Received
from ..program import Gradients, Leaves, Loss, Stage, without_aux
from ..signature import differentiable, flatten
from ..tree import filled, tree_flatten, tree_paths, tree_structure


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
    fn: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], names: tuple[str, ...]
) -> tuple[Any, Any]:
    """Compute ``fn(*primals)`` and its derivative along ``tangents``: :func:`torch.func.jvp` for any trees.

    The second has the structure of the first, None for leaves without derivative; it is None alone where
    every tangent is zero.
    """
    leaves, treedef = tree_flatten(primals)
    slopes = [
        t for p, v, name in zip(primals, tangents, names, strict=True) for t in flatten_tangents(p, v, name)
    ]
    moving = [i for i, slope in enumerate(slopes) if slope is not None]
    if not moving:
        return fn(*primals), None
    structure: list[Any] = []

    def run(*moved: torch.Tensor) -> tuple[Leaves, Leaves]:
        # Fused attention has no forward derivative, normalisation one that is differentiated wrongly.
        with sdpa_kernel(SDPBackend.MATH), DecomposedNorms():
            y, y_def = flatten(fn(*treedef.unflatten(filled(leaves, moving, moved))), "y")
        structure.append(y_def)
        return tuple(t for t in y if differentiable(t.dtype)), y

    at, along = (tuple(values[i] for i in moving) for values in (leaves, slopes))
    _, pushed, y = jvp(run, at, along, has_aux=True)
    rest = iter(pushed)
    ty = [next(rest) if differentiable(t.dtype) else None for t in y]
    return structure[0].unflatten(y), structure[0].unflatten(ty)


# -- normalisation by torch's decompositions

_LAYER = DECOMPOSITIONS[torch.ops.aten.native_layer_norm.default]
_BATCH = DECOMPOSITIONS[torch.ops.aten._native_batch_norm_legit.no_stats]


class DecomposedNorms(torch.overrides.TorchFunctionMode):
    """Compute normalisation by decompositions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _DECOMPOSED.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    return _LAYER(input, list(normalized_shape), weight, bias, eps)[0]


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    require_batch(input.size())
    if running_mean is not None or running_var is not None:
        # For its effect on the running statistics, which have no derivative.
        F.batch_norm(input.detach(), running_mean, running_var, None, None, training, momentum, eps)
    return _BATCH(input, weight, bias, training, momentum, eps)[0]


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if running_mean is not None or running_var is not None:
        raise NotImplementedError(
            "instance norm with running statistics has no second derivatives here; set"
            " track_running_stats=False"
        )
    require_spatial(input.size())
    b = len(input)
    scale, shift = (None if t is None else t.repeat(b) for t in (weight, bias))
    y = _BATCH(rearrange(input, "b c ... -> 1 (b c) ..."), scale, shift, True, momentum, eps)[0]
    return rearrange(y, "1 (b c) ... -> b c ...", b=b)


_DECOMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.layer_norm: _layer_norm,
    F.layer_norm: _layer_norm,
    torch.batch_norm: lambda x, weight, bias, mean, var, *rest: _batch_norm(
        x, mean, var, weight, bias, *rest[:3]
    ),
    F.batch_norm: _batch_norm,
    torch.instance_norm: lambda x, weight, bias, mean, var, *rest: _instance_norm(
        x, mean, var, weight, bias, *rest[:3]
    ),
    F.instance_norm: _instance_norm,
}
