"""Gradients are added up over microbatches and ranks, as one by one."""

import pytest
import torch

from ppfunc.training import Reducer
from tests.training.world import World

LEAVES = [
    torch.zeros(3, 2, dtype=torch.float64),
    torch.arange(3),
    torch.zeros((), dtype=torch.float64),
    torch.zeros(0, 4, dtype=torch.float64),
    torch.zeros(1, 5, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.complex128),
]


def gradients(seed):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(leaf.shape, generator=g, dtype=torch.float64).to(leaf.dtype) for leaf in LEAVES]
    return [None if n == 1 or (n == 0 and seed % 3 == 0) else g for n, g in enumerate(made)]


def total(seeds, dtype):
    sums = [
        None if n == 1 else torch.zeros(leaf.shape, dtype=leaf.dtype if leaf.dtype.is_complex or dtype is None else dtype)
        for n, leaf in enumerate(LEAVES)
    ]
    for seed in seeds:
        sums = [a if b is None else a + b.to(a.dtype) for a, b in zip(sums, gradients(seed), strict=True)]
    return sums


@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_sums_over_microbatches(dtype, most):
    reducer = Reducer(LEAVES, dtype=dtype, most=most)
    for seeds in ((1, 2, 3), (3, 4), (), (6,)):  # one step after the other
        for seed in seeds:
            given = gradients(seed)
            kept = [None if g is None else g.clone() for g in given]
            reducer.add(given)
            assert all(a is None or torch.equal(a, b) for a, b in zip(given, kept, strict=True))
        reducer.launch()
        for got, expected in zip(reducer.wait(), total(seeds, dtype), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or (got.dtype == expected.dtype and torch.equal(got, expected))


def test_what_is_written_into_the_sums_is_kept():
    reducer = Reducer([torch.zeros(2)])
    reducer.accumulated()[0].fill_(3)
    reducer.add([torch.ones(2)])
    reducer.launch()
    assert reducer.wait()[0].tolist() == [4, 4]


def test_calls_out_of_order():
    reducer = Reducer(LEAVES, chosen=[0])
    with pytest.raises(RuntimeError, match="no reduction is under way: launch one first"):
        reducer.wait()
    with pytest.raises(ValueError, match="got 1 gradients, expected 6"):
        reducer.add([None])
    reducer.launch()
    with pytest.raises(RuntimeError, match="under way already"):
        reducer.launch()
    with pytest.raises(RuntimeError, match="gradients came while a reduction is under way"):
        reducer.add(gradients(1))
    assert [s is None for s in reducer.wait()] == [False, True, True, True, True, True]


def over_ranks(rank, size, dtype):
    world = World()
    reducer = Reducer(LEAVES, [world], dtype=dtype, most=64)
    twice = Reducer(LEAVES, [world, world], dtype=dtype)
    results = []
    for step in range(2):
        for seed in (1, 2):
            for one in (reducer, twice):
                one.add(gradients(10 * step + 4 * rank + seed))
        reducer.launch()
        twice.launch()
        results.append([[None if s is None else s.clone() for s in one.wait()] for one in (reducer, twice)])
    return results


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_sums_over_ranks(two, dtype):
    for results in two(over_ranks, dtype):
        for step, (once, twice) in enumerate(results):
            parts = [total([10 * step + 4 * rank + seed for seed in (1, 2)], dtype) for rank in range(2)]
            for got, double, a, b in zip(once, twice, *parts, strict=True):
                assert (got is None) == (a is None)
                assert got is None or (torch.equal(got, a + b) and torch.equal(double, (a + b) * 2))
