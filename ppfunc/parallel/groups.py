"""List the groups of ranks that communicate, as plain tuples, from a topology.

The axes ``pipe``, ``data`` and ``model`` (tensor slices) have a meaning here; other axes only take
part in the arithmetic. A kind of parallelism whose axis is missing has groups of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .counts import require_counts
from .topology import Topology

Group = tuple[int, ...]


class NamedGroup(NamedTuple):
    """A group of ranks, and its kind: ``"replica"``, ``"data"``, ``"neighbours"``, ``"pipe"`` or ``"slice"``."""

    kind: str
    ranks: Group


class ParallelSizes(NamedTuple):
    """The number of ranks that work together in each kind of parallelism, one where a kind is not used."""

    pipe: int
    data: int
    model: int

    @property
    def slices(self) -> int:
        """The number of tensor slices, which is the size of the ``model`` axis."""
        return self.model


class Membership(NamedTuple):
    """The position of one rank in every kind of group; groups are made when they are asked for.

    Args:
        topology: the topology.
        rank: the rank itself, in the world.
        stage: its index along ``pipe``: its rank in the pipeline group.
        replica: its index along ``data``: its rank in the data parallel group.
        slice: its index along ``model``: its rank among the tensor slices.
    """

    topology: Topology
    rank: int
    stage: int
    replica: int
    slice: int

    @property
    def sizes(self) -> ParallelSizes:
        """The sizes of the pipeline, data parallel and slice groups."""
        return parallel_sizes(self.topology)

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage is the first of the pipeline."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage is the last of the pipeline."""
        return self.stage == self.sizes.pipe - 1

    @property
    def pipeline_group(self) -> Group:
        """The ranks of its pipeline, in the order of the stages."""
        return _group_of(self.topology, self.rank, "pipe")

    @property
    def data_parallel_group(self) -> Group:
        """The ranks that hold the same part of the model."""
        return _group_of(self.topology, self.rank, "data")

    @property
    def slice_group(self) -> Group:
        """The ranks among which the tensors of its stage are sliced."""
        return _group_of(self.topology, self.rank, "model")

    @property
    def replica_group(self) -> Group:
        """All ranks of its replica, over which norms and overflow are agreed."""
        if "data" not in self.topology.axes:
            return tuple(range(self.topology.world_size))
        return self.topology.ranks_at("data", self.replica)

    @property
    def rank_in_replica(self) -> int:
        """Its position among all ranks of its replica."""
        coordinate = zip(self.topology.axes, self.topology.coordinate(self.rank), strict=True)
        place = 0
        for axis, index in coordinate:
            if axis != "data":
                place = place * self.topology.axis_size(axis) + index
        return place


def parallel_sizes(topology: Topology) -> ParallelSizes:
    """Read the sizes of the axes pipe, data and model, one for each that is missing.

    >>> parallel_sizes(Topology.of(pipe=4, data=2))
    ParallelSizes(pipe=4, data=2, model=1)
    """
    return ParallelSizes(*(max(topology.axis_size(axis), 1) for axis in ParallelSizes._fields))


def replica_groups(topology: Topology) -> Iterator[Group]:
    """List, for each index along ``data``, the ranks that hold one replica of the model together.

    Overflow flags and gradient norms are agreed over these.

    >>> list(replica_groups(Topology.of(pipe=2, data=2, model=2)))
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    if "data" not in topology.axes:
        yield tuple(range(topology.world_size))
        return
    for index in range(topology.axis_size("data")):
        yield topology.ranks_at("data", index)


def data_parallel_groups(topology: Topology) -> Iterator[Group]:
    """List the groups of ranks that hold the same part of the model: gradients are summed over these."""
    return _along(topology, "data")


def pipeline_groups(topology: Topology) -> Iterator[Group]:
    """List the ranks of each pipeline, in the order of their index along ``pipe``."""
    return _along(topology, "pipe")


def slice_groups(topology: Topology) -> Iterator[Group]:
    """List the groups of ranks among which the tensors of one stage are sliced."""
    return _along(topology, "model")


def neighbour_pairs(topology: Topology) -> Iterator[tuple[int, int]]:
    """Pair every rank, in order, with the next one in its pipeline; the last with the first.

    >>> list(neighbour_pairs(Topology.of(pipe=2, data=2)))
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    stages = parallel_sizes(topology).pipe
    stride = topology.strides[topology.axes.index("pipe")] if "pipe" in topology.axes else 0
    for rank in range(topology.world_size):
        stage = _index(topology, rank, "pipe")
        yield rank, rank + ((stage + 1) % stages - stage) * stride


def model_groups(world_size: int, tensor: int, pipe: int) -> Iterator[Group]:
    """List contiguous groups of ``tensor * pipe`` ranks: all model parallel ranks of one replica.

    For grids whose data axis is outermost. Rank ``r`` is number ``r % (tensor * pipe)`` in its group.

    >>> list(model_groups(8, tensor=2, pipe=2))
    [(0, 1, 2, 3), (4, 5, 6, 7)]

    References:
        ColossalAI, ``ParallelMode.MODEL``.
    """
    require_counts(world_size=world_size, tensor=tensor, pipe=pipe)
    size = tensor * pipe
    if world_size % size:
        raise ValueError(
            f"{world_size} ranks do not divide into replicas of tensor x pipe = {tensor} x {pipe} ranks: "
            "the world has a positive multiple of that"
        )
    return (tuple(range(first, first + size)) for first in range(0, world_size, size))


def groups_in_creation_order(topology: Topology) -> Iterator[NamedGroup]:
    """List every group, in the order in which all ranks have to create them.

    First ``replica``, then ``data``, ``neighbours``, ``pipe`` and ``slice``.
    """
    kinds = {
        "replica": replica_groups,
        "data": data_parallel_groups,
        "neighbours": neighbour_pairs,
        "pipe": pipeline_groups,
        "slice": slice_groups,
    }
    return (NamedGroup(kind, ranks) for kind, groups in kinds.items() for ranks in groups(topology))


def rank_of_stage(topology: Topology, rank: int, stage: int, **elsewhere: int) -> int:
    """Find the rank that holds ``stage`` in the replica of ``rank``: its coordinate with ``pipe`` replaced.

    Args:
        topology: one with an axis ``pipe``.
        rank: the rank that asks.
        stage: the index along ``pipe``.
        elsewhere: other axes to replace as well, by name.

    >>> rank_of_stage(Topology.of(pipe=2, data=2), rank=1, stage=1)
    3
    >>> rank_of_stage(Topology.of(pipe=2, data=2), rank=1, stage=1, data=0)
    2
    """
    here = dict(zip(topology.axes, topology.coordinate(rank), strict=True))
    return topology.rank(**{**here, "pipe": stage, **elsewhere})


def membership(topology: Topology, rank: int) -> Membership:
    """Find the position of ``rank`` in every kind of group.

    >>> membership(Topology.of(pipe=2, data=2), 3).pipeline_group
    (1, 3)
    """
    return Membership(topology, rank, *(_index(topology, rank, axis) for axis in ("pipe", "data", "model")))


def _along(topology: Topology, axis: str) -> Iterator[Group]:
    if axis in topology.axes:
        return topology.groups(axis)
    return ((rank,) for rank in range(topology.world_size))


def _group_of(topology: Topology, rank: int, axis: str) -> Group:
    return topology.group_of(rank, axis) if axis in topology.axes else (rank,)


def _index(topology: Topology, rank: int, axis: str) -> int:
    coordinate = topology.coordinate(rank)
    return coordinate[topology.axes.index(axis)] if axis in topology.axes else 0
