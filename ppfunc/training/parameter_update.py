"""Update parameters within a step: sums of gradients over data ranks, their norm, clipping, and the optimizer."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isinf, nan
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..runtime.arguments import StepArguments
from ..runtime.buffers import Buffers, Leaves
from ..runtime.collective import Wait
from ..runtime.gradients import Gradients
from ..runtime.nonfinite import NotFinite
from ..runtime.ownership import Owned
from ..runtime.spec import ParameterUpdate
from ..runtime.ties import leaf_number
from ..stage import LeafSignature, Signature
from ..stage._torch import versions
from ..stage.layout import distributed, layout_of, local
from ..stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths
from ._torch import multiply_each, multiply_into_each
from .norms import clip_coefficient, leaf_sums, norm_of
from .precision import LossScale, Precision, overflow
from .protocols import Optimizer, ShardOf, Tree, selected, text_of
from .ranks import Cut, ShardWhat, TrainingRanks
from .reducer import Reducer
from .sharding import Dims, gather
from .start import start_facts
from .train_state import Metrics, TrainState

OnNonfinite = Literal["skip", "raise", "ignore"]
Idle = dict[int, list[Reducer]]
"""By stage, reducers that no step uses."""


class UpdateRule(NamedTuple):
    """How gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: largest norm of all gradients together.
        norm_type: p of the norm.
        scale: of the loss.
        precision: the dtypes.
        on_nonfinite: what to do where loss or norm are not finite.
        shard: whether each data rank keeps, and updates, a part of the optimizer's state, or also of the parameters.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite
    shard: ShardWhat

    @property
    def options_text(self) -> str:
        """The options that all ranks have to agree on."""
        dtypes = "/".join(str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master))
        scaled = "a scaled loss" if self.scale else "no scale"
        return f"clip {self.clip} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is not finite, shard {self.shard}"

    @property
    def numbers_text(self) -> tuple[str, str]:
        """The numbers of the optimizer and of the scale."""
        return f"optimizer {text_of(self.optimizer)}", f"scale {'none' if self.scale is None else self.scale.text}"

    @property
    def needs_all(self) -> bool:
        """Whether an update needs the gradients of all stages."""
        return not (self.clip == inf and self.scale is None and self.on_nonfinite == "ignore")


@dataclass
class Progress:
    """Hold the findings of a step so far.

    Args:
        state: from which it began; after each update, the new one.
        weighted: whether the caller gave weights of the losses, whose sum over the data ranks is not 1 yet.
        stage_state: leaves of the states of stages before this update.
        reducers: by stage, where gradients are added up over microbatches and data ranks, and the numbers of the leaves.
        cuts: by stage, how its parameters lie.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found: 1 where loss or gradients are not finite, float32[].
        shares: parts of this rank in the norm.
        totals: of every update whose sums over all ranks are under way, what waits for them.
        metrics: of every update.
        written: leaves of the state that were updated in place.
        left: by stage, how many updates are to come.
    """

    state: TrainState
    weighted: bool
    stage_state: dict[int, Leaves] = field(default_factory=dict)
    reducers: dict[int, tuple[Reducer, Sequence[int]]] = field(default_factory=dict)
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found: Tensor | None = None
    shares: list[Tensor] = field(default_factory=list)
    totals: list[Wait] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)


def parameter_update(rule: UpdateRule, ranks: TrainingRanks) -> ParameterUpdate:
    """The update of a step whose ``carry`` is :class:`Progress`."""
    idle: Idle = {}
    return ParameterUpdate(
        begin=partial(_begin, ranks),
        sums=partial(_sums, rule, ranks, idle) if ranks.data.size > 1 else None,
        reduce=_reduce,
        join=partial(_join, rule, ranks),
        step=partial(_step, rule, ranks, idle),
        finish=_finish,
        together=rule.needs_all,
        unshard=partial(_unshard, rule, ranks) if rule.shard == "params" else None,
        facts=lambda progress: start_facts(rule.numbers_text, ranks, progress.state),
    )


def _begin(ranks: TrainingRanks, passes: Sequence[StepArguments]) -> Sequence[StepArguments]:
    """Divide the weights of the losses by their sum over all data ranks: before any gradient, which could overflow in half precision."""
    progress: Progress = passes[0].carry
    progress.stage_state = dict(passes[0].state)
    progress.left = dict.fromkeys(progress.state.params, sum(part.ends for part in passes))
    if not progress.weighted:
        return passes
    given = torch.cat([part.loss_weights for part in passes if part.loss_weights is not None]).to(progress.state.step.device)
    total = given.sum()
    ranks.data.all_reduce(total)()
    if total.device.type == "cpu" and total == 0:  # elsewhere the loss is no number
        raise ValueError("loss_weights: their sum over all data ranks is 0, expected one that losses can be divided by")
    weights = (given / total).chunk(len(passes))
    return [part._replace(loss_weights=own) for part, own in zip(passes, weights, strict=True)]


