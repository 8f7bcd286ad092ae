"""Update parameters within a step: sums of gradients over data ranks, their norm, clipping, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isinf
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..runtime import Transport
from ..runtime.buffers import Buffers
from ..runtime.collective import Collective, Wait
from ..runtime.lower import ParameterUpdate
from ..runtime.ties import Tied, leaf_number
from ..schedule import Schedule
from ..stage import Signature
from ..stage.layout import MeshLayout, distributed, layout_of, local, placements_of
from ..stage.signature import differentiable
from ..stage.tree import NAMESPACE, tree_flatten, tree_leaves, tree_map, tree_structure
from ._torch import multiply_each
from .norms import clip_coefficient, leaf_sums, norm_of
from .precision import LossScale, Precision, overflow
from .protocols import Optimizer, Tree
from .sharding import Dims, Pending, gather, reduce_shards, shard, shard_dim

OnNonfinite = Literal["skip", "raise", "ignore"]


class TrainState(NamedTuple):
    """Everything that training goes on from; every leaf is a tensor or a DTensor.

    Args:
        step: updates so far, without those that were skipped, int64[].
        params: by stage of the model, of this process, in the dtype of ``precision.master``.
        optimizer: its state, by stage.
        scale: of the loss, as :class:`LossScale` keeps it; empty where there is none.
    """

    step: Tensor
    params: dict[int, Tree]
    optimizer: dict[int, Tree]
    scale: dict[str, Tensor]


class Metrics(NamedTuple):
    """Describe a step, the same on all ranks; tensors on the device, which nothing has read.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, float64[].
        grad_norm: of all gradients, before they were clipped, float64[].
        scale: of the loss in this step, float64[].
        skipped: 1 where the update was left out since loss or gradients were not finite, else 0, float32[].
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor


