"""Topologies: every question agrees with a table of all ranks, at any size, at once; groups are those of
DeepSpeed's grid and of ColossalAI. Placements: loops, Vs that snake, two directions, and those written out.
"""

from __future__ import annotations

import itertools
import math
import pickle
import subprocess
import sys
import timeit

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import (
    Topology,
    default_grid,
    explicit,
    loop,
    place,
    prime_factors,
    stages_of,
    v_shape,
)

CUBE = Topology.of(pipe=2, data=2, model=2)


@st.composite
def topologies(draw):
    names = st.sampled_from(["pipe", "data", "model", "expert", "x"])
    axes = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    return Topology(tuple(axes), tuple(draw(st.integers(1, 4)) for _ in axes))


def table_of(topology):
    """All coordinates as dictionaries, in the order of their ranks."""
    every = itertools.product(*(range(size) for size in topology.sizes))
    return [dict(zip(topology.axes, coordinate, strict=True)) for coordinate in every]


def replicas(topology):
    """The ranks that hold one replica of the model together, over which norms and overflow are agreed."""
    return list(topology.groups(*{*topology.axes} - {"data"}))


def neighbours(topology):
    """Every rank with the next one in its pipeline, the last with the first."""
    stages = [c.pipe for c in topology.coordinates()]
    after = [(stage + 1) % topology.axis_size("pipe") for stage in stages]
    return [(rank, topology.moved(rank, pipe=stage)) for rank, stage in enumerate(after)]


@given(topologies())
def test_ranks_and_coordinates_agree_with_a_table(topology):
    table = table_of(topology)
    assert topology.world_size == len(table)
    for rank, coordinate in enumerate(table):
        assert topology.rank(**coordinate) == rank
        assert topology.coordinate(rank)._asdict() == coordinate
    assert [c._asdict() for c in topology.coordinates()] == table


@given(topologies(), st.data())
def test_groups_agree_with_a_table(topology, data):
    """Along several axes: those at which the others agree. They cover every rank once, in its place."""
    axes = data.draw(st.lists(st.sampled_from(topology.axes), min_size=1, unique=True))
    by_rest = {}
    for rank, coordinate in enumerate(table_of(topology)):
        by_rest.setdefault(tuple(i for a, i in coordinate.items() if a not in axes), []).append(rank)
    groups = list(topology.groups(*axes))
    assert groups == [tuple(by_rest[rest]) for rest in sorted(by_rest)]
    for group in groups:
        assert all(topology.group_of(rank, *axes) == group for rank in group)
        assert len(group) == math.prod(map(topology.axis_size, axes))
    for number, axis in enumerate(topology.axes):
        for rank in range(topology.world_size):
            assert topology.group_of(rank, axis).index(rank) == topology.coordinate(rank)[number]
    if "data" in topology.axes:
        assert sorted(itertools.chain(*replicas(topology))) == list(range(topology.world_size))
    if "pipe" in topology.axes:
        assert sorted(after for _, after in neighbours(topology)) == list(range(topology.world_size))
        rank = data.draw(st.integers(0, topology.world_size - 1))
        for stage, peer in enumerate(topology.group_of(rank, "pipe")):
            assert topology.moved(rank, pipe=stage) == peer


@given(topologies(), st.data())
def test_filters_agree_with_a_table(topology, data):
    chosen = data.draw(st.lists(st.sampled_from(topology.axes), unique=True))
    wanted = {axis: data.draw(st.integers(0, topology.axis_size(axis) - 1)) for axis in chosen}
    matching = [r for r, c in enumerate(table_of(topology)) if wanted.items() <= c.items()]
    assert list(topology.ranks_where(**wanted)) == matching


