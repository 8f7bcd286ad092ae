"""Lay the leaves of a tree out in flat buffers, so that one collective moves many of them."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppfunc.stage.signature import LeafSignature, differentiable

# Bytes of a bucket. Of several, each has half of that at least, unless its leaves are larger.
MOST = 25 * 2**20
_ALIGNED = 64  # bytes: the begin of a leaf


class LeafPlace(NamedTuple):
    """Place a leaf in a bucket.

    Args:
        leaf: its number among the leaves of the tree.
        offset: of its first element, in elements of the bucket.
        shape: in elements of the bucket: complex numbers are pairs.
        pairs: the leaf is complex.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    pairs: bool


class Bucket(NamedTuple):
    """Describe the layout of a flat buffer of one dtype.

    Args:
        dtype: a real one.
        numel: elements, gaps between leaves counted.
        places: its leaves.
    """

    dtype: torch.dtype
    numel: int
    places: tuple[LeafPlace, ...]


def plan_buckets(
    leaves: Sequence[Tensor | LeafSignature],
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
    kinds = ((dtype.to_real() if dtype.is_complex else dtype, alike) for dtype, alike in by_dtype.items())
    return tuple(bucket for kind, alike in kinds for bucket in _laid_out(leaves, alike, kind, most))


def _laid_out(
    leaves: Sequence[Tensor | LeafSignature],
    numbers: Sequence[int],
    dtype: torch.dtype,
    most: int,
) -> Iterable[Bucket]:
    shapes = {
        n: (*leaves[n].shape, 2) if leaves[n].dtype.is_complex else tuple(leaves[n].shape) for n in numbers
    }
    step = max(1, _ALIGNED // dtype.itemsize)
    room = {n: -(-math.prod(shape) // step) * step for n, shape in shapes.items()}
    limit = most // dtype.itemsize
    even = sum(room.values()) / max(1, math.ceil(sum(room.values()) / max(1, limit)))
    places: list[LeafPlace] = []
    used = 0
    for n in numbers:
        if places and (used >= even or used + room[n] > limit):
            yield Bucket(dtype, used, tuple(places))
            places, used = [], 0
        places.append(LeafPlace(n, used, shapes[n], leaves[n].dtype.is_complex))
        used += room[n]
    if places:
        yield Bucket(dtype, used, tuple(places))


def views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """View the leaves in a buffer: tensors that share its memory, complex ones as such.

    Args:
        flat: dtype[numel] of the bucket.
    """
    leaves = []
    for place in bucket.places:
        leaf = flat[place.offset : place.offset + math.prod(place.shape)].view(place.shape)
        leaves.append(torch.view_as_complex(leaf) if place.pairs else leaf)
    return leaves
