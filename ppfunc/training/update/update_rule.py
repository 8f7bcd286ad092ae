"""Define how gradients become new parameters, and how the states of stages go on."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from optree import PyTreeSpec

from ppfunc._checks import require_one_of, require_type, shown
from ppfunc.runtime.ports.protocols import Collective, Wait
from ppfunc.runtime.values.arguments import Form
from ppfunc.runtime.values.buffers import Leaves
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.frozen import FrozenLeaves
from ppfunc.stage.layout import local
from ppfunc.stage.process import hold_interrupts
from ppfunc.stage.signature import (
    Signature,
    differentiable,
    first_match,
    flatten,
    leaf_names,
    require_reachable,
)
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from ..optim._torch import looked_through
from ..optim.norms import Clip
from ..optim.optimizer import (
    Optimizer,
    Tree,
    UpdateLeaves,
    require_pair,
    skipping,
    text_of,
)
from ..optim.updates import matrices_by
from .precision import Precision
from .ranks import CutMatrices, TrainingRanks, on_matrices

ReduceState = Mapping[str, str]
"""By patterns of names, as of a shell, alternatives divided by ``|``: ``"mean"`` or ``"sum"``."""

UpdateState = Callable[[int, Any], Any]
"""``(stage, its state) -> its new state``, a tree of the same form."""


class StateRule(NamedTuple):
    """Define how the states of stages go on from one step to the next.

    Args:
        reduce: ``"sum"`` or ``"mean"`` over the data ranks, by pattern of names; None for one data rank.
        update: changes the state of a stage at the end of a step.
    """

    reduce: ReduceState | None
    update: UpdateState | None

    @classmethod
    def of(cls, reduce: Any, update: Any) -> Self:
        """Make the rule of a trainer's arguments.

        Raises:
            TypeError, ValueError: other arguments; a pattern that an earlier one hides.
        """
        if reduce is not None and not (
            isinstance(reduce, Mapping)
            and all(isinstance(name, str) and how in ("mean", "sum") for name, how in reduce.items())
        ):
            raise TypeError(
                f"reduce_state: got {shown(reduce)}, expected 'mean' or 'sum' by pattern of names, such as"
                ' {"*counts": "sum", "*": "mean"}'
            )
        require_reachable("reduce_state", reduce or ())
        if update is not None and not callable(update):
            raise TypeError(f"update_state: got {shown(update)}, expected a function (stage, state) -> state")
        return cls(reduce, update)

    @property
    def text(self) -> str:
        """Write the rule for other ranks to compare."""
        reduced = ", ".join(f"{name} by {how}" for name, how in (self.reduce or {}).items())
        update = getattr(self.update, "__qualname__", type(self.update).__name__)
        if code := getattr(self.update, "__code__", None):  # several lambdas have one name
            update = f"{update} of line {code.co_firstlineno}"
        return f"states {reduced or 'apart'}{f', then {update}' if self.update else ''}"

    def reductions(self, stage: int, tree: Tree) -> list[str]:
        """Return ``"mean"`` or ``"sum"`` for every leaf of a state.

        Raises:
            ValueError: a leaf that no pattern matches, or one of booleans.
        """
        signature, patterns, kinds = Signature.of(tree), self.reduce or {}, []
        for name, leaf in zip(leaf_names(signature), signature.leaves, strict=True):
            pattern = first_match(name, patterns)
            if pattern is None or leaf.dtype is torch.bool:
                got = f"{name!r} of {leaf.dtype}" if pattern else f"no pattern that matches {name!r}"
                raise ValueError(
                    f"reduce_state: got {got} for the state of stage {stage}, expected numbers, and a mean or"
                    ' a sum for each: add "*": "mean"'
                )
            kinds.append(patterns[pattern])
        return kinds

    def require_summable(self, stage: int, tree: Tree) -> None:
        """Raise ValueError for a state before the first step whose changes cannot be summed, nor averaged."""
        ways, leaves = self.reductions(stage, tree), map(local, tree_flatten(tree)[0])
        names = leaf_names(Signature.of(tree))
        for name, way, leaf in zip(names, ways, leaves, strict=True):
            if way == "sum" and not leaf.is_meta and not leaf.isfinite().all():
                raise ValueError(
                    f"reduce_state: got {name!r} of stage {stage}, which begins with numbers that are not"
                    " finite, so that their changes have no sum; begin with finite numbers, or take 'mean'"
                )

    def begin(
        self, ranks: TrainingRanks, stage: int, tree: Tree, before: Leaves, after: Leaves
    ) -> Callable[[], Leaves]:
        """Begin to combine the state of a stage over the data ranks: average it, or sum its changes.

        Args:
            tree: the state that the caller gave, for its layouts.
            before, after: the leaves of this rank before and after the step.

        Returns:
            A function that waits, and returns the new leaves.
        """
        given, treedef = tree_flatten(tree)
        new, waits = list(after), list[Wait]()
        alike: dict[tuple[Collective, bool], list[int]] = {}
        for n, leaf in enumerate(given) if ranks.data.size > 1 else ():
            if (over := ranks.summed_over(leaf).ranks).size > 1:
                alike.setdefault((over, differentiable(leaf.dtype)), []).append(n)
        ways = self.reductions(stage, tree) if alike else []
        for (over, _), numbers in alike.items():
            terms = [_term(ways[n], before[n], after[n], over.size) for n in numbers]
            flat = torch.cat([term.reshape(-1) for term in terms])
            waits.append(over.all_reduce(flat))
            sums = flat.split([term.numel() for term in terms])
            totals = [total.view(term.shape) for total, term in zip(sums, terms, strict=True)]
            waits.append(partial(_renew, new, before, ways, totals, numbers, over.size))

        def finish() -> Leaves:
            for wait in waits:
                wait()
            return tuple(new) if self.update is None else self._updated(stage, treedef.unflatten(new))

        return finish

    def _updated(self, stage: int, state: Tree) -> Leaves:
        assert self.update is not None
        changed = self.update(stage, tree_map(torch.clone, state))  # it may write into its own
        old, new = Signature.of(state).without_grad(), Signature.of(changed, "update_state").without_grad()
        if new != old:
            raise ValueError(
                f"update_state({stage}, ...): got {new}, expected {old}, the form of the state before"
            )
        return tuple(leaf.detach() for leaf in map(local, tree_flatten(changed)[0]))


def _term(way: str, before: torch.Tensor, after: torch.Tensor, ranks: int) -> torch.Tensor:
    """Compute the term of a leaf in its sum over ranks: float64, or int64 of integers.

    A mean sums the numbers themselves, since changes would lose those that began far away, in terms so small
    that their sum stays below the largest number.
    """
    old, new = _wide(before), _wide(after)
    if way == "sum":
        return torch.where(new == old, torch.zeros_like(new), new - old)  # 0 of infinities
    return (
        new / 2.0 ** (ranks - 1).bit_length()
        if new.is_floating_point()
        else torch.stack([new // ranks, new % ranks])
    )


def _renew(
    new: list[torch.Tensor], before: Leaves, ways: Sequence[str], totals: Sequence[torch.Tensor],
    numbers: Sequence[int], ranks: int,
) -> None:  # fmt: skip
    """Make the leaves of these numbers of the sums of their terms over the ranks."""
    for n, total in zip(numbers, totals, strict=True):
        if ways[n] == "sum":
            total = _wide(before[n]) + total
        elif total.is_floating_point():
            total = total / ranks * 2.0 ** (ranks - 1).bit_length()
        else:
            total = total[0] + total[1] // ranks
        new[n] = (torch.view_as_complex(total) if before[n].is_complex() else total).to(before[n].dtype)


def _wide(leaf: torch.Tensor) -> torch.Tensor:
    """Convert to float64, complex numbers as pairs, or integers to int64."""
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return real.double() if real.is_floating_point() else real.long()


Tensors = Sequence[torch.Tensor]

OnNonfinite = Literal["skip", "raise", "ignore"]


class UpdateRule(NamedTuple):
    """Define how gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: the clip by the norm of all gradients together.
        precision: the dtypes, and the scale of the loss.
        on_nonfinite: see :class:`ppfunc.Trainer`.
        frozen: the parameters that stay as they are.
        states: the rule by which the states of stages go on.
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
    """Runs the optimizer on the leaves of a stage, without frozen parameters.

    Args:
        rule: the rule by which gradients become new parameters.
        stage: the stage of the model, for errors.
        params, optimizer: forms of the parameters that train, and of the optimizer state.
        axes: the axes that cut matrices of these parameters.
    """

    def __init__(
        self, rule: UpdateRule, stage: int, params: Form, optimizer: Form, axes: Sequence[CutMatrices]
    ) -> None:
        self._rule, self._stage, self._forms, self._axes = rule, stage, (params, optimizer), axes
        self._run: UpdateLeaves | None = None

    def __call__(
        self, grads: Tensors, state: Tensors, params: Tensors, found_inf: torch.Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """Run the optimizer.

        Args:
            found_inf: flag, 1 where nothing may change, of a rule that skips, float32[].

        Returns:
            The leaves of the parameters and of the state.
        """
        rule, (of_params, of_state) = self._rule, self._forms
        found_inf = found_inf if rule.on_nonfinite == "skip" else None
        run: UpdateLeaves = self._by_trees
        if not looked_through((grads, state, params)):
            if self._run is None:
                trees = of_state.treedef.unflatten(state), of_params.treedef.unflatten(params)
                update, prepare = rule.optimizer.on_leaves or (None, lambda *trees: self._by_trees)
                self._run = prepare(*trees) if update is rule.optimizer.update else self._by_trees
            run = self._run
        with matrices_by(self._on_matrices) if self._axes else nullcontext():
            return run(grads, state, params, found_inf)

    def _on_matrices(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        """Apply a function to the whole matrices of a tree, in which other parameters are left out."""
        column: list[Any] = self._forms[0].treedef.flatten_up_to(tree)
        for dtype in {leaf.dtype: None for leaf in column if leaf is not None}:
            alike = {n: leaf for n, leaf in enumerate(column) if leaf is not None and leaf.dtype == dtype}
            for n, leaf in on_matrices(fn, alike, self._axes).items():
                column[n] = leaf
        return self._forms[0].treedef.unflatten(column)

    def _by_trees(
        self, grads: Tensors, state: Tensors, params: Tensors, found_inf: torch.Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """Run an update that knows trees alone."""
        stage, (of_params, of_state) = self._stage, self._forms
        results = self._rule.optimizer.update(
            of_params.treedef.unflatten(grads),
            of_state.treedef.unflatten(state),
            of_params.treedef.unflatten(params),
            found_inf=found_inf,
        )
        if not isinstance(results, tuple) or len(results) != 2:
            raise TypeError(
                f"the optimizer has returned {reprlib.repr(results)} for stage {stage}, expected (parameters,"
                " state)"
            )
        new, after = results
        return (
            _alike(stage, "parameter", params, of_params, new),
            _alike(stage, "state", state, of_state, after),
        )


def _alike(
    stage: int, name: str, before: Sequence[torch.Tensor], form: Form, new: Tree
) -> list[torch.Tensor]:
    """Return the leaves of a tree that the optimizer has made; raise ValueError for another form."""
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
    """Update constants by an optimizer, to compare optimizers. A parameter is replaced by a single element.

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


def require_state_of(rule: UpdateRule, params: Tree, state: Tree, name: str) -> PyTreeSpec:
    """Return the structure of a state of the optimizer, with keys in the order of these parameters.

    Raises:
        ValueError: this tree is no such state, whatever the order of its keys; errors say ``name``.
    """
    flatten(state, name)  # raises for leaves that are no tensors
    ones, init = tree_map(_one, params), rule.optimizer.init
    with preserve_rng(leaf.device for leaf in tree_leaves(ones)):
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
    return structure


def _forms(tree: Tree, name: str, sized: bool) -> dict[str, str]:
    leaves, treedef = tree_flatten(tree)
    pairs = zip(tree_paths(treedef, name), leaves, strict=True)
    return {
        path: f"{t.dtype} of " + (f"shape {[*t.shape]}" if sized else f"{t.ndim} dimensions")
        for path, t in pairs
    }


def _one(leaf: torch.Tensor) -> torch.Tensor:
    """Make a tensor of at most one element, 1, of the dimensions and the dtype of a leaf."""
    leaf = local(leaf)
    return torch.ones([min(1, size) for size in leaf.shape], dtype=leaf.dtype, device=leaf.device)
