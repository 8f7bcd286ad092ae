"""Name the ranks of pipelines that train together, on the axes of a DeviceMesh."""

from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

ShardWhat = Literal["none", "optimizer", "params"]


class Axes(NamedTuple):
    """Name the axes of a mesh; None for an axis that it does not have.

    Args:
        pipe: along it the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
    """

    pipe: str = "pp"
    data: str | None = None
    model: str | None = None


class Grid(NamedTuple):
    """Describe the pipelines around a rank. Ranks are numbered over all that train together.

    Args:
        pipelines: the ranks of each pipeline that runs the batch of this rank, in the order of the pipeline.
        data: the ranks that have this rank's place in the pipelines that run other batches, and this rank.
        size: the number of ranks that train together.
        rank: this one.
    """

    pipelines: tuple[tuple[int, ...], ...]
    data: tuple[int, ...]
    size: int
    rank: int

    @property
    def pipeline(self) -> tuple[int, ...]:
        """List the ranks of the pipeline of this rank."""
        return next(ranks for ranks in self.pipelines if self.rank in ranks)

    @property
    def model(self) -> tuple[int, ...]:
        """List the ranks with the place of this rank in the pipelines that run the same batch."""
        place = self.pipeline.index(self.rank)
        return tuple(ranks[place] for ranks in self.pipelines)

    @property
    def same_batch(self) -> tuple[int, ...]:
        """List the ranks that run the same batch, those of the first pipeline first."""
        return tuple(rank for ranks in self.pipelines for rank in ranks)


def grid_of(mesh: DeviceMesh, axes: Axes, rank: int) -> Grid:
    """Make the grid around a rank; its ranks are numbered as the mesh lists them.

    Args:
        rank: that in the world.

    Raises:
        ValueError: the mesh has no such axis, or an axis that has no name here, or one has two.
    """
    names = mesh.mesh_dim_names or ()
    roles = {name: role for role, name in axes._asdict().items() if name is not None}
    if sorted(roles) != sorted(names) or len(roles) != sum(name is not None for name in axes):
        raise ValueError(
            f"axes: got {axes}, the mesh has the axes {', '.join(names) or 'without names'}; name each of"
            " them once"
        )
    here = mesh.mesh.flatten().tolist().index(rank)
    numbers = torch.arange(mesh.mesh.numel(), device="cpu").view(mesh.mesh.shape)
    order = (
        "1" if name is None else role
        for role, name in (("data", axes.data), ("model", axes.model), ("pipe", axes.pipe))
    )
    by_batch = rearrange(numbers, f"{' '.join(roles[name] for name in names)} -> {' '.join(order)}")
    pipelines = next(ranks for ranks in by_batch if bool((ranks == here).any()))
    data = by_batch[:, pipelines == here].flatten()
    return Grid(tuple(map(tuple, pipelines.tolist())), tuple(data.tolist()), numbers.numel(), here)
