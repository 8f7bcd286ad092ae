"""Partitions as values: no layer lost or repeated, no empty stage by accident; cut evenly, by weights with
the least maximum, and with the ends counted as layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import (
    Partition,
    count_stages,
    effective_loads,
    partition_balanced,
    partition_layers,
    partition_uniform,
    slice_lengths,
)
from tests.clock import busy


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_layer_is_in_exactly_one_stage(sizes):
    partition = Partition.from_sizes(sizes, allow_empty=True)
    assert partition.sizes == tuple(sizes)
    assert partition.boundaries[-1] == partition.layers == sum(sizes)
    listed = [layer for stage in range(partition.stages) for layer in partition.layers_of(stage)]
    assert listed == list(range(sum(sizes)))
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
    assert partition.split_points(prefix="blocks.") == ("blocks.2", "blocks.3")
    assert partition.dealt(1) == (partition.intervals,)


def test_empty_stages_have_to_be_asked_for():
    assert Partition((0, 2, 2, 3), allow_empty=True).sizes == (2, 0, 1)
    assert partition_uniform(3, 5, allow_empty=True).boundaries == (0, 1, 2, 3, 3, 3)
    assert partition_uniform(3, 5, remainder="last", allow_empty=True).sizes == (0, 0, 1, 1, 1)
    assert partition_balanced([1, 2], 3, allow_empty=True).boundaries == (0, 1, 2, 2)
    assert partition_layers(4, 4, allow_empty=True).sizes == (0, 2, 2, 0)
    assert partition_layers(1, 3, allow_empty=True).sizes == (0, 1, 0)


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


UNIFORM = [  # made with ColossalAI's partition_uniform: layers, ranks, chunks, intervals of every rank
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


def best_by_trying_all(weights, stages):
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    return min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *c, len(weights)))) for c in cuts)


@st.composite
def problems(draw):
    weight = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.floats(0, 1e6, allow_subnormal=False))
    stages = draw(st.integers(1, 5))
    return draw(st.lists(weight, min_size=stages, max_size=10)), stages


@given(problems())
def test_optimal_for_any_weights(problem):
    weights, stages = problem
    exact = [Fraction(w) for w in weights]
    found = partition_balanced(weights, stages)
    assert found.stages == stages and found.layers == len(weights) and min(found.sizes) >= 1
    assert max(sum(part) for part in found.split(exact)) == best_by_trying_all(exact, stages)


@pytest.mark.parametrize("seed", range(10))
def test_balanced_chunks_have_the_least_maximum(seed):
    chance = random.Random(seed)
    weights = [chance.randint(0, 1000) for _ in range(200)]
    for stages in (2, 7, 30, 90):
        limit = max(partition_balanced(weights, stages).loads(weights))
        # One less, and stages that are filled to the brim do not take all layers.
        used, load = 1, 0
        for weight in weights:
            used, load = (used, load + weight) if load + weight < limit else (used + 1, weight)
        assert used > stages or limit == max(weights)


def test_of_cuts_with_the_least_maximum_an_even_one_is_taken():
    weights = [4, 4, 4, 4, 4, 4]
    assert partition_balanced(weights, 4).loads(weights) == (8, 4, 8, 4)
    weights = [6, 1, 6, 1, 6]
    assert partition_balanced(weights, 2).loads(weights) == (13, 7)
    assert partition_balanced([1, 2, 3], 2).boundaries == (0, 2, 3)


@pytest.mark.parametrize(
    "weights", [[1] * 10_000, list(range(10_000)), [random.Random(0).random() for _ in range(10_000)]]
)
def test_ten_thousand_layers_over_512_stages(weights):
    start = time.process_time()
    found = partition_balanced(weights, 512)
    assert time.process_time() - start < 2 * busy()
    assert found.stages == 512 and min(found.sizes) >= 1
    if weights == [1] * 10_000:
        assert max(found.sizes) == 20


@pytest.mark.parametrize(
    ("layers", "stages", "options", "sizes"),
    [
        # Three stages once divided by zero, one stage had no place for a split, two were right by luck.
        (8, 1, {}, (8,)),
        (8, 2, {}, (4, 4)),
        (8, 3, {}, (2, 4, 2)),
        # These once had a middle stage of up to five times the ends, or a stage of one layer.
        (8, 4, {}, (1, 3, 3, 1)),
        (16, 4, {}, (3, 5, 5, 3)),
        (32, 8, {}, (3, 5, 5, 4, 4, 4, 4, 3)),
        (61, 8, {}, (7, 8, 8, 8, 8, 8, 8, 6)),
        (16, 8, {}, (1, 3, 3, 2, 2, 2, 2, 1)),
        # This once had empty stages.
        (4, 4, {}, (1, 1, 1, 1)),
        # Made with torchtitan's generate_llm_fqn_per_model_part.
        (8, 4, {"extra": "first"}, (2, 3, 2, 1)),
        (16, 4, {"extra": "first"}, (4, 5, 4, 3)),
        (61, 8, {"extra": "first"}, (7, 8, 8, 8, 8, 8, 8, 6)),
        (3, 2, {"extra": "first", "input_weight": 2, "output_weight": 2}, (2, 1)),
        (32, 8, {"extra": "first"}, (4, 5, 4, 4, 4, 4, 4, 3)),
        (5, 1, {"extra": "first", "input_weight": 3, "output_weight": 3}, (5,)),
        # Weights that are not whole.
        (8, 4, {"extra": "first", "input_weight": 0.5, "output_weight": 0.25}, (2, 2, 2, 2)),
    ],
)
def test_sizes(layers, stages, options, sizes):
    assert partition_layers(layers, stages, **options).sizes == sizes


def test_names_of_split_points():
    assert partition_layers(8, 1).split_points() == ()
    even = partition_layers(8, 4, input_weight=0, output_weight=0)
    assert even.split_points() == ("layers.2", "layers.4", "layers.6")


@given(st.integers(1, 24), st.integers(0, 80), st.integers(0, 4), st.integers(0, 4))
def test_effective_loads_are_even_and_the_ends_lightest(stages, more, first, last):
    weights = first, last
    layers = stages * (1 + max(weights)) + more
    partition = partition_layers(layers, stages, *weights)
    loads = effective_loads(partition, *weights)
    assert sum(loads) == layers + sum(weights)
    assert max(loads) - min(loads) <= 1
    assert min(partition.sizes) >= 1
    if stages > 2:
        assert loads[-1] == min(loads)
        # Where all but one stage carry an extra layer, the first has to be one of them.
        assert loads[0] == min(loads) or sum(load > min(loads) for load in loads) == stages - 1
    other = partition_layers(layers, stages, *weights, extra="first", allow_empty=True)
    assert effective_loads(other, *weights) == tuple(sorted(loads, reverse=True))


@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 20), st.integers(0, 20))
def test_heavy_ends_take_as_little_as_they_can(stages, layers, first, last):
    weights = first, last
    partition = partition_layers(max(layers, stages), stages, *weights)
    loads = effective_loads(partition, *weights)
    for load, size in zip(loads, partition.sizes, strict=True):
        # No layer can go elsewhere and make the heaviest lighter.
        assert size == 1 or load <= min(loads) + 1


def test_number_of_stages():
    assert count_stages(32, 4, several=False) == 4
    assert count_stages(32, 4, several=True) == 8
    assert count_stages(32, 4, several=False, layers_per_stage=8) == 4
    assert count_stages(32, 4, several=True, layers_per_stage=2) == 16
    assert count_stages(30, 4, several=True, layers_per_stage=4) == 8
    # The modules at the ends are counted only where they are given.
    assert count_stages(32, 4, several=True, layers_per_stage=3, input_weight=2, output_weight=2) == 12
    for options, words in (
        ({"several": False, "layers_per_stage": 7}, "make 5 stages, which do not divide among 4 ranks"),
        ({"several": False, "layers_per_stage": 4}, "exactly one stage per rank.*increase layers_per_stage"),
        ({"several": True, "layers_per_stage": 8}, "two or more stages per rank.*decrease layers_per_stage"),
        ({"several": True, "layers_per_stage": 0}, "layers_per_stage = 0, expected an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            count_stages(32, 4, **options)
    with pytest.raises(ValueError, match="6 layers cannot fill 8 stages"):
        count_stages(6, 4, several=True)


ASCENDING = "expected whole numbers that ascend from 0 to the number of layers"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda b=b: Partition(b), ASCENDING) for b in ((), (0,), (1, 3), (0, 3, 2), (0, 1.5), (0, True))),
        (lambda: Partition((0, 3, 2), allow_empty=True), ASCENDING),
        (
            lambda: Partition((0, 2, 2, 3)),
            r"stage 1 would be empty: 3 layers in 3 stages of sizes \[2, 0, 1\].*allow_empty",
        ),
        (lambda: Partition((0, 2)).split([1, 2, 3]), "got 3 items, expected 2, one for each layer"),
        (lambda: Partition((0, 2)).loads([1]), "got 1 items, expected 2, one for each layer"),
        (lambda: Partition((0, 2)).layers_of(1), "stage: got 1, expected a number from 0 to 0"),
        (lambda: Partition((0, 2)).layers_of(-1), "stage: got -1, expected a number from 0 to 0"),
        (lambda: Partition((0, 1, 2, 3)).dealt(2), "3 stages cannot be dealt evenly to 2 ranks"),
        (lambda: partition_uniform(3, 5), r"sizes \[1, 1, 1, 0, 0\]"),
        (lambda: partition_uniform(4, 0), "stages = 0, expected an integer of at least 1"),
        (lambda: partition_uniform(-1, 2), "layers = -1, expected an integer of at least 0"),
        (lambda: partition_uniform(4.0, 2), r"layers = 4\.0, expected an integer"),
        (lambda: partition_uniform(4, 2, remainder="middle"), "remainder: got 'middle', expected 'first'"),
        (lambda: partition_balanced([1, 2], 3), r"2 layers in 3 stages of sizes \[1, 1, 0\]"),
        (lambda: partition_balanced([1], 0), "stages = 0, expected an integer of at least 1"),
        *(
            (
                lambda w=w, n=n: partition_balanced([w] + [1] * n, 1),
                "the weight of layer 0 is a finite number",
            )
            for w in (-1, float("nan"), float("inf"), "1")
            for n in (0, 2)
        ),
        (lambda: partition_layers(3, 4), "stage 0 would be empty: 3 layers in 4 stages"),
        (lambda: partition_layers(8, 4, 4, 1, extra="first"), r"stage 0 would be empty.*\[0, 3, 3, 2\]"),
        (lambda: partition_layers(8, 4, 1, 4, extra="first"), "stage 3 would be empty"),
        (lambda: partition_layers(4, 4, extra="first"), r"sizes \[1, 2, 1, 0\]"),
        (lambda: partition_layers(8, 4, -1), "input_weight is -1, expected a finite number of at least 0"),
        (lambda: partition_layers(8, 4, 1, float("nan")), "output_weight is nan, expected a finite number"),
        (lambda: partition_layers(8, 4, extra="last"), "extra: got 'last', expected 'middle' or 'first'"),
        (lambda: partition_layers(8, 0), "stages = 0, expected an integer of at least 1"),
    ],
)
def test_errors_say_what_is_valid(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.integers(1, 9), st.integers(1, 4), st.fractions(0, 3), st.integers(1, 3))
def test_the_dearest_slice_costs_the_least(parts, slices, attention, multiple):
    tokens = parts * multiple
    if parts < slices:
        with pytest.raises(
            ValueError, match=f"slices = {slices}, expected at most {parts}, one per {multiple} tokens"
        ):
            slice_lengths(tokens, slices, attention, multiple=multiple)
        return

    def dearest(lengths):
        starts = itertools.accumulate(lengths, initial=0)
        return max(
            n + attention * n * (past + Fraction(n, 2)) for past, n in zip(starts, lengths, strict=False)
        )

    cuts = (
        [b - a for a, b in itertools.pairwise((0, *inner, tokens))]
        for inner in itertools.combinations(range(multiple, tokens, multiple), slices - 1)
    )
    found = slice_lengths(tokens, slices, attention, multiple=multiple)
    assert sum(found) == tokens and not any(n % multiple for n in found)
    assert dearest(found) == min(map(dearest, cuts))


def test_slices_of_equal_tokens_where_attention_costs_nothing_and_what_is_refused():
    assert slice_lengths(1024, 4) == (256,) * 4 and slice_lengths(7, 1, 2) == (7,)
    for bad, reason in (
        ((10, 2, 0, 4), "multiple of 4"),
        ((10, 2, -1, 1), "attention"),
        ((0, 1, 0, 1), "tokens"),
    ):
        with pytest.raises(ValueError, match=reason):
            slice_lengths(*bad[:3], multiple=bad[3])
