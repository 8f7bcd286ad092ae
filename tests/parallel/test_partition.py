"""Partitions as values: no layer lost or repeated, no empty stage by accident."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Partition, partition_uniform


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_layer_is_in_exactly_one_stage(sizes):
    partition = Partition.from_sizes(sizes, allow_empty=True)
    assert partition.sizes == tuple(sizes)
    assert partition.boundaries[-1] == partition.layers == sum(sizes)
    assert [layer for stage in range(partition.stages) for layer in partition.layers_of(stage)] == list(
        range(sum(sizes))
    )
    assert sum(partition.split(range(partition.layers)), ()) == tuple(range(partition.layers))
    assert sum(partition.loads([1] * partition.layers)) == partition.layers


def test_a_partition_is_a_value():
    partition = Partition([0, 2, 5])
    assert partition == Partition((0, 2, 5)) and hash(partition) == hash(Partition((0, 2, 5)))
    assert pickle.loads(pickle.dumps(partition)) == partition
    assert Partition((0, 2), allow_empty=True) == Partition((0, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        partition.boundaries = (0, 5)


def test_what_a_partition_says():
    partition = Partition((0, 2, 3, 7))
    assert partition.intervals == ((0, 2), (2, 3), (3, 7))
    assert partition.loads([1, 2, 3, 4, 5, 6, 7]) == (3, 3, 22)
    assert partition.loads([0.1] * 7) == pytest.approx((0.2, 0.1, 0.4))
    assert partition.split("abcdefg") == (("a", "b"), ("c",), ("d", "e", "f", "g"))
    assert partition.split_points() == ("layers.2", "layers.3")
    assert partition.split_points(prefix="blocks.") == ("blocks.2", "blocks.3")
    assert partition.dealt(1) == (partition.intervals,)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ((), "run from 0"),
        ((0,), "run from 0"),
        ((1, 3), "run from 0"),
        ((0, 3, 2), "have to ascend"),
        ((0, 1.5), "whole numbers"),
        ((0, True), "whole numbers"),
        ((0, 2, 2, 3), r"stage 1 would be empty: 3 layers in 3 stages of sizes \[2, 0, 1\].*allow_empty"),
    ],
)
def test_what_is_no_partition(boundaries, message):
    with pytest.raises(ValueError, match=message):
        Partition(boundaries)


def test_empty_stages_have_to_be_asked_for():
    assert Partition((0, 2, 2, 3), allow_empty=True).sizes == (2, 0, 1)
    with pytest.raises(ValueError, match="have to ascend"):
        Partition((0, 3, 2), allow_empty=True)
    with pytest.raises(ValueError, match=r"sizes \[1, 1, 1, 0, 0\]"):
        partition_uniform(3, 5)
    assert partition_uniform(3, 5, allow_empty=True).boundaries == (0, 1, 2, 3, 3, 3)
    assert partition_uniform(3, 5, remainder="last", allow_empty=True).sizes == (0, 0, 1, 1, 1)


def test_the_two_rules_for_the_remainder():
    assert partition_uniform(10, 4).boundaries == (0, 3, 6, 8, 10)
    assert partition_uniform(10, 4, remainder="last").boundaries == (0, 2, 4, 7, 10)
    assert partition_uniform(12, 4) == partition_uniform(12, 4, remainder="last")


@given(st.integers(1, 60), st.integers(1, 12), st.sampled_from(["first", "last"]))
def test_uniform_sizes_differ_by_at_most_one(layers, stages, remainder):
    sizes = partition_uniform(layers, stages, remainder=remainder, allow_empty=True).sizes
    assert sum(sizes) == layers
    assert list(sizes) == sorted(sizes, reverse=remainder == "first")
    assert sizes.count(layers // stages) + sizes.count(layers // stages + 1) == stages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_uniform(4, 0), "stages = 0, expected an integer of at least 1"),
        (lambda: partition_uniform(-1, 2), "layers = -1, expected an integer of at least 0"),
        (lambda: partition_uniform(4.0, 2), r"layers = 4\.0, expected an integer"),
        (lambda: partition_uniform(4, 2, remainder="middle"), "'first' or the 'last' stages, got 'middle'"),
        (lambda: Partition((0, 2)).split([1, 2, 3]), "got 3 items, expected 2, one for each layer"),
        (lambda: Partition((0, 2)).loads([1]), "got 1 items, expected 2, one for each layer"),
        (lambda: Partition((0, 2)).layers_of(1), r"stage 1 is out of range: the stages are 0\.\.0"),
        (lambda: Partition((0, 2)).layers_of(-1), "stage -1 is out of range"),
        (lambda: Partition((0, 1, 2, 3)).dealt(2), "3 stages cannot be dealt evenly to 2 ranks"),
    ],
)
def test_errors_say_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call()
