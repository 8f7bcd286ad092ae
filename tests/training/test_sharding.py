"""Shards are slices of the whole, and a step on shards is one on the whole, to rounding."""

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.runtime.transport.inprocess import CollectiveOnPaper
from ppfunc.training.optim import adamw, sgd
from ppfunc.training.update.buckets import gather, shard, shard_dim
from tests.live import Live
from tests.training.world import World, shard_dims


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


def trained(rank, size, name):
    """Weights after steps with whole state, and with sharded state; bytes of both states."""
    make = {
        "adamw": lambda: adamw(0.1),
        "sgd": lambda: sgd(0.1, 0.9),
    }[name]
    world, optimizer = World(), make()
    whole = tuple(leaves())
    dims = shard_dims(whole, size)
    given = whole
    own = shard(whole, dims, size, rank)
    states = optimizer.init(list(whole)), optimizer.init(list(own))
    for step in range(3):
        sums = [
            sum(column) for column in zip(*(leaves(100 * step + 10 * r) for r in range(size)), strict=True)
        ]
        whole, state = optimizer.update(sums, states[0], list(whole))
        parts = shard(sums, dims, size, rank)
        own, small = optimizer.update(list(parts), states[1], list(own))
        states = state, small
        given = gather(own, dims, world)()
        torch.testing.assert_close(given, tuple(whole))
    names = [name for name in states[0] if name != "updates"]
    sizes = [
        sum(leaf.untyped_storage().nbytes() for name in names for leaf in state[name] if leaf is not None)
        for state in states
    ]
    return sizes


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_on_shards_is_one_on_the_whole(two, name):
    whole = [leaf for leaf in leaves() if leaf.dtype != torch.int64]
    dims = [dim for n, dim in enumerate(DIMS) if n != 5]
    copies = 2 if name == "adamw" else 1
    both = [copies * sum(leaf.nbytes for leaf in whole)]
    both += [
        copies * sum(leaf.nbytes // (1 if dim is None else 2) for leaf, dim in zip(whole, dims, strict=True))
    ]
    assert two(trained, name) == [both] * 2
