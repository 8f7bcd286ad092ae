"""Boxes: the part of a tensor that a rank holds, or that a file has, as offset and shape in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ppfunc.stage.layout import local


class Box(NamedTuple):
    """A part of a tensor.

    Args:
        offset: of its first element, per dimension.
        shape: of the part.
    """

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
        """Find the place of this box in a tensor that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """Intersect two boxes; None where there is none.

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
    if not isinstance(tensor, DTensor):
        return Box.of_whole(tensor.shape)
    mesh, offset, shape = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    place = mesh.get_coordinate()
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            dim = placement.dim % tensor.ndim
            size = -(-shape[dim] // mesh.size(axis))  # as torch.chunk cuts
            start = min(shape[dim], size * place[axis]) if place else shape[dim]
            offset[dim], shape[dim] = offset[dim] + start, min(size, shape[dim] - start)
        elif type(placement) is not Replicate:
            raise ValueError(f"{name} has the placement {placement}, whose parts are no boxes; redistribute it to Shard or Replicate first")
    box = Box(tuple(offset), tuple(shape)) if place else Box(tuple(offset), (0,) * tensor.ndim)
    if place and box.shape != tuple(local(tensor).shape):
        raise ValueError(
            f"{name}: this rank holds the shape {list(local(tensor).shape)}, its placements {tensor.placements} give {list(box.shape)}"
        )
    return box


def require_tiled(boxes: Sequence[Box], shape: Sequence[int], name: str) -> None:
    """Raise ValueError unless every element of a tensor is in one box, and in one only."""
    whole, ahead = Box.of_whole(shape), [box for box in sorted(boxes) if box.numel]
    for box in ahead:
        if len(box.offset) != len(whole.shape) or (box & whole) != box:
            raise ValueError(f"{name} of shape {list(shape)} has the part {_told(box)}, which leaves it")
    open_: list[Box] = []
    for box in ahead:
        open_ = [o for o in open_ if not o.shape or o.offset[0] + o.shape[0] > box.offset[0]]
        if (other := next((o for o in open_ if o & box), None)) is not None:
            raise ValueError(f"{name} has the parts {_told(other)} and {_told(box)}, which overlap")
        open_.append(box)
    if sum(box.numel for box in ahead) != whole.numel:
        raise ValueError(f"{name} of shape {list(shape)} has parts for {sum(box.numel for box in ahead)} of {whole.numel} elements")


def _told(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*box, strict=True)) + "]"
