"""Chunks dealt round the ranks; the tables are made with ColossalAI's functions."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import chunks_balanced, chunks_uniform, loop, stages_of

UNIFORM = [
    (10, 4, 1, [((0, 2),), ((2, 4),), ((4, 7),), ((7, 10),)]),
    (8, 4, 2, [((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8))]),
    (14, 4, 2, [((0, 1), (7, 8)), ((1, 3), (8, 10)), ((3, 5), (10, 12)), ((5, 7), (12, 14))]),
    (4, 4, 2, [((0, 0), (2, 2)), ((0, 0), (2, 2)), ((0, 1), (2, 3)), ((1, 2), (3, 4))]),
    (9, 2, 3, [((0, 1), (3, 4), (6, 7)), ((1, 3), (4, 6), (7, 9))]),
    (3, 4, 1, [((0, 0),), ((0, 1),), ((1, 2),), ((2, 3),)]),
]
BALANCED = [
    ([1, 2, 3, 4, 5, 6], 2, 1, [((0, 4),), ((4, 6),)]),
    ([1, 2, 3, 4, 5, 6], 2, 2, [((0, 3), (4, 5)), ((3, 4), (5, 6))]),
    ([0, 0, 0, 0, 0], 2, 1, [((0, 3),), ((3, 5),)]),
    ([10, 1, 1, 1, 1, 1, 10], 2, 2, [((0, 1), (3, 6)), ((1, 3), (6, 7))]),
    ([0, 7, 0, 0, 7, 0, 3, 0], 3, 1, [((0, 3),), ((3, 6),), ((6, 8),)]),
    ([5, 5, 5, 5, 5, 5, 5, 5], 2, 2, [((0, 2), (4, 6)), ((2, 4), (6, 8))]),
    ([100, 1, 1, 1, 1, 1], 2, 2, [((0, 1), (3, 4)), ((1, 3), (4, 6))]),
    ([9, 8, 7, 6, 5, 4, 3, 2, 1], 2, 2, [((0, 1), (3, 6)), ((1, 3), (6, 9))]),
    ([4, 4, 4, 4], 2, 2, [((0, 1), (2, 3)), ((1, 2), (3, 4))]),
]


@pytest.mark.parametrize(("layers", "ranks", "chunks", "expected"), UNIFORM)
def test_uniform_chunks(layers, ranks, chunks, expected):
    assert list(chunks_uniform(layers, ranks, chunks, allow_empty=True).dealt(ranks)) == expected


@pytest.mark.parametrize(("weights", "ranks", "chunks", "expected"), BALANCED)
def test_balanced_chunks(weights, ranks, chunks, expected):
    assert list(chunks_balanced(weights, ranks, chunks).dealt(ranks)) == expected


@given(st.lists(st.integers(0, 50), min_size=12, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_balanced_chunks_have_the_least_maximum(weights, ranks, chunks):
    partition = chunks_balanced(weights, ranks, chunks)
    counted = [weight or 1 for weight in weights]
    limit = max(partition.loads(counted))
    # One less, and even stages filled to the brim do not take all layers.
    stages, load = 1, 0
    for weight in counted:
        if load + weight > limit - 1:
            stages, load = stages + 1, 0
        load += weight
    assert stages > ranks * chunks or limit == max(counted)


def test_stages_that_are_dealt_are_those_of_a_loop():
    partition = chunks_uniform(14, ranks=4, chunks=2)
    for rank, intervals in enumerate(partition.dealt(4)):
        held = stages_of(loop(4, 2), rank)
        assert intervals == tuple(partition.intervals[stage] for stage in held)


def test_weights_that_are_not_whole():
    assert chunks_balanced([0.5, 0.5, 0.5, 0.0], ranks=2).boundaries == (0, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: chunks_uniform(9, 2, chunks=2),
            "9 layers do not divide into 2 equal chunks.*chunks_balanced",
        ),
        (lambda: chunks_uniform(4, 4, chunks=2), r"stage 0 would be empty.*\[0, 0, 1, 1, 0, 0, 1, 1\]"),
        (lambda: chunks_balanced([1, 1, 1, 1], 4, chunks=2), "stage 0 would be empty"),
        (lambda: chunks_balanced([1, -1], 1), "the weight of layer 1"),
        (lambda: chunks_uniform(4, 0), "ranks = 0, expected an integer of at least 1"),
        (lambda: chunks_uniform(4, 2, chunks=0), "chunks = 0, expected an integer of at least 1"),
    ],
)
def test_errors_say_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call()
