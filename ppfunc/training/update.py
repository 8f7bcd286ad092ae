"""Update parameters within a step: sums of gradients over data ranks, their norm, clipping, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isinf, nan
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh

from ..runtime import P2P, Transport
from ..runtime.buffers import Buffers
from ..runtime.collective import Collective, Wait
from ..runtime.gradients import Gradients
from ..runtime.grid import Axes
from ..runtime.ownership import Owned
from ..runtime.spec import ParameterUpdate
from ..runtime.ties import Tied, leaf_number
from ..schedule import Schedule
from ..stage import LeafSignature, Signature
from ..stage.layout import MeshLayout, distributed, layout_of, local, placements_of
from ..stage.signature import differentiable
from ..stage.tree import NAMESPACE, tree_flatten, tree_leaves, tree_map, tree_structure
from ._torch import multiply_each, multiply_into_each
from .norms import clip_coefficient, leaf_sums, norm_of
from .precision import LossScale, Precision, overflow
from .protocols import Optimizer, ShardOf, Tree
from .reducer import Reducer
from .sharding import Dims, gather, parts_of, shard, shard_dim, whole_shape

OnNonfinite = Literal["skip", "raise", "ignore"]
Shard = Literal["none", "optimizer", "params"]


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
        shard: whether each data rank keeps, and updates, a part of the optimizer's state, or also of the parameters.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite
    shard: Shard

    @property
    def text(self) -> str:
        """The options that all ranks have to agree on."""
        dtypes = "/".join(str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master))
        scaled = "a scaled loss" if self.scale else "no scale"
        return f"clip {self.clip} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is not finite, shard {self.shard}"

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
        reducers: by stage, where gradients are added up over microbatches and data ranks, and the numbers of the leaves.
        cuts: by stage, how its parameters lie.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found: 1 where loss or gradients are not finite, float32[].
        shares: parts of this rank in the norm.
        totals: of every update whose sums over all ranks are under way, what waits for them.
        metrics: of every update.
    """

    state: TrainState
    weights: list[float | None]
    reducers: dict[int, tuple[Reducer, Sequence[int]]] = field(default_factory=dict)
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found: Tensor | None = None
    shares: list[Tensor] = field(default_factory=list)
    totals: list[Wait] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)


class Cut(NamedTuple):
    """How a parameter lies.

    Args:
        part: the dimension of which each data rank adds its part to the norm, None where the first adds the whole: the same for
            every way to shard, so that the norm has the same bits.
        dim: the dimension that is cut over the data ranks, None where each has the whole.
        layout: as stages are given it: over the ranks of the model axis; None for a plain tensor.
        kept: as each data rank keeps its part.
    """

    part: int | None
    dim: int | None
    layout: MeshLayout | None
    kept: MeshLayout | None


