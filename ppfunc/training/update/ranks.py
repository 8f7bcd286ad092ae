"""Decide how parameters are cut over the ranks that train together, and put cut matrices together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.runtime import Transport
from ppfunc.runtime.lowering.comparison import DATA_AXES
from ppfunc.runtime.lowering.ties import Tied
from ppfunc.runtime.ports.protocols import Axes, Collective, CollectiveOnPaper, ShardWhat
from ppfunc.schedule import Schedule
from ppfunc.stage.layout import MeshLayout, distributed, layout_of, local, placements_of
from ppfunc.stage.signature import differentiable, flatten

from ..optim.optimizer import Tree
from .buckets import Dims, Sums, shard, shard_dim, whole_shape
from .precision import Precision

Leaves = Mapping[int, torch.Tensor]


class CutMatrices(NamedTuple):
    """Name the leaves whose matrices, of their last two dimensions, are cut over the ranks of an axis.

    Args:
        axis: the name of the axis.
        ranks: the ranks of the axis; None for an axis that the transport does not know.
        cuts: the dimension that is cut, and its length over all ranks, by number of the leaf.
        sizes: the elements of the whole leaf, by number of the leaf, equal on every rank of all axes.
    """

    axis: str
    ranks: Collective | None
    cuts: dict[int, tuple[int, int]]
    sizes: dict[int, int]


def on_matrices(
    fn: Callable[[torch.Tensor], torch.Tensor], leaves: Leaves, axes: Sequence[CutMatrices]
) -> Leaves:
    """Apply a function to the whole matrices of which each rank has these parts.

    Equivalent to, for every leaf, which is gathered on one rank of each axis only::

        part of this rank (fn(whole leaf))

    Leaves are dealt to the ranks of an axis by size. All of them call this with their parts of the same
    leaves.

    Args:
        fn: a function of a leaf, which may be a stack of matrices; returns a tensor of the same form.
        leaves: leaves by number, all of one dtype.
        axes: the first is that which cut last.

    Raises:
        ValueError: the transport does not know an axis.
    """
    if not axes:
        return {n: fn(leaf) for n, leaf in leaves.items()}
    (axis, ranks, cuts, elements), *others = axes
    if ranks is None:
        raise ValueError(
            f"params: got matrices in parts over the axis {axis!r}, which are updated whole, and a transport"
            f" without it; pass ppfunc.P2P(mesh=mesh, axes=ppfunc.Axes('pp', model={axis!r}))"
        )
    whole = {n: _with_length(leaf.shape, *cuts[n]) for n, leaf in leaves.items() if n in cuts}
    if not whole:
        return on_matrices(fn, leaves, others)
    like, dealt = next(iter(leaves.values())), deal({n: elements[n] for n in whole}, ranks.size)
    mine = dealt[ranks.index]
    sizes = {n: [part_length(cuts[n][1], ranks.size, rank) for rank in range(ranks.size)] for n in mine}

    def exchange(
        sent: list[list[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each rank; return the tensors, of these shapes, that each sends to this rank."""
        flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in chain(*sent))])
        lengths = [list(map(math.prod, each)) for each in shapes]
        sends = [sum(t.numel() for t in each) for each in sent]
        received, wait = ranks.all_to_all(flat, list(map(sum, lengths)), sends)
        wait()
        pieces = iter(received.split([*chain(*lengths)]))
        return [[next(pieces).view(*shape) for shape in each] for each in shapes]

    parts = exchange(
        [[leaves[n] for n in numbers] for numbers in dealt],
        [[_with_length(whole[n], cuts[n][0], sizes[n][rank]) for n in mine] for rank in range(ranks.size)],
    )
    joined = {n: torch.cat(column, cuts[n][0]) for n, *column in zip(mine, *parts, strict=True)}
    del parts
    results = on_matrices(fn, {n: leaf for n, leaf in leaves.items() if n not in whole} | joined, others)
    split = {n: results[n].split(sizes[n], cuts[n][0]) for n in mine}
    back = exchange(
        [[split[n][rank] for n in mine] for rank in range(ranks.size)],
        [[leaves[n].shape for n in numbers] for numbers in dealt],
    )
    return {**results, **dict(zip(chain(*dealt), chain(*back), strict=True))}


