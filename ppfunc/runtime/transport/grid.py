"""Name the ranks that train together on the axes of a DeviceMesh; make the mesh and groups of a topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.parallel.groups import groups_in_creation_order
from ppfunc.parallel.topology import Topology

_AXIS_OF_KIND = {"data": "data", "pipe": "pipe", "slice": "model"}

ShardWhat = Literal["none", "optimizer", "params"]


class Axes(NamedTuple):
    """Name the axes of a mesh; None for an axis that it does not have.

    Args:
        pipe: along it the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches. Of several axes, parameters are cut
            over the last; along the others each rank keeps the same parts.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
        experts: one of the data axes, whose ranks hold different experts, and pass tokens to each other
            within stages. A parameter of experts is a DTensor that is cut over this axis, such as
            ``ppfunc.stage.shard`` makes; its gradient is summed over the other data axes. Stages of these
            ranks run microbatches of the same shapes.
        context: one of the data axes, whose ranks have parts of the same sequences, and attend to each other
            within stages. Weigh losses by tokens where ranks have unequal numbers of them.
    """

    pipe: str = "pp"
    data: str | tuple[str, ...] | None = None
    model: str | None = None
    experts: str | None = None
    context: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """List the axes of the data ranks."""
        return self.data if isinstance(self.data, tuple) else () if self.data is None else (self.data,)

    @property
    def of_stages(self) -> tuple[str, ...]:
        """List the axes over which stages communicate."""
        return tuple(dict.fromkeys(a for a in (self.model, self.experts, self.context) if a is not None))


class Grid(NamedTuple):
    """Describe the pipelines around a rank. Ranks are numbered over all that train together.

    Args:
        pipelines: the ranks of each pipeline that runs the batch of this rank, in the order of the pipeline.
        data: the ranks that have this rank's place in the pipelines that run other batches, and this rank.
        size: the number of ranks that train together.
        rank: this one.
        together: the ranks that run the same stages, and communicate within them.
        axes, sizes: of the mesh, whose ranks are numbered row-major.
    """

    pipelines: tuple[tuple[int, ...], ...]
    data: tuple[int, ...]
    size: int
    rank: int
    together: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def pipeline(self) -> tuple[int, ...]:
        """List the ranks of the pipeline of this rank."""
        return next(ranks for ranks in self.pipelines if self.rank in ranks)

    @property
    def model(self) -> tuple[int, ...]:
        """List the ranks with the place of this rank in the pipelines that run the same batch."""
        place = self.pipeline.index(self.rank)
        return tuple(ranks[place] for ranks in self.pipelines)

    @property
    def same_batch(self) -> tuple[int, ...]:
        """List the ranks that run the same batch, those of the first pipeline first."""
        return tuple(rank for ranks in self.pipelines for rank in ranks)

    @property
    def mixes_batches(self) -> bool:
        """Tell whether stages communicate with ranks that run other batches."""
        return not set(self.together) <= set(self.model)

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """List the ranks that differ from this one along these axes alone, in the order of the axes.

        >>> Grid(((0,),), (0, 1, 2, 3), 8, 5, axes=("out", "in", "pp"), sizes=(2, 2, 2)).along(("in", "out"))
        (1, 5, 3, 7)
        """
        numbers = torch.arange(self.size, device="cpu").view(self.sizes)
        here = (numbers == self.rank).nonzero()[0].tolist()
        kept = tuple(slice(None) if a in axes else n for a, n in zip(self.axes, here, strict=True))
        order = [a for a in self.axes if a in axes]
        return tuple(numbers[kept].permute([order.index(a) for a in axes]).flatten().tolist())


def grid_of(mesh: DeviceMesh, axes: Axes, rank: int) -> Grid:
    """Make the grid around a rank; its ranks are numbered as the mesh lists them.

    Args:
        rank: that in the world.

    Raises:
        ValueError: the mesh has no such axis, or an axis that has no name here, or one has two; experts or
            context lie over no data axis.
    """
    names = mesh.mesh_dim_names or ()
    data = axes.data_axes
    model = () if axes.model is None else (axes.model,)
    for role in ("experts", "context"):
        if (axis := getattr(axes, role)) is not None and axis not in data:
            raise ValueError(
                f"axes: got {role}={axis!r}, expected one of the data axes, {', '.join(data) or 'none'}: its"
                f" ranks run other {'batches' if role == 'experts' else 'tokens'}, and are data ranks"
            )
    if sorted(map(str, (*data, axes.pipe, *model))) != sorted(names):
        raise ValueError(
            f"axes: got {axes}, the mesh has the axes {', '.join(names) or 'without names'}; name each of"
            " them once"
        )
    here = mesh.mesh.flatten().tolist().index(rank)
    grid = Grid((), (), mesh.mesh.numel(), here, axes=tuple(names), sizes=tuple(mesh.mesh.shape))
    pipelines = torch.tensor(grid.along((*model, axes.pipe)), device="cpu").view(
        -1, mesh.size(names.index(axes.pipe))
    )
    return grid._replace(
        pipelines=tuple(map(tuple, pipelines.tolist())),
        data=grid.along(data),
        together=grid.along(axes.of_stages),
    )


def require_shardable(axes: Axes | None, shard: ShardWhat) -> None:
    """Raise ValueError if ``shard`` cuts state over data ranks, and no axis has such ranks."""
    if shard != "none" and (axes is None or not axes.data_axes):
        raise ValueError(
            f"shard: got {shard!r}, and no axis of data ranks to cut over; expected P2P(mesh=mesh,"
            " axes=Axes('pp', data='dp'), shard=...)"
        )
    if shard == "params" and axes is not None and axes.experts in axes.data_axes[-1:]:
        raise ValueError(
            f"shard: got 'params' with experts={axes.experts!r}, the last data axis, over which parameters of"
            " experts are cut already; name another data axis last, data=('ep', 'dp'), or take"
            " shard='optimizer'"
        )


# -- meshes and groups of a topology


def device_mesh(topology: Topology, device_type: str = "cpu") -> DeviceMesh:
    """Make the mesh of a topology; every rank calls it, after ``init_process_group`` and choosing its device.

    Args:
        topology: one with as many ranks as the world.
        device_type: such as ``"cpu"`` or ``"cuda"``.

    Raises:
        RuntimeError: before ``torch.distributed`` is initialised.
        ValueError: the topology has another number of ranks than the world.
    """
    _require_world(topology)
    ranks = torch.arange(topology.world_size, dtype=torch.int, device="cpu").view(topology.sizes)
    return DeviceMesh(device_type, ranks, mesh_dim_names=topology.axes)


def topology_of_mesh(mesh: DeviceMesh, names: Mapping[str, str] | None = None) -> Topology:
    """Read the topology of a mesh. Its rank ``i`` is the ``i``-th of the mesh, row-major.

    Args:
        mesh: a mesh with named dimensions.
        names: topology names of mesh dimensions, such as ``{"pp": "pipe", "dp": "data", "tp": "model"}``.

    Raises:
        ValueError: the dimensions have no names, or ``names`` has one that the mesh has not.
    """
    dims = mesh.mesh_dim_names
    if dims is None:
        raise ValueError(
            'the mesh has no names for its dimensions: make it with mesh_dim_names=("pipe", "data")'
        )
    names = names or {}
    unknown = sorted(set(names) - set(dims))
    if unknown:
        raise ValueError(
            f"the mesh has no dimension {', '.join(unknown)}: its dimensions are {', '.join(dims)}"
        )
    return Topology(tuple(names.get(name, name) for name in dims), tuple(mesh.mesh.shape))


class ProcessGroups:
    """Holds the process groups of this rank, of kinds ``replica``, ``data``, ``pipe`` and ``slice``.

    On exit it destroys the groups that it made, and leaves those of a mesh alone. Every rank of the world
    makes it, at the same point of its program. ``position`` is the rank of this process in the topology. With
    a mesh whose ranks are permuted it differs from the rank in the world. torch sorts the ranks of a group:
    a place in a group is not one on the axis.

    Args:
        topology: one with as many ranks as the world; None to take that of ``mesh``.
        mesh: a mesh whose groups are used where it has an axis of the kind.
        names: for a mesh with other names, as in `topology_of_mesh`.

    Raises:
        RuntimeError: before ``torch.distributed`` is initialised.
        ValueError: topology, mesh and world do not fit together.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        mesh: DeviceMesh | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        if (topology is None) == (mesh is None):
            raise ValueError("expected a topology or a mesh, one of the two")
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        if mesh is not None:
            topology = topology_of_mesh(mesh, names)
            axes = ((kind, axis) for kind, axis in _AXIS_OF_KIND.items() if axis in topology.axes)
            self._groups.update((kind, mesh.get_group(topology.axes.index(axis))) for kind, axis in axes)
        assert topology is not None
        _require_world(topology)
        self.topology = topology
        self._ranks = (
            tuple(range(topology.world_size)) if mesh is None else tuple(mesh.mesh.flatten().tolist())
        )
        self.position = self._ranks.index(dist.get_rank())
        # The groups to make follow from the topology, so they are the same on every rank.
        kinds = {"replica", *_AXIS_OF_KIND} - self._groups.keys()
        for kind, positions in groups_in_creation_order(topology):
            if kind in kinds:
                self._make(kind, [self._ranks[position] for position in positions])

    def __getitem__(self, kind: str) -> dist.ProcessGroup:
        if kind not in self._groups:
            raise KeyError(f"no group of kind {kind!r}: the kinds are {', '.join(self._groups)}")
        return self._groups[kind]

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ranks(self, kind: str) -> tuple[int, ...]:
        """Return the ranks in the world of the group of a kind, ascending, in the order of the group."""
        return tuple(dist.get_process_group_ranks(self[kind]))

    def close(self) -> None:
        """Destroy the groups that were made here. No group can be used afterwards."""
        self._groups.clear()
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _make(self, kind: str, ranks: list[int]) -> None:
        group = dist.new_group(ranks, group_desc=f"ppfunc {kind}")
        if dist.get_rank() in ranks:
            self._groups[kind] = group
            self._made.append(group)


def _require_world(topology: Topology) -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
    topology.require_world_size(dist.get_world_size())