def _cuts(ranks: TrainingRanks, progress: Progress, stage: int) -> list[Cut]:
    """How the parameters of a stage lie, worked out once in a step."""
    if stage not in progress.cuts:
        progress.cuts[stage] = ranks.cuts(tree_leaves(progress.state.params[stage]))
    return progress.cuts[stage]


def _dims(ranks: TrainingRanks, progress: Progress, stage: int) -> Dims:
    """The dimension of every parameter of a stage that is cut over the data ranks."""
    return tuple(cut.dim for cut in _cuts(ranks, progress, stage))


def _sums(rule: UpdateRule, ranks: TrainingRanks, idle: Idle, buffers: Buffers, stage: int, leaves: dict[int, LeafSignature]) -> Reducer:
    """Find buckets for the gradients of a stage: those of an earlier step that nobody uses, else new ones.

    A step takes them out of ``idle``, and puts them back once it has used their sums. A step that fails does not put them back: a sum
    may still be written there.
    """
    progress: Progress = buffers.carry
    dims, free = _dims(ranks, progress, stage), idle.setdefault(stage, [])
    form = tuple(leaves.values()), tuple(dims[n] for n in leaves)
    while free:
        reducer = free.pop()
        if reducer.form == form and reducer.idle:
            return reducer
    device = next((local(leaf).device for leaf in tree_leaves(progress.state.params[stage])), None)
    return Reducer(*form, ranks.data, dtype=rule.precision.reduce, axis=ranks.axes.data or "dp", stage=stage, device=device)


