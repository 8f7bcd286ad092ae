"""Describe the trees of a stage in a state, which step after step finds alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ppfunc.stage import Signature
from ppfunc.stage.form import Form, form_of, same_form
from ppfunc.stage.layout import distributed
from ppfunc.stage.signature import leaf_number
from ppfunc.stage.tree import tree_flatten

from .ranks import Cut, TrainingRanks
from .sharding import Dims
from .train_state import TrainState
from .update_rule import UpdateRule


class StageTrees(NamedTuple):
    """Describe the parameters and the optimizer state of a stage.

    Args:
        params, optimizer: the forms of the trees.
        fixed: the numbers of frozen parameters.
        cuts: of every parameter.
        dims: of every parameter, the dimension that is cut over the data ranks; frozen ones are cut where
            they are kept so.
        counted: the numbers of the parameters whose gradients this rank counts in the norm. Of the ranks that
            hold the same, and of tied or replicated places, the first counts it.
    """

    params: Form
    optimizer: Form
    fixed: frozenset[int]
    cuts: list[Cut]
    dims: Dims
    counted: tuple[int, ...]

    @classmethod
    def of(cls, rule: UpdateRule, ranks: TrainingRanks, stage: int, state: TrainState) -> StageTrees:
        """Describe the trees of a stage."""
        leaves, treedef = tree_flatten(state.params[stage])
        forms = form_of(leaves, treedef), form_of(*tree_flatten(state.optimizer[stage]))
        signature, cuts = Signature.of(state.params[stage]), ranks.cuts(leaves)
        fixed, again = rule.frozen.numbers(stage, signature), _further_places(ranks, stage, signature)
        whole = frozenset[int]() if ranks.shards_params else fixed
        dims = tuple(None if n in whole else cut.dim for n, cut in enumerate(cuts))
        counted = tuple(n for n, cut in enumerate(cuts) if n not in again and _counts(ranks, cut))
        return cls(*forms, fixed, cuts, dims, counted)

    def describes(self, stage: int, state: TrainState) -> bool:
        """Tell if the trees of the stage have these forms."""
        pairs = (state.params[stage], self.params), (state.optimizer[stage], self.optimizer)
        return all(same_form(tree, form) is not None for tree, form in pairs)


def laid_out(leaves: Sequence[Tensor], form: Form) -> Iterable[Tensor]:
    """Make DTensors of the local leaves of a tree of this form, where it has some."""
    return leaves if form.layouts is None else map(distributed, leaves, form.layouts)


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
