"""A stack of equal layers in stages: even effective loads for any number of stages, and none of the old
defects.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import count_stages, effective_loads, partition_layers


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        # Three stages once divided by zero, one stage had no place for a split, two were right by luck.
        (8, 1, (8,)),
        (8, 2, (4, 4)),
        (8, 3, (2, 4, 2)),
        # These once had a middle stage of up to five times the ends, or a stage of one layer.
        (8, 4, (1, 3, 3, 1)),
        (16, 4, (3, 5, 5, 3)),
        (32, 8, (3, 5, 5, 4, 4, 4, 4, 3)),
        (61, 8, (7, 8, 8, 8, 8, 8, 8, 6)),
        (16, 8, (1, 3, 3, 2, 2, 2, 2, 1)),
        # This once had empty stages.
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_sizes(layers, stages, sizes):
    assert partition_layers(layers, stages).sizes == sizes


def test_names_of_split_points():
    assert partition_layers(8, 4).split_points() == ("layers.1", "layers.4", "layers.7")
    assert partition_layers(8, 2).split_points() == ("layers.4",)
    assert partition_layers(8, 1).split_points() == ()
    assert partition_layers(8, 4, input_weight=0, output_weight=0).split_points() == (
        "layers.2",
        "layers.4",
        "layers.6",
    )


@given(st.integers(1, 24), st.integers(0, 80), st.integers(0, 4), st.integers(0, 4))
def test_effective_loads_are_even_and_the_ends_lightest(stages, more, input_weight, output_weight):
    layers = stages * (1 + max(input_weight, output_weight)) + more
    partition = partition_layers(layers, stages, input_weight, output_weight)
    loads = effective_loads(partition, input_weight, output_weight)
    assert sum(loads) == layers + input_weight + output_weight
    assert max(loads) - min(loads) <= 1
    assert min(partition.sizes) >= 1
    if stages > 2:
        assert loads[-1] == min(loads)
        # Where all but one stage carry an extra layer, the first has to be one of them.
        assert loads[0] == min(loads) or sum(load > min(loads) for load in loads) == stages - 1


@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 20), st.integers(0, 20))
def test_heavy_ends_take_as_little_as_they_can(stages, layers, input_weight, output_weight):
    layers = max(layers, stages)
    partition = partition_layers(layers, stages, input_weight, output_weight)
    loads = effective_loads(partition, input_weight, output_weight)
    for load, size in zip(loads, partition.sizes, strict=True):
        # No layer can go elsewhere and make the heaviest lighter.
        assert size == 1 or load <= min(loads) + 1


def test_empty_stages_have_to_be_asked_for():
    with pytest.raises(ValueError, match=r"3 layers in 4 stages of sizes \[1, 1, 1, 0\]"):
        partition_layers(3, 4)
    assert partition_layers(4, 4, allow_empty=True).sizes == (0, 2, 2, 0)
    assert partition_layers(1, 3, allow_empty=True).sizes == (0, 1, 0)


@pytest.mark.parametrize(
    ("layers", "stages", "weights", "sizes"),
    [
        # Made with torchtitan's generate_llm_fqn_per_model_part.
        (8, 4, (1, 1), (2, 3, 2, 1)),
        (16, 4, (1, 1), (4, 5, 4, 3)),
        (61, 8, (1, 1), (7, 8, 8, 8, 8, 8, 8, 6)),
        (3, 2, (2, 2), (2, 1)),
        (32, 8, (1, 1), (4, 5, 4, 4, 4, 4, 4, 3)),
        (5, 1, (3, 3), (5,)),
    ],
)
def test_extra_layers_for_the_first_stages(layers, stages, weights, sizes):
    assert partition_layers(layers, stages, *weights, extra="first").sizes == sizes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: partition_layers(8, 4, 4, 1, extra="first"),
            "input_weight=4 is more than the 3 of 13 effective layers",
        ),
        (lambda: partition_layers(8, 4, 1, 4, extra="first"), "output_weight=4 is more than the 3"),
        (lambda: partition_layers(4, 4, extra="first"), r"sizes \[1, 2, 1, 0\]"),
        (lambda: partition_layers(8, 4, 0.5, 0.25, extra="first"), "whole weights"),
        (lambda: partition_layers(8, 4, 0.5, 0.5, extra="first"), "whole weights"),
        (
            lambda: partition_layers(8, 4, -1),
            "input_weight is the cost of modules in layers, zero or more; got -1",
        ),
        (lambda: partition_layers(8, 4, 1, float("nan")), "output_weight is the cost"),
        (lambda: partition_layers(8, 4, extra="last"), "extra: got 'last', expected 'middle' or 'first'"),
        (lambda: partition_layers(8, 0), "stages = 0, expected an integer of at least 1"),
    ],
)
def test_errors_say_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_number_of_stages():
    assert count_stages(32, 4, several=False) == 4
    assert count_stages(32, 4, several=True) == 8
    assert count_stages(32, 4, several=False, layers_per_stage=8) == 4
    assert count_stages(32, 4, several=True, layers_per_stage=2) == 16
    assert count_stages(30, 4, several=True, layers_per_stage=4) == 8
    # The modules at the ends are counted only where they are given.
    assert count_stages(32, 4, several=True, layers_per_stage=3, input_weight=2, output_weight=2) == 12
    with pytest.raises(ValueError, match="make 5 stages, which do not divide among 4 ranks"):
        count_stages(33, 4, several=False, layers_per_stage=8)
    with pytest.raises(ValueError, match="exactly one stage per rank.*increase layers_per_stage"):
        count_stages(32, 4, several=False, layers_per_stage=4)
    with pytest.raises(ValueError, match="two or more stages per rank.*decrease layers_per_stage"):
        count_stages(32, 4, several=True, layers_per_stage=8)
    with pytest.raises(ValueError, match="6 layers cannot fill 8 stages"):
        count_stages(6, 4, several=True)
    with pytest.raises(ValueError, match="layers_per_stage = 0, expected an integer of at least 1"):
        count_stages(6, 4, several=True, layers_per_stage=0)
