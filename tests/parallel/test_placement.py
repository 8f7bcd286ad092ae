"""Placements: loops, Vs that snake, two directions, and those written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import explicit, loop, place, stages_of, v_shape


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
    assert all(abs(a - b) <= 1 for a, b in pairwise(v_shape(ranks, chunks)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: place("zigzag", 2, 4), "style: got 'zigzag', expected 'loop' or 'v'"),
        (lambda: place("loop", 4, 6), "6 stages do not spread evenly over 4 ranks"),
        (lambda: loop(0), "ranks = 0, expected an integer of at least 1"),
        (lambda: loop(2, 0), "chunks = 0, expected an integer of at least 1"),
        (lambda: explicit([]), "one or more stages"),
        (lambda: explicit([0, -1]), "0 or more"),
        (lambda: explicit([0, 2]), r"ranks \[1\] hold no stage"),
    ],
)
def test_errors_say_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call()
