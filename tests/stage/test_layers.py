"""Stages made of layers compute what the layers do one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import Partition
from ppfunc.stage.modules import stages_from_layers


def affine(params, x, *extras):
    return params[0] * x + params[1] + sum(extras)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_stages_one_after_the_other_are_the_layers(sizes, data):
    partition = Partition.from_sizes(sizes, allow_empty=True)
    params = [data.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))) for _ in range(partition.layers)]
    expected = 5
    for layer_params in params:
        expected = affine(layer_params, expected, 7)
    x = 5
    split = partition.split(params)
    for stage, fn in enumerate(stages_from_layers([affine] * partition.layers, partition)):
        x = fn(split[stage], x, 7)
    assert x == expected
    assert [layer for stage in split for layer in stage] == params


def test_a_stage_says_which_layers_it_has():
    stages = stages_from_layers([affine] * 3, Partition((0, 2, 3)))
    assert [stage.__name__ for stage in stages] == ["layers_0_to_2", "layers_2_to_3"]
    with pytest.raises(ValueError, match="layers_0_to_2 takes params for 2 layers, got 1"):
        stages[0]([(1, 2)], 3)


def test_numbers_of_layers_have_to_fit():
    partition = Partition((0, 2, 3))
    with pytest.raises(ValueError, match="got 2 items, expected 3, one for each layer"):
        stages_from_layers([affine] * 2, partition)
    with pytest.raises(TypeError, match=r"partition: got \[1, 2\] of type list, expected a Partition"):
        stages_from_layers([affine] * 3, [1, 2])
