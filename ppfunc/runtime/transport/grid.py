"""Name the ranks of pipelines that train together, on the axes of a DeviceMesh."""

from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

ShardWhat = Literal["none", "optimizer", "params"]


class Axes(NamedTuple):
    """Name the axes of a mesh; None for an axis that it does not have.

    Args:
        pipe: along it the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches. Of several axes, parameters are cut
            over the last; along the others each rank keeps the same parts.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
    """

    pipe: str = "pp"
    data: str | tuple[str, ...] | None = None
    model: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """List the axes of the data ranks."""
        return self.data if isinstance(self.data, tuple) else () if self.data is None else (self.data,)


class Grid(NamedTuple):
    """Describe the pipelines around a rank. Ranks are numbered over all that train together.

    Args:
        pipelines: the ranks of each pipeline that runs the batch of this rank, in the order of the pipeline.
        data: the ranks that have this rank's place in the pipelines that run other batches, and this rank.
        pieces: into how many parts a parameter is cut, over so many data ranks in a row.
        size: the number of ranks that train together.
        rank: this one.
    """

    pipelines: tuple[tuple[int, ...], ...]
    data: tuple[int, ...]
    size: int
    rank: int
    pieces: int = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """List the data ranks over which parameters are cut, this one among them."""
        first = self.data.index(self.rank) // self.pieces * self.pieces
        return self.data[first : first + self.pieces]

    @property
    def copies(self) -> tuple[int, ...]:
        """List the data ranks that keep the same parts as this one."""
        return self.data[self.data.index(self.rank) % self.pieces :: self.pieces]

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
    data = {name: f"data{n}" for n, name in enumerate(axes.data_axes)}
    named = [*axes.data_axes, *(name for name in (axes.pipe, axes.model) if name is not None)]
    roles: dict[Any, str] = {axes.pipe: "pipe", axes.model: "model", **data}
    if sorted(map(str, named)) != sorted(names):
        raise ValueError(
            f"axes: got {axes}, the mesh has the axes {', '.join(names) or 'without names'}; name each of"
            " them once"
        )
    here = mesh.mesh.flatten().tolist().index(rank)
    numbers = torch.arange(mesh.mesh.numel(), device="cpu").view(mesh.mesh.shape)
    order = f"({' '.join(data.values())}) {'1' if axes.model is None else 'model'} pipe"
    by_batch = rearrange(numbers, f"{' '.join(roles[name] for name in names)} -> {order}")
    pipelines = next(ranks for ranks in by_batch if bool((ranks == here).any()))
    same = by_batch[:, pipelines == here].flatten().tolist()
    pieces = mesh.size(names.index(axes.data_axes[-1])) if data else 1
    return Grid(tuple(map(tuple, pipelines.tolist())), tuple(same), numbers.numel(), here, pieces)
