"""List the groups of ranks that communicate, as plain tuples, from a topology.

The axes ``pipe``, ``data`` and ``model`` (tensor slices) have a meaning here; other axes only take
part in the arithmetic. A kind of parallelism whose axis is missing has groups of one rank.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .topology import Topology

Group = tuple[int, ...]
_AXES = "pipe", "data", "model"


class NamedGroup(NamedTuple):
    """Name the kind of a group: ``"replica"``, ``"data"``, ``"neighbours"``, ``"pipe"`` or ``"slice"``."""

    kind: str
    ranks: Group


class Membership(NamedTuple):
    """Locate one rank in every kind of group.

    Args:
        rank: the rank itself, in the world.
        stage: its index along ``pipe``: its rank in the pipeline group.
        replica: its index along ``data``: its rank in the data parallel group.
        slice: its index along ``model``: its rank among the tensor slices.
        pipeline_group: the ranks of its pipeline, in the order of the stages.
        data_parallel_group: the ranks that hold the same part of the model.
        slice_group: the ranks among which the tensors of its stage are sliced.
        replica_group: all ranks of its replica, over which norms and overflow are agreed.
    """

    rank: int
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
    pipe, data, model = (whole.coordinate(rank)[whole.axes.index(axis)] for axis in _AXES)
    pipeline, parallel, sliced = (whole.group_of(rank, axis) for axis in _AXES)
    replica = whole.ranks_where(data=data)
    return Membership(rank, pipe, data, model, pipeline, parallel, sliced, replica)


def neighbour_pairs(topology: Topology) -> Iterator[tuple[int, int]]:
    """Pair every rank, in order, with the next one in its pipeline; the last with the first.

    >>> list(neighbour_pairs(Topology.of(pipe=2, data=2)))
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    pairs = (
        pair
        for group in _complete(topology).groups("pipe")
        for pair in zip(group, (*group[1:], group[0]), strict=True)
    )
    return iter(sorted(pairs))


def groups_in_creation_order(topology: Topology) -> Iterator[NamedGroup]:
    """List every group, in the order in which all ranks have to create them.

    First ``replica``: all ranks that hold one replica of the model together, over which norms and overflow
    are agreed. Then ``data``, over which gradients are summed, ``neighbours``, ``pipe`` and ``slice``.
    """
    whole = _complete(topology)
    kinds: dict[str, Iterable[Group]] = {
        "replica": (whole.ranks_where(data=index) for index in range(whole.axis_size("data"))),
        "data": whole.groups("data"),
        "neighbours": neighbour_pairs(topology),
        "pipe": whole.groups("pipe"),
        "slice": whole.groups("model"),
    }
    return (NamedGroup(kind, ranks) for kind, groups in kinds.items() for ranks in groups)


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
    missing = tuple(axis for axis in _AXES if axis not in topology.axes)
    return Topology((*topology.axes, *missing), (*topology.sizes, *(1 for _ in missing)))
