"""Compute norms of gradients of which each rank has a part."""

from collections.abc import Sequence
from math import inf, isinf
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ppfunc._checks import naming_arguments, require_real
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_leaves, tree_map

from ._torch import looked_through, norms_of_each

_DTYPE = attrgetter("dtype")
_ROW, _LONG = 4096, 16_384  # elements of a row, and of the shortest leaf that is read in rows


def leaf_norms(leaves: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Compute the norm of each leaf.

    Args:
        leaves: gradients of this rank. Those that are neither floating nor complex count as 0.
        norm_type: p.

    Returns:
        float32 or float64[leaves], on the device of the first. Halves are squared in float32.
    """
    sizes = list(map(torch.Tensor.numel, leaves))
    if all(sizes) and len(set(map(_DTYPE, leaves))) == len(set(map(torch.Tensor.get_device, leaves))) == 1:
        return _norms(leaves, norm_type, max(sizes))
    norms = torch.zeros(len(leaves), dtype=torch.float64, device=leaves[0].device if leaves else None)
    by_leaf, by_kind = list(norms.unbind()), dict[tuple[torch.dtype, torch.device], list[int]]()
    for n, leaf in enumerate(leaves):
        if sizes[n]:
            by_kind.setdefault((leaf.dtype, leaf.device), []).append(n)
    for alike in by_kind.values():
        own = _norms([leaves[n] for n in alike], norm_type, max(sizes)).to(norms)
        for n, norm in zip(alike, own.unbind(), strict=True):  # an index would be a tensor of the host
            by_leaf[n] = norm
    return torch.stack(by_leaf) if by_leaf else norms


def powers(norms: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Raise the results of :func:`leaf_norms` to p, float64; for infinity, leave them."""
    return norms.double() if isinf(norm_type) else norms.double().pow(norm_type)


def _norms(leaves: Sequence[torch.Tensor], norm_type: float, largest: int) -> torch.Tensor:
    """Compute the norms of leaves that have elements, of one dtype and device: float[leaves].

    Args:
        largest: elements of a leaf, at most.
    """
    if not differentiable(leaves[0].dtype):
        return torch.zeros(len(leaves), dtype=torch.float64, device=leaves[0].device)
    if leaves[0].dtype.is_complex:
        leaves = [leaf.abs() for leaf in leaves]
    wide = torch.promote_types(leaves[0].dtype, torch.float32)
    if leaves[0].dtype != wide:
        leaves = [leaf.to(wide) for leaf in leaves]
    if looked_through(leaves):
        return torch.stack(
            [torch.linalg.vector_norm(leaf, norm_type, dtype=torch.float64) for leaf in leaves]
        )
    if leaves[0].is_cpu and largest > _LONG:
        leaves = [_in_rows(leaf, norm_type) if leaf.numel() > _LONG else leaf for leaf in leaves]
    return torch.stack(norms_of_each(tuple(leaves), norm_type))


def _in_rows(leaf: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Compute norms of rows of a long leaf on the CPU, float64, which together have the norm of the leaf.

    There torch adds up the squares one by one: 10**6 of float32 are off by 1e-5.
    """
    flat = leaf.flatten()
    rows = flat[: flat.numel() // _ROW * _ROW].unflatten(0, (-1, _ROW))
    rest = flat[rows.numel() :]
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1)
    return torch.cat(
        [norms, torch.linalg.vector_norm(rest, norm_type)[None]] if rest.numel() else [norms]
    ).double()


def norm_sum(sums: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Add up the results of :func:`powers`, float64[]; for the infinity norm, take the largest."""
    return sums.amax() if isinf(norm_type) and len(sums) else sums.sum()


def norm_of(total: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Compute the norm from the sum over all ranks of :func:`norm_sum`."""
    return total if isinf(norm_type) else total.pow(1 / norm_type)


@naming_arguments
def global_norm(tree: Any, norm_type: float = 2.0) -> torch.Tensor:
    """Compute the norm of all leaves of a tree as of one vector, float64[].

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)}).item()
    5.0
    """
    sums = powers(leaf_norms(tree_leaves(tree), norm_type), norm_type)
    return norm_of(norm_sum(sums, norm_type), norm_type)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """Compute the factor of clipping, a tensor like ``norm``: ``min(1, max_norm / (norm + 1e-6))``.

    Returns None for an infinite ``max_norm``.
    A norm that is not finite gives a factor of 0 or no number: such a step has to be skipped.
    """
    return None if max_norm == inf else (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Clip(NamedTuple):
    """Clip gradients by the norm of all of them.

    Args:
        max_norm: larger norms are clipped to it.
        norm_type: p of the norm.
    """

    max_norm: float
    norm_type: float

    @property
    def text(self) -> str:
        """Write the numbers of the clip, which ranks that train together compare."""
        return f"clip_by_global_norm({self.max_norm}, {self.norm_type})"

    def __call__(self, grads: Any) -> Any:
        factor = clip_coefficient(global_norm(grads, self.norm_type), self.max_norm)
        if factor is None:
            return grads
        return tree_map(
            lambda g: g * factor.to(g.device, g.real.dtype) if differentiable(g.dtype) else g, grads
        )


@naming_arguments
def clip_by_global_norm(max_norm: float, norm_type: float = 2.0) -> Clip:
    """Make a clip: scale all gradients by one factor, so that their norm is at most ``max_norm``.

    Equivalent to ``torch.nn.utils.clip_grad_norm_``: the factor is ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        max_norm: 0 makes all gradients 0, infinity changes nothing.
        norm_type: p of the norm, more than 0, or infinity.

    Raises:
        ValueError, TypeError: a negative number, or one that is none.
    """
    require_real("max_norm", max_norm)
    require_real("norm_type", norm_type, ", such as math.inf" if str(norm_type) == "inf" else "")
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type is {norm_type}, expected a number of more than 0, or math.inf")
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm is {max_norm}, expected a norm, at least 0, or math.inf for none")
    return Clip(max_norm, norm_type)