@given(topologies())
def test_text_round_trip(topology):
    assert Topology.parse(str(topology)) == topology
    assert hash(Topology.parse(str(topology))) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_groups_of_a_cube():
    assert replicas(CUBE) == [(0, 1, 4, 5), (2, 3, 6, 7)] == list(CUBE.groups("model", "pipe"))
    assert list(CUBE.groups("data")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert (
        list(CUBE.groups("pipe")) == [(0, 4), (1, 5), (2, 6), (3, 7)] == list(CUBE.groups("pipe", "expert"))
    )
    assert list(CUBE.groups("model")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(CUBE.groups()) == [(rank,) for rank in range(8)] and CUBE.group_of(3) == (3,)
    assert neighbours(CUBE) == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)]


def test_neighbours_of_five_stages_and_two_replicas():
    # Stages 3 and 4 of replica 1 are ranks 7 and 9, and stage 4 wraps to rank 1, because data is innermost.
    pairs = neighbours(Topology.of(pipe=5, data=2))
    assert pairs[7] == (7, 9)
    assert pairs[9] == (9, 1)
    # With the axes in the other order, stages 2 and 3 of replica 1 are ranks 7 and 8.
    assert neighbours(Topology.of(data=2, pipe=5))[7] == (7, 8)


def test_a_rank_moved_along_axes():
    assert CUBE.moved(3, pipe=1) == 7
    assert CUBE.moved(3, pipe=1, data=0) == 5
    assert CUBE.moved(3, pipe=0, data=0, model=0) == 0
    assert CUBE.moved(3) == 3


def test_replicas_are_contiguous_where_data_is_outermost():
    """As ``ParallelMode.MODEL`` of ColossalAI has all model parallel ranks of a replica."""
    for tensor, model in ((4, 8), (8, 16)):
        groups = list(Topology.of(data=2, pipe=2, model=tensor).groups("pipe", "model"))
        assert groups == [tuple(range(model)), tuple(range(model, 2 * model))]
        assert all(group.index(rank) == rank % model for group in groups for rank in group)


def test_an_axis_that_is_missing_has_no_size_and_no_groups():
    topology = Topology.of(pipe=2, data=3)
    assert topology.axis_size("model") == 0
    assert list(topology.groups("model")) == []
    assert topology.axes == ("pipe", "data")


def test_text_of_a_rank_and_its_options():
    assert Topology.of(pipe=2, data=2).rank_repr(3) == ""
    assert CUBE.rank_repr(1) == "model_01"
    topology = Topology.of(a=2, b=200)
    assert topology.rank_repr(399) == "a_01-b_199"
    assert topology.rank_repr(3, omit_axes=["a"]) == "b_03"
    assert topology.rank_repr(3, omit_axes=(), inner_sep="=", outer_sep="/") == "a=00/b=03"
    assert CUBE.rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"


GRIDS = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 6: (2, 3), 8: (4, 2), 12: (6, 2), 16: (4, 4)}


@pytest.mark.parametrize("world", GRIDS)
def test_default_grid(world):
    assert default_grid(world).sizes == GRIDS[world] and default_grid(world).axes == ("pipe", "data")


@given(st.integers(1, 5000))
def test_the_default_grid_deals_prime_factors_in_turn(number):
    factors, left = [], number
    while left > 1:
        factors.append(next(d for d in range(2, left + 1) if left % d == 0))
        left //= factors[-1]
    assert prime_factors(number) == tuple(factors)
    pipe, data = default_grid(number).sizes
    assert (pipe, data) == (math.prod(factors[::2]), math.prod(factors[1::2]))


def test_a_question_about_a_million_ranks_takes_microseconds():
    topology = Topology.of(pipe=100, data=100, model=100)
    questions = [
        lambda: topology.rank(pipe=99, data=98, model=97),
        lambda: topology.coordinate(987_654),
        lambda: topology.group_of(987_654, "data"),
        lambda: next(topology.groups("pipe")),
        lambda: topology.rank_repr(987_654),
        lambda: topology.ranks_where(pipe=3, data=4),
    ]
    for question in questions:
        # The best of several rounds: a table of all ranks would take a second.
        assert min(timeit.repeat(question, number=10, repeat=5)) / 10 < 500e-6


def held(placement):
    return [stages_of(placement, rank) for rank in range(max(placement) + 1)]


