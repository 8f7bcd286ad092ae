"""Show a training step from shapes alone: its text, its memory with parameters and optimizer, its cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppfunc.runtime import LoweredFunction
from ppfunc.runtime.lowering.analysis import Cost, Memory
from ppfunc.schedule import Op
from ppfunc.stage import Signature
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_leaves, tree_map

from .optim.protocols import Tree
from .update.parameter_update import TrainingUpdate
from .update.ranks import TrainingRanks
from .update.train_state import TrainState
from .update.update_rule import UpdateRule


class TrainingMemory(NamedTuple):
    """Count the bytes that one rank holds in a training step, by kind.

    Args:
        params: parameters as the state keeps them: whole or shards, in the dtype of the masters.
        optimizer: the state of the optimizer.
        computed: parameters that stages compute with, where those are other tensors: casts, and what is
            gathered at once at most.
        gradients: their sums over microbatches, with the buckets that are summed over data ranks.
        updated: new parameters and optimizer state beside the old ones; 0 for an optimizer that writes into
            them.
        batch, residuals, messages, outputs: as of ``value_and_grad(...).lower(...).memory_analysis()``.
    """

    params: int
    optimizer: int
    computed: int
    gradients: int
    updated: int
    batch: int
    residuals: int | None
    messages: int
    outputs: int


class LoweredTraining:
    """Shows a training step that was lowered and has not run; :meth:`Trainer.lower` returns it.

    Args:
        step: the gradients.
        state: before the step, on the device meta.
        update: of a call that begins from that state.
        rule: how gradients become new parameters.
        ranks: those that train together.
    """

    def __init__(
        self,
        step: LoweredFunction,
        state: TrainState,
        update: TrainingUpdate,
        rule: UpdateRule,
        ranks: TrainingRanks,
    ) -> None:
        self.step, self.state = step, state
        self._update, self._rule, self._ranks = update, rule, ranks

    def __repr__(self) -> str:
        return repr(self.step)

    def as_text(self) -> str:
        """Return the program of every rank of this process, its stages, and its messages with their bytes."""
        return self.step.as_text()

    def cost_analysis(self) -> dict[int, Cost]:
        """Return floating point operations per rank, without those of sums and updates."""
        return self.step.cost_analysis()

    def memory_analysis(self) -> dict[int, TrainingMemory]:
        """Return bytes per rank and kind; stages are traced, nothing runs."""
        self._update.begin([None])
        return {rank: self._memory(rank, memory) for rank, memory in self.step.memory_analysis().items()}

    def _memory(self, rank: int, of_step: Memory) -> TrainingMemory:
        stages, state = self.step.step.schedule.model_stages_of(rank), self.state
        return TrainingMemory(
            params=sum(_bytes(state.params[s]) for s in stages),
            optimizer=sum(_bytes(state.optimizer[s]) for s in stages),
            computed=sum(map(self._cast, stages)) + self._gathered(rank),
            gradients=sum(map(self._gradients, stages)),
            updated=sum(map(self._updated, stages)),
            batch=of_step.batch,
            residuals=of_step.residuals,
            messages=of_step.messages,
            outputs=of_step.outputs,
        )

    def _cast(self, stage: int) -> int:
        """Count the bytes of the parameters that are cast for the stages."""
        leaves = [local(leaf) for leaf in tree_leaves(self.state.params[stage])]
        pairs = zip(leaves, self._rule.precision.to_compute(leaves), strict=True)
        return _bytes([cast for leaf, cast in pairs if cast is not leaf])

    def _gathered(self, rank: int) -> int:
        """Count the most bytes of parameters that are whole at once, between UNSHARD and RESHARD."""
        now = most = 0
        schedule, ranks = self.step.step.schedule, self._ranks
        for instruction in schedule.instructions(rank):
            if instruction.op in (Op.UNSHARD, Op.RESHARD):
                stage = schedule.model_stages[instruction.stage]
                pairs = zip(
                    self.step.step.form.params[stage].leaves,
                    ranks.cuts(tree_leaves(self.state.params[stage])),
                    strict=True,
                )
                size = sum(leaf.nbytes for leaf, cut in pairs if cut.dim is not None)
                now += size if instruction.op is Op.UNSHARD else -size
                most = max(most, now)
        return most

    def _gradients(self, stage: int) -> int:
        """Count the bytes in which the gradients of a stage are added up."""
        step = self.step.step
        fixed = self._rule.frozen.numbers(stage, step.form.params[stage])
        leaves = {n: leaf for n, leaf in enumerate(step.form.params[stage].leaves) if leaf.grad}
        forms = {n: step.new_gradients().signature(leaf) for n, leaf in leaves.items()}
        reducer = self._update.sums(stage, forms)
        if reducer is None:
            return sum(form.nbytes for n, form in forms.items() if n not in fixed)
        return reducer.nbytes

    def _updated(self, stage: int) -> int:
        """Count the bytes of what an update makes anew, as it does of leaves of one element each."""
        trained = self._rule.frozen.trained(stage, self.state.params[stage])
        tiny = tree_map(_tiny, trained)
        with preserve_rng([torch.device("cpu")]):  # an optimizer may draw
            state = self._rule.optimizer.init(tiny)
            before = {leaf.data_ptr() for leaf in tree_leaves((tiny, state))}
            after = tree_leaves(self._rule.optimizer.update(tree_map(_tiny, trained), state, tiny))
        sizes = tree_leaves((trained, self.state.optimizer[stage]))
        return _bytes([leaf for leaf, new in zip(sizes, after, strict=True) if new.data_ptr() not in before])


def on_meta(tree: Any) -> Any:
    """Replace the tensors of a tree, or its signature, by tensors without values."""
    if isinstance(tree, Signature):
        empty = (torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tree.leaves)
        layouts = (leaf.layout for leaf in tree.leaves)
        return tree.unflatten(map(distributed, empty, layouts))
    return tree_map(_leaf_on_meta, tree)


def _leaf_on_meta(leaf: Any) -> Any:
    """Take the values of a tensor; a number, a text or a flag stays."""
    if not isinstance(leaf, Tensor):
        return leaf
    return distributed(local(leaf).detach().to("meta"), layout_of(leaf))


def _bytes(tree: Tree) -> int:
    """Count the bytes of the tensors of a tree that this rank holds."""
    return sum(local(leaf).nbytes for leaf in tree_leaves(tree))


def _tiny(leaf: Tensor) -> Tensor:
    """Make ones of at most one element, of the dimensions and the dtype of a leaf, with values."""
    leaf = local(leaf)
    return torch.ones([min(1, size) for size in leaf.shape], dtype=leaf.dtype, device="cpu")