class UpdateRule(NamedTuple):
    """How gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: largest norm of all gradients together.
        norm_type: p of the norm.
        scale: of the loss.
        precision: the dtypes.
        on_nonfinite: what to do where loss or norm are not finite.
        sharded: whether each data rank keeps a part of the optimizer's state, and updates that part.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite
    sharded: bool

    @property
    def needs_all(self) -> bool:
        """Whether an update needs the gradients of all stages."""
        return not (self.clip == inf and self.scale is None and self.on_nonfinite == "ignore")


@dataclass
class Running:
    """Hold the findings of a step so far.

    Args:
        state: from which it began; after each update, the new one.
        weights: for each update to come, the sum of the weights of this data rank's microbatches, None where that of all is 1.
        pending: by stage, sums over data ranks under way, and the numbers of the leaves.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found: 1 where loss or gradients are not finite, float32[].
        shares: parts of this rank in the norm.
        totals: of every update whose sums over all ranks are under way, what waits for them.
        metrics: of every update.
    """

    state: TrainState
    weights: list[float | None]
    pending: dict[int, tuple[list[int], Pending]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found: Tensor | None = None
    shares: list[Tensor] = field(default_factory=list)
    totals: list[Wait] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)


class Ground(NamedTuple):
    """Where an update takes place.

    Args:
        rule: how it is made.
        schedule: which stages are whose.
        ranks: of the pipeline, in this process.
        tied: places of tied parameters.
        data, model, world: the ranks that hold the same parameters, parts of the same, and all.
        mesh: the ranks of the axes of data and model, in the order of the mesh; None without one.
        axis: the number of the data axis in it.
    """

    rule: UpdateRule
    schedule: Schedule
    ranks: tuple[int, ...]
    tied: Tied
    data: Collective
    model: Collective
    world: Collective
    mesh: DeviceMesh | None = None
    axis: int = 0

    @classmethod
    def of(cls, rule: UpdateRule, schedule: Schedule, tied: Tied, transport: Transport, mesh: DeviceMesh | None, axes: Any) -> Ground:
        """The ground of a transport."""
        data, model, world = (transport.collective(among) for among in ("data", "model", "world"))
        part, axis = None, 0
        if mesh is not None and axes.data is not None:
            names = tuple(name for name in mesh.mesh_dim_names or () if name in (axes.data, axes.model))
            part, axis = mesh[names], names.index(axes.data)
        return cls(rule, schedule, transport.local_ranks(schedule.ranks), tied, data, model, world, part, axis)

    def dims(self, leaves: Sequence[Tensor]) -> Dims:
        """The dimension of every leaf that is cut over the data ranks."""
        if not self.rule.sharded:
            return (None,) * len(leaves)
        return tuple(shard_dim(local(t).shape, self.data.size, _cut_by(t)) if differentiable(t.dtype) else None for t in leaves)

    def layouts(self, leaves: Sequence[Tensor], dims: Dims) -> list[MeshLayout | None]:
        """How the shards of leaves lie over the mesh."""
        return [self._layout(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]

    def _layout(self, leaf: Tensor, dim: int | None) -> MeshLayout | None:
        own = layout_of(leaf)
        if dim is None or self.mesh is None:
            return own
        placements: list[Any] = [Replicate()] * (self.mesh.ndim - 1) if own is None else list(placements_of(own.placements))
        placements.insert(self.axis, Shard(dim))
        return MeshLayout.of(self.mesh, placements, leaf.shape)

    def update(self) -> ParameterUpdate:
        """The update of a step whose ``carry`` is :class:`Running`."""
        return ParameterUpdate(partial(_reduce, self), partial(_join, self), partial(_step, self), self.rule.needs_all)

    def init(self, params: Tree) -> Tree:
        """The state of the optimizer for the parameters of a stage."""
        leaves, treedef = tree_flatten(params)
        dims = self.dims(leaves)
        own = shard(tuple(map(local, leaves)), dims, self.data.size, self.data.place)
        state = self.rule.optimizer.init(treedef.unflatten(own))
        layouts, shapes = self.layouts(leaves, dims), [t.shape for t in own]

        def is_like(node: Any) -> bool:
            return tree_structure(node) == treedef and [t.shape for t in tree_leaves(node)] == shapes

        def laid(node: Any) -> Any:
            if not is_like(node):
                return node
            return treedef.unflatten(map(distributed, tree_leaves(node), layouts))

        return optree.tree_map(laid, state, is_leaf=is_like, namespace=NAMESPACE)


def _cut_by(leaf: Tensor) -> set[int]:
    """The dimensions of a leaf that another axis cuts."""
    layout = layout_of(leaf)
    return set() if layout is None else {p.dim for p in placements_of(layout.placements) if isinstance(p, Shard)}


def _reduce(ground: Ground, buffers: Buffers, stage: int, gradients: dict[int, Tensor]) -> None:
    """Begin to sum the gradients of a stage over the data ranks."""
    run: Running = buffers.carry
    run.gradients[stage] = gradients
    if ground.data.size > 1:
        numbers = sorted(gradients)
        dims = ground.dims(tree_leaves(run.state.params[stage]))
        given, reduce = [gradients[n] for n in numbers], ground.rule.precision.reduce
        run.pending[stage] = numbers, reduce_shards(given, tuple(dims[n] for n in numbers), ground.data, dtype=reduce)


def _receive(ground: Ground, run: Running, stage: int) -> None:
    """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
    if stage in run.pending:
        numbers, pending = run.pending.pop(stage)
        run.gradients[stage] = dict(zip(numbers, pending.wait(), strict=True))
    counted = [g for n, g in sorted(run.gradients[stage].items()) if _counts(ground, run, stage, n)]
    run.shares.append(leaf_sums(counted, ground.rule.norm_type).to(run.state.step.device))


def _counts(ground: Ground, run: Running, stage: int, leaf: int) -> bool:
    """Whether this rank adds a leaf to the norm: the first of those that hold the same."""
    leaves = tree_leaves(run.state.params[stage])
    layout = layout_of(leaves[leaf])
    if ground.data.place and ground.dims(leaves)[leaf] is None:
        return False
    if ground.model.place and not (layout is not None and layout.sharded):
        return False
    for _, places in ground.tied:
        for place, name in places[1:]:
            if place == stage and leaf_number(Signature.of(run.state.params[stage]), name, "params") == leaf:
                return False
    group = next((g for g in ground.schedule.replicas if ground.schedule.model_stages[g[0]] == stage), None)
    return group is None or ground.schedule.placement[group[0]] in ground.ranks


