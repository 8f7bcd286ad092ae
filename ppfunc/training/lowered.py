"""Show a training step from shapes alone: its text, its memory with parameters and optimizer, its cost."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ppfunc.runtime import LoweredFunction, Microbatches
from ppfunc.runtime.call.arguments import StepArguments
from ppfunc.runtime.lowering.analysis import Shown
from ppfunc.runtime.lowering.lowered import LoweredStep
from ppfunc.runtime.lowering.memory import Completed
from ppfunc.stage import Signature
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_leaves, tree_map

from .optim.protocols import Tree
from .update.parameter_update import TrainingUpdate
from .update.ranks import TrainingRanks
from .update.stage_trees import stages_of
from .update.train_state import TrainState
from .update.update_rule import UpdateRule


class LoweredTraining(Shown):
    """Shows a training step that was lowered and has not run; :meth:`Trainer.lower` returns it.

    Bytes are those of ``value_and_grad(...).lower(...)`` with the state and its update; operations are
    counted without those of sums and updates.

    Args:
        step: the gradients.
        state: before the step, on the device meta.
        rule: how gradients become new parameters.
        ranks: those that train together.
        inputs: as the caller gives them, on the device meta.
    """

    def __init__(
        self, step: LoweredFunction, state: TrainState, rule: UpdateRule, ranks: TrainingRanks, inputs: Any
    ) -> None:
        super().__init__(step.step, step.programs)
        self._state, self._rule, self._ranks, self._inputs = state, rule, ranks, inputs

    def _completed(self, step: LoweredStep, arguments: StepArguments) -> Completed:
        """Complete the arguments of a rank by an update, whose collectives move nothing."""
        stages, devices = step.schedule.model_stages_of(step.ranks[0]), step.form.devices

        def empty(trees: Mapping[int, Tree]) -> dict[int, Tree]:
            return {s: tree_map(partial(_empty_on, devices[s]), trees[s]) for s in stages if s in trees}

        here, of = partial(_empty_on, devices[stages[0]]), self._state
        state = TrainState(
            here(of.step),
            empty(of.params),
            empty(of.optimizer),
            tree_map(here, of.scale),
            empty(of.stage_state),
        )
        ranks = self._ranks.on_paper(step.ranks)
        update = TrainingUpdate(self._rule, ranks, {}, state, known=True)
        update.stages, _ = stages_of(self._rule, ranks, state, {})
        (weights,) = update.begin([None])
        params = {s: ranks.for_step(tree, self._rule.precision) for s, tree in state.params.items()}
        arguments = replace(
            arguments, params=_local_leaves(params), state=_local_leaves(state.stage_state),
            scale=state.scale.get("scale"), update=update,
        )  # fmt: skip
        kept = "shards" if ranks.shards_params else "masters"
        first = step.schedule.model_stages[step.schedule.chains[0].stages[0]]
        inputs = self._inputs if isinstance(self._inputs, Microbatches) else [self._inputs]
        given = [leaf for tree in inputs for leaf in tree_leaves(tree) if first in stages]
        cast = [here(leaf) for leaf in given if self._rule.precision.to_compute(leaf) is not leaf]
        read = [*cast, state.step, state.scale, () if weights is None else weights]
        return arguments, {kept: state.params, "optimizer": state.optimizer, "batch": read}


def _empty_on(device: torch.device, leaf: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the form of a leaf."""
    return distributed(torch.empty_like(local(leaf), device=device), layout_of(leaf))


def _local_leaves(trees: Mapping[int, Tree]) -> dict[int, tuple[torch.Tensor, ...]]:
    return {s: tuple(map(local, tree_leaves(tree))) for s, tree in trees.items()}


def on_meta(tree: Any) -> Any:
    """Replace the tensors of a tree, and signatures of trees in it, by tensors without values."""
    return tree_map(_leaf_on_meta, tree)


def _leaf_on_meta(leaf: Any) -> Any:
    """Take the values of a leaf; a number, a text or a flag stays."""
    if isinstance(leaf, Signature):
        empty = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in leaf.leaves)
        return leaf.unflatten(map(distributed, empty, (each.layout for each in leaf.leaves)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return distributed(local(leaf).detach().to("meta"), layout_of(leaf))
