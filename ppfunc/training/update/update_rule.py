"""Define how gradients become new parameters."""

import reprlib
from collections.abc import Collection, Sequence
from math import inf
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from optree import PyTreeSpec
from torch import Tensor

from ppfunc._text import require_one_of, shown
from ppfunc.stage._torch import versions
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.form import Form, leaves_like
from ppfunc.stage.layout import local
from ppfunc.stage.modules.frozen import FrozenLeaves
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from .._torch import multiply_into_each
from ..optim.protocols import Optimizer, Tree, require_pair, skipping, text_of
from .precision import Precision
from .states import StateRule
from .train_state import TrainState, mark_donated

OnNonfinite = Literal["skip", "raise", "ignore"]
Flat = tuple[list[Tensor], PyTreeSpec, Form | None]
"""Leaves of a tree, its structure, and a form of this structure."""


class UpdateRule(NamedTuple):
    """Define how gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        max_norm: largest norm of all gradients together.
        norm_type: p of the norm.
        precision: the dtypes, and the scale of the loss.
        on_nonfinite: see :class:`ppfunc.Trainer`.
        frozen: the parameters that stay as they are.
        states: how the states of stages go on.
    """

    optimizer: Optimizer
    max_norm: float
    norm_type: float
    precision: Precision
    on_nonfinite: OnNonfinite
    frozen: FrozenLeaves
    states: StateRule

    @classmethod
    def of(
        cls,
        optimizer: Any,
        precision: Any,
        on_nonfinite: OnNonfinite,
        frozen: FrozenLeaves,
        states: StateRule,
    ) -> Self:
        """Make the rule of a trainer's arguments.

        Raises:
            TypeError, ValueError: arguments that do not fit together.
        """
        require_pair("optimizer", optimizer)
        if not isinstance(precision, Precision):
            raise TypeError(
                f"precision: got {shown(precision)}, expected Precision, such as"
                " ppfunc.Precision(compute=torch.bfloat16)"
            )
        require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        scale = precision.scale
        if scale is not None and scale.changes and on_nonfinite != "skip":
            raise ValueError(
                f"on_nonfinite: got {on_nonfinite!r} with the scale {scale.text}, which changes where an"
                " update is skipped; take 'skip', or a scale that never changes, such as"
                " ppfunc.static_scale(1024.0)"
            )
        max_norm, norm_type = inf, 2.0
        if (clipped := getattr(optimizer, "clipped", None)) is not None:
            clip, optimizer = clipped
            max_norm, norm_type = clip.max_norm, clip.norm_type
        return cls(skipping(optimizer), max_norm, norm_type, precision, on_nonfinite, frozen, states)

    @property
    def options_text(self) -> str:
        """Write the options that all ranks have to agree on."""
        dtypes = "/".join(
            str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master)
        )
        scaled = "a scaled loss" if self.precision.scale else "no scale"
        return (
            f"clip {self.max_norm} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is"
            f" not finite, {self.states.text}"
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


def updated(
    rule: UpdateRule,
    stage: int,
    grads: Tree,
    state: Flat,
    params: Flat,
    found_inf: Tensor | None,
    begun: TrainState,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the optimizer on gradients, its state and parameters of a stage, without frozen parameters.

    Args:
        found_inf: 1 where nothing may change, of a rule that skips.
        begun: the state that the caller gave, whose leaves the optimizer may write into.

    Returns:
        The leaves of the parameters and of the state.
    """
    leaves = [*state[0], *params[0]]
    before = versions(leaves)
    try:
        results = rule.optimizer.update(
            grads,
            state[1].unflatten(state[0]),
            params[1].unflatten(params[0]),
            found_inf=found_inf if rule.on_nonfinite == "skip" else None,
        )
    finally:
        pairs = zip(leaves, before, versions(leaves), strict=True)
        written = [leaf for leaf, one, other in pairs if one != other]
        mark_donated(begun.step, written)
    if not isinstance(results, tuple) or len(results) != 2:
        raise TypeError(
            f"the optimizer has returned {reprlib.repr(results)} for stage {stage}, expected (parameters,"
            " state)"
        )
    return _alike(stage, "parameter", params, results[0]), _alike(stage, "state", state, results[1])


def _alike(stage: int, name: str, old: Flat, new: Tree) -> list[Tensor]:
    """Return the leaves of a tree that the optimizer has made; raise ValueError for one of another form."""
    before, structure, form = old
    after, other_structure = None if form is None else leaves_like(new, form), structure
    if after is None:
        after, other_structure = tree_flatten(new)
    if other_structure != structure:
        raise ValueError(
            f"the optimizer has made the structure {other_structure} of the {name}s of stage {stage},"
            f" expected {structure} as before"
        )
    for n, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is other:
            continue
        if not isinstance(other, Tensor) or (one.dtype, one.shape, one.device) != (
            other.dtype,
            other.shape,
            other.device,
        ):
            got, expected = (
                f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else reprlib.repr(t)
                for t in (other, one)
            )
            where = f"the {name} {expected} of stage {stage}, {tree_paths(structure, name)[n]}"
            raise ValueError(
                f"the optimizer has made {got} of {where}; expected the same shape, dtype and device"
            )
    return after


def multiply(gradients: Collection[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, each in its dtype."""
    for device in dict.fromkeys(g.device for g in gradients):
        multiply_into_each([g for g in gradients if g.device == device], factor.to(device))


def updated_ones(optimizer: Optimizer, params: Tree, gradients: Sequence[float]) -> Tree:
    """Describe an optimizer by its update of ones, of one element each, in the place of parameters.

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