def test_stages_of_each_rank():
    assert held(place("loop", 4, 8)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert held(place("v", 4, 8)) == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert held(place("loop", 2, 6)) == [(0, 2, 4), (1, 3, 5)]
    assert held(v_shape(2, chunks=4)) == [(0, 3, 4, 7), (1, 2, 5, 6)]
    assert held(v_shape(3, chunks=3)) == [(0, 5, 6), (1, 4, 7), (2, 3, 8)]
    assert held(explicit([1, 0, 0, 1])) == [(1, 2), (0, 3)]


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_rank_has_as_many_stages(ranks, chunks):
    for placement in (loop(ranks, chunks), v_shape(ranks, chunks)):
        assert {len(stages) for stages in held(placement)} == {chunks} and placement[0] == 0
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(v_shape(ranks, chunks)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.rank(pipe=0),
            "data of pipe=2,data=3 missing, expected all; ranks_where takes some",
        ),
        (lambda t: t.rank(pipe=0, data=0, model=0), "unknown axis 'model'.*pipe, data"),
        (lambda t: t.rank(pipe=2, data=0), "pipe: got 2, expected a number from 0 to 1"),
        (lambda t: t.rank(pipe=-1, data=0), "pipe: got -1"),
        (lambda t: t.rank(pipe=True, data=0), "pipe: got True"),
        (lambda t: t.moved(0, pipe=2), "pipe: got 2"),
        (lambda t: t.moved(0, expert=0), "unknown axis 'expert'"),
        (lambda t: t.coordinate(6), "rank: got 6, expected a number from 0 to 5"),
        (lambda t: t.coordinate(-1), "rank: got -1"),
        (lambda t: t.group_of(0, "model"), "unknown axis 'model'"),
        (lambda t: t.group_of(6, "pipe"), "rank: got 6"),
        (lambda t: t.ranks_where(model=0), "unknown axis 'model'"),
        (lambda t: t.ranks_where(data=3), "data: got 3, expected a number from 0 to 2"),
        (lambda t: t.rank_repr(6), "rank: got 6"),
        (lambda t: Topology(("pipe",), (2, 3)), "one size per axis"),
        (lambda t: Topology(("pipe", "pipe"), (2, 3)), "duplicate .*'pipe'"),
        (lambda t: Topology(("a b",), (2,)), "must be valid identifiers: 'a b'"),
        (lambda t: Topology(("class",), (2,)), "cannot be a keyword: 'class'"),
        (lambda t: Topology(("pipe",), (0,)), "pipe = 0, expected an integer of at least 1"),
        (lambda t: Topology(("pipe",), (2.0,)), r"pipe = 2\.0, expected an integer"),
        (lambda t: Topology.parse("pipe=2,data"), "cannot read 'pipe=2,data': expected such as pipe=2"),
        (lambda t: Topology.parse("pipe=x"), "cannot read 'pipe=x'"),
        (lambda t: Topology.parse(""), "cannot read ''"),
        (lambda t: prime_factors(-1), "number = -1, expected an integer of at least 1"),
        (lambda t: default_grid(0), "world_size = 0, expected an integer of at least 1"),
        (lambda _: place("zigzag", 2, 4), "style: got 'zigzag', expected 'loop' or 'v'"),
        (lambda _: place("loop", 4, 6), "6 stages do not spread evenly over 4 ranks"),
        (lambda _: loop(0), "ranks = 0, expected an integer of at least 1"),
        (lambda _: loop(2, 0), "chunks = 0, expected an integer of at least 1"),
        (lambda _: explicit([]), "one or more stages"),
        (lambda _: explicit([0, -1]), "0 or more"),
        (lambda _: explicit([0, 2]), r"ranks \[1\] hold no stage"),
    ],
)
def test_errors_say_what_was_got_and_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call(Topology.of(pipe=2, data=3))


def test_a_placement_loads_nothing_else():
    program = (
        "import sys, ppfunc.parallel.topology; sys.exit(bool({'fractions', 'difflib'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
