"""Describe the trees of a state, which step after step finds alike, and refuse those of another trainer."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Self
from weakref import ref

import optree
import torch

from ppfunc.runtime.values.arguments import Form, form_of, has_form, leaves_like, require_trees
from ppfunc.stage.layout import MeshLayout, distributed, layout_of, local
from ppfunc.stage.signature import Signature, leaf_number
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_paths

from .ranks import Cut, TrainingRanks
from .sharding import Dims
from .train_state import TrainState, are, refs, require_not_donated, stages_made
from .update_rule import StageUpdate, UpdateRule, require_state_of


class StageTrees(NamedTuple):
    """Describe the parameters and the optimizer state of a stage.

    Args:
        params, optimizer: the forms of the trees.
        bare: the form of the parameters without frozen ones.
        fixed, trained: the numbers of frozen parameters, and of the others.
        cuts: of every parameter.
        dims: of every parameter, the dimension that is cut over the data ranks; frozen ones are cut where
            they are kept so.
        counted: the numbers of the parameters whose gradients this rank counts in the norm. Of the ranks that
            hold the same, and of tied or replicated places, the first counts it.
        parted: the numbers of those of which each data rank counts its part, although it has the whole.
        patterns: whether each of the optimizer takes a parameter.
    """

    params: Form
    optimizer: Form
    bare: Form
    fixed: frozenset[int]
    trained: tuple[int, ...]
    cuts: list[Cut]
    dims: Dims
    counted: tuple[int, ...]
    parted: frozenset[int]
    patterns: Mapping[str, bool]

    @classmethod
    def of(cls, rule: UpdateRule, ranks: TrainingRanks, stage: int, state: TrainState) -> Self:
        """Describe the trees of a stage; raise ValueError for parts, or an optimizer state of others."""
        leaves, treedef = tree_flatten(state.params[stage])
        if not ranks.shards_params:
            ranks.require_whole(leaves, f"state.params[{stage}]")
        signature = Signature.of(state.params[stage], f"state.params[{stage}]")
        cuts = ranks.cuts(leaves)
        fixed, again = rule.frozen.numbers(stage, signature), _further_places(ranks, stage, signature)
        trained = tuple(n for n in range(len(leaves)) if n not in fixed)
        bare = treedef.unflatten(None if n in fixed else leaf for n, leaf in enumerate(leaves))
        whole = frozenset[int]() if ranks.shards_params else fixed
        dims = tuple(None if n in whole else cut.dim for n, cut in enumerate(cuts))
        optimizer = state.optimizer[stage]
        of_state, patterns = require_state_of(rule, bare, optimizer, f"state.optimizer[{stage}]")
        moments: list[Any] = of_state.flatten_up_to(optimizer)
        forms = form_of(leaves, treedef), form_of(moments, of_state)
        counted = tuple(n for n in trained if n not in again and _counts(ranks, cuts[n]))
        parted = frozenset(n for n, cut in enumerate(cuts) if cut.dim is None and cut.part is not None)
        kept = [cut.kept for cut in cuts]
        if ranks.shards_params:
            _require_kept(f"state.params[{stage}]", treedef, leaves, kept)
        of_moments = [
            kept[n] if n is not None and leaf.shape == leaves[n].shape else layout_of(leaf)
            for leaf, n in zip(moments, owners_of(of_state, treedef), strict=True)
        ]
        _require_kept(f"state.optimizer[{stage}]", of_state, moments, of_moments)
        of_bare = form_of(*tree_flatten(bare))
        return cls(*forms, of_bare, fixed, trained, cuts, dims, counted, parted, patterns)

    def leaves_of(self, stage: int, state: TrainState) -> "StageLeaves | None":
        """Return the leaves of the stage of a state, if its trees have these structures; else None."""
        params = leaves_like(state.params[stage], self.params)
        try:  # in half the time, in any order of keys
            optimizer: list[Any] = self.optimizer.treedef.flatten_up_to(state.optimizer[stage])
        except ValueError:
            return None
        return None if params is None else StageLeaves(self, params, optimizer)


class StageLeaves(NamedTuple):
    """Hold the leaves of a stage of a state.

    Args:
        trees: describe them.
        params, optimizer: as the state has them, tensors or DTensors.
        update: of these leaves, None until it was needed; the next step goes on with it.
    """

    trees: StageTrees
    params: list[torch.Tensor]
    optimizer: list[torch.Tensor]
    update: StageUpdate | None = None

    def has_form(self) -> bool:
        """Tell whether they have the forms of the trees."""
        return has_form(self.params, self.trees.params) and has_form(self.optimizer, self.trees.optimizer)

    def made(self) -> "StageMade":
        """Return what :func:`note_made` notes of them, which keeps none alive."""
        return StageMade(self.trees, self.update, refs((*self.params, *self.optimizer)))


class StageMade(NamedTuple):
    """Note what is known of the leaves of a stage, see :class:`StageLeaves`."""

    trees: StageTrees
    update: StageUpdate | None
    leaves: list[ref[torch.Tensor]]


def read(leaves: list[torch.Tensor], form: Form) -> list[torch.Tensor]:
    """Return the local leaves of a tree of this form."""
    return leaves if form.layouts is None else list(map(local, leaves))


def laid_out(leaves: Sequence[torch.Tensor], form: Form) -> list[torch.Tensor]:
    """Make the leaves of a tree of this form of its local leaves."""
    return list(leaves if form.layouts is None else map(distributed, leaves, form.layouts))


def owners_of(state: optree.PyTreeSpec, params: optree.PyTreeSpec) -> list[int | None]:
    """Find the parameter to which each leaf of a state of the optimizer belongs, by its path."""
    numbers = {path: n for n, path in enumerate(params.paths())}
    ends = ((path[k:] for k in range(len(path) + 1)) for path in state.paths())
    return [next((numbers[end] for end in each if end in numbers), None) for each in ends]


def _require_kept(
    name: str, treedef: optree.PyTreeSpec, leaves: Sequence[torch.Tensor], kept: Sequence[MeshLayout | None]
) -> None:
    """Raise ValueError for leaves of a state that do not lie over the ranks as a trainer keeps them."""
    for path, leaf, layout in zip(tree_paths(treedef, name), leaves, kept, strict=True):
        if layout_of(leaf) != layout:
            raise ValueError(
                f"{path}: got a tensor {layout_of(leaf) or 'that is whole'}, expected a DTensor {layout}, as"
                " this trainer keeps it; give whole parameters to trainer.init, and load a state of other"
                " ranks by ppfunc.checkpoint.load(folder, like=state)"
            )


def _counts(ranks: TrainingRanks, cut: Cut) -> bool:
    other = cut.over.copies.index or (cut.over.parts.index and cut.part is None)
    return not (other or (ranks.model.index and cut.repeated))


def _further_places(ranks: TrainingRanks, stage: int, signature: Signature) -> set[int]:
    """Find the leaves of a stage that count at another place: the first of a tied or replicated parameter."""
    group = next((g for g in ranks.schedule.replicas if ranks.schedule.model_stages[g[0]] == stage), None)
    if group is not None and ranks.schedule.placement[group[0]] not in ranks.ranks:
        return set(range(len(signature.leaves)))
    names = (name for _, places in ranks.tied for place, name in places[1:] if place == stage)
    return {leaf_number(signature, name, "params") for name in names}


def stages_of(
    rule: UpdateRule, ranks: TrainingRanks, state: TrainState, known: dict[int, StageTrees]
) -> tuple[dict[int, StageLeaves], bool]:
    """Read the stages of a state.

    Args:
        known: by stage, the trees of the state that was checked last; updated in place.

    Returns:
        The leaves by stage, and whether all are those that a step has made.

    Raises:
        TypeError, ValueError: it is not a state of this trainer, or its leaves were donated to an update.
    """
    scale, here = rule.precision.scale, ranks.stages
    keys = set() if scale is None else set(scale.init("cpu"))
    _require_parts(state, here, keys, 1 if rule.states.reduce is not None else ranks.data.size)
    made, stages, same = stages_made(state), dict[int, StageLeaves](), True
    for s in here:
        leaves, before = known[s].leaves_of(s, state) if s in known else None, made.get(s)
        if leaves is None or not leaves.has_form():
            known[s] = StageTrees.of(rule, ranks, s, state)
            leaves = known[s].leaves_of(s, state)
        assert leaves is not None
        same &= before is not None and are(before.leaves, (*leaves.params, *leaves.optimizer))
        stages[s] = leaves
    require_not_donated(state)
    # Updates go on, and check nothing again; a leaf that is new may share memory with any stage.
    for s, leaves in stages.items() if same else ():
        if made[s].trees is leaves.trees:
            stages[s] = leaves._replace(update=made[s].update)
    return stages, same


def _require_parts(state: TrainState, stages: Sequence[int], scale: Set[str], data_ranks: int) -> None:
    """Raise TypeError or ValueError unless this is a state of these stages of the model.

    Args:
        scale: the keys of the state of the loss scale.
        data_ranks: how many ranks run other batches, and do not bring their states together.
    """
    if not isinstance(state, TrainState):
        pair = isinstance(state, tuple) and bool(state) and isinstance(state[0], TrainState)
        mend = "; a step returns a pair: state, metrics = trainer.step(state, ...)" if pair else ""
        raise TypeError(
            f"state: got an object of type {type(state).__name__}, expected a TrainState, as init or step"
            f" returns it{mend}"
        )
    require_trees("state.params", state.params, stages)
    require_trees("state.optimizer", state.optimizer, stages)
    given = state.scale if isinstance(state.scale, Mapping) else [state.scale]
    if set(given) != scale:
        got, expected = (", ".join(map(repr, keys)) or "none" for keys in (given, sorted(scale)))
        raise ValueError(
            f"state.scale: got {got}, the scale of this trainer has {expected}; go on with the same scale=,"
            " or init anew"
        )
    if not isinstance(state.step, torch.Tensor) or state.step.shape or state.step.dtype != torch.int64:
        raise TypeError(f"state.step: got {reprlib.repr(state.step)}, expected an int64 tensor of one number")
    if data_ranks > 1 and tree_leaves(state.stage_state):
        raise ValueError(
            f"state: got that of the stages {sorted(state.stage_state)}, of which each of the {data_ranks}"
            " data ranks would have another; say how they go together, Trainer(..., reduce_state={'*':"
            " 'mean'}), or put batch norms into evaluation mode before they are split or made stages by"
            " stage_from_module(module, constants=True), which have no state then"
        )
