"""Cut the leaves of a tree over the ranks of an axis: shards of parameters, of gradients, of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..stage.signature import LeafSignature
from ._torch import copy_into_each
from .buckets import MOST, Bucket, plan_buckets, views
from .protocols import Ranks, ShardOf, Wait

Dims = tuple[int | None, ...]
"""Of every leaf the dimension that is cut, None for leaves of which each rank has the whole."""


def shard_dim(shape: Sequence[int], ranks: int, taken: Collection[int] = ()) -> int | None:
    """The first dimension that no other axis cuts and that divides by the number of ranks; None where there is none.

    Args:
        shape: of the whole leaf, or of the shard of it that another axis leaves.
        ranks: of the axis.
        taken: the dimensions that other axes cut.

    >>> shard_dim((3, 4), 2), shard_dim((4, 4), 2, taken={0}), shard_dim((1,), 2), shard_dim((), 2)
    (1, 1, None, None)
    """
    if ranks < 2:
        return None
    return next((d for d, size in enumerate(shape) if d not in taken and size and size % ranks == 0), None)


def shard(leaves: Sequence[Tensor], dims: Dims, ranks: int, rank: int) -> tuple[Tensor, ...]:
    """Shards of leaves that this rank has whole, in memory of their own; a leaf that is not cut is returned as it is."""
    return tuple(
        leaf if dim is None else leaf.tensor_split(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


def parts_of(leaves: Sequence[Tensor | LeafSignature], dims: Dims, ranks: int, rank: int) -> tuple[ShardOf, ...]:
    """The places of this rank's shards in their wholes, for an optimizer to give them the bits that the whole would get.

    Args:
        leaves: whole ones, or their signatures.
    """
    return tuple(
        ShardOf(tuple(leaf.shape)) if dim is None else ShardOf(tuple(leaf.shape), dim, ranks, rank)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


class Pending(NamedTuple):
    """Collectives that are under way.

    Args:
        waits: one per collective.
        finish: makes their result, once they have ended.
    """

    waits: tuple[Wait, ...]
    finish: Callable[[], tuple[Tensor, ...]]

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for them and return the result, one tensor per leaf. Call it once."""
        for wait in self.waits:
            wait()
        return self.finish()


@torch.no_grad()
def gather(shards: Sequence[Tensor], dims: Dims, ranks: Ranks, *, most: int = MOST) -> Pending:
    """Begin to make whole leaves of the shards of all ranks: see :func:`shard`.

    Returns:
        What gives the whole leaves, in memory of their own; a leaf that is not cut is returned as it is.
    """
    shards = [s.detach() for s in shards]
    buckets = plan_buckets(shards, chosen=_cut(dims), most=most // ranks.size)
    waits, flats = [], []
    for bucket in buckets:
        own = torch.empty(bucket.numel, dtype=bucket.dtype, device=shards[bucket.places[0].leaf].device)
        copy_into_each(views(bucket, own), [shards[place.leaf] for place in bucket.places])
        flat, wait = ranks.all_gather(own)
        flats.append(flat)
        waits.append(wait)

    def finish() -> tuple[Tensor, ...]:
        whole = list(shards)
        for bucket, flat in zip(buckets, flats, strict=True):
            for n in (place.leaf for place in bucket.places):
                whole[n] = shards[n].new_empty(whole_shape(shards[n].shape, dims[n], ranks.size))
            into = [split(whole[place.leaf], dims[place.leaf], ranks.size) for place in bucket.places]
            copy_into_each(into, split_views(bucket, flat, dims, ranks.size))
        return tuple(whole)

    return Pending(tuple(waits), finish)


def _cut(dims: Dims) -> list[int]:
    return [n for n, dim in enumerate(dims) if dim is not None]


def whole_shape(shape: Sequence[int], dim: int | None, ranks: int) -> tuple[int, ...]:
    """The shape of what a tensor of this shape is one of so many equal parts of."""
    return tuple(size * ranks if d == dim else size for d, size in enumerate(shape))


def part_signature(leaf: Tensor | LeafSignature, dim: int | None, ranks: int) -> LeafSignature:
    """The signature of one of so many equal parts of a leaf."""
    return LeafSignature(tuple(size // ranks if d == dim else size for d, size in enumerate(leaf.shape)), leaf.dtype, False)


def split(leaf: Tensor, dim: int | None, ranks: int) -> Tensor:
    """A view of a whole leaf whose dimension ``dim`` is two: ranks, and the rows of each."""
    assert dim is not None
    return leaf.unflatten(dim, (ranks, leaf.shape[dim] // ranks))


def split_views(bucket: Bucket, flat: Tensor, dims: Dims, ranks: int) -> list[Tensor]:
    """The whole leaves, split as by :func:`split`, in a buffer that holds the shards of one rank after those of another."""
    made = []
    for place, first in zip(bucket.places, views(bucket, flat[: bucket.numel]), strict=True):
        dim, distance = dims[place.leaf], bucket.numel // 2 if place.pairs else bucket.numel
        assert dim is not None
        shape, strides = ((*sizes[:dim], one, *sizes[dim:]) for sizes, one in ((first.shape, ranks), (first.stride(), distance)))
        made.append(first.as_strided(shape, strides))
    return made