def _reduce(buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
    """Begin to sum the gradients of a stage over the data ranks."""
    progress: Progress = buffers.carry
    if isinstance(sums, Reducer):
        sums.launch()
        progress.reducers[stage] = sums, numbers
    else:
        like = tuple(buffers.params[stage][n] for n in numbers)
        progress.gradients[stage] = dict(zip(numbers, sums.take(like, Owned()), strict=True))


def _receive(rule: UpdateRule, ranks: TrainingRanks, progress: Progress, stage: int) -> None:
    """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
    if stage in progress.reducers:
        reducer, numbers = progress.reducers[stage]
        progress.gradients[stage] = dict(zip(numbers, reducer.wait(), strict=True))
    cuts, again = _cuts(ranks, progress, stage), _further_places(ranks, progress, stage)
    counted = [(n, g) for n, g in sorted(progress.gradients[stage].items()) if n not in again and _counts(ranks, cuts[n])]
    dims = tuple(cuts[n].part if cuts[n].dim is None else None for n, _ in counted)
    parts = [
        g if dim is None else g.tensor_split(ranks.data.size, dim)[ranks.data.place].contiguous()
        for (_, g), dim in zip(counted, dims, strict=True)
    ]
    progress.shares.append(leaf_sums(parts, rule.norm_type).to(progress.state.step.device))


def _counts(ranks: TrainingRanks, cut: Cut) -> bool:
    """Whether this rank adds a leaf to the norm: the first of those that hold the same."""
    whole = cut.layout is None or not cut.layout.sharded
    return not (ranks.data.place and cut.part is None) and not (ranks.model.place and whole)


def _further_places(ranks: TrainingRanks, progress: Progress, stage: int) -> set[int]:
    """The leaves of a stage that are counted elsewhere: at the first place of a tied parameter, in the first replica."""
    signature = Signature.of(progress.state.params[stage]) if ranks.tied else None
    group = next((g for g in ranks.schedule.replicas if ranks.schedule.model_stages[g[0]] == stage), None)
    if group is not None and ranks.schedule.placement[group[0]] not in ranks.ranks:
        return set(progress.gradients[stage])
    names = (name for _, places in ranks.tied for place, name in places[1:] if place == stage)
    return {leaf_number(signature, name, "params") for name in names if signature is not None}


def _join(rule: UpdateRule, ranks: TrainingRanks, buffers: Buffers, losses: dict[int, Tensor]) -> None:
    """Sum the norm and the loss over all ranks; conclude from them where the updates are to come."""
    progress, p = buffers.carry, rule.norm_type
    for stage in sorted({*progress.gradients, *progress.reducers}) if rule.needs_all else ():
        _receive(rule, ranks, progress, stage)
    shares = torch.cat([torch.zeros(1, dtype=torch.float64, device=progress.state.step.device), *progress.shares])
    progress.shares.clear()
    own = [part.sum().to(shares) for part in losses.values()] if ranks.model.place == 0 else []
    loss = torch.stack([shares[0], *own]).sum()
    bad = shares.isnan().any().to(shares)  # the largest of several numbers need not be NaN where one is
    total = torch.stack([shares[0] if isinf(p) else shares.sum(), loss, bad])
    largest = shares.amax() if isinf(p) else None
    waits = [ranks.world.all_reduce(total), *([] if largest is None else [ranks.world.all_reduce(largest, "max")])]

    def conclude() -> None:
        for wait in waits:
            wait()
        _conclude(rule, progress, total if largest is None else torch.stack([largest, *total[1:]]), scale)

    scale = buffers.scale
    if not rule.needs_all:
        progress.totals.append(conclude)
        return
    conclude()
    if rule.on_nonfinite == "skip":
        buffers.state.update(selected(progress.found, progress.stage_state, buffers.state))
    progress.stage_state = dict(buffers.state)
    if rule.scale is not None:
        progress.state = progress.state._replace(scale=rule.scale.update(progress.state.scale, progress.found))
        buffers.scale = progress.state.scale["scale"]


def _conclude(rule: UpdateRule, progress: Progress, total: Tensor, loss_scale: Tensor | None) -> None:
    """Conclude from the sums over all ranks whether the update is made, and by what gradients are divided."""
    norm, loss = norm_of(total[0], rule.norm_type), total[1]
    norm = torch.where(total[2] > 0, torch.full_like(norm, nan), norm)
    scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
    norm = norm / scale
    progress.found = overflow(loss, norm)
    if rule.on_nonfinite == "raise" and bool(progress.found):
        raise NotFinite(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}")
    clipped = clip_coefficient(norm, rule.clip)
    progress.divisor = None if loss_scale is None and clipped is None else scale if clipped is None else scale / clipped
    skipped = progress.found if rule.on_nonfinite == "skip" else torch.zeros_like(progress.found)
    progress.metrics.append(Metrics(loss, norm, scale, skipped, {}))
    progress.state = progress.state._replace(step=progress.state.step + (1 - skipped).to(progress.state.step))


def _step(rule: UpdateRule, ranks: TrainingRanks, idle: Idle, buffers: Buffers, stage: int) -> None:
    """Make the new parameters and optimizer state of a stage."""
    progress: Progress = buffers.carry
    progress.left[stage] -= 1
    if not rule.needs_all:
        _receive(rule, ranks, progress, stage)
    leaves, treedef = tree_flatten(progress.state.params[stage])
    dims, gradients, optimizer = _dims(ranks, progress, stage), progress.gradients.pop(stage), progress.state.optimizer[stage]
    own = ranks.own(leaves, dims)
    gradients = {n: g.to(own[n].dtype) for n, g in gradients.items()}  # before they are divided, which would lose small ones
    if progress.divisor is not None:  # not by the fused kernels, which divide by a float32
        gradients = _divided(gradients, progress.divisor, into=stage in progress.reducers)
    grads = treedef.unflatten([gradients[n] if n in gradients else torch.zeros_like(p) for n, p in enumerate(own)])
    given = (grads, tree_map(local, optimizer), treedef.unflatten(own))
    new, after = _optimized(rule, progress, stage, given, ranks.parts(own, dims))
    parts = tree_leaves(new)
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
        made |= own if into else zip(own, multiply_each(given, factor), strict=True)
        if into:
            multiply_into_each(given, factor)
    return made


def _finish(buffers: Buffers) -> None:
    """Wait for the sums that are still under way."""
    progress: Progress = buffers.carry
    while progress.totals:
        progress.totals.pop(0)()


def _unshard(rule: UpdateRule, ranks: TrainingRanks, buffers: Buffers, stage: int) -> None:
    """Gather the parameters of a stage."""
    progress: Progress = buffers.carry
    shards = tuple(rule.precision.to_compute(list(map(local, tree_leaves(progress.state.params[stage])))))
    buffers.shards[stage] = shards
    buffers.params[stage] = gather(shards, _dims(ranks, progress, stage), ranks.data).wait()
