"""Define how gradients become new parameters."""

import reprlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from math import inf
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from optree import PyTreeSpec

from ppfunc._checks import require_one_of, require_type
from ppfunc.runtime.values.arguments import Form, leaves_like
from ppfunc.stage._torch import versions
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.frozen import FrozenLeaves
from ppfunc.stage.layout import local
from ppfunc.stage.process import hold_interrupts
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from ..optim._torch import looked_through
from ..optim.groups import noting_patterns
from ..optim.norms import Clip
from ..optim.protocols import Optimizer, Tree, UpdateLeaves, prepared, require_pair, skipping, text_of
from ..optim.whole import matrices_by
from .matrices import CutMatrices, on_matrices
from .precision import Precision
from .states import StateRule
from .train_state import Donation, are, refs, updated_from

OnNonfinite = Literal["skip", "raise", "ignore"]


class UpdateRule(NamedTuple):
    """Define how gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: by the norm of all gradients together.
        precision: the dtypes, and the scale of the loss.
        on_nonfinite: see :class:`ppfunc.Trainer`.
        frozen: the parameters that stay as they are.
        states: how the states of stages go on.
    """

    optimizer: Optimizer
    clip: Clip
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
        require_type(
            "precision", precision, Precision, "Precision, such as ppfunc.Precision(compute=torch.bfloat16)"
        )
        require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        scale = precision.scale
        if scale is not None and scale.changes and on_nonfinite != "skip":
            raise ValueError(
                f"on_nonfinite: got {on_nonfinite!r} with the scale {scale.text}, which changes where an"
                " update is skipped; take 'skip', or a scale that never changes, such as"
                " ppfunc.static_scale(1024.0)"
            )
        clip, optimizer = getattr(optimizer, "clipped", None) or (Clip(inf, 2.0), optimizer)
        return cls(skipping(optimizer), clip, precision, on_nonfinite, frozen, states)

    @property
    def options_text(self) -> str:
        """Write the options that all ranks have to agree on, terms separated by ``"; "``."""
        dtypes = "/".join(
            str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master)
        )
        scale = "none" if self.precision.scale is None else self.precision.scale.text
        return (
            f"{self.clip.text}; scale {scale}; dtypes to compute, reduce and keep {dtypes}; on_nonfinite"
            f" {self.on_nonfinite}; {self.states.text}"
        )


class StageUpdate:
    """Updates the leaves of a stage, each time those that it made the last time, without frozen parameters.

    Args:
        rule: how gradients become new parameters.
        stage: of the model, for errors.
        params, optimizer: forms of the parameters that train, and of the optimizer state.
        axes: those that cut matrices of these parameters.
    """

    def __init__(
        self, rule: UpdateRule, stage: int, params: Form, optimizer: Form, axes: Sequence[CutMatrices]
    ) -> None:
        self._rule, self._stage, self._forms, self._axes = rule, stage, (params, optimizer), axes
        self._run: UpdateLeaves | None = None
        self._donation, self._written = Donation(stage), refs(())

    def __call__(
        self,
        grads: list[torch.Tensor],
        state: list[torch.Tensor],
        params: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        step: torch.Tensor,
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Run the optimizer.

        Args:
            found_inf: 1 where nothing may change, of a rule that skips.
            step: of the state that the caller gave, whose leaves the optimizer may write into.

        Returns:
            The leaves of the parameters and of the state.
        """
        rule, (of_params, of_state) = self._rule, self._forms
        found_inf = found_inf if rule.on_nonfinite == "skip" else None
        seen, written = looked_through((grads, state, params)), list[torch.Tensor]()
        if self._run is None and not seen:
            if (found := updated_from(step, (*state, *params))) is not None:
                names = (f"{name}[{self._stage}]" for name in ("state.optimizer", "state.params"))
                pairs = zip((of_state, of_params), names, strict=True)
                paths = [path for form, name in pairs for path in tree_paths(form.treedef, name)]
                raise ValueError(
                    f"{paths[found[0]]} shares its memory with stage {found[1]}, whose update from this state"
                    " has written there in place; pass donate=False or make them separate tensors"
                )
            trees = of_state.treedef.unflatten(state), of_params.treedef.unflatten(params)
            self._run = prepared(rule.optimizer, *trees) or self._by_trees
        try:
            run = self._by_trees if seen or self._run is None else self._run
            with matrices_by(self._on_matrices) if self._axes else nullcontext():
                return run(grads, state, params, found_inf, written)
        finally:
            if written:
                marked = are(self._written, written)
                self._donation.mark(step, () if marked else written)
                self._written = self._written if marked else refs(written)

    def _on_matrices(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        """Apply a function to whole matrices, of a tree with None in the place of other parameters."""
        column: list[Any] = self._forms[0].treedef.flatten_up_to(tree)
        for dtype in {leaf.dtype: None for leaf in column if leaf is not None}:
            alike = {n: leaf for n, leaf in enumerate(column) if leaf is not None and leaf.dtype == dtype}
            for n, leaf in on_matrices(fn, alike, self._axes).items():
                column[n] = leaf
        return self._forms[0].treedef.unflatten(column)

    def _by_trees(
        self,
        grads: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        found_inf: torch.Tensor | None,
        written: list[torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run an update that knows trees alone; ``written`` gets the leaves that it has written into."""
        stage, (of_params, of_state) = self._stage, self._forms
        leaves = [*state, *params]
        before = versions(leaves)
        try:
            results = self._rule.optimizer.update(
                of_params.treedef.unflatten(grads),
                of_state.treedef.unflatten(state),
                of_params.treedef.unflatten(params),
                found_inf=found_inf,
            )
        finally:
            pairs = zip(leaves, before, versions(leaves), strict=True)
            written += [leaf for leaf, one, other in pairs if one != other]
        if not isinstance(results, tuple) or len(results) != 2:
            raise TypeError(
                f"the optimizer has returned {reprlib.repr(results)} for stage {stage}, expected (parameters,"
                " state)"
            )
        new, after = results
        return _alike(stage, "parameter", params, of_params, new), _alike(
            stage, "state", state, of_state, after
        )


def _alike(
    stage: int, name: str, before: Sequence[torch.Tensor], form: Form, new: Tree
) -> list[torch.Tensor]:
    """Return the leaves of a tree that the optimizer has made; raise ValueError for one of another form."""
    after = leaves_like(new, form)
    if after is None:  # its keys may be in another order
        after, structure = tree_flatten(new)
        if structure != form.treedef:
            raise ValueError(
                f"the optimizer has made the structure {structure} of the {name}s of stage {stage},"
                f" expected {form.treedef} as before; let its update return trees of the form it was given"
            )
    for n, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is other:
            continue
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape, one.device) != (
            other.dtype,
            other.shape,
            other.device,
        ):
            got, expected = (
                f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else reprlib.repr(t)
                for t in (other, one)
            )
            where = f"the {name} {expected} of stage {stage}, {tree_paths(form.treedef, name)[n]}"
            raise ValueError(
                f"the optimizer has made {got} of {where}; expected the same shape, dtype and device"
            )
    return after


