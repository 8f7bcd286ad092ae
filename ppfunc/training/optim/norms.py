"""Compute norms of gradients of which each rank has a part."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_leaves, tree_map

from .._torch import norms_of_each
from ..checks import require_real


def leaf_sums(leaves: Sequence[Tensor]) -> Tensor:
    """Sum ``|x|**2`` over each leaf.

    Args:
        leaves: gradients of this rank. Those that are neither floating nor complex count as 0.

    Returns:
        float64[leaves], on the device of the first. Halves are squared in float32.
    """
    trained = [n for n, leaf in enumerate(leaves) if differentiable(leaf.dtype) and leaf.numel()]
    device = leaves[0].device if leaves else None
    none = torch.zeros(1, dtype=torch.float64, device=device)
    sums_by_leaf = [none] * len(leaves)
    for kind in dict.fromkeys((leaves[n].dtype, leaves[n].device) for n in trained):
        alike = [n for n in trained if (leaves[n].dtype, leaves[n].device) == kind]
        norms = torch.stack(_norms([leaves[n].detach() for n in alike])).to(none)
        for n, norm in zip(alike, norms.split(1), strict=True):  # an index would be a tensor of the host
            sums_by_leaf[n] = norm
    return (torch.cat(sums_by_leaf) if leaves else none[:0]).square()


def _norms(leaves: list[Tensor]) -> list[Tensor]:
    """Compute the norms of leaves of one dtype, in float32 or wider."""
    if leaves[0].dtype.is_complex:
        leaves = [leaf.abs() for leaf in leaves]
    wide = torch.promote_types(leaves[0].dtype, torch.float32)
    if leaves[0].dtype != wide:
        leaves = [leaf.to(wide) for leaf in leaves]
    return list(norms_of_each(leaves))


def global_norm(tree: Any) -> Tensor:
    """Compute the norm of all leaves of a tree as of one vector, float64[].

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)}).item()
    5.0
    """
    return leaf_sums(tree_leaves(tree)).sum().sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor | None:
    """Compute the factor of clipping, a tensor like ``norm``: ``min(1, max_norm / (norm + 1e-6))``.

    Returns None for an infinite ``max_norm``.
    A norm that is not finite gives a factor of 0 or no number: such a step has to be skipped.
    """
    return None if max_norm == inf else (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Clip(NamedTuple):
    """Clip gradients by the norm of all of them.

    Args:
        max_norm: larger norms are clipped to it.
    """

    max_norm: float

    @property
    def text(self) -> str:
        """Its number, which ranks that train together compare."""
        return f"clip_by_global_norm({self.max_norm})"

    @torch.no_grad()
    def __call__(self, grads: Any) -> Any:
        """Clip the gradients of a tree by its norm."""
        factor = clip_coefficient(global_norm(grads), self.max_norm)
        if factor is None:
            return grads
        return tree_map(
            lambda g: g * factor.to(g.device, g.real.dtype) if differentiable(g.dtype) else g, grads
        )


def clip_by_global_norm(max_norm: float) -> Clip:
    """Make a clip: scale all gradients by one factor, so that their norm is at most ``max_norm``.

    Equivalent to ``torch.nn.utils.clip_grad_norm_``: the factor is ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        max_norm: 0 makes all gradients 0, infinity changes nothing.

    Raises:
        ValueError, TypeError: a negative number, or one that is none.
    """
    require_real("max_norm", max_norm)
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm is {max_norm}, expected a norm, at least 0, or math.inf for none")
    return Clip(max_norm)
