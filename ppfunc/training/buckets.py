"""Lay the leaves of a tree out in flat buffers, so that one collective moves many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..stage.signature import LeafSignature, differentiable

MOST = 25 * 2**20  # bytes of a bucket; of several, each has half of that at least, unless its leaves are larger
_ALIGNED = 64  # bytes: the begin of a leaf


class LeafPlace(NamedTuple):
    """Where a leaf lies in a bucket.

    Args:
        leaf: its number among the leaves of the tree.
        offset: of its first element, in elements of the bucket.
        shape: in elements of the bucket: complex numbers are pairs.
        pairs: whether the leaf is complex.
    """

    leaf: int
    offset: int
    shape: tuple[int, ...]
    pairs: bool


class Bucket(NamedTuple):
    """The layout of one flat buffer: of one stage, one dtype, and one axis of ranks.

    Args:
        axis: name of the axis over which it is moved.
        stage: stage of the model.
        dtype: a real one.
        numel: elements, gaps between leaves counted.
        places: its leaves.
    """

    axis: str
    stage: int
    dtype: torch.dtype
    numel: int
    places: tuple[LeafPlace, ...]

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.numel * self.dtype.itemsize


def plan_buckets(
    leaves: Sequence[Tensor | LeafSignature],
    *,
    axis: str = "dp",
    stage: int = 0,
    chosen: Iterable[int] | None = None,
    most: int = MOST,
) -> tuple[Bucket, ...]:
    """Lay leaves out in as few buckets of about equal size as ``most`` allows, one dtype each, in the order of the leaves.

    Args:
        leaves: tensors or their signatures. Those that are neither floating nor complex are left out.
        axis, stage: names of the buckets.
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
    kinds = ((dtype.to_real() if dtype.is_complex else dtype, own) for dtype, own in by_dtype.items())
    return tuple(bucket for kind, own in kinds for bucket in _laid_out(leaves, own, axis, stage, kind, most))


def _laid_out(
    leaves: Sequence[Tensor | LeafSignature], numbers: Sequence[int], axis: str, stage: int, dtype: torch.dtype, most: int
) -> Iterable[Bucket]:
    shapes = {n: (*leaves[n].shape, 2) if leaves[n].dtype.is_complex else tuple(leaves[n].shape) for n in numbers}
    step = max(1, _ALIGNED // dtype.itemsize)
    room = {n: -(-math.prod(shape) // step) * step for n, shape in shapes.items()}
    limit = most // dtype.itemsize
    even = sum(room.values()) / max(1, math.ceil(sum(room.values()) / max(1, limit)))
    places: list[LeafPlace] = []
    used = 0
    for n in numbers:
        if places and (used >= even or used + room[n] > limit):
            yield Bucket(axis, stage, dtype, used, tuple(places))
            places, used = [], 0
        places.append(LeafPlace(n, used, shapes[n], leaves[n].dtype.is_complex))
        used += room[n]
    if places:
        yield Bucket(axis, stage, dtype, used, tuple(places))


def views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The leaves in a buffer: tensors that share its memory, complex ones as such.

    Args:
        flat: dtype[numel] of the bucket.
    """
    parts = (flat[p.offset : p.offset + math.prod(p.shape)].view(p.shape) for p in bucket.places)
    return [torch.view_as_complex(part) if p.pairs else part for p, part in zip(bucket.places, parts, strict=True)]