def updated_ones(optimizer: Optimizer, params: Tree, gradients: Sequence[float] = (1.0, -0.5, 0.25)) -> Tree:
    """Update ones by an optimizer, to compare optimizers: each parameter is replaced by one element.

    Args:
        params: a tree, of which the structure, dimensions and dtypes are used.
        gradients: the gradient of every element, one number per update.
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


def require_state_of(
    rule: UpdateRule, params: Tree, state: Tree, name: str
) -> tuple[PyTreeSpec, dict[str, bool]]:
    """Return the structure of a state of the optimizer, with keys in the order of these parameters.

    Returns:
        That, and whether each pattern of the optimizer takes one of the parameters.

    Raises:
        ValueError: this tree is no such state, whatever the order of its keys; errors say ``name``.
    """
    flatten(state, name)  # raises for leaves that are no tensors
    ones, init = tree_map(_one, params), rule.optimizer.init
    with preserve_rng(leaf.device for leaf in tree_leaves(ones)), noting_patterns() as used:
        sized = None
        with hold_interrupts(), suppress(Exception):  # it needs values: sizes are compared by its updates
            sized = init(tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), params))
        made = init(ones)  # last: an optimizer may keep what it was given
    known = sized is not None
    expected_state = sized if known else made
    ours, theirs = (_forms(tree, name, known) for tree in (expected_state, state))
    for path in {**ours, **theirs}:
        got, expected = (forms.get(path, "nothing") for forms in (theirs, ours))
        if got != expected:
            raise ValueError(
                f"{path}: got {got}, expected {expected}, which the optimizer {text_of(rule.optimizer)}"
                " keeps; go on with the optimizer whose state it is, or init anew"
            )
    structure = tree_structure(expected_state)
    try:
        structure.flatten_up_to(state)
    except ValueError:
        raise ValueError(
            f"{name}: got the structure {tree_structure(state)}, expected {structure}, with keys in any order"
        ) from None
    return structure, used


def _forms(tree: Tree, name: str, sized: bool) -> dict[str, str]:
    leaves, treedef = tree_flatten(tree)
    pairs = zip(tree_paths(treedef, name), leaves, strict=True)
    return {
        path: f"{t.dtype} of " + (f"shape {[*t.shape]}" if sized else f"{t.ndim} dimensions")
        for path, t in pairs
    }


def _one(leaf: torch.Tensor) -> torch.Tensor:
    """Make ones of at most one element, of the dimensions and the dtype of a leaf."""
    leaf = local(leaf)
    return torch.ones([min(1, size) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)
