"""Lay leaves out in flat buffers, whole or cut over ranks, so that one collective moves many of them."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.signature import LeafSignature, differentiable

from ..optim._torch import copy_into_each

# Bytes of a bucket. Of several, each has half of that at least, unless its leaves are larger.
MOST = 25 * 2**20
_ALIGNED = 64  # bytes: the begin of a leaf

Dims = tuple[int | None, ...]
"""Dimension of every leaf that is cut; None for leaves of which each rank has the whole."""


class LeafPlace(NamedTuple):
    """Place a leaf in a bucket.

    Args:
        leaf: its number among the leaves of the tree.
        offset: of its first element, in elements of the bucket.
        shape: of the leaf.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]


class Bucket(NamedTuple):
    """Describe the layout of a flat buffer of one dtype.

    Args:
        dtype: of all of its leaves.
        numel: elements, gaps between leaves counted.
        places: its leaves.
    """

    dtype: torch.dtype
    numel: int
    places: tuple[LeafPlace, ...]


def plan_buckets(
    leaves: Sequence[torch.Tensor | LeafSignature],
    *,
    chosen: Iterable[int] | None = None,
    most: int = MOST,
) -> tuple[Bucket, ...]:
    """Lay leaves out, in their order, in as few buckets of about equal size as ``most`` allows.

    Each bucket has one dtype.

    Args:
        leaves: tensors or their signatures. Those that are neither floating nor complex are left out.
        chosen: numbers of the leaves to lay out; by default all.
        most: bytes of a bucket. A larger leaf has one for itself.

    >>> [bucket.numel for bucket in plan_buckets([torch.zeros(3), torch.zeros(2, 8), torch.zeros(())])]
    [48]
    """
    numbers = range(len(leaves)) if chosen is None else sorted(chosen)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for n in numbers:
        if differentiable(leaves[n].dtype):
            by_dtype.setdefault(leaves[n].dtype, []).append(n)
    return tuple(b for dtype, alike in by_dtype.items() for b in _laid_out(leaves, alike, dtype, most))


def _laid_out(
    leaves: Sequence[torch.Tensor | LeafSignature],
    numbers: Sequence[int],
    dtype: torch.dtype,
    most: int,
) -> Iterable[Bucket]:
    step = max(1, _ALIGNED // dtype.itemsize)
    room = {n: -(-math.prod(leaves[n].shape) // step) * step for n in numbers}
    limit = most // dtype.itemsize
    even = sum(room.values()) / max(1, math.ceil(sum(room.values()) / max(1, limit)))
    places: list[LeafPlace] = []
    used = 0
    for n in numbers:
        if places and (used >= even or used + room[n] > limit):
            yield Bucket(dtype, used, tuple(places))
            places, used = [], 0
        places.append(LeafPlace(n, used, tuple(leaves[n].shape)))
        used += room[n]
    if places:
        yield Bucket(dtype, used, tuple(places))


def views(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """View the leaves in a buffer: tensors that share its memory.

    Args:
        flat: dtype[numel] of the bucket.
    """
    return [flat[p.offset : p.offset + math.prod(p.shape)].view(p.shape) for p in bucket.places]


class Sums(NamedTuple):
    """Name the ranks over which the gradient of a parameter is summed.

    Args:
        ranks: all of them, which hold the same of it when it is whole.
        parts: those of them over which it may be cut.
        copies: those that get the same part.
    """

    ranks: Collective
    parts: Collective
    copies: Collective


def shard_dim(shape: Sequence[int], ranks: int, taken: Collection[int] = ()) -> int | None:
    """Find the first dimension that no other axis cuts and that divides by the number of ranks, else None.

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


def shard(leaves: Sequence[torch.Tensor], dims: Dims, ranks: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Cut leaves that this rank has whole: shards in new memory; leaves that are not cut as they are."""
    return tuple(
        leaf
        if dim is None
        else leaf.tensor_split(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
        for leaf, dim in zip(leaves, dims, strict=True)
    )


@torch.no_grad()
def gather(
    shards: Sequence[torch.Tensor], dims: Dims, ranks: Collective, *, most: int = MOST
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Begin to gather whole leaves from the shards of all ranks, those of :func:`shard`.

    Returns:
        A function to call once. It waits, and returns the whole leaves in new memory. Leaves that are not cut
        are returned as they are.
    """
    whole = [s.detach() if s.requires_grad else s for s in shards]
    cut = [n for n, dim in enumerate(dims) if dim is not None]
    if not cut:
        return lambda: tuple(whole)
    begun = []
    for bucket in plan_buckets(whole, chosen=cut, most=most // ranks.size):
        first = whole[bucket.places[0].leaf]
        if len(bucket.places) == 1 and first.numel() == bucket.numel:
            part = first.reshape(-1)
        else:
            part = torch.empty(bucket.numel, dtype=bucket.dtype, device=first.device)
            copy_into_each(views(bucket, part), [whole[place.leaf] for place in bucket.places])
        begun.append((bucket, *ranks.all_gather(part)))

    @torch.no_grad()
    def gathered() -> tuple[torch.Tensor, ...]:
        while begun:
            bucket, flat, wait = begun.pop(0)
            wait()
            numbers = [place.leaf for place in bucket.places]
            shapes = [whole_shape(whole[n].shape, dims[n], ranks.size) for n in numbers]
            if len(shapes) == 1 and flat.numel() == math.prod(shapes[0]) and dims[numbers[0]] == 0:
                whole[numbers[0]] = flat.view(shapes[0])
                continue
            for n, shape in zip(numbers, shapes, strict=True):
                whole[n] = whole[n].new_empty(shape)
            into = [by_rank(whole[n], dims[n], ranks.size) for n in numbers]
            copy_into_each(into, views_by_rank(bucket, flat, dims, ranks.size))
        return tuple(whole)

    return gathered


def whole_shape(shape: Sequence[int], dim: int | None, ranks: int) -> tuple[int, ...]:
    """Return the shape of the whole tensor, of which each rank holds an equal part of this shape."""
    return tuple(size * ranks if d == dim else size for d, size in enumerate(shape))


def part_signature(leaf: torch.Tensor | LeafSignature, dim: int | None, ranks: int) -> LeafSignature:
    """Return the signature of one of so many equal parts of a leaf."""
    return LeafSignature(
        tuple(size // ranks if d == dim else size for d, size in enumerate(leaf.shape)), leaf.dtype, False
    )


def by_rank(leaf: torch.Tensor, dim: int | None, ranks: int) -> torch.Tensor:
    """View a whole leaf with two dimensions in the place of ``dim``: ranks, and the rows of each."""
    assert dim is not None
    return leaf.unflatten(dim, (ranks, leaf.shape[dim] // ranks))


def views_by_rank(bucket: Bucket, flat: torch.Tensor, dims: Dims, ranks: int) -> list[torch.Tensor]:
    """View the whole leaves, as of :func:`by_rank`, in a buffer that holds the shards rank after rank."""
    rows, leaves = flat.view(ranks, bucket.numel), []
    for place in bucket.places:
        dim = dims[place.leaf]
        assert dim is not None
        shards = rows[:, place.offset : place.offset + math.prod(place.shape)]
        leaves.append(shards.view(ranks, *place.shape).movedim(0, dim))
    return leaves
