"""Describe how tensors lie over the ranks of a mesh, and take DTensors apart into the tensors of this rank, and put them together.

Outside of a step leaves are tensors or DTensors; a stage is given the tensors of its rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ._torch import StridedShard, awaited, dtensor, part_of
from .tree import tree_leaves


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """How one tensor lies over the ranks of a mesh: hashable, comparable, storable as JSON.

    Args:
        axes, sizes: of the mesh.
        placements: by axis, as torch writes them: ``"R"`` for whole on every rank, ``"S(0)"`` for cut along axis 0.
        shape: of the whole tensor.
        mesh: of this process; no part of the value.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> MeshLayout:
        """That of a tensor of this whole shape."""
        axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return cls(tuple(axes), tuple(mesh.shape), tuple(map(str, placements)), tuple(shape), mesh)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds less than all of it."""
        return any(placement != "R" for placement in self.placements)

    def cut(self, pieces: int) -> MeshLayout:
        """The layout of one of as many pieces, into which every rank cuts its part along axis 0."""
        return replace(self, shape=(self.shape[0] // pieces, *self.shape[1:]))

    def stacked(self, rows: int) -> MeshLayout:
        """The layout of as many such tensors, beside each other in a new axis 0."""
        return self._moved(1, (rows, *self.shape))

    def without(self, axes: int) -> MeshLayout:
        """The layout of a sum over that many axes in front, which are whole on every rank."""
        return self._moved(-axes, self.shape[axes:])

    def _moved(self, by: int, shape: tuple[int, ...]) -> MeshLayout:
        moved = tuple(re.sub(r"\d+", lambda axis: str(int(axis[0]) + by), p, count=1) for p in self.placements)
        return replace(self, placements=moved, shape=shape)

    def to_json(self) -> list[Any]:
        """Lists, texts and numbers."""
        return [list(part) for part in (self.axes, self.sizes, self.placements, self.shape)]

    @classmethod
    def from_json(cls, data: Any) -> MeshLayout:
        """Read what :meth:`to_json` gave; a ``ValueError`` for anything else."""
        axes, sizes, placements, shape = (tuple(part) for part in data)
        typed = all(type(t) is str for t in axes + placements) and all(type(n) is int for n in sizes + shape)
        if not (typed and len(axes) == len(sizes) == len(placements)):
            raise ValueError(f"got the layout {data}, expected [names, sizes, placements, shape]")
        return cls(axes, sizes, placements, shape)

    def __str__(self) -> str:
        spread = ", ".join(f"{p} over {a}={n}" for a, n, p in zip(self.axes, self.sizes, self.placements, strict=True))
        return f"of [{','.join(map(str, self.shape))}] {spread}"


def layout_of(tensor: torch.Tensor) -> MeshLayout | None:
    """The layout of a DTensor; None for a tensor of this rank alone."""
    return MeshLayout.of(tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else None


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether the ranks of a DTensor hold parts of a sum that is still to be made."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def same_placement(one: MeshLayout | None, other: MeshLayout | None) -> bool:
    """Whether both cut a tensor in the same way; None, the layout of a plain tensor, cuts nothing."""
    ways = [(layout and layout.sharded and (layout.axes, layout.sizes, layout.placements)) or None for layout in (one, other)]
    return ways[0] == ways[1]


def same_layout(tensor: torch.Tensor, layout: MeshLayout | None) -> bool:
    """Whether a tensor of the class that the layout belongs to has it, on the same mesh; its shape has been compared."""
    if layout is None:
        return True
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh == layout.mesh and tensor.placements == placements_of(layout.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, with its history where gradients are on."""
    if not isinstance(tensor, DTensor):
        return tensor
    return awaited(tensor.to_local() if tensor.requires_grad and torch.is_grad_enabled() else part_of(tensor))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank, with its history."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distributed(tensor: torch.Tensor, layout: MeshLayout | None) -> torch.Tensor:
    """The tensor of which ``tensor`` is the part of this rank; itself where there is no layout."""
    if layout is None:
        return tensor
    if layout.mesh is None:
        raise ValueError(f"got a layout {layout} that was read from a text, and so knows no mesh to make a DTensor on")
    strides = _strides(tensor.stride(), layout.shape)
    return dtensor(tensor, layout.mesh, placements_of(layout.placements), torch.Size(layout.shape), strides)


