"""Make process groups and a DeviceMesh for a topology, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.parallel.groups import groups_in_creation_order
from ppfunc.parallel.topology import Topology

_AXIS_OF_KIND = {"data": "data", "pipe": "pipe", "slice": "model"}


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
