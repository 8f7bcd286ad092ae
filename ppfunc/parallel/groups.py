"""List the groups of ranks that communicate, as plain tuples, from a topology.

The axes ``pipe``, ``data`` and ``model`` (tensor slices) have a meaning here; other axes only take
part in the arithmetic. A kind of parallelism whose axis is missing has groups of one rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .counts import require_counts
from .topology import Topology

Group = tuple[int, ...]


class NamedGroup(NamedTuple):
    """Name the kind of a group: ``"replica"``, ``"data"``, ``"neighbours"``, ``"pipe"`` or ``"slice"``."""

    kind: str
    ranks: Group


class ParallelSizes(NamedTuple):
    """Count the ranks of each kind of parallelism; a kind that is not used has one."""

    pipe: int
    data: int
    model: int

    @property
    def slices(self) -> int:
        """Count the tensor slices: the size of the ``model`` axis."""
        return self.model


class Membership(NamedTuple):
    """Locate one rank in every kind of group.

    Args:
        rank: the rank itself, in the world.
        sizes: the sizes of the pipeline, data parallel and slice groups.
        stage: its index along ``pipe``: its rank in the pipeline group.
        replica: its index along ``data``: its rank in the data parallel group.
        slice: its index along ``model``: its rank among the tensor slices.
        pipeline_group: the ranks of its pipeline, in the order of the stages.
        data_parallel_group: the ranks that hold the same part of the model.
        slice_group: the ranks among which the tensors of its stage are sliced.
        replica_group: all ranks of its replica, over which norms and overflow are agreed.
    """

    rank: int
    sizes: ParallelSizes
    stage: int
    replica: int
    slice: int
    pipeline_group: Group
    data_parallel_group: Group
    slice_group: Group
    replica_group: Group


def membership(topology: Topology, rank: int) -> Membership:
    """Find the position of ``rank`` in every kind of group.

    >>> membership(Topology.of(pipe=2, data=2), 3).pipeline_group
    (1, 3)
    """
    whole = _complete(topology)
    pipe, data, model = (whole.coordinate(rank)[whole.axes.index(axis)] for axis in ParallelSizes._fields)
    pipeline, parallel, sliced = (whole.group_of(rank, axis) for axis in ParallelSizes._fields)
    return Membership(
        rank,
        parallel_sizes(topology),
        pipe,
        data,
        model,
        pipeline,
        parallel,
        sliced,
        whole.ranks_at("data", data),
    )


def parallel_sizes(topology: Topology) -> ParallelSizes:
    """Read the sizes of the axes pipe, data and model; a missing axis has size one.

    >>> parallel_sizes(Topology.of(pipe=4, data=2))
    ParallelSizes(pipe=4, data=2, model=1)
    """
    return ParallelSizes(*map(_complete(topology).axis_size, ParallelSizes._fields))


def replica_groups(topology: Topology) -> Iterator[Group]:
    """List, for each index along ``data``, the ranks that hold one replica of the model together.

    Overflow flags and gradient norms are agreed over these.

    >>> list(replica_groups(Topology.of(pipe=2, data=2, model=2)))
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    whole = _complete(topology)
    return (whole.ranks_at("data", index) for index in range(whole.axis_size("data")))


def data_parallel_groups(topology: Topology) -> Iterator[Group]:
    """List the groups of ranks that hold the same part of the model: gradients are summed over these."""
    return _complete(topology).groups("data")


def pipeline_groups(topology: Topology) -> Iterator[Group]:
    """List the ranks of each pipeline, in the order of their index along ``pipe``."""
    return _complete(topology).groups("pipe")


def slice_groups(topology: Topology) -> Iterator[Group]:
    """List the groups of ranks among which the tensors of one stage are sliced."""
    return _complete(topology).groups("model")


def neighbour_pairs(topology: Topology) -> Iterator[tuple[int, int]]:
    """Pair every rank, in order, with the next one in its pipeline; the last with the first.

    >>> list(neighbour_pairs(Topology.of(pipe=2, data=2)))
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    pairs = (
        pair
        for group in pipeline_groups(topology)
        for pair in zip(group, (*group[1:], group[0]), strict=True)
    )
    return iter(sorted(pairs))


def model_groups(world_size: int, tensor: int, pipe: int) -> Iterator[Group]:
    """List contiguous groups of ``tensor * pipe`` ranks: all model parallel ranks of one replica.

    For grids whose data axis is outermost. Rank ``r`` is number ``r % (tensor * pipe)`` in its group.

    Raises:
        ValueError: ``tensor * pipe`` does not divide the ranks.

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


def _complete(topology: Topology) -> Topology:
    """Give the topology the axes that it lacks, each of one rank, which leaves every rank its number."""
    missing = tuple(axis for axis in ParallelSizes._fields if axis not in topology.axes)
    return Topology((*topology.axes, *missing), (*topology.sizes, *(1 for _ in missing)))
