"""Groups of ranks: their members, their order, and what a rank knows of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Topology, groups_in_creation_order, membership, neighbour_pairs, rank_of_stage

CUBE = Topology.of(pipe=2, data=2, model=2)


def groups_of(topology):
    groups = {}
    for kind, ranks in groups_in_creation_order(topology):
        groups.setdefault(kind, []).append(ranks)
    return groups


@st.composite
def topologies(draw):
    axes = draw(
        st.lists(st.sampled_from(["pipe", "data", "model", "expert"]), min_size=1, max_size=4, unique=True)
    )
    return Topology(tuple(axes), tuple(draw(st.integers(1, 3)) for _ in axes))


def test_creation_order_without_slices():
    assert list(groups_in_creation_order(Topology.of(pipe=2, data=2))) == [
        ("replica", (0, 2)),
        ("replica", (1, 3)),
        ("data", (0, 1)),
        ("data", (2, 3)),
        ("neighbours", (0, 2)),
        ("neighbours", (1, 3)),
        ("neighbours", (2, 0)),
        ("neighbours", (3, 1)),
        ("pipe", (0, 2)),
        ("pipe", (1, 3)),
        ("slice", (0,)),
        ("slice", (1,)),
        ("slice", (2,)),
        ("slice", (3,)),
    ]


def test_groups_with_slices():
    groups = groups_of(CUBE)
    assert groups["replica"] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert groups["data"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["pipe"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups["slice"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["neighbours"] == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)]


def test_neighbours_of_five_stages_and_two_replicas():
    # Stages 3 and 4 of replica 1 are ranks 7 and 9, and stage 4 wraps to rank 1, because data is innermost.
    pairs = list(neighbour_pairs(Topology.of(pipe=5, data=2)))
    assert pairs[7] == (7, 9)
    assert pairs[9] == (9, 1)
    # With the axes in the other order, stages 2 and 3 of replica 1 are ranks 7 and 8.
    assert list(neighbour_pairs(Topology.of(data=2, pipe=5)))[7] == (7, 8)


@given(topologies())
def test_every_kind_covers_every_rank_once(topology):
    everyone = list(range(topology.world_size))
    for kind in ("replica", "data", "pipe", "slice"):
        assert sorted(rank for group in groups_of(topology)[kind] for rank in group) == everyone
    pairs = list(neighbour_pairs(topology))
    assert [rank for rank, _ in pairs] == everyone
    assert sorted(buddy for _, buddy in pairs) == everyone


@given(topologies())
def test_membership_agrees_with_the_groups(topology):
    sizes = [max(topology.axis_size(axis), 1) for axis in ("pipe", "data", "model")]
    groups = groups_of(topology)
    pairs = dict(neighbour_pairs(topology))
    for rank in range(topology.world_size):
        mine = membership(topology, rank)
        for group, kind in (
            (mine.replica_group, "replica"),
            (mine.data_parallel_group, "data"),
            (mine.pipeline_group, "pipe"),
            (mine.slice_group, "slice"),
        ):
            assert [g for g in groups[kind] if rank in g] == [group]
        assert mine.pipeline_group.index(rank) == mine.stage
        assert mine.data_parallel_group.index(rank) == mine.replica
        assert mine.slice_group.index(rank) == mine.slice
        assert [*map(len, (mine.pipeline_group, mine.data_parallel_group, mine.slice_group))] == sizes
        assert (mine.stage == sizes[0] - 1) == (pairs[rank] == mine.pipeline_group[0])


@given(topologies().filter(lambda t: "pipe" in t.axes), st.data())
def test_rank_of_another_stage_of_my_replica(topology, data):
    rank = data.draw(st.integers(0, topology.world_size - 1))
    for stage, peer in enumerate(topology.group_of(rank, "pipe")):
        assert rank_of_stage(topology, rank, stage) == peer


def test_rank_of_a_stage_with_other_axes_replaced():
    assert rank_of_stage(CUBE, rank=3, stage=1) == 7
    assert rank_of_stage(CUBE, rank=3, stage=1, data=0) == 5
    assert rank_of_stage(CUBE, rank=3, stage=0, data=0, model=0) == 0
    with pytest.raises(ValueError, match=r"pipe=2 is out of range"):
        rank_of_stage(CUBE, rank=3, stage=2)
    with pytest.raises(ValueError, match="unknown axis 'expert'"):
        rank_of_stage(CUBE, rank=3, stage=0, expert=0)
    with pytest.raises(ValueError, match="unknown axis 'pipe'"):
        rank_of_stage(Topology.of(data=2), rank=0, stage=0)


def test_axes_that_are_missing_make_groups_of_one():
    only_model = Topology.of(model=2)
    assert groups_of(only_model) == {
        "replica": [(0, 1)],
        "data": [(0,), (1,)],
        "neighbours": [(0, 0), (1, 1)],
        "pipe": [(0,), (1,)],
        "slice": [(0, 1)],
    }
    mine = membership(only_model, 1)
    assert (mine.stage, mine.replica, mine.slice) == (0, 0, 1)


def test_replicas_are_contiguous_where_data_is_outermost():
    """As ``ParallelMode.MODEL`` of ColossalAI has all model parallel ranks of a replica."""
    for tensor, model in ((4, 8), (8, 16)):
        replicas = groups_of(Topology.of(data=2, pipe=2, model=tensor))["replica"]
        assert replicas == [tuple(range(model)), tuple(range(model, 2 * model))]
        assert all(group.index(rank) == rank % model for group in replicas for rank in group)
