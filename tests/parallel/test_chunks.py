"""Chunks dealt round the ranks; the table is made with ColossalAI's ``partition_uniform``."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Partition, loop, partition_balanced, partition_uniform, stages_of

UNIFORM = [
    (10, 4, 1, [((0, 2),), ((2, 4),), ((4, 7),), ((7, 10),)]),
    (8, 4, 2, [((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8))]),
    (14, 4, 2, [((0, 1), (7, 8)), ((1, 3), (8, 10)), ((3, 5), (10, 12)), ((5, 7), (12, 14))]),
    (4, 4, 2, [((0, 0), (2, 2)), ((0, 0), (2, 2)), ((0, 1), (2, 3)), ((1, 2), (3, 4))]),
    (9, 2, 3, [((0, 1), (3, 4), (6, 7)), ((1, 3), (4, 6), (7, 9))]),
    (3, 4, 1, [((0, 0),), ((0, 1),), ((1, 2),), ((2, 3),)]),
]


@pytest.mark.parametrize(("layers", "ranks", "chunks", "expected"), UNIFORM)
def test_uniform_chunks(layers, ranks, chunks, expected):
    one = partition_uniform(layers // chunks, ranks, remainder="last", allow_empty=True)
    assert list(Partition.from_sizes(one.sizes * chunks, allow_empty=True).dealt(ranks)) == expected


@given(st.lists(st.integers(1, 50), min_size=12, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_balanced_chunks_have_the_least_maximum(weights, ranks, chunks):
    partition = partition_balanced(weights, ranks * chunks)
    assert [len(intervals) for intervals in partition.dealt(ranks)] == [chunks] * ranks
    limit = max(partition.loads(weights))
    # One less, and even stages filled to the brim do not take all layers.
    stages, load = 1, 0
    for weight in weights:
        if load + weight > limit - 1:
            stages, load = stages + 1, 0
        load += weight
    assert stages > ranks * chunks or limit == max(weights)


def test_stages_that_are_dealt_are_those_of_a_loop():
    partition = partition_uniform(14, 8)
    for rank, intervals in enumerate(partition.dealt(4)):
        held = stages_of(loop(4, 2), rank)
        assert intervals == tuple(partition.intervals[stage] for stage in held)
