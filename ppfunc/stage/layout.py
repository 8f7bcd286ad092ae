"""Describe how tensors lie over the ranks of a mesh; take DTensors apart, and make them of parts.

Outside of a step leaves are tensors or DTensors; a stage is given the tensors of its rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import naming_arguments

from ._torch import awaited, dtensor, dtensor_class, is_dtensor, part_of, strided_shard
from .tree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """How one tensor lies over the ranks of a mesh: hashable, comparable, storable as JSON.

    Args:
        axes, sizes: names and sizes of the axes of the mesh.
        placements: placements by axis, as torch writes them: ``"R"`` for whole on every rank, ``"S(0)"`` for
            cut along axis 0.
        shape: the shape of the whole tensor.
        mesh: the mesh of this process; no part of the value.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> MeshLayout:
        """Return the layout of a tensor of this whole shape."""
        axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return cls(tuple(axes), tuple(mesh.shape), tuple(map(str, placements)), tuple(shape), mesh)

    @property
    def sharded(self) -> bool:
        """Tell whether each rank holds only a part, of the tensor or of a sum."""
        return any(placement != "R" for placement in self.placements)

    def cut(self, pieces: int) -> MeshLayout:
        """Return the layout of each of ``pieces`` equal pieces. Every rank cuts its part along axis 0."""
        return replace(self, shape=(self.shape[0] // pieces, *self.shape[1:]))

    def stacked(self, rows: int) -> MeshLayout:
        """Return the layout of ``rows`` such tensors, stacked along a new axis 0."""
        return self._moved(1, (rows, *self.shape))

    def without(self, axes: int) -> MeshLayout:
        """Return the layout after the first axes are summed away. Every rank holds them whole."""
        return self._moved(-axes, self.shape[axes:])

    def _moved(self, by: int, shape: tuple[int, ...]) -> MeshLayout:
        moved = tuple(
            re.sub(r"\d+", lambda axis: str(int(axis[0]) + by), p, count=1) for p in self.placements
        )
        return replace(self, placements=moved, shape=shape)

    def to_json(self) -> list[Any]:
        """Write the layout as lists, texts and numbers, for JSON."""
        return [list(part) for part in (self.axes, self.sizes, self.placements, self.shape)]

    @classmethod
    def from_json(cls, data: Any) -> MeshLayout:
        """Read the lists of :meth:`to_json`; raise ``ValueError`` for anything else."""
        axes, sizes, placements, shape = (tuple(part) for part in data)
        typed = all(type(t) is str for t in axes + placements) and all(type(n) is int for n in sizes + shape)
        if not (typed and len(axes) == len(sizes) == len(placements)):
            raise ValueError(f"got the layout {data}, expected [names, sizes, placements, shape]")
        return cls(axes, sizes, placements, shape)

    def __str__(self) -> str:
        spread = ", ".join(
            f"{p} over {a}={n}" for a, n, p in zip(self.axes, self.sizes, self.placements, strict=True)
        )
        return f"of [{','.join(map(str, self.shape))}] {spread}"


def layout_of(tensor: torch.Tensor) -> MeshLayout | None:
    """Return the layout of a DTensor; a plain tensor has no layout."""
    return MeshLayout.of(tensor.device_mesh, tensor.placements, tensor.shape) if is_dtensor(tensor) else None


def same_placement(one: MeshLayout | None, other: MeshLayout | None) -> bool:
    """Tell whether two layouts cut a tensor in the same way. Plain tensors, without a layout, are whole."""
    ways = [
        (layout and layout.sharded and (layout.axes, layout.sizes, layout.placements)) or None
        for layout in (one, other)
    ]
    return ways[0] == ways[1]


def same_layout(tensor: torch.Tensor, layout: MeshLayout | None) -> bool:
    """Compare the layout and mesh of a tensor, whose class and shape have been compared."""
    if layout is None:
        return True
    assert is_dtensor(tensor)
    return tensor.device_mesh == layout.mesh and tensor.placements == placements_of(layout.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, with its history if gradients are on."""
    if not is_dtensor(tensor):
        return tensor
    return awaited(tensor.to_local() if tensor.requires_grad and torch.is_grad_enabled() else part_of(tensor))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather all of a tensor on every rank, with its history."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def distributed(tensor: torch.Tensor, layout: MeshLayout | None) -> torch.Tensor:
    """Make the DTensor of which ``tensor`` is this rank's part; the tensor itself without a layout."""
    if layout is None:
        return tensor
    if layout.mesh is None:
        raise ValueError(
            f"got a layout {layout} that was read from a text, and so knows no mesh to make a DTensor on"
        )
    strides = _strides(tensor.stride(), layout.shape)
    return dtensor(tensor, layout.mesh, placements_of(layout.placements), torch.Size(layout.shape), strides)


def as_dtensor(tensor: torch.Tensor, layout: MeshLayout) -> DTensor:
    """Make a DTensor as :func:`distributed` does, with the history of ``tensor``: for use inside a stage."""
    shape, strides = torch.Size(layout.shape), _strides(tensor.stride(), layout.shape)
    return dtensor_class().from_local(
        tensor, layout.mesh, placements_of(layout.placements), run_check=False, shape=shape, stride=strides
    )


def cut_by(mesh: DeviceMesh, placements: Sequence[Placement], part: Sequence[int]) -> MeshLayout:
    """Return the layout of a tensor of which every rank holds a part of this shape."""
    from torch.distributed.tensor import Shard

    whole, positive = list(part), []
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            if not -len(part) <= placement.dim < len(part):
                raise ValueError(
                    f"got the placement {placement} for a tensor of shape {list(part)}, which has no such"
                    " axis"
                )
            placement = Shard(placement.dim % len(part))
            whole[placement.dim] *= size
        positive.append(placement)
    return MeshLayout.of(mesh, positive, whole)


LAY_OTHERWISE = (
    "its parameters are cut over ranks: take a number of ranks that divides what this line reshapes, such as"
    " heads, or change the plan; for pp.tune, leave these ranks out of grids="
)
"""What to do where a stage or a model cannot run on its part of the parameters."""


class Boundary(NamedTuple):
    """Describe how the tensors that a stage takes and returns lie over the ranks of an axis.

    Args:
        mesh: an axis of a mesh.
        inputs, outputs: a placement, or a tree of them for the trees that begin like it; None for plain
            tensors.
        params: the layouts of the parameters that the stage was made for, by name.
    """

    mesh: DeviceMesh | None = None
    inputs: Any = None
    outputs: Any = None
    params: Mapping[str, MeshLayout] = {}

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Boundary:
        """Return the layouts that a stage declares."""
        return getattr(fn, "boundary", cls())

    def map(self, change: Callable[[Any], Any]) -> Boundary:
        """Return this boundary with ``change`` applied to the declared inputs and outputs."""
        inputs, outputs = (None if part is None else change(part) for part in (self.inputs, self.outputs))
        return self._replace(inputs=inputs, outputs=outputs)


@naming_arguments
def with_layouts(
    fn: Callable[..., Any], mesh: DeviceMesh, *, inputs: Any = None, outputs: Any = None
) -> Callable[..., Any]:
    """Declare that the activations of a stage are cut over the ranks of an axis.

    The stage takes and returns the parts of its rank. Two stages between which a part travels must declare
    the same placement, or a step raises before it runs. The outputs of a last stage come back as DTensors.

    Args:
        fn: ``fn(params, x, *extras) -> y``.
        mesh: an axis of a mesh, such as ``mesh["tp"]``.
        inputs, outputs: placements of ``x`` and ``y``: ``Shard(axis)`` for all of their leaves, or a tree of
            placements; None, or ``Replicate()``, for leaves that are whole on every rank.

    Raises:
        TypeError, ValueError: other values than placements that cut, or not one axis of a mesh.
    """
    from torch.distributed.tensor import Replicate, Shard

    require_axis(mesh, "with_layouts")
    for name, prefix in (("inputs", inputs), ("outputs", outputs)):
        for placement in tree_leaves(prefix):
            if not isinstance(placement, Replicate | Shard):
                raise TypeError(
                    f"{name}: got {placement!r}, expected Replicate() or Shard(axis), or a tree of these"
                )

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        return fn(params, x, *extras)

    return declaring(stage, Boundary.of(fn)._replace(mesh=mesh, inputs=inputs, outputs=outputs))


def declaring(stage: Callable[..., Any], boundary: Boundary) -> Callable[..., Any]:
    """Attach a boundary to a stage, and return the stage."""
    if boundary.mesh is not None:
        stage.boundary = boundary  # type: ignore[attr-defined]
    return stage


def require_axis(mesh: Any, name: str) -> None:
    """Raise unless ``mesh`` is one axis of a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{name}: got {type(mesh).__name__} as the mesh, expected one axis of a DeviceMesh, such as"
            " mesh['tp']"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{name}: got a mesh with the axes {mesh.mesh_dim_names}, expected one of them, such as"
            " mesh['tp']"
        )


@cache
def placements_of(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    """Read placements as torch writes them.

    >>> placements_of(("R", "S(1)"))
    (Replicate(), Shard(dim=1))
    """
    return tuple(map(_placement, texts))


def _placement(text: str) -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    if text == "R":
        return Replicate()
    match = re.fullmatch(r"(_?)S\((\d+)(?:, (\d+))?\)", text)
    if match is None:
        raise ValueError(f"got the placement {text!r}, expected one that replicates or shards")
    return strided_shard(int(match[2]), int(match[3])) if match[1] else Shard(int(match[2]))


@lru_cache(4096)
def _strides(part: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the whole tensor; its axes lie in memory in the order of the axes of a part."""
    order = sorted(range(len(part)), key=lambda axis: (-part[axis], axis))
    after = [order[order.index(axis) + 1 :] for axis in range(len(part))]
    return tuple(math.prod(max(shape[axis], 1) for axis in inner) for inner in after)


def gather_texts(mesh: DeviceMesh, group: dist.ProcessGroup, text: str) -> list[str]:
    """Gather the texts of all ranks of a group, in its order, without pickle.

    Args:
        mesh: whose device carries them.
        group: all of its ranks call this.
        text: not empty.
    """
    data = torch.frombuffer(bytearray(text.encode(errors="surrogatepass")), dtype=torch.uint8)
    data = data.to(mesh.device_type)
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, sizes[0].new_tensor([data.numel()]), group=group)
    longest = int(torch.stack(sizes).max())
    padded = [data.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([data, data.new_zeros(longest - data.numel())]), group=group)
    return [
        bytes(row[: int(size)].tolist()).decode(errors="surrogatepass")
        for row, size in zip(padded, sizes, strict=True)
    ]