def deal(sizes: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Deal things of these sizes to ranks, the largest first, each to the rank that has least.

    >>> deal({0: 1, 1: 5, 2: 3, 3: 3}, 2)
    [[1, 0], [2, 3]]
    """
    dealt, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for n in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        dealt[rank].append(n)
        loads[rank] += sizes[n]
    return dealt


def part_length(length: int, ranks: int, rank: int) -> int:
    """Return how much of a dimension a rank has, cut as ``torch.chunk`` does.

    >>> [part_length(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    each = -(-length // ranks)
    return max(0, min(each, length - rank * each))


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return *shape[:dim], length, *shape[dim + 1 :]


if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class Cut(NamedTuple):
    """Describe how a parameter is cut.

    Args:
        part: the dimension of which each data rank adds its part to the norm. None where the first data rank
            adds the whole. It does not depend on what is sharded, so that the norm always has the same bits.
        dim: the dimension that is cut over the data ranks, None where each has the whole.
        layout: the layout that stages are given: over the axes of model and experts; None for a plain tensor.
        kept: the layout in which each data rank keeps its part.
        over: the ranks over which its gradient is summed.
        repeated: model ranks have the same of it.
    """

    part: int | None
    dim: int | None
    layout: MeshLayout | None
    kept: MeshLayout | None
    over: Sums
    repeated: bool

    @property
    def split(self) -> int | None:
        """Return a dimension along which ranks of any axis keep parts, if there is any."""
        if self.dim is not None or self.layout is None:
            return self.dim
        return next((p.dim for p in placements_of(self.layout.placements) if hasattr(p, "dim")), None)


def placements_by_axis(layout: MeshLayout | None) -> dict[str, Placement]:
    """Return the placement of a tensor on every axis of its mesh; nothing of a plain tensor."""
    return {} if layout is None else dict(zip(layout.axes, placements_of(layout.placements), strict=True))


class TrainingRanks(NamedTuple):
    """Describe the ranks that train together, as this process sees them.

    Args:
        shard: ``"optimizer"`` or ``"params"``, which is cut over the data ranks, or ``"none"``.
        schedule: places stages on ranks.
        ranks: the ranks of the pipeline in this process.
        tied: places of tied parameters.
        data, model, world: the ranks that run other batches, hold parts of the same stage, and all.
        dense, experts: the data ranks over which gradients are summed, of parameters that all data ranks
            have, and of those that are cut over the axis of experts.
        cutting: the ranks of every axis that may cut parameters.
        mesh: the ranks of the axes of data and model, in the order of the mesh; None without one.
        axes: the names of the axes.
    """

    shard: ShardWhat
    schedule: Schedule
    ranks: tuple[int, ...]
    tied: Tied
    data: Collective
    model: Collective
    world: Collective
    dense: Sums
    experts: Sums
    cutting: Mapping[str, Collective]
    mesh: DeviceMesh | None
    axes: Axes

    @classmethod
    def of(cls, schedule: Schedule, tied: Tied, transport: Transport) -> Self:
        """Describe the ranks of a transport."""
        mesh, axes, shard = transport.mesh, transport.axes, transport.shard
        every = axes.data_axes
        if mesh is not None:
            roles = (*every, axes.model)
            names = tuple(name for name in mesh.mesh_dim_names or () if name in roles)
            mesh = mesh[names] if every else None
            # Parts over the axes of experts alone cannot be told from experts.
            if mesh is not None and shard != "none" and not set(names) <= {axes.experts, axes.model}:
                DATA_AXES[mesh] = every[-1]

        def along(names: tuple[str, ...]) -> Collective:
            return transport.collective(names) if names else Collective()

        def sums(names: tuple[str, ...]) -> Sums:
            last = tuple(axis for axis in names if axis == every[-1])
            return Sums(along(names), along(last), along(names[: len(names) - len(last)]))

        dense, experts = sums(every), sums(tuple(axis for axis in every if axis != axes.experts))
        model = along(axes.model_axes)
        cutting = {axis: along((axis,)) for axis in (*every[-1:], axes.model, axes.experts) if axis}
        local_ranks, world = transport.local_ranks(schedule.ranks), transport.collective("world")
        return cls(
            shard, schedule, local_ranks, tied, dense.ranks, model, world, dense, experts, cutting, mesh, axes
        )

    def on_paper(self, ranks: tuple[int, ...]) -> TrainingRanks:
        """Describe the same ranks, of which this process runs ``ranks``; collectives move nothing."""
        of = CollectiveOnPaper.of
        dense, experts = (Sums(*map(of, sums)) for sums in (self.dense, self.experts))
        model, world = of(self.model), of(self.world)
        cutting = {axis: of(each) for axis, each in self.cutting.items()}
        return self._replace(
            ranks=ranks, data=dense.ranks, model=model, world=world, dense=dense, experts=experts,
            cutting=cutting,
        )  # fmt: skip

    @property
    def parts(self) -> Collective:
        """Return the data ranks over which parameters are cut."""
        return self.dense.parts

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of the model that this process holds."""
        return tuple(sorted({stage for rank in self.ranks for stage in self.schedule.model_stages_of(rank)}))

    @property
    def shards_params(self) -> bool:
        """Tell whether parameters are whole only between UNSHARD and RESHARD."""
        return self.shard == "params" and self.parts.size > 1

    def cut(self, leaf: torch.Tensor) -> Cut:
        """Decide how a parameter is cut, for a leaf as ``init`` gets it or as a state has it."""
        layout, axes = layout_of(leaf), self.axes
        if self.mesh is None or not differentiable(leaf.dtype):
            return Cut(None, None, layout, layout, self.dense, layout is None or not layout.sharded)
        from torch.distributed.tensor import Replicate, Shard  # here, because the import takes long

        last, names = axes.data_axes[-1], self.mesh.mesh_dim_names or ()
        placements = placements_by_axis(layout)
        cut_over = {name for name, placement in placements.items() if isinstance(placement, Shard)}
        over = self.experts if axes.experts in cut_over else self.dense
        repeated, given, kept = not cut_over - {last, axes.experts}, layout, layout
        own, before = tuple(n for n in names if n == axes.model or n in cut_over - {last}), None
        if self.shards_params and layout is not None and last in layout.axes:  # of a state
            placed = [placements.get(name, Replicate()) for name in own]
            given = MeshLayout.of(self.mesh[own], placed, layout.shape) if own else None
            before = placements.pop(last)
        taken = {p.dim for p in placements.values() if isinstance(p, Shard)}
        dim = shard_dim(local(leaf).shape, over.parts.size, taken)
        dim = before.dim if isinstance(before, Shard) else dim
        if dim is not None and self.shard != "none":
            placements[last] = Shard(dim)
            placed = [placements.get(name, Replicate()) for name in names]
            kept = MeshLayout.of(self.mesh, placed, leaf.shape)
        return Cut(dim, None if self.shard == "none" else dim, given, kept, over, repeated)

    def cut_matrices(self, cuts: Sequence[Cut]) -> list[CutMatrices]:
        """List the axes that cut matrices of parameters, as data ranks keep them, in the order to join them.

        Args:
            cuts: the cuts of the parameters, which are numbered in their order.
        """
        found = dict[str, CutMatrices]()
        for n, cut in enumerate(cuts):
            lengths = [] if cut.kept is None else [*cut.kept.shape]
            elements = math.prod(lengths)
            for axis, placement in placements_by_axis(cut.kept).items():
                if (dim := getattr(placement, "dim", -1)) >= max(0, len(lengths) - 2):
                    ranks = self.cutting.get(axis)
                    one = found.setdefault(axis, CutMatrices(axis, ranks, {}, {}))
                    one.cuts[n], one.sizes[n] = (dim, lengths[dim]), elements
                    if ranks is not None:
                        lengths[dim] = part_length(lengths[dim], ranks.size, ranks.index)
        order = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return [found[axis] for axis in (*(found.keys() - {*order}), *reversed(order)) if axis in found]

    def summed_over(self, leaf: torch.Tensor) -> Sums:
        """Return the data ranks over which the gradient of a leaf, or its change, is summed."""
        return self.experts if self.axes.experts in self._data_axes_of(leaf) else self.dense

    def copied_over(self, leaf: torch.Tensor) -> tuple[str, ...]:
        """List the data axes along which ranks keep the same part of a leaf of a state."""
        cut = self._data_axes_of(leaf)
        return tuple(axis for axis in self.axes.data_axes if axis not in cut)

    def require_whole(self, leaves: Sequence[torch.Tensor], name: str) -> None:
        """Raise ValueError for parameters that are cut over a data axis other than the axis of experts."""
        axes = (axis for leaf in leaves for axis in self._data_axes_of(leaf) if axis != self.axes.experts)
        if axis := next(axes, None):
            raise ValueError(
                f"{name}: got parts over the axis {axis!r}, expected whole parameters, such as"
                " leaf.full_tensor(), which this trainer cuts itself; parameters of experts lie over the axis"
                " Axes(experts=...)"
            )

    def _data_axes_of(self, leaf: torch.Tensor) -> list[str]:
        layout = layout_of(leaf)
        if layout is None:
            return []
        pairs = zip(layout.axes, layout.placements, strict=True)
        return [axis for axis, placement in pairs if axis in self.axes.data_axes and placement != "R"]

    def shards(self, leaves: Sequence[torch.Tensor], dims: Dims) -> Sequence[torch.Tensor]:
        """Return the shards of leaves of this rank that this data rank updates."""
        if self.shards_params or self.parts.size == 1:
            return leaves
        return shard(leaves, dims, self.parts.size, self.parts.index)

    def for_step(self, params: Tree, precision: Precision) -> Tree:
        """Cast the parameters of a stage for a step; parameters that it gathers have no memory yet."""
        if not self.shards_params:
            return precision.to_compute(params)
        leaves, treedef = flatten(params)
        return treedef.unflatten(self._bare(leaf, self.cut(leaf), precision) for leaf in leaves)

    def _bare(self, leaf: torch.Tensor, cut: Cut, precision: Precision) -> torch.Tensor:
        """Make a tensor of the form of a whole parameter, without memory if this rank holds a shard."""
        part = precision.to_compute(local(leaf))
        if cut.dim is None:
            return distributed(part, cut.layout)
        bare = torch.empty(
            whole_shape(part.shape, cut.dim, self.parts.size), dtype=part.dtype, device=part.device
        )
        bare.untyped_storage().resize_(0)
        return distributed(bare, cut.layout)
