"""Topologies: every question agrees with a table of all ranks, at any size, at once."""

from __future__ import annotations

import itertools
import math
import pickle
import timeit

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Topology, default_grid, prime_factors


@st.composite
def topologies(draw):
    axes = draw(
        st.lists(
            st.sampled_from(["pipe", "data", "model", "expert", "x"]), min_size=1, max_size=4, unique=True
        )
    )
    return Topology(tuple(axes), tuple(draw(st.integers(1, 4)) for _ in axes))


def table_of(topology):
    """All coordinates as dictionaries, in the order of their ranks."""
    every = itertools.product(*(range(size) for size in topology.sizes))
    return [dict(zip(topology.axes, coordinate, strict=True)) for coordinate in every]


@given(topologies())
def test_ranks_and_coordinates_agree_with_a_table(topology):
    table = table_of(topology)
    assert topology.world_size == len(table)
    for rank, coordinate in enumerate(table):
        assert topology.rank(**coordinate) == rank
        assert topology.coordinate(rank)._asdict() == coordinate
    assert [c._asdict() for c in topology.coordinates()] == table


@given(topologies())
def test_groups_agree_with_a_table(topology):
    table = table_of(topology)
    for axis in topology.axes:
        by_rest = {}
        for rank, coordinate in enumerate(table):
            rest = tuple((other, index) for other, index in coordinate.items() if other != axis)
            by_rest.setdefault(rest, []).append(rank)
        groups = list(topology.groups(axis))
        assert groups == [
            tuple(ranks) for _, ranks in sorted(by_rest.items(), key=lambda item: [i for _, i in item[0]])
        ]
        for group in groups:
            assert all(topology.group_of(rank, axis) == group for rank in group)


@given(topologies(), st.data())
def test_filters_agree_with_a_table(topology, data):
    chosen = data.draw(st.lists(st.sampled_from(topology.axes), unique=True))
    wanted = {axis: data.draw(st.integers(0, topology.axis_size(axis) - 1)) for axis in chosen}
    matching = [
        r for r, c in enumerate(table_of(topology)) if all(c[axis] == i for axis, i in wanted.items())
    ]
    assert list(topology.ranks_where(**wanted)) == matching
    for axis, index in wanted.items():
        expected = tuple(r for r, c in enumerate(table_of(topology)) if c[axis] == index)
        assert topology.ranks_where(**{axis: index}) == expected


@given(topologies())
def test_text_round_trip(topology):
    assert Topology.parse(str(topology)) == topology
    assert hash(Topology.parse(str(topology))) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_groups_of_a_cube():
    cube = Topology.of(pipe=2, data=2, model=2)
    assert list(cube.groups("pipe")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(cube.groups("data")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(cube.groups("model")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cube.ranks_where(pipe=0, data=1) == (2, 3)


def test_an_axis_that_is_missing_has_no_size_and_no_groups():
    topology = Topology.of(pipe=2, data=3)
    assert topology.axis_size("model") == 0
    assert list(topology.groups("model")) == []
    assert topology.axes == ("pipe", "data")


def test_text_of_a_rank_and_its_options():
    assert Topology.of(pipe=2, data=2).rank_repr(3) == ""
    assert Topology.of(pipe=2, data=2, model=2).rank_repr(0) == "model_00"
    assert Topology.of(pipe=2, data=2, model=2).rank_repr(1) == "model_01"
    topology = Topology.of(a=2, b=200)
    assert topology.rank_repr(3) == "a_00-b_03"
    assert topology.rank_repr(399) == "a_01-b_199"
    assert topology.rank_repr(3, omit_axes=["a"]) == "b_03"
    assert topology.rank_repr(3, omit_axes=(), inner_sep="=", outer_sep="/") == "a=00/b=03"
    assert Topology.of(pipe=2, data=2, model=2).rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"


@pytest.mark.parametrize(
    ("world", "pipe", "data"),
    [
        *[
            (1, 1, 1),
            (2, 2, 1),
            (3, 3, 1),
            (4, 2, 2),
            (6, 2, 3),
            (8, 4, 2),
            (12, 6, 2),
            (16, 4, 4),
            (24, 4, 6),
        ],
        *[(30, 10, 3), (32, 8, 4), (64, 8, 8), (7, 7, 1)],
    ],
)
def test_default_grid(world, pipe, data):
    assert default_grid(world) == Topology.of(pipe=pipe, data=data)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.rank(pipe=0), "without data.*ranks_where"),
        (lambda t: t.rank(pipe=0, data=0, model=0), "unknown axis 'model'.*pipe, data"),
        (lambda t: t.rank(pipe=2, data=0), r"pipe=2 is out of range.*0\.\.1"),
        (lambda t: t.rank(pipe=-1, data=0), "pipe=-1 is out of range"),
        (lambda t: t.rank(pipe=True, data=0), "pipe=True is out of range"),
        (lambda t: t.coordinate(6), r"rank 6 is not in the topology pipe=2,data=3: its ranks are 0\.\.5"),
        (lambda t: t.coordinate(-1), "rank -1 is not in the topology"),
        (lambda t: t.group_of(0, "model"), "unknown axis 'model'"),
        (lambda t: t.group_of(6, "pipe"), "rank 6 is not in the topology"),
        (lambda t: t.ranks_where(model=0), "unknown axis 'model'"),
        (lambda t: t.ranks_where(data=3), r"data=3 is out of range.*0\.\.2"),
        (lambda t: t.rank_repr(6), "rank 6 is not in the topology"),
        (lambda t: Topology(("pipe",), (2, 3)), "one size per axis"),
        (lambda t: Topology(("pipe", "pipe"), (2, 3)), "occurs twice"),
        (lambda t: Topology(("a b",), (2,)), "cannot name an axis"),
        (lambda t: Topology(("class",), (2,)), "cannot name an axis"),
        (lambda t: Topology(("pipe",), (0,)), "pipe = 0, expected an integer of at least 1"),
        (lambda t: Topology(("pipe",), (2.0,)), r"pipe = 2\.0, expected an integer"),
        (lambda t: Topology.parse("pipe=2,data"), "cannot read 'data'"),
        (lambda t: Topology.parse("pipe=x"), "cannot read 'pipe=x'"),
        (lambda t: Topology.parse(""), "cannot read ''"),
        (lambda t: prime_factors(-1), "number = -1, expected an integer of at least 1"),
        (lambda t: default_grid(0), "world_size = 0, expected an integer of at least 1"),
    ],
)
def test_errors_say_what_was_got_and_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call(Topology.of(pipe=2, data=3))
