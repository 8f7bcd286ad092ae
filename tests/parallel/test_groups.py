"""Groups of ranks as DeepSpeed's grid and ColossalAI have them, each an expression of a topology."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Topology

CUBE = Topology.of(pipe=2, data=2, model=2)


@st.composite
def topologies(draw):
    axes = draw(
        st.lists(st.sampled_from(["pipe", "data", "model", "expert"]), min_size=1, max_size=4, unique=True)
    )
    return Topology(tuple(axes), tuple(draw(st.integers(1, 3)) for _ in axes))


def replicas(topology):
    """The ranks that hold one replica of the model together, over which norms and overflow are agreed."""
    return list(topology.groups(*{*topology.axes} - {"data"}))


def neighbours(topology):
    """Every rank with the next one in its pipeline, the last with the first."""
    stages = [c.pipe for c in topology.coordinates()]
    after = [(stage + 1) % topology.axis_size("pipe") for stage in stages]
    return [(rank, topology.moved(rank, pipe=stage)) for rank, stage in enumerate(after)]


def test_groups_of_a_cube():
    assert replicas(CUBE) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert list(CUBE.groups("data")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(CUBE.groups("pipe")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(CUBE.groups("model")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert neighbours(CUBE) == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)]


def test_neighbours_of_five_stages_and_two_replicas():
    # Stages 3 and 4 of replica 1 are ranks 7 and 9, and stage 4 wraps to rank 1, because data is innermost.
    pairs = neighbours(Topology.of(pipe=5, data=2))
    assert pairs[7] == (7, 9)
    assert pairs[9] == (9, 1)
    # With the axes in the other order, stages 2 and 3 of replica 1 are ranks 7 and 8.
    assert neighbours(Topology.of(data=2, pipe=5))[7] == (7, 8)


@given(topologies())
def test_every_kind_covers_every_rank_once_and_knows_its_place(topology):
    everyone = list(range(topology.world_size))
    if "data" in topology.axes:
        assert sorted(rank for group in replicas(topology) for rank in group) == everyone
    for place, axis in enumerate(topology.axes):
        groups = list(topology.groups(axis))
        assert sorted(rank for group in groups for rank in group) == everyone
        for rank in everyone:
            mine = topology.group_of(rank, axis)
            assert [group for group in groups if rank in group] == [mine]
            assert len(mine) == topology.axis_size(axis)
            assert mine.index(rank) == topology.coordinate(rank)[place]
    if "pipe" in topology.axes:
        assert [rank for rank, _ in neighbours(topology)] == everyone
        assert sorted(buddy for _, buddy in neighbours(topology)) == everyone


@given(topologies().filter(lambda t: "pipe" in t.axes), st.data())
def test_rank_of_another_stage_of_my_replica(topology, data):
    rank = data.draw(st.integers(0, topology.world_size - 1))
    for stage, peer in enumerate(topology.group_of(rank, "pipe")):
        assert topology.moved(rank, pipe=stage) == peer


def test_a_rank_moved_along_axes():
    assert CUBE.moved(3, pipe=1) == 7
    assert CUBE.moved(3, pipe=1, data=0) == 5
    assert CUBE.moved(3, pipe=0, data=0, model=0) == 0
    assert CUBE.moved(3) == 3
    with pytest.raises(ValueError, match=r"pipe=2 is out of range"):
        CUBE.moved(3, pipe=2)
    with pytest.raises(ValueError, match="unknown axis 'expert'"):
        CUBE.moved(3, pipe=0, expert=0)
    with pytest.raises(ValueError, match="rank 8 is not in the topology"):
        CUBE.moved(8, pipe=0)


def test_groups_along_several_axes():
    assert list(CUBE.groups("model", "pipe")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert list(CUBE.groups("pipe", "data", "model")) == [tuple(range(8))]
    assert list(CUBE.groups("pipe", "expert")) == list(CUBE.groups("pipe"))
    assert list(CUBE.groups("expert")) == []
    assert list(CUBE.groups()) == [(rank,) for rank in range(8)]
    assert CUBE.group_of(3, "pipe", "model") == (2, 3, 6, 7)
    assert CUBE.group_of(3) == (3,)


@given(topologies(), st.data())
def test_groups_along_axes_are_those_at_which_the_others_agree(topology, data):
    axes = data.draw(st.lists(st.sampled_from(topology.axes), min_size=1, unique=True))
    by_rest = {}
    for rank, place in enumerate(topology.coordinates()):
        rest = tuple(getattr(place, axis) for axis in topology.axes if axis not in axes)
        by_rest.setdefault(rest, []).append(rank)
    assert list(topology.groups(*axes)) == [tuple(by_rest[rest]) for rest in sorted(by_rest)]


def test_replicas_are_contiguous_where_data_is_outermost():
    """As ``ParallelMode.MODEL`` of ColossalAI has all model parallel ranks of a replica."""
    for tensor, model in ((4, 8), (8, 16)):
        groups = list(Topology.of(data=2, pipe=2, model=tensor).groups("pipe", "model"))
        assert groups == [tuple(range(model)), tuple(range(model, 2 * model))]
        assert all(group.index(rank) == rank % model for group in groups for rank in group)
