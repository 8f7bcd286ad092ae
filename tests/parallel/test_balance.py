"""Balanced partitions are optimal for their objective, and quick."""

from __future__ import annotations

import itertools
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import partition_balanced, partition_min_range
from tests.clock import busy


def maximum(loads):
    return max(loads)


def spread(loads):
    return max(loads) - min(loads)


OBJECTIVES = [(partition_balanced, maximum), (partition_min_range, spread)]


def best_by_trying_all(weights, stages, objective):
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    return min(
        objective([sum(weights[a:b]) for a, b in itertools.pairwise((0, *c, len(weights)))]) for c in cuts
    )


@st.composite
def problems(draw, weight):
    stages = draw(st.integers(1, 5))
    return draw(st.lists(weight, min_size=stages, max_size=10)), stages


@pytest.mark.parametrize(("partition", "objective"), OBJECTIVES)
@given(problem=problems(st.one_of(st.integers(0, 3), st.integers(0, 1000))))
def test_optimal_for_whole_weights(partition, objective, problem):
    weights, stages = problem
    found = partition(weights, stages)
    assert found.stages == stages and found.layers == len(weights) and min(found.sizes) >= 1
    assert objective(found.loads(weights)) == best_by_trying_all(weights, stages, objective)


@pytest.mark.parametrize(("partition", "objective"), OBJECTIVES)
def test_optimal_for_all_small_problems(partition, objective):
    for weights in itertools.product((0, 1, 3, 4), repeat=5):
        for stages in (2, 3):
            loads = partition(weights, stages).loads(weights)
            assert objective(loads) == best_by_trying_all(weights, stages, objective)


@pytest.mark.parametrize("seed", range(20))
def test_least_maximum_of_long_lists(seed):
    chance = random.Random(seed)
    weights = [chance.randint(0, 1000) for _ in range(200)]
    for stages in (2, 7, 30, 90):
        limit = max(partition_balanced(weights, stages).loads(weights))
        # One less, and stages that are filled to the brim do not take all layers.
        used, load = 1, 0
        for weight in weights:
            used, load = (used, load + weight) if load + weight < limit else (used + 1, weight)
        assert used > stages or limit == max(weights)


@pytest.mark.parametrize("seed", range(20))
def test_least_range_of_longer_lists(seed):
    chance = random.Random(seed)
    weights = [chance.choice((0, 0, 1, 2, 5, 9)) for _ in range(14)]
    for stages in (5, 8):
        assert spread(partition_min_range(weights, stages).loads(weights)) == best_by_trying_all(
            weights, stages, spread
        )


@pytest.mark.parametrize(("partition", "objective"), OBJECTIVES)
@given(problem=problems(st.floats(0, 1e6, allow_subnormal=False)))
def test_optimal_for_any_weights(partition, objective, problem):
    weights, stages = problem
    exact = [Fraction(w) for w in weights]
    found = [sum(part) for part in partition(weights, stages).split(exact)]
    assert objective(found) == best_by_trying_all(exact, stages, objective)


@pytest.mark.parametrize(
    ("weights", "boundaries"),
    [
        # Made with the dynamic programme of DeepSpeed, deepspeed/runtime/utils.py.
        ([1, 2, 1], (0, 1, 2, 3)),
        ([1, 1, 1, 1, 1], (0, 2, 3, 4, 5)),
        ([1, 1, 1, 1, 0, 1], (0, 2, 3, 5, 6)),
        ([1, 0, 1, 1, 1, 1], (0, 3, 4, 5, 6)),
        ([3, 1, 4, 1, 5, 9, 2, 6], (0, 5, 6, 8)),
        ([2, 7, 1, 8, 2, 8, 1, 8], (0, 2, 4, 6, 8)),
        ([10, 39, 20, 15, 51, 5], (0, 1, 2, 4, 5, 6)),
        ([2, 5, 7, 4, 5, 1, 1, 6, 7], (0, 2, 4, 7, 9)),
        ([0, 0, 5, 0, 5, 0, 0], (0, 4, 7)),
        ([5] * 10, (0, 4, 7, 10)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], (0, 5, 7, 9, 10)),
        ([20, 3, 3, 3, 3, 3, 3, 20], (0, 1, 4, 7, 8)),
        ([0, 1, 1, 1, 1, 0], (0, 3, 4, 6)),
    ],
)
def test_least_range_prefers_the_later_cut(weights, boundaries):
    assert partition_min_range(weights, len(boundaries) - 1).boundaries == boundaries


def test_least_range_where_the_best_is_not_made_of_best_prefixes():
    # A dynamic programme that keeps one partition per prefix ends at (0, 2, 3, 4, 6), whose spread is 10.
    weights = [7, 4, 10, 3, 12, 1]
    assert spread(partition_min_range(weights, 4).loads(weights)) == 9


def test_the_two_objectives_differ():
    weights = [4, 4, 4, 4, 4, 4]
    assert partition_balanced(weights, 4).loads(weights) == (8, 4, 8, 4)
    weights = [6, 1, 6, 1, 6]
    assert partition_balanced(weights, 2).loads(weights) == (13, 7)
    assert partition_balanced([1, 2, 3], 2).boundaries == (0, 2, 3)


@pytest.mark.parametrize(("partition", "objective"), OBJECTIVES)
@pytest.mark.parametrize(
    "weights", [[1] * 10_000, list(range(10_000)), [random.Random(0).random() for _ in range(10_000)]]
)
def test_ten_thousand_layers_over_512_stages(weights, partition, objective):
    start = time.process_time()
    found = partition(weights, 512)
    assert time.process_time() - start < 2 * busy()
    assert found.stages == 512 and min(found.sizes) >= 1
    if weights == [1] * 10_000:
        assert max(found.sizes) == 20


@pytest.mark.parametrize(("partition", "objective"), OBJECTIVES)
def test_what_is_refused(partition, objective):
    with pytest.raises(ValueError, match=r"2 layers in 3 stages of sizes \[1, 1, 0\]"):
        partition([1, 2], 3)
    assert partition([1, 2], 3, allow_empty=True).boundaries == (0, 1, 2, 2)
    for wrong in (-1, float("nan"), float("inf"), "1"):
        for layers in (1, 3):
            with pytest.raises(
                ValueError, match="the weight of layer 0 is a finite number, zero or more; got"
            ):
                partition([wrong] + [1] * (layers - 1), 1)
    with pytest.raises(ValueError, match="stages = 0, expected an integer of at least 1"):
        partition([1], 0)