def _join(ground: Ground, buffers: Buffers, losses: dict[int, Tensor]) -> None:
    """Sum the norm, the loss and the weights over all ranks; conclude from them where the updates are to come."""
    run, p = buffers.carry, ground.rule.norm_type
    for stage in sorted(run.gradients) if ground.rule.needs_all else ():
        _receive(ground, run, stage)
    weight = run.weights.pop(0)
    shares = torch.cat([torch.zeros(1, dtype=torch.float64, device=run.state.step.device), *run.shares])
    run.shares.clear()
    own = [part.sum().to(shares) for part in losses.values()] if ground.model.place == 0 else []
    weighs = weight is not None and ground.model.place == 0 and 0 in ground.ranks
    loss = torch.stack([shares[0], *own]).sum()
    total = torch.stack([shares[0] if isinf(p) else shares.sum(), loss, shares.new_tensor(weight if weighs else 0.0)])
    largest = shares.amax() if isinf(p) else None
    waits = [ground.world.all_reduce(total), *([] if largest is None else [ground.world.all_reduce(largest, "max")])]

    def conclude() -> None:
        for wait in waits:
            wait()
        _conclude(ground.rule, run, total if largest is None else torch.stack([largest, *total[1:]]), weight is not None, scale)

    scale = buffers.scale
    if ground.rule.needs_all:
        conclude()
        if ground.rule.scale is not None:
            run.state = run.state._replace(scale=ground.rule.scale.update(run.state.scale, run.found))
            buffers.scale = run.state.scale["scale"]
    else:
        run.totals.append(conclude)


def _conclude(rule: UpdateRule, run: Running, total: Tensor, weighted: bool, loss_scale: Tensor | None) -> None:
    """What the sums over all ranks say of the update: whether it is made, and what gradients are divided by."""
    norm, loss, weight = norm_of(total[0], rule.norm_type), total[1], total[2]
    scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
    divisor = scale
    if weighted:
        loss, divisor = loss / weight, divisor * weight
    norm = norm / divisor
    found = overflow(loss, norm)
    if rule.on_nonfinite == "raise" and bool(found):
        raise FloatingPointError(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}; nothing was updated")
    clipped = clip_coefficient(norm, rule.clip)
    divisor = divisor if clipped is None else divisor / clipped
    run.divisor = None if loss_scale is None and not weighted and clipped is None else divisor
    run.found = found
    skipped = found if rule.on_nonfinite == "skip" else torch.zeros_like(found)
    run.metrics.append(Metrics(loss, norm, scale, skipped))
    run.state = run.state._replace(step=run.state.step + (1 - skipped).to(run.state.step))


def _step(ground: Ground, buffers: Buffers, stage: int) -> None:
    """Make the new parameters and optimizer state of a stage."""
    run, rule = buffers.carry, ground.rule
    if not rule.needs_all:
        _receive(ground, run, stage)
    leaves, treedef = tree_flatten(run.state.params[stage])
    dims, gradients, optimizer = ground.dims(leaves), run.gradients.pop(stage), run.state.optimizer[stage]
    own = shard(tuple(map(local, leaves)), dims, ground.data.size, ground.data.place)
    if run.divisor is not None:  # not by the fused kernels, which divide by a float32
        scaled = multiply_each(list(gradients.values()), run.divisor.reciprocal())  # tied stages may share some
        gradients = dict(zip(gradients, scaled, strict=True))
    filled = [gradients[n].to(p.dtype) if n in gradients else torch.zeros_like(p) for n, p in enumerate(own)]
    found = run.found if rule.on_nonfinite == "skip" else None
    new, after = rule.optimizer.update(treedef.unflatten(filled), tree_map(local, optimizer), treedef.unflatten(own), found_inf=found)
    whole = gather(tree_leaves(new), dims, ground.data).wait()
    run.state.params[stage] = treedef.unflatten(map(distributed, whole, map(layout_of, leaves)))
    run.state.optimizer[stage] = tree_map(lambda old, part: distributed(part, layout_of(old)), optimizer, after)
    buffers.params[stage] = tuple(tree_leaves(rule.precision.to_compute(treedef.unflatten(whole))))
