"""Balanced partitions are optimal for their objective, and quick."""

from __future__ import annotations

import itertools
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import partition_balanced
from tests.clock import busy


def best_by_trying_all(weights, stages):
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    return min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *c, len(weights)))) for c in cuts)


@st.composite
def problems(draw, weight):
    stages = draw(st.integers(1, 5))
    return draw(st.lists(weight, min_size=stages, max_size=10)), stages


@given(problem=problems(st.one_of(st.integers(0, 3), st.integers(0, 1000))))
def test_optimal_for_whole_weights(problem):
    weights, stages = problem
    found = partition_balanced(weights, stages)
    assert found.stages == stages and found.layers == len(weights) and min(found.sizes) >= 1
    assert max(found.loads(weights)) == best_by_trying_all(weights, stages)


def test_optimal_for_all_small_problems():
    for weights in itertools.product((0, 1, 3, 4), repeat=5):
        for stages in (2, 3):
            loads = partition_balanced(weights, stages).loads(weights)
            assert max(loads) == best_by_trying_all(weights, stages)


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


@given(problem=problems(st.floats(0, 1e6, allow_subnormal=False)))
def test_optimal_for_any_weights(problem):
    weights, stages = problem
    exact = [Fraction(w) for w in weights]
    found = [sum(part) for part in partition_balanced(weights, stages).split(exact)]
    assert max(found) == best_by_trying_all(exact, stages)


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


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"2 layers in 3 stages of sizes \[1, 1, 0\]"):
        partition_balanced([1, 2], 3)
    assert partition_balanced([1, 2], 3, allow_empty=True).boundaries == (0, 1, 2, 2)
    for wrong in (-1, float("nan"), float("inf"), "1"):
        for layers in (1, 3):
            with pytest.raises(
                ValueError, match="the weight of layer 0 is a finite number, zero or more; got"
            ):
                partition_balanced([wrong] + [1] * (layers - 1), 1)
    with pytest.raises(ValueError, match="stages = 0, expected an integer of at least 1"):
        partition_balanced([1], 0)