class Ground(NamedTuple):
    """Where an update takes place.

    Args:
        rule: how it is made.
        schedule: which stages are whose.
        ranks: of the pipeline, in this process.
        tied: places of tied parameters.
        data, model, world: the ranks that hold the same parameters, parts of the same, and all.
        mesh: the ranks of the axes of data and model, in the order of the mesh; None without one.
        axes: the names of the axes.
        idle: by stage, reducers that no step uses.
    """

    rule: UpdateRule
    schedule: Schedule
    ranks: tuple[int, ...]
    tied: Tied
    data: Collective
    model: Collective
    world: Collective
    mesh: DeviceMesh | None
    axes: Axes
    idle: dict[int, list[Reducer]]

    @classmethod
    def of(cls, rule: UpdateRule, schedule: Schedule, tied: Tied, transport: Transport) -> Ground:
        """The ground of a transport."""
        data, model, world = (transport.collective(among) for among in ("data", "model", "world"))
        mesh, axes = (transport.mesh, transport.axes) if isinstance(transport, P2P) else (None, Axes())
        if mesh is not None:
            names = tuple(name for name in mesh.mesh_dim_names or () if name in (axes.data, axes.model))
            mesh = mesh[names] if axes.data in names else None
        return cls(rule, schedule, transport.local_ranks(schedule.ranks), tied, data, model, world, mesh, axes, {})

    @property
    def shards_params(self) -> bool:
        """Whether parameters are whole only between UNSHARD and RESHARD."""
        return self.rule.shard == "params" and self.data.size > 1

    def cuts(self, leaves: Sequence[Tensor]) -> list[Cut]:
        """How the leaves of parameters lie: as they are given to ``init``, or as a state has them."""
        return [self._cut(leaf) for leaf in leaves]

    def _cut(self, leaf: Tensor) -> Cut:
        own = layout_of(leaf)
        if self.mesh is None or self.axes.data is None or not differentiable(leaf.dtype):
            return Cut(None, None, own, own)
        axis = (self.mesh.mesh_dim_names or ()).index(self.axes.data)
        if own is not None and self.axes.data in own.axes:  # of a state
            placements = list(placements_of(own.placements))
            cut = placements.pop(axis)
            model = MeshLayout.of(self.mesh[self.axes.model], placements, own.shape) if self.axes.model and placements else None
            dim = cut.dim if isinstance(cut, dtensor.Shard) else None
            return Cut(dim, dim, model, own)
        placements = [dtensor.Replicate()] * (self.mesh.ndim - 1) if own is None else list(placements_of(own.placements))
        dim = shard_dim(local(leaf).shape, self.data.size, {p.dim for p in placements if isinstance(p, dtensor.Shard)})
        if dim is None or self.rule.shard == "none":
            return Cut(dim, None, own, own)
        placements.insert(axis, dtensor.Shard(dim))
        return Cut(dim, dim, own, MeshLayout.of(self.mesh, placements, leaf.shape))

    def own(self, leaves: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """The parts of leaves that this data rank updates."""
        if self.shards_params:
            return tuple(map(local, leaves))
        return shard(tuple(map(local, leaves)), dims, self.data.size, self.data.place)

    def parts(self, own: Sequence[Tensor], dims: Dims) -> tuple[ShardOf, ...] | None:
        """Where the parts that this data rank updates lie in their wholes; None where all are whole."""
        if all(dim is None for dim in dims):
            return None
        wholes = [LeafSignature(whole_shape(t.shape, dim, self.data.size), t.dtype, False) for t, dim in zip(own, dims, strict=True)]
        return parts_of(wholes, dims, self.data.size, self.data.place)

    def update(self) -> ParameterUpdate:
        """The update of a step whose ``carry`` is :class:`Running`."""
        unshard = partial(_unshard, self) if self.rule.shard == "params" else None
        sums = partial(_sums, self) if self.data.size > 1 else None
        reduce, join, step = (partial(part, self) for part in (_reduce, _join, _step))
        return ParameterUpdate(sums, reduce, join, step, _finish, self.rule.needs_all, unshard)

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        """The parameters of a stage as they are kept, and the state of the optimizer for them."""
        leaves, treedef = tree_flatten(params)
        if any(self.axes.data in layout.axes for layout in map(layout_of, leaves) if layout is not None):
            raise ValueError(f"params: got parts over the axis {self.axes.data!r}, expected whole parameters, which init cuts itself")
        cuts = self.cuts(leaves)
        parts = shard(tuple(map(local, leaves)), tuple(cut.dim for cut in cuts), self.data.size, self.data.place)
        state = self.rule.optimizer.init(treedef.unflatten(parts))
        shapes, layouts = [t.shape for t in parts], [cut.kept for cut in cuts]

        def is_like(node: Any) -> bool:
            return tree_structure(node) == treedef and [t.shape for t in tree_leaves(node)] == shapes

        def laid(node: Any) -> Any:
            return treedef.unflatten(map(distributed, tree_leaves(node), layouts)) if is_like(node) else node

        kept = treedef.unflatten(map(distributed, parts, layouts)) if self.shards_params else params
        return kept, optree.tree_map(laid, state, is_leaf=is_like, namespace=NAMESPACE)

    def given(self, params: Tree) -> Tree:
        """The parameters of a stage as a step is given them: without memory where they are gathered in it."""
        if not self.shards_params:
            return self.rule.precision.to_compute(params)
        leaves, treedef = tree_flatten(params)
        return treedef.unflatten(map(self._bare, leaves, self.cuts(leaves)))

    def _bare(self, leaf: Tensor, cut: Cut) -> Tensor:
        """A tensor of the form of a whole parameter, without memory where this rank has a part of it."""
        part = self.rule.precision.to_compute(local(leaf))
        if cut.dim is None:
            return distributed(part, cut.layout)
        bare = torch.empty(whole_shape(part.shape, cut.dim, self.data.size), dtype=part.dtype, device=part.device)
        bare.untyped_storage().resize_(0)
        return distributed(bare, cut.layout)


def _cuts(ground: Ground, run: Running, stage: int) -> list[Cut]:
    """How the parameters of a stage lie, worked out once in a step."""
    if stage not in run.cuts:
        run.cuts[stage] = ground.cuts(tree_leaves(run.state.params[stage]))
    return run.cuts[stage]


def _sums(ground: Ground, buffers: Buffers, stage: int, leaves: dict[int, LeafSignature]) -> Reducer:
    """Add the gradients of a stage up in the buckets of an earlier step, if nobody uses them, else in new ones.

    A step takes them out, and puts them back once it has used their sums. After a failure they are not seen again: a sum may
    still be written there.
    """
    cuts, idle = _cuts(ground, buffers.carry, stage), ground.idle.setdefault(stage, [])
    form = tuple(leaves.values()), tuple(cuts[n].dim for n in leaves)
    while idle:
        reducer = idle.pop()
        if reducer.form == form and reducer.idle:
            return reducer
    device = next((local(leaf).device for leaf in tree_leaves(buffers.carry.state.params[stage])), None)
    return Reducer(*form, ground.data, dtype=ground.rule.precision.reduce, axis=ground.axes.data or "dp", stage=stage, device=device)


def _reduce(ground: Ground, buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
    """Begin to sum the gradients of a stage over the data ranks."""
    run: Running = buffers.carry
    if isinstance(sums, Reducer):
        sums.launch()
        run.reducers[stage] = sums, numbers
    else:
        like = tuple(buffers.params[stage][n] for n in numbers)
        run.gradients[stage] = dict(zip(numbers, sums.take(like, Owned()), strict=True))


def _receive(ground: Ground, run: Running, stage: int) -> None:
    """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
    if stage in run.reducers:
        reducer, numbers = run.reducers[stage]
        run.gradients[stage] = dict(zip(numbers, reducer.wait(), strict=True))
    cuts, again = _cuts(ground, run, stage), _further_places(ground, run, stage)
    counted = [(n, g) for n, g in sorted(run.gradients[stage].items()) if n not in again and _counts(ground, cuts[n])]
    dims = tuple(cuts[n].part if cuts[n].dim is None else None for n, _ in counted)
    parts = [
        g if dim is None else g.tensor_split(ground.data.size, dim)[ground.data.place].contiguous()
        for (_, g), dim in zip(counted, dims, strict=True)
    ]
    run.shares.append(leaf_sums(parts, ground.rule.norm_type).to(run.state.step.device))


def _counts(ground: Ground, cut: Cut) -> bool:
    """Whether this rank adds a leaf to the norm: the first of those that hold the same."""
    whole = cut.layout is None or not cut.layout.sharded
    return not (ground.data.place and cut.part is None) and not (ground.model.place and whole)


def _further_places(ground: Ground, run: Running, stage: int) -> set[int]:
    """The leaves of a stage that are counted elsewhere: at the first place of a tied parameter, in the first replica."""
    signature = Signature.of(run.state.params[stage]) if ground.tied else None
    group = next((g for g in ground.schedule.replicas if ground.schedule.model_stages[g[0]] == stage), None)
    if group is not None and ground.schedule.placement[group[0]] not in ground.ranks:
        return set(run.gradients[stage])
    names = (name for _, places in ground.tied for place, name in places[1:] if place == stage)
    return {leaf_number(signature, name, "params") for name in names if signature is not None}


def _join(ground: Ground, buffers: Buffers, losses: dict[int, Tensor]) -> None:
    """Sum the norm, the loss and the weights over all ranks; conclude from them where the updates are to come."""
    run, p = buffers.carry, ground.rule.norm_type
    for stage in sorted({*run.gradients, *run.reducers}) if ground.rule.needs_all else ():
        _receive(ground, run, stage)
    weight = run.weights.pop(0)
    shares = torch.cat([torch.zeros(1, dtype=torch.float64, device=run.state.step.device), *run.shares])
    run.shares.clear()
    own = [part.sum().to(shares) for part in losses.values()] if ground.model.place == 0 else []
    weighs = weight is not None and ground.model.place == 0 and 0 in ground.ranks
    loss = torch.stack([shares[0], *own]).sum()
    bad = (~shares.isfinite()).any().to(shares)  # the largest of several numbers need not be NaN where one is
    total = torch.stack([shares[0] if isinf(p) else shares.sum(), loss, shares.new_tensor(weight if weighs else 0.0), bad])
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
    """Conclude from the sums over all ranks whether the update is made, and by what gradients are divided."""
    norm, loss, weight = norm_of(total[0], rule.norm_type), total[1], total[2]
    norm = torch.where(total[3] > 0, torch.full_like(norm, nan), norm)
    scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
    divisor = scale
    if weighted:
        loss, divisor = loss / weight, divisor * weight
    norm = norm / divisor.abs()
    found = overflow(loss, norm)
    if rule.on_nonfinite == "raise" and bool(found):
        raise FloatingPointError(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}")
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
    dims = tuple(cut.dim for cut in _cuts(ground, run, stage))
    gradients, optimizer, own = run.gradients.pop(stage), run.state.optimizer[stage], ground.own(leaves, dims)
    gradients = {n: g.to(own[n].dtype) for n, g in gradients.items()}  # before they are divided, which would lose small ones
    if run.divisor is not None:  # not by the fused kernels, which divide by a float32
        gradients = _divided(gradients, run.divisor, into=stage in run.reducers)
    filled = [gradients[n] if n in gradients else torch.zeros_like(p) for n, p in enumerate(own)]
    found = run.found if rule.on_nonfinite == "skip" else None
    new, after = rule.optimizer.update(
        treedef.unflatten(filled), tree_map(local, optimizer), treedef.unflatten(own), found_inf=found, parts=ground.parts(own, dims)
    )
    parts = tree_leaves(new)
    _require_alike(stage, own, parts)
    run.state.optimizer[stage] = tree_map(lambda old, part: distributed(part, layout_of(old)), optimizer, after)
    if not ground.shards_params:
        parts = list(gather(parts, dims, ground.data).wait())
        buffers.params[stage] = tuple(tree_leaves(rule.precision.to_compute(treedef.unflatten(parts))))
    run.state.params[stage] = treedef.unflatten(map(distributed, parts, map(layout_of, leaves)))
    if stage in run.reducers:
        ground.idle[stage].append(run.reducers.pop(stage)[0])


def _require_alike(stage: int, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Raise ValueError where the optimizer has made parameters of another form."""
    before, after = ([f"{t.dtype}{list(t.shape)}" for t in leaves] for leaves in (old, new))
    if before != after:
        one, other = next(((a, b) for a, b in zip(before, after, strict=False) if a != b), (len(before), len(after)))
        raise ValueError(f"the optimizer has made {other} of the parameter {one} of stage {stage}; expected the same shape and dtype")


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
    run: Running = buffers.carry
    while run.totals:
        run.totals.pop(0)()


def _unshard(ground: Ground, buffers: Buffers, stage: int) -> None:
    """Gather the parameters of a stage."""
    run: Running = buffers.carry
    shards = tuple(ground.rule.precision.to_compute(list(map(local, tree_leaves(run.state.params[stage])))))
    buffers.shards[stage] = shards
    buffers.params[stage] = gather(shards, tuple(cut.dim for cut in _cuts(ground, run, stage)), ground.data).wait()
