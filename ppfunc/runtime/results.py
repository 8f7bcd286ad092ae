"""Make trees for the caller of the buffers of a step that has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ppfunc.stage import Signature
from ppfunc.stage.tree import tree_leaves, tree_map, tree_structure

from .arguments import StepArguments
from .batch import Microbatches
from .buffers import Buffers, Key, Leaves, Tag
from .lowered import BATCH, LoweredStage, LoweredStep
from .ownership import Owned

_NOTHING = tree_structure(None)


class Aux(NamedTuple):
    """The metrics and states that the stages of this process return, by stage of the model.

    Args:
        metrics: trees with a leading axis of the microbatches that this process ran, ascending, pass after pass; Microbatches, with
            None for those without, where they differ in form.
        state: trees, after the last microbatch.
    """

    metrics: dict[int, Any]
    state: dict[int, Any]


class StepResult(NamedTuple):
    """The results of one step; those that were not wanted are None.

    Args:
        loss: the weighted sum of all losses, a tensor of the shape of a loss, on every rank.
        grads: the gradients of the parameters of this process, by stage of the model.
        input_grads: those of the inputs, in their form; None where this process runs no first stage.
        outputs: what the last stages of this process return, in the form of the inputs; None where it runs none.
        aux: metrics and state, :class:`Aux`.
        update_state: what the update of the step has left.
    """

    loss: Any = None
    grads: Any = None
    input_grads: Any = None
    outputs: Any = None
    aux: Any = None
    update_state: Any = None


def collect(lowered: LoweredStep, passes: Sequence[StepArguments], buffers: Buffers) -> StepResult:
    """Make what is wanted out of the buffers of the last pass, but for the loss, which needs those of the other ranks."""
    wants, owned, arguments = lowered.spec.wants, Owned(_tensors(passes)), passes[0]
    return StepResult(
        None,
        _gradients(lowered, arguments, buffers, owned) if "grads" in wants else None,
        _input_gradients(lowered, arguments, buffers, owned) if "input_grads" in wants else None,
        _outputs(lowered, buffers, owned) if "outputs" in wants else None,
        _aux(lowered, arguments, buffers, owned) if "aux" in wants else None,
        buffers.update_state,
    )


def _tensors(passes: Sequence[StepArguments]) -> Iterator[torch.Tensor]:
    """The caller's tensors."""
    yield from chain.from_iterable((*passes[0].params.values(), *passes[0].state.values()))
    for part in passes:
        for batch in (part.inputs, part.targets, *part.extras.values()):
            yield from chain.from_iterable(batch)


def _gradients(lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, owned: Owned) -> dict[int, Any]:
    """The gradients of every stage of the model, with the structure of its parameters."""
    made: dict[int, Any] = {}
    firsts = {lowered.schedule.model_stages[stage]: gradients for stage, gradients in reversed(buffers.gradients.items())}
    for model, leaves in arguments.params.items():
        signature, gradients = arguments.form.params[model], firsts[model]  # sums over replicas are with the first
        if all([leaf.grad and leaf.layout is None for leaf in signature.leaves]):
            made[model] = signature.unflatten(gradients.take(leaves, owned))
            continue
        whole = Signature(signature.treedef, tuple(map(gradients.signature, signature.leaves)))
        taken = iter(gradients.take(tuple(t for t, leaf in zip(leaves, signature.leaves, strict=True) if leaf.grad), owned))
        zeros = zip(leaves, whole.leaves, strict=True)
        made[model] = whole.wrap([next(taken) if leaf.grad else t.new_zeros(leaf.shape, dtype=leaf.dtype) for t, leaf in zeros])
    return made


def _input_gradients(lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, owned: Owned) -> Any:
    schedule, signatures = lowered.schedule, arguments.form.inputs or ()
    firsts = {m: chain.stages[0] for chain in schedule.chains for m in chain.microbatches}
    if not any(schedule.placement[stage] in lowered.ranks for stage in firsts.values()):
        return None

    def row(m: int) -> Any:
        wanted = signatures[m].with_grad()
        given = iter(buffers.values.pop(Tag("B", firsts[m], BATCH, m), ()))
        pairs = zip(wanted.leaves, arguments.inputs[m], strict=True)
        return wanted.wrap([next(given) if leaf.grad else torch.zeros_like(t) for leaf, t in pairs])

    return _in_form_of_inputs([row(m) for m in range(schedule.microbatches)], lowered, owned)


def _outputs(lowered: LoweredStep, buffers: Buffers, owned: Owned) -> Any:
    lasts = [chain.stages[-1] for chain in lowered.schedule.chains]
    rows = [row for stage in lasts for row in _kept(lowered, buffers.kept, stage, lambda low: low.outputs)]
    return _in_form_of_inputs(rows, lowered, owned) if rows else None


def _in_form_of_inputs(rows: list[Any], lowered: LoweredStep, owned: Owned) -> Any:
    """One tree, joined along axis 0, where the inputs were a whole batch; else Microbatches."""
    if lowered.form.rows is not None:
        return Microbatches(rows).join()
    return Microbatches(tree_map(owned, row) for row in rows)


def _aux(lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, owned: Owned) -> Aux:
    schedule, metrics = lowered.schedule, {}
    for model in sorted({low.model for low in lowered.stages.values() if low.metrics.treedef != _NOTHING}):
        stages = [s for s in range(schedule.stages) if schedule.model_stages[s] == model]
        passes = [*buffers.kept_before, buffers.kept]
        rows = [row for kept in passes for stage in stages for row in _kept(lowered, kept, stage, lambda low: low.metrics)]
        if any(row is not None for row in rows):
            metrics[model] = _stacked(rows, owned)
    state = {s: arguments.form.state[s].wrap(map(owned, leaves)) for s, leaves in buffers.state.items()}
    return Aux(metrics, state)


def _kept(lowered: LoweredStep, kept: Mapping[Key, Leaves], stage: int, which: Callable[[LoweredStage], Signature]) -> Iterator[Any]:
    """One of the trees that a stage has kept for the caller, of every microbatch that this process ran."""
    for m in _microbatches(lowered, stage):
        if (stage, m) not in lowered.stages:
            continue
        low, leaves = lowered.stages[stage, m], kept.get((stage, m), ())
        start = int(low.loss is not None)
        for signature in (low.outputs, low.metrics):
            stop = start + len(signature.leaves)
            if signature is which(low):
                yield signature.wrap(leaves[start:stop])
            start = stop


def _stacked(rows: list[Any], owned: Owned) -> Any:
    """One tree with a leading axis; Microbatches where the trees differ in structure, shape or dtype."""
    first, *others = ((tree_structure(row), [(t.shape, t.dtype) for t in tree_leaves(row)]) for row in rows)
    if any(other != first for other in others):
        return Microbatches(tree_map(owned, row) for row in rows)
    return Microbatches(rows).stack()


def _microbatches(lowered: LoweredStep, stage: int) -> range:
    return next(chain.microbatches for chain in lowered.schedule.chains if stage in chain.stages)
