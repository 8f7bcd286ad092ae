"""Leaves lie in buckets once each, apart, aligned; and no bucket is larger than it may be."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.training.update.buckets import plan_buckets, views

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
