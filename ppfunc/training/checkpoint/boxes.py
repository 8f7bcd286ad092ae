"""Describe the part of a tensor that a rank or a file holds, by its offset and shape in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ppfunc.stage._torch import is_dtensor
from ppfunc.stage.layout import local

from .._torch import shape_and_offset


class Box(NamedTuple):
    """Describe a part of a tensor: the offset of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> Box:
        """Make the box of a whole tensor."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def __and__(self, other: Box) -> Box | None:
        """Intersect two boxes; None where no element is in both.

        >>> Box((0, 0), (2, 4)) & Box((1, 2), (5, 5)), Box((0,), (2,)) & Box((2,), (1,))
        (Box(offset=(1, 2), shape=(1, 2)), None)
        """
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None


def box_of(tensor: torch.Tensor, name: str) -> Box:
    """Find the part of a tensor that this rank holds; all of a plain tensor.

    Raises:
        ValueError: a DTensor whose ranks hold parts of a sum, or parts that are no boxes.
    """
    if not is_dtensor(tensor):
        return Box.of_whole(tensor.shape)
    if not tensor.device_mesh.get_coordinate():  # this rank holds nothing
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    from torch.distributed.tensor import Replicate, Shard  # here, because the import takes long

    if other := [p for p in tensor.placements if type(p) not in (Shard, Replicate)]:
        raise ValueError(
            f"{name} has the placement {other[0]}, whose parts are no boxes; redistribute it to Shard or"
            " Replicate first"
        )
    shape, offset = shape_and_offset(tensor)
    if shape != local(tensor).shape:
        raise ValueError(
            f"{name}: this rank holds the shape {list(local(tensor).shape)}, its placements"
            f" {tensor.placements} give {shape}"
        )
    return Box(offset, shape)


def require_tiled(boxes: Iterable[Box], shape: Sequence[int], name: str) -> None:
    """Raise ValueError unless every element of a tensor is in exactly one box."""
    whole, count = Box.of_whole(shape), 0
    open_: list[Box] = []  # those that may overlap the next one, whose offsets are not smaller
    for box in sorted(box for box in boxes if box.numel):
        if len(box.offset) != len(whole.shape) or (box & whole) != box:
            raise ValueError(f"{name} of shape {list(shape)} has the part {_shown(box)}, which leaves it")
        open_ = [o for o in open_ if not o.shape or o.offset[0] + o.shape[0] > box.offset[0]]
        if other := next((o for o in open_ if o & box), None):
            raise ValueError(f"{name} has the parts {_shown(other)} and {_shown(box)}, which overlap")
        open_.append(box)
        count += box.numel
    if count != whole.numel:
        raise ValueError(f"{name} of shape {list(shape)} has parts for {count} of {whole.numel} elements")


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*box, strict=True)) + "]"
