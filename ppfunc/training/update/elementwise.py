"""Refuse optimizers that work on whole leaves where ranks have parts of them."""

from collections.abc import Sequence

import torch
from optree import PyTreeSpec
from torch import Tensor

from ppfunc.stage.device import preserve_rng
from ppfunc.stage.errors import raised
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_paths

from ..optim.protocols import Optimizer, Tree, text_of

_LARGEST = 256  # elements along a dimension: optimizers may treat small ones in another way


def require_elementwise(optimizer: Optimizer, params: Tree, dims: Sequence[int | None], name: str) -> None:
    """Raise ValueError if updates of parts of parameters are not the parts of updates.

    Runs three updates of random numbers in float64, where a small rate shows: once whole, and for halves.

    Args:
        params: of a stage, whole or parts.
        dims: the dimension along which each is cut over ranks, None for those that are not.
        name: of the parameters, for errors.
    """
    if optimizer.elementwise or all(dim is None for dim in dims):
        return
    leaves, treedef = tree_flatten(params)
    draw = torch.Generator().manual_seed(0)
    columns = [[_random(p, dim, draw) for p, dim in zip(leaves, dims, strict=True)] for _ in range(4)]
    halves = [
        [
            [t if dim is None else t.chunk(2, dim)[n] for t, dim in zip(row, dims, strict=True)]
            for row in columns
        ]
        for n in range(2)
    ]
    try:
        with preserve_rng({leaf.device for leaf in leaves}):  # an optimizer may draw
            whole, *parts = (_trained(optimizer, treedef, each) for each in (columns, *halves))
    except Exception as error:
        raise ValueError(
            f"{name}: the optimizer {text_of(optimizer)} cannot be tried out on float64 of another size:"
            f" {raised(error)}; if it works element by element, say so, Optimizer(..., elementwise=True)"
        ) from error
    for path, dim, expected, *got in zip(tree_paths(treedef, name), dims, whole, *parts, strict=True):
        joined = got[0] if dim is None else torch.cat(got, dim)
        if not torch.allclose(joined, expected, rtol=1e-12, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"{path}: got the optimizer {text_of(optimizer)}, which updates a part of a parameter in"
                " another way than the whole; ranks hold parts of this one; expected an optimizer that works"
                " element by element, such as ppfunc.optim.adamw, or whole parameters: shard='none', and no"
                " tensor parallel ones"
            )


def _random(leaf: Tensor, dim: int | None, draw: torch.Generator) -> Tensor:
    """Draw a tensor like a leaf, of an even size along ``dim``; zeros for leaves that do not train."""
    shape = [
        min(size, _LARGEST) // 2 * 2 or 2 if d == dim else min(size, _LARGEST)
        for d, size in enumerate(leaf.shape)
    ]
    if not differentiable(leaf.dtype):
        return leaf.new_zeros(shape)
    wide = torch.complex128 if leaf.dtype.is_complex else torch.float64
    return torch.randn(shape, generator=draw, dtype=wide).to(leaf.device)


def _trained(optimizer: Optimizer, treedef: PyTreeSpec, columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return parameters, the first column, after updates by gradients, the others."""
    params, *gradients = (treedef.unflatten(t.clone() for t in column) for column in columns)
    state = optimizer.init(params)
    for grads in gradients:
        params, state = optimizer.update(grads, state, params)
    return tree_leaves(params)
