"""Read and push tangents of trees: one per leaf that moves, None for a leaf that stays.

The forward derivatives of ``layer_norm`` and, in training, of ``batch_norm`` and ``instance_norm`` take the
mean and the variance of the input for constants when they are differentiated themselves (torch 2.13):
gradients through them are wrong, without an error. Those of torch's decompositions are exact, which are
pushed in their place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch import DECOMPOSITIONS, jvp, require_batch, require_spatial
from ..layout import layout_of
from ..signature import differentiable, flatten
from ..tree import tree_flatten, tree_paths, tree_structure

Leaves = tuple[torch.Tensor, ...]
Tangents = tuple[torch.Tensor | None, ...]  # one entry per leaf, None for a zero tangent


def flatten_tangents(primal: Any, tangent: Any, name: str) -> Tangents:
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
            y, y_def = flatten(fn(*treedef.unflatten(replaced(leaves, moving, moved))), "y")
        structure.append(y_def)
        return tuple(t for t in y if differentiable(t.dtype)), y

    at, along = (tuple(values[i] for i in moving) for values in (leaves, slopes))
    _, pushed, y = jvp(run, at, along, has_aux=True)
    rest = iter(pushed)
    ty = [next(rest) if differentiable(t.dtype) else None for t in y]
    return structure[0].unflatten(y), structure[0].unflatten(ty)


def replaced(
    leaves: Sequence[torch.Tensor], places: Sequence[int], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the leaves, with ``values`` at ``places``."""
    full = list(leaves)
    for i, value in zip(places, values, strict=True):
        full[i] = value
    return full


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
