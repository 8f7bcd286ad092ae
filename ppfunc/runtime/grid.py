"""Name the ranks of pipelines that train together, on the axes of a DeviceMesh."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh


class Axes(NamedTuple):
    """The axes of a mesh, by name, None where it has no such axis.

    Args:
        pipe: along it the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
    """

    pipe: str = "pp"
    data: str | None = None
    model: str | None = None


class Grid(NamedTuple):
    """The pipelines around a rank. Ranks are numbered over all that train together.

    Args:
        lines: the pipelines that run the batch that this rank runs, each the ranks of one, in the order of the pipeline.
        data: the ranks that have this rank's place in the pipelines that run other batches, and this rank.
        size: how many ranks train together.
        rank: this one.
    """

    lines: tuple[tuple[int, ...], ...]
    data: tuple[int, ...]
    size: int
    rank: int

    @property
    def line(self) -> tuple[int, ...]:
        """The ranks of the pipeline of this rank."""
        return next(line for line in self.lines if self.rank in line)

    @property
    def model(self) -> tuple[int, ...]:
        """The ranks that have this rank's place in the pipelines that run the same batch, and this rank."""
        place = self.line.index(self.rank)
        return tuple(line[place] for line in self.lines)

    @property
    def replica(self) -> tuple[int, ...]:
        """The ranks that run the same batch, those of the first pipeline first."""
        return tuple(rank for line in self.lines for rank in line)


def grid_of(mesh: DeviceMesh, axes: Axes, rank: int) -> Grid:
    """The grid around a rank; its ranks are numbered as the mesh lists them.

    Args:
        rank: that in the world.

    Raises:
        ValueError: the mesh has no such axis, or an axis that has no name here, or one has two.
    """
    own, named = mesh.mesh_dim_names or (), {name: role for role, name in axes._asdict().items() if name is not None}
    if sorted(named) != sorted(own) or len(named) != sum(name is not None for name in axes):
        raise ValueError(f"axes: got {axes}, the mesh has the axes {', '.join(own) or 'without names'}; name each of them once")
    here = mesh.mesh.flatten().tolist().index(rank)
    numbers = torch.arange(mesh.mesh.numel(), device="cpu").view(mesh.mesh.shape)
    missing = ("1" if name is None else role for role, name in (("data", axes.data), ("model", axes.model), ("pipe", axes.pipe)))
    replicas = rearrange(numbers, f"{' '.join(named[name] for name in own)} -> {' '.join(missing)}")
    lines = next(replica for replica in replicas if bool((replica == here).any()))
    data = replicas[:, lines == here].flatten()
    return Grid(tuple(map(tuple, lines.tolist())), tuple(data.tolist()), numbers.numel(), here)