def as_dtensor(tensor: torch.Tensor, layout: MeshLayout) -> DTensor:
    """As :func:`distributed`, with the history of ``tensor``: for use inside a stage."""
    shape, strides = torch.Size(layout.shape), _strides(tensor.stride(), layout.shape)
    return DTensor.from_local(tensor, layout.mesh, placements_of(layout.placements), run_check=False, shape=shape, stride=strides)


def cut_by(mesh: DeviceMesh, placements: Sequence[Placement], part: Sequence[int]) -> MeshLayout:
    """The layout of a tensor of which every rank holds a part of this shape."""
    whole, found = list(part), []
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            if not -len(part) <= placement.dim < len(part):
                raise ValueError(f"got the placement {placement} for a tensor of shape {list(part)}, which has no such axis")
            placement = Shard(placement.dim % len(part))
            whole[placement.dim] *= size
        found.append(placement)
    return MeshLayout.of(mesh, found, whole)


class Boundary(NamedTuple):
    """How the tensors that a stage is given, and those that it returns, lie over the ranks of an axis.

    Args:
        mesh: one axis of a mesh.
        inputs, outputs: a placement, or a tree of them for the trees that begin like it; None for plain tensors.
        params: the layouts of the parameters that the stage was made for, by name.
    """

    mesh: DeviceMesh | None = None
    inputs: Any = None
    outputs: Any = None
    params: Mapping[str, MeshLayout] = {}

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Boundary:
        """That which a stage declares."""
        return getattr(fn, "boundary", cls())

    def map(self, change: Callable[[Any], Any]) -> Boundary:
        """The same with other inputs and outputs, where there are any."""
        inputs, outputs = (None if part is None else change(part) for part in (self.inputs, self.outputs))
        return self._replace(inputs=inputs, outputs=outputs)


def with_layouts(fn: Callable[..., Any], mesh: DeviceMesh, *, inputs: Any = None, outputs: Any = None) -> Callable[..., Any]:
    """The stage, which declares that its activations are cut over the ranks of an axis.

    The stage is given the parts of its rank, and returns such. Two stages between which such a part travels must declare the same
    placement; else a step is refused before it runs. The outputs of a last stage come back as DTensors.

    Args:
        fn: ``fn(params, x, *extras) -> y``.
        mesh: one axis of a mesh, such as ``mesh["tp"]``.
        inputs, outputs: how ``x`` and ``y`` are cut: ``Shard(axis)`` for all of their leaves, or a tree of placements; None, or
            ``Replicate()``, for those that are whole on every rank.

    Raises:
        TypeError, ValueError: something else than placements that cut, or not one axis of a mesh.
    """
    require_axis(mesh, "with_layouts")
    for name, prefix in (("inputs", inputs), ("outputs", outputs)):
        for placement in tree_leaves(prefix):
            if not isinstance(placement, Replicate | Shard):
                raise TypeError(f"{name}: got {placement!r}, expected Replicate() or Shard(axis), or a tree of these")

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        return fn(params, x, *extras)

    return declaring(stage, Boundary.of(fn)._replace(mesh=mesh, inputs=inputs, outputs=outputs))


def declaring(stage: Callable[..., Any], boundary: Boundary) -> Callable[..., Any]:
    """The stage itself, with this boundary."""
    if boundary.mesh is not None:
        stage.boundary = boundary  # type: ignore[attr-defined]
    return stage


def require_axis(mesh: Any, name: str) -> None:
    """Raise unless ``mesh`` is one axis of a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name}: got {type(mesh).__name__} as the mesh, expected one axis of a DeviceMesh, such as mesh['tp']")
    if mesh.ndim != 1:
        raise ValueError(f"{name}: got a mesh with the axes {mesh.mesh_dim_names}, expected one of them, such as mesh['tp']")


@cache
def placements_of(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    """The placements that torch writes so.

    >>> placements_of(("R", "S(1)"))
    (Replicate(), Shard(dim=1))
    """
    return tuple(map(_placement, texts))


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    found = re.fullmatch(r"(_?)S\((\d+)(?:, (\d+))?\)", text)
    if found is None:
        raise ValueError(f"got the placement {text!r}, expected one that replicates or shards")
    return StridedShard(int(found[2]), split_factor=int(found[3])) if found[1] else Shard(int(found[2]))


@lru_cache(4096)
def _strides(part: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of the whole, with its axes in the order in which those of a part lie in memory."""
    order = sorted(range(len(part)), key=lambda axis: (-part[axis], axis))
    after = [order[order.index(axis) + 1 :] for axis in range(len(part))]
    return tuple(math.prod(max(shape[axis], 1) for axis in inner) for inner in after)
