"""Leaves lie in buckets once each, whole or as shards; gradients are added up there as one by one."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.runtime.ports.protocols import Collective, CollectiveOnPaper
from ppfunc.stage import LeafSignature, graph
from ppfunc.stage.engines.tracing import cut
from ppfunc.training.update.buckets import Reducer, Sums, gather, plan_buckets, shard, shard_dim, views
from tests.live import Live
from tests.models import normal
from tests.training.world import World, shard_dims

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
trees = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=12)


@given(trees, st.integers(1, 2000))
def test_every_leaf_has_one_place_and_no_two_overlap(tree, most):
    leaves = [torch.ones(shape).to(kind) for shape, kind in tree]
    buckets = plan_buckets(leaves, most=most)
    placed = [place.leaf for bucket in buckets for place in bucket.places]
    assert sorted(placed) == [
        n for n, leaf in enumerate(leaves) if leaf.dtype not in (torch.int64, torch.bool)
    ]
    for bucket in buckets:
        assert bucket.numel * bucket.dtype.itemsize <= most or len(bucket.places) == 1
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
        for place, view in zip(bucket.places, views(bucket, flat), strict=True):
            leaf = leaves[place.leaf]
            assert view.shape == leaf.shape and view.is_contiguous()
            assert view.dtype == leaf.dtype
            assert place.offset * bucket.dtype.itemsize % 64 == 0
            assert not view.any()
            view += 1
        assert flat.sum() == sum(
            leaves[p.leaf].numel() for p in bucket.places
        )  # real parts, or complex ones, of 1


@pytest.mark.parametrize(("megabytes", "count"), [(0, 0), (1, 1), (24, 1), (26, 2), (60, 3), (1000, 40)])
def test_buckets_are_4_to_25_megabytes_where_there_is_as_much(megabytes, count):
    leaves = [torch.empty(2**16, device="meta") for _ in range(4 * megabytes)]  # a quarter of a megabyte each
    sizes = [bucket.numel * bucket.dtype.itemsize / 2**20 for bucket in plan_buckets(leaves)]
    assert len(sizes) == count
    assert all((size >= 4 or megabytes < 4) and size <= 25 for size in sizes)


def test_some_leaves_only():
    leaves = [torch.ones(2), torch.ones(3), torch.ones(4)]
    (bucket,) = plan_buckets(leaves, chosen={2, 0})
    assert [(p.leaf, p.offset, p.shape) for p in bucket.places] == [(0, 0, (2,)), (2, 16, (4,))]
    assert plan_buckets([]) == plan_buckets([torch.arange(3)]) == ()
    assert plan_buckets(leaves, most=1) == tuple(
        b for n in range(3) for b in plan_buckets(leaves, chosen=[n])
    )
    assert math.prod(bucket.places[0].shape) == 2


def test_a_bucket_ends_before_a_leaf_that_would_not_fit():
    first, second = plan_buckets([torch.ones(64), torch.ones(128)], most=160 * 4)
    assert (first.numel, second.numel) == (64, 128)


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 4), st.sets(st.integers(0, 3)))
def test_the_first_dimension_that_divides_and_is_free_is_cut(shape, ranks, taken):
    dim = shard_dim(shape, ranks, taken)
    fitting = [d for d, size in enumerate(shape) if d not in taken and size > 0 and size % ranks == 0]
    assert dim == (fitting[0] if fitting and ranks > 1 else None)


def leaves(seed=0):
    g = torch.Generator().manual_seed(seed)

    def make(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return [
        make(4, 3),
        make(3, 6),
        make(1, 5),  # cut nowhere
        make(()),
        make(0, 4),
        torch.arange(4),
        make(2, 2, dtype=torch.complex128),
        make(3, 5, 2, dtype=torch.float32),
        make(6, 2, dtype=torch.bfloat16),
        make(7),
    ]


DIMS = (0, 1, None, None, 1, None, 0, 2, 0, None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_slices(ranks):
    whole = leaves()
    dims = shard_dims(whole, ranks)
    parts = [shard(whole, dims, ranks, rank) for rank in range(ranks)]
    for n, (leaf, dim) in enumerate(zip(whole, dims, strict=True)):
        if dim is None:
            assert all(part[n] is leaf for part in parts)
        else:
            assert torch.equal(torch.cat([part[n] for part in parts], dim), leaf)
            assert all(
                part[n].is_contiguous() and part[n].untyped_storage().nbytes() == leaf.nbytes // ranks
                for part in parts
            )
    assert shard_dims(whole, 2) == DIMS
    assert shard_dims(whole, 2, {0})[:2] == (None, 1)
    assert shard_dims(whole, 1) == (None,) * len(whole)


def moved(rank, size, most):
    whole, world = [*leaves(), torch.arange(96.0).view(32, 3)], World()
    dims = shard_dims(whole, size)
    gathered = gather(shard(whole, dims, size, rank), dims, world, most=most)()
    return all(map(torch.equal, gathered, whole)) and all(a.is_contiguous() for a in gathered)


@pytest.mark.parametrize("most", [1, 2**20])
def test_gather_undoes_shard(two, most):
    assert two(moved, most) == [True] * 2


def test_a_leaf_that_is_cut_along_its_first_axis_is_gathered_in_place():
    """Its bytes are there once; along another axis, as they come and in order."""
    part = torch.zeros(8, 4)
    for dim, parts in ((0, 2), (1, 4)):
        with Live() as live:
            (whole,) = gather((part,), (dim,), CollectiveOnPaper(2))()
        assert whole.is_contiguous() and live.most == parts * part.nbytes


LEAVES = [
    torch.zeros(3, 2, dtype=torch.float64),
    torch.zeros((), dtype=torch.float64),
    torch.zeros(0, 4, dtype=torch.float64),
    torch.zeros(2, 5, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.complex128),
    torch.zeros(4, 3, dtype=torch.float32),
]
WHOLE = (None,) * len(LEAVES)


def reducer_of(leaves=LEAVES, dims=None, ranks=None, **options):
    signatures = [LeafSignature(tuple(leaf.shape), leaf.dtype, True) for leaf in leaves]
    ranks = ranks or Collective()
    over = [Sums(ranks, ranks, Collective())] * len(leaves)
    return Reducer(signatures, (None,) * len(leaves) if dims is None else dims, over, **options)


def gradients(seed):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(leaf.shape, generator=g, dtype=torch.float64).to(leaf.dtype) for leaf in LEAVES]
    return tuple(None if n == 0 and seed % 3 == 0 else g for n, g in enumerate(made))


def add(reducer, made, parts=None):
    """Add gradients, those that are None left aside, all at once or in these parts."""
    for part in parts or [range(len(made))]:
        numbers = tuple(n for n in part if made[n] is not None)
        reducer.add([made[n] for n in numbers], numbers, 0)


def total(seeds, dtype=None):
    """The sums over microbatches, in the dtype of each leaf, then in that of the sums over ranks."""
    sums = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in LEAVES]
    for seed in seeds:
        sums = [a if b is None else a + b for a, b in zip(sums, gradients(seed), strict=True)]
    return [a if a.is_complex() or dtype is None else a.to(dtype) for a in sums]


def same(got, expected):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("most", [1, 2**20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_sums_over_microbatches(dtype, most):
    reducer = reducer_of(dtype=dtype, most=most)
    for seeds in ((1, 2, 3), (3, 4), (), (6,)):  # one step after the other
        for seed in seeds:
            mine = gradients(seed)
            kept = [None if g is None else g.clone() for g in mine]
            add(reducer, mine)
            assert all(a is None or torch.equal(a, b) for a, b in zip(mine, kept, strict=True))
        reducer.launch()
        assert same(reducer.wait(), total(seeds, dtype))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.permutations(range(len(LEAVES))), st.sets(st.integers(1, len(LEAVES) - 1))
        ),
        max_size=4,
    )
)
def test_sums_of_gradients_that_come_in_parts(microbatches):
    """In any parts, each microbatch in others: the same bits as one after the other."""
    reducer, size = reducer_of(most=100), len(LEAVES)
    for _ in range(2):
        for seed, order, cuts in microbatches:
            add(reducer, gradients(seed), [order[a:b] for a, b in pairwise([0, *sorted(cuts), size])])
        reducer.launch()
        assert same(reducer.wait(), total([seed for seed, *_ in microbatches]))


@torch.no_grad()
def test_a_backward_holds_few_gradients_beside_the_buckets(monkeypatch):
    """Those of a layer, where all would be six."""
    monkeypatch.setattr(cut, "_TOGETHER", 1)

    def chain(params, x):
        for w in params:
            x = torch.tanh(x @ w)
        return x

    params, x = tuple(normal(32, 32, seed=n) for n in range(6)), normal(2, 32)
    flat, reducer = graph(chain, (params, x)).flat, reducer_of(params)
    for microbatch in range(3):
        residuals = flat.forward(params, (x,), ())[1]
        with Live() as live:
            flat.backward.accumulating(residuals, (x,), (reducer, microbatch, None))
        assert params[0].nbytes <= live.most < 2 * params[0].nbytes


def test_sums_over_places_are_taken_in_the_place_of_the_own():
    reducer = reducer_of()
    for seed in (1, 2):
        add(reducer, gradients(seed))
    taken = reducer.take((), torch.clone)
    assert same(taken, total((1, 2)))
    reducer.put_back((taken[0] + 1, *taken[1:]))
    assert same(taken, total((1, 2)))  # which other places may still be sent
    reducer.launch()
    first, *rest = total((1, 2))
    assert same(reducer.wait(), [first + 1, *rest])


def test_who_keeps_a_gradient_keeps_its_memory():
    reducer = reducer_of(LEAVES[:2])
    reducer.launch()
    sums = reducer.wait()
    assert not reducer.idle
    row = sums[0][1]
    del sums
    assert not reducer.idle
    del row
    assert reducer.idle


def over_ranks(rank, size, dtype, most):
    """Whether sums over ranks are right, whole and in parts, step after step in one memory."""
    dims = shard_dims(LEAVES, size)
    whole, cut = (reducer_of(dims=d, ranks=World(), dtype=dtype, most=most) for d in (WHOLE, dims))
    for step in range(2):
        seeds = [[10 * step + 4 * place + seed for seed in (1, 2)] for place in range(size)]
        for reducer in (whole, cut):
            for seed in seeds[rank]:
                add(reducer, gradients(seed))
            reducer.launch()
        expected = [a + b for a, b in zip(*(total(own, dtype) for own in seeds), strict=True)]
        assert same(whole.wait(), expected)
        assert same(cut.wait(), shard(expected, dims, size, rank))
        merged = [reducer.take((), torch.clone) for reducer in (whole, cut)]  # nothing has come: zeros
        assert all(not leaf.any() for leaves in merged for leaf in leaves)
        for reducer in (whole, cut):
            reducer.put_back(tuple(total([rank], None)))
            reducer.launch()
        expected = [a + b for a, b in zip(*(total([place], dtype) for place in range(size)), strict=True)]
        assert same(whole.wait(), expected)
        assert same(cut.wait(), shard(expected, dims, size, rank))
    return [dim is None for dim in dims]


@pytest.mark.parametrize("most", [64, 2**20])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_sums_over_ranks(two, dtype, most):
    assert two(over_ranks, dtype, most) == [[False, True, False, False, False, False]] * 2
