"""Name the ranks that train together on the axes of a DeviceMesh."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import naming_arguments, require_one_of

ShardWhat = Literal["none", "optimizer", "params"]


@naming_arguments
class Axes(NamedTuple):
    """Name the axes of a mesh.

    Args:
        pipe: axis of the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches. Of several axes, parameters are cut
            over the last; along the others each rank keeps the same parts.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
        experts: data axis, whose ranks hold different experts, and pass tokens to each other
            within stages. A parameter of experts is a DTensor that is cut over this axis, such as
            ``ppfunc.stage.shard`` makes; its gradient is summed over the other data axes. Stages of these
            ranks run microbatches of the same shapes.
        context: data axis, whose ranks have parts of the same sequences, and attend to each other
            within stages. Weigh losses by tokens where ranks have unequal numbers of them.
    """

    pipe: str = "pp"
    data: str | tuple[str, ...] | None = None
    model: str | None = None
    experts: str | None = None
    context: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """List the axes of the data ranks."""
        return self.data if isinstance(self.data, tuple) else () if self.data is None else (self.data,)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """List the axis of the ranks that hold parts of the parameters of a stage, if any."""
        return () if self.model is None else (self.model,)

    @property
    def of_stages(self) -> tuple[str, ...]:
        """List the axes over which stages communicate."""
        return tuple(dict.fromkeys(a for a in (self.model, self.experts, self.context) if a is not None))


class Grid(NamedTuple):
    """Describe the pipelines around a rank. Ranks are numbered over all that train together.

    Args:
        pipelines: the ranks of each pipeline that runs the batch of this rank, in the order of the pipeline.
        size: the number of ranks that train together.
        rank: this one.
        together: the ranks that run the same stages, and communicate within them.
        axes, sizes: axes of the mesh and their sizes; its ranks are numbered row-major.
    """

    pipelines: tuple[tuple[int, ...], ...]
    size: int
    rank: int
    together: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def pipeline(self) -> tuple[int, ...]:
        """List the ranks of the pipeline of this rank."""
        return next(ranks for ranks in self.pipelines if self.rank in ranks)

    @property
    def mixes_batches(self) -> bool:
        """Tell whether stages communicate with ranks that run other batches."""
        place = self.pipeline.index(self.rank)
        return not set(self.together) <= {ranks[place] for ranks in self.pipelines}

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """List the ranks that differ from this one along these axes alone, in the order of the axes.

        >>> Grid(((0,),), 8, 5, axes=("out", "in", "pp"), sizes=(2, 2, 2)).along(("in", "out"))
        (1, 5, 3, 7)
        """
        first, apart, numbers = self.rank, self.size, dict[str, range]()
        for axis, size in zip(self.axes, self.sizes, strict=True):
            apart //= size  # numbers of ranks that are neighbours along the axis
            numbers[axis] = range(0, size * apart, apart)
            if axis in axes:
                first -= self.rank // apart % size * apart
        return tuple(first + sum(further) for further in product(*map(numbers.__getitem__, axes)))


def grid_of(mesh: DeviceMesh, axes: Axes, rank: int) -> Grid:
    """Make the grid around a rank; its ranks are numbered as the mesh lists them.

    Args:
        rank: number of this rank in the world.

    Raises:
        ValueError: the mesh has no such axis, or an axis that has no name here, or one has two; experts or
            context lie over no data axis; ranks do not ascend along an axis other than that of the pipeline.
    """
    names = mesh.mesh_dim_names or ()
    data = axes.data_axes
    for role in ("experts", "context"):
        if (axis := getattr(axes, role)) is not None and axis not in data:
            raise ValueError(
                f"axes: got {role}={axis!r}, expected one of the data axes, {', '.join(data) or 'none'}: its"
                f" ranks run other {'batches' if role == 'experts' else 'tokens'}, and are data ranks"
            )
    if sorted(map(str, (*data, axes.pipe, *axes.model_axes))) != sorted(names):
        raise ValueError(
            f"axes: got {axes}, the mesh has the axes {', '.join(names) or 'without names'}; name each of"
            " them once"
        )
    for n, name in enumerate(names):
        if name != axes.pipe and (mesh.mesh.diff(dim=n) < 0).any():
            raise ValueError(
                f"mesh: got the ranks {mesh.mesh.tolist()}, which do not ascend along the axis {name!r};"
                " torch joins the parts of a DTensor in ascending order of ranks: expected a mesh with"
                " ascending ones; only along the pipeline ranks may stand in any order"
            )
    here = mesh.mesh.flatten().tolist().index(rank)
    grid = Grid((), mesh.mesh.numel(), here, axes=tuple(names), sizes=tuple(mesh.mesh.shape))
    pipelines = torch.tensor(grid.along((*axes.model_axes, axes.pipe)), device="cpu").view(
        -1, mesh.size(names.index(axes.pipe))
    )
    return grid._replace(
        pipelines=tuple(map(tuple, pipelines.tolist())),
        together=grid.along(axes.of_stages),
    )


def require_shardable(axes: Axes | None, shard: ShardWhat) -> None:
    """Raise ValueError for another word, or if it cuts state over data ranks, and no axis has such ranks."""
    require_one_of("shard", shard, get_args(ShardWhat))
    if shard != "none" and (axes is None or not axes.data_axes):
        raise ValueError(
            f"shard: got {shard!r}, and no axis of data ranks to cut over; expected P2P(mesh=mesh,"
            " axes=Axes('pp', data='dp'), shard=...)"
        )
    if shard == "params" and axes is not None and axes.experts in axes.data_axes[-1:]:
        raise ValueError(
            f"shard: got 'params' with experts={axes.experts!r}, the last data axis, over which parameters of"
            " experts are cut already; name another data axis last, data=('ep', 'dp'), or take"
            " shard='optimizer'"
        )
