"""Say how parameters and optimizer state lie over the ranks that train together, and cut them so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh

from ..runtime import P2P, Transport
from ..runtime.collective import Collective
from ..runtime.grid import Axes
from ..runtime.ties import Tied
from ..schedule import Schedule
from ..stage import LeafSignature
from ..stage.layout import MeshLayout, distributed, layout_of, local, placements_of
from ..stage.signature import differentiable, flatten
from ..stage.tree import NAMESPACE, tree_leaves, tree_structure
from .precision import Precision
from .protocols import Optimizer, ShardOf, Tree
from .sharding import Dims, parts_of, shard, shard_dim, whole_shape

ShardWhat = Literal["none", "optimizer", "params"]


class Cut(NamedTuple):
    """How a parameter lies.

    Args:
        part: the dimension of which each data rank adds its part to the norm. None where the first data rank adds the whole. It does
            not depend on what is sharded, so that the norm always has the same bits.
        dim: the dimension that is cut over the data ranks, None where each has the whole.
        layout: as stages are given it: over the ranks of the model axis; None for a plain tensor.
        kept: as each data rank keeps its part.
    """

    part: int | None
    dim: int | None
    layout: MeshLayout | None
    kept: MeshLayout | None


class TrainingRanks(NamedTuple):
    """The ranks that train together, as one of them sees them.

    Args:
        shard: what is cut over the data ranks.
        schedule: which stages are whose.
        ranks: of the pipeline, in this process.
        tied: places of tied parameters.
        data, model, world: the ranks that hold the same parameters, parts of the same, and all.
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
    mesh: DeviceMesh | None
    axes: Axes

    @classmethod
    def of(cls, shard: ShardWhat, schedule: Schedule, tied: Tied, transport: Transport) -> TrainingRanks:
        """Describe the ranks of a transport."""
        data, model, world = (transport.collective(among) for among in ("data", "model", "world"))
        mesh, axes = (transport.mesh, transport.axes) if isinstance(transport, P2P) else (None, Axes())
        if mesh is not None:
            names = tuple(name for name in mesh.mesh_dim_names or () if name in (axes.data, axes.model))
            mesh = mesh[names] if axes.data in names else None
        return cls(shard, schedule, transport.local_ranks(schedule.ranks), tied, data, model, world, mesh, axes)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the model that this process holds."""
        return tuple(sorted({stage for rank in self.ranks for stage in self.schedule.model_stages_of(rank)}))

    @property
    def shards_params(self) -> bool:
        """Whether parameters are whole only between UNSHARD and RESHARD."""
        return self.shard == "params" and self.data.size > 1

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
        if dim is None or self.shard == "none":
            return Cut(dim, None, own, own)
        placements.insert(axis, dtensor.Shard(dim))
        return Cut(dim, dim, own, MeshLayout.of(self.mesh, placements, leaf.shape))

    def is_whole(self, leaf: Tensor) -> bool:
        """Whether every data rank keeps the same of a leaf of a state."""
        layout = layout_of(leaf)
        return layout is None or self.axes.data not in layout.axes

    def own(self, leaves: Sequence[Tensor], dims: Dims) -> tuple[Tensor, ...]:
        """The parts of leaves that this data rank updates."""
        if self.shards_params:
            return tuple(map(local, leaves))
        return shard(tuple(map(local, leaves)), dims, self.data.size, self.data.index)

    def parts(self, own: Sequence[Tensor], dims: Dims) -> tuple[ShardOf, ...] | None:
        """Where the parts that this data rank updates lie in their wholes; None where all are whole."""
        if all(dim is None for dim in dims):
            return None
        wholes = [LeafSignature(whole_shape(t.shape, dim, self.data.size), t.dtype, False) for t, dim in zip(own, dims, strict=True)]
        return parts_of(wholes, dims, self.data.size, self.data.index)

    def init(self, params: Tree, optimizer: Optimizer, name: str) -> tuple[Tree, Tree]:
        """The parameters of a stage as they are kept, and the state of the optimizer for them; ``name`` for errors."""
        leaves, treedef = flatten(params, name)
        if not all(map(self.is_whole, leaves)):
            raise ValueError(f"{name}: got parts over the axis {self.axes.data!r}, expected whole parameters, which init cuts itself")
        cuts = self.cuts(leaves)
        parts = shard(tuple(map(local, leaves)), tuple(cut.dim for cut in cuts), self.data.size, self.data.index)
        state = optimizer.init(treedef.unflatten(parts))
        flatten(state, f"optimizer.init({name})")  # raises for leaves that are no tensors
        layouts = [cut.kept for cut in cuts]
        trained = [n for n, leaf in enumerate(parts) if differentiable(leaf.dtype)]
        bare = treedef.unflatten(leaf if differentiable(leaf.dtype) else None for leaf in parts)
        forms = [(treedef, range(len(parts))), (tree_structure(bare), trained)]  # of trees like the parameters, or those of them that train

        def numbers_of(node: Any) -> Sequence[int] | None:
            structure, shapes = tree_structure(node), [t.shape for t in tree_leaves(node)]
            return next((own for form, own in forms if form == structure and shapes == [parts[n].shape for n in own]), None)

        def laid(node: Any) -> Any:
            numbers = numbers_of(node)
            made = () if numbers is None else (distributed(t, layouts[n]) for t, n in zip(tree_leaves(node), numbers, strict=True))
            return node if numbers is None else tree_structure(node).unflatten(made)

        kept = treedef.unflatten(map(distributed, parts, layouts)) if self.shards_params else params
        return kept, optree.tree_map(laid, state, is_leaf=lambda node: numbers_of(node) is not None, namespace=NAMESPACE)

    def given(self, params: Tree, precision: Precision) -> Tree:
        """The parameters of a stage as a step is given them: without memory where they are gathered in it."""
        if not self.shards_params:
            return precision.to_compute(params)
        leaves, treedef = flatten(params)
        return treedef.unflatten(self._bare(leaf, cut, precision) for leaf, cut in zip(leaves, self.cuts(leaves), strict=True))

    def _bare(self, leaf: Tensor, cut: Cut, precision: Precision) -> Tensor:
        """A tensor of the form of a whole parameter, without memory where this rank has a part of it."""
        part = precision.to_compute(local(leaf))
        if cut.dim is None:
            return distributed(part, cut.layout)
        bare = torch.empty(whole_shape(part.shape, cut.dim, self.data.size), dtype=part.dtype, device=part.device)
        bare.untyped_storage().resize_(0)
        return distributed(bare, cut.layout)
