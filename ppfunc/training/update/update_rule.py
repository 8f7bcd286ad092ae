"""Define how gradients become new parameters."""

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ppfunc.runtime.execution.torch_state import preserve_rng
from ppfunc.stage.layout import local
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from ..optim.protocols import Optimizer, Tree, text_of
from .precision import Precision

OnNonfinite = Literal["skip", "raise", "ignore"]


class UpdateRule(NamedTuple):
    """Define how gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        max_norm: largest norm of all gradients together.
        norm_type: p of the norm.
        precision: the dtypes, and the scale of the loss.
        on_nonfinite: what to do where loss or norm are not finite.
    """

    optimizer: Optimizer
    max_norm: float
    norm_type: float
    precision: Precision
    on_nonfinite: OnNonfinite

    @property
    def options_text(self) -> str:
        """Write the options that all ranks have to agree on."""
        dtypes = "/".join(
            str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master)
        )
        scaled = "a scaled loss" if self.precision.scale else "no scale"
        return (
            f"clip {self.max_norm} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is"
            " not finite"
        )

    @property
    def numbers_text(self) -> tuple[str, str]:
        """Write the numbers of the optimizer and of the scale."""
        return (
            f"optimizer {text_of(self.optimizer)}",
            f"scale {'none' if self.precision.scale is None else self.precision.scale.text}",
        )

    @property
    def needs_all(self) -> bool:
        """Tell if an update needs the gradients of all stages."""
        return not (self.max_norm == inf and self.precision.scale is None and self.on_nonfinite == "ignore")


def updated_ones(optimizer: Optimizer, params: Tree, gradients: Sequence[float]) -> Tree:
    """Show what an optimizer does: update ones, of one element each, in the place of parameters.

    Args:
        params: their structure, dimensions and dtypes.
        gradients: of every element, in update after update.
    """

    ones = tree_map(_one, params)
    with preserve_rng(leaf.device for leaf in tree_leaves(ones)):  # an optimizer may draw
        state = optimizer.init(ones)
        for value in gradients:
            grads = tree_map(
                lambda leaf, value=value: (
                    torch.full_like(leaf, value) if differentiable(leaf.dtype) else leaf
                ),
                ones,
            )
            ones, state = optimizer.update(grads, state, ones)
    return ones


def require_state_of(rule: UpdateRule, params: Tree, state: Tree, name: str) -> None:
    """Raise ValueError unless a tree is a state of the optimizer for such parameters; errors say ``name``."""
    expected, structure = tree_flatten(rule.optimizer.init(tree_map(_one, params)))
    leaves, state_structure = flatten(state, name)
    text = (
        f"which the optimizer {text_of(rule.optimizer)} {{}}; go on with the optimizer whose state it is, or"
        " init anew"
    )
    if state_structure != structure:
        theirs, ours = tree_paths(state_structure), tree_paths(structure)
        lacking, further = [p for p in ours if p not in theirs], [p for p in theirs if p not in ours]
        got = (
            f"no {lacking[0]}, {text.format('keeps')}"
            if lacking
            else f"{(further or theirs)[0]}, {text.format('does not keep')}"
        )
        raise ValueError(f"{name}: got {got}")
    for path, one, other in zip(tree_paths(structure, name), leaves, expected, strict=True):
        if (one.dtype, one.ndim) != (other.dtype, other.ndim):
            got, known = (f"{t.dtype} of {t.ndim} dimensions" for t in (one, other))
            raise ValueError(f"{path}: got {got}, expected {known}, {text.format('keeps')}")


def _one(leaf: Tensor) -> Tensor:
    """Make ones of at most one element, of the dimensions and the dtype of a leaf."""
    leaf = local(leaf)
    return torch.ones([min(1, size) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)
