"""Update parameters within a step: sum gradients over data ranks, and run the optimizer on them."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..runtime.arguments import StepArguments
from ..runtime.buffers import Buffers
from ..runtime.gradients import Gradients
from ..runtime.spec import ParameterUpdate
from ..stage import LeafSignature, Stage
from ..stage._torch import versions
from ..stage.layout import distributed, layout_of, local
from ..stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths
from ._torch import multiply_each, multiply_into_each
from .conclusion import join, receive
from .progress import Progress, dims_of
from .protocols import ShardOf, Tree
from .ranks import TrainingRanks
from .reducer import Reducer
from .sharding import gather
from .start import start_facts
from .update_rule import UpdateRule, frozen_numbers

Idle = dict[int, list[Reducer]]
"""By stage, reducers that no step uses."""


def parameter_update(rule: UpdateRule, ranks: TrainingRanks, stages: Sequence[Stage | None]) -> ParameterUpdate:
    """The update of a step whose ``update_state`` is :class:`Progress`.

    Args:
        stages: the functions of the stages, which know what their modules have frozen.
    """
    idle: Idle = {}
    return ParameterUpdate(
        begin=partial(_begin, ranks),
        sums=partial(_sums, rule, ranks, idle) if ranks.data.size > 1 else None,
        reduce=_reduce,
        join=partial(join, rule, ranks),
        step=partial(_step, rule, ranks, idle, stages),
        finish=_finish,
        together=rule.needs_all,
        unshard=partial(_unshard, rule, ranks) if rule.shard == "params" else None,
        facts=lambda progress: start_facts(rule, ranks, progress.state, stages),
        kept=lambda progress: {s: (tree, frozen_numbers(stages[s], tree)) for s, tree in progress.state.params.items()},
        alike=ranks.data.size > 1,
    )


def _begin(ranks: TrainingRanks, passes: Sequence[StepArguments]) -> Sequence[StepArguments]:
    """Divide the weights of the losses by their sum over all data ranks: before any gradient, which could overflow in half precision."""
    progress: Progress = passes[0].update_state
    progress.stage_state = dict(passes[0].state)
    progress.left = dict.fromkeys(progress.state.params, sum(part.ends for part in passes))
    if not progress.weighted:
        return passes
    given = torch.cat([part.loss_weights for part in passes if part.loss_weights is not None]).to(progress.state.step.device)
    total = given.sum(0, keepdim=True)
    ranks.data.all_reduce(total)()
    if total.device.type == "cpu" and total.tolist() == [0]:  # on another device it is not read, and the loss is no number
        raise ValueError("loss_weights: their sum over all data ranks is 0, expected one that losses can be divided by")
    weights = (given / total).chunk(len(passes))
    return [part._replace(loss_weights=own) for part, own in zip(passes, weights, strict=True)]


def _sums(rule: UpdateRule, ranks: TrainingRanks, idle: Idle, buffers: Buffers, stage: int, leaves: dict[int, LeafSignature]) -> Reducer:
    """Find buckets for the gradients of a stage: those of an earlier step that nobody uses, else new ones.

    A step takes them out of ``idle``, and puts them back once it has used their sums. A step that fails does not put them back: a sum
    may still be written there.
    """
    progress: Progress = buffers.update_state
    dims, free = dims_of(ranks, progress, stage), idle.setdefault(stage, [])
    form = tuple(leaves.values()), tuple(dims[n] for n in leaves)
    while free:
        reducer = free.pop()
        if reducer.form == form and reducer.idle:
            return reducer
    device = next((local(leaf).device for leaf in tree_leaves(progress.state.params[stage])), None)
    return Reducer(*form, ranks.data, dtype=rule.precision.reduce, axis=ranks.axes.data or "dp", stage=stage, device=device)


def _reduce(buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
    """Begin to sum the gradients of a stage over the data ranks."""
    progress: Progress = buffers.update_state
    if isinstance(sums, Reducer):
        sums.launch()
        progress.reducers[stage] = sums, numbers
    else:
        like = tuple(buffers.params[stage][n] for n in numbers)
        progress.gradients[stage] = dict(zip(numbers, sums.take(like, torch.clone), strict=True))


def _step(rule: UpdateRule, ranks: TrainingRanks, idle: Idle, stages: Sequence[Stage | None], buffers: Buffers, stage: int) -> None:
    """Make the new parameters and optimizer state of a stage; parameters that its module has frozen stay."""
    progress: Progress = buffers.update_state
    progress.left[stage] -= 1
    if not rule.needs_all:
        receive(rule, ranks, progress, stage)
    leaves, treedef = tree_flatten(progress.state.params[stage])
    dims, gradients, optimizer = dims_of(ranks, progress, stage), progress.gradients.pop(stage), progress.state.optimizer[stage]
    own = ranks.own(leaves, dims)
    gradients = {n: g.to(own[n].dtype) for n, g in gradients.items()}  # before they are divided, which would lose small ones
    if progress.divisor is not None:  # not by the fused kernels, which divide by a float32
        gradients = _divided(gradients, progress.divisor, into=stage in progress.reducers)
    grads = treedef.unflatten([gradients[n] if n in gradients else torch.zeros_like(p) for n, p in enumerate(own)])
    given = (grads, tree_map(local, optimizer), treedef.unflatten(own))
    frozen = sorted(frozen_numbers(stages[stage], progress.state.params[stage]))
    stay, untouched = [own[n].clone() for n in frozen], versions([own[n] for n in frozen])
    new, after = _optimized(rule, progress, stage, given, ranks.parts(own, dims))
    parts = list(tree_leaves(new))
    written = versions([own[n] for n in frozen]) != untouched  # in place
    for n, value in zip(frozen, stay, strict=True):
        parts[n] = own[n].copy_(value) if written else own[n]
    progress.state.optimizer[stage] = tree_map(lambda old, part: distributed(part, layout_of(old)), optimizer, after)
    if not ranks.shards_params:
        parts = list(gather(parts, dims, ranks.data).wait())
        if progress.left[stage]:  # after the last update nobody computes with them
            buffers.params[stage] = tuple(tree_leaves(rule.precision.to_compute(treedef.unflatten(parts))))
    progress.state.params[stage] = treedef.unflatten(map(distributed, parts, map(layout_of, leaves)))
    if stage in progress.reducers:
        idle[stage].append(progress.reducers.pop(stage)[0])


def _optimized(
    rule: UpdateRule, progress: Progress, stage: int, given: tuple[Tree, Tree, Tree], parts: Sequence[ShardOf] | None
) -> tuple[Tree, Tree]:
    """Run the optimizer on gradients, its state and parameters; note which of them it has written into."""
    _, state, params = given
    leaves = tree_leaves((state, params))
    before = versions(leaves)
    try:
        made = rule.optimizer.update(*given, found_inf=progress.found if rule.on_nonfinite == "skip" else None, parts=parts)
    finally:
        if (after := versions(leaves)) != before:
            progress.written += [leaf for leaf, one, other in zip(leaves, before, after, strict=True) if one != other]
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"the optimizer has returned {reprlib.repr(made)} for stage {stage}, expected (parameters, state)")
    for name, old, new in (("parameter", params, made[0]), ("state", state, made[1])):
        _require_alike(stage, name, old, new)
    return made


def _require_alike(stage: int, name: str, old: Tree, new: Tree) -> None:
    """Raise where the optimizer has made something of another form."""
    (before, structure), (after, made) = tree_flatten(old), tree_flatten(new)
    if made != structure:
        raise ValueError(f"the optimizer has made the structure {made} of the {name}s of stage {stage}, expected {structure} as before")
    for n, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is other:
            continue
        if not isinstance(other, Tensor) or (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            got, known = (f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else reprlib.repr(t) for t in (other, one))
            where = f"the {name} {known} of stage {stage}, {tree_paths(structure, name)[n]}"
            raise ValueError(f"the optimizer has made {got} of {where}; expected the same shape, dtype and device")


def _divided(gradients: dict[int, Tensor], divisor: Tensor, *, into: bool) -> dict[int, Tensor]:
    """Divide gradients in place, or make new ones: tied stages may share some, but never the buckets of a reducer."""
    made: dict[int, Tensor] = {}
    for device in {g.device for g in gradients.values()}:
        own = {n: g for n, g in gradients.items() if g.device == device}
        factor, given = divisor.reciprocal().to(device), list(own.values())
        if not into:  # a product of two scalars has the wider dtype
            made |= {n: product.to(g.dtype) for (n, g), product in zip(own.items(), multiply_each(given, factor), strict=True)}
        else:
            multiply_into_each(given, factor)
            made |= own
    return made


def _finish(buffers: Buffers) -> None:
    """Wait for the sums that are still under way."""
    progress: Progress = buffers.update_state
    while progress.totals:
        progress.totals.pop(0)()


def _unshard(rule: UpdateRule, ranks: TrainingRanks, buffers: Buffers, stage: int) -> None:
    """Gather the parameters of a stage."""
    progress: Progress = buffers.update_state
    shards = tuple(rule.precision.to_compute(list(map(local, tree_leaves(progress.state.params[stage])))))
    buffers.shards[stage] = shards
    buffers.params[stage] = gather(shards, dims_of(ranks, progress, stage), ranks.data).wait()
