"""Name the ranks that train together on the axes of a DeviceMesh; sum and gather among some of them."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import require_one_of

from . import _torch

ShardWhat = Literal["none", "optimizer", "params"]


class Axes(NamedTuple):
    """Name the axes of a mesh; None for an axis that it does not have.

    Args:
        pipe: along it the ranks of a pipeline.
        data: ranks that hold the same parameters, and run other batches. Of several axes, parameters are cut
            over the last; along the others each rank keeps the same parts.
        model: ranks that hold parts of the parameters of one stage, and run the same batch.
        experts: one of the data axes, whose ranks hold different experts, and pass tokens to each other
            within stages. A parameter of experts is a DTensor that is cut over this axis, such as
            ``ppfunc.stage.shard`` makes; its gradient is summed over the other data axes. Stages of these
            ranks run microbatches of the same shapes.
        context: one of the data axes, whose ranks have parts of the same sequences, and attend to each other
            within stages. Weigh losses by tokens where ranks have unequal numbers of them.
    """

    pipe: str = "pp"
    data: str | tuple[str, ...] | None = None
    model: str | None = None
    experts: str | None = None
    context: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        return self.data if isinstance(self.data, tuple) else () if self.data is None else (self.data,)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """List the axis of the ranks that hold parts of the parameters of one stage, if there is one."""
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
        axes, sizes: of the mesh, whose ranks are numbered row-major.
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
        rank: that in the world.

    Raises:
        ValueError: the mesh has no such axis, or an axis that has no name here, or one has two; experts or
            context lie over no data axis.
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


# -- sums and gathers, over communicators that a transport opens again after a failure


Wait = Callable[[], None]
"""Wait until an operation is done."""

Among = Literal["world"] | tuple[str, ...] | tuple[int, ...]
"""Name ranks.

``"world"``: all that train together. A tuple of axes of the mesh: those that differ along these alone. A
tuple of numbers: ranks of the pipeline, ascending.
"""


def named(among: Among) -> tuple[str, tuple[Any, ...]]:
    """Name a set of ranks, such that sets sort in one order on all ranks."""
    if not isinstance(among, tuple):
        return among, ()
    return (f"axes {','.join(map(str, among))}", ()) if isinstance(among[0], str) else ("line", among)


class Collective:
    """Sums and gathers among some ranks, all of which call the same operations in the same order.

    An operation begins at once, and returns a function that waits for it. Tensors are read and written until
    then.

    Args:
        size: how many ranks.
        index: of this rank among them.
        guard: calls what waits for an operation, and translates its errors into those of the transport.
        require_carried: raises for a device whose tensors the backend does not carry.
    """

    def __init__(
        self,
        size: int = 1,
        index: int = 0,
        guard: Callable[[Wait], None] = lambda wait: wait(),
        require_carried: Callable[[torch.device], None] | None = None,
    ) -> None:
        self.size, self.index = size, index
        self.group: Any = None  # until the transport has connected, and again after a failure
        self._guard, self._require_carried = guard, require_carried
        self._running: dict[int, tuple[Any, ...]] = {}  # works, and tensors that live until they are done
        self._begun = 0

    def let_go(self) -> list[_torch.UnderWay]:
        under_way: list[_torch.UnderWay] = [([work], tensors) for work, tensors in self._running.values()]
        self.group = None
        self._running.clear()
        return under_way

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        """Replace a contiguous tensor by the sum, or the largest, of those of all ranks."""
        return _nothing if self.size == 1 else self._begin(_torch.all_reduce, tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor, part: torch.Tensor) -> Wait:
        """Write this rank's part of the sum of tensors [size * n] into ``part``, [n]."""
        if self.size == 1:
            part.copy_(tensor)
            return _nothing
        return self._begin(_torch.reduce_scatter, part, tensor)

    def all_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """Gather the tensors [n] of all ranks one after the other: a new tensor [size * n]."""
        if self.size == 1:
            return part, _nothing
        whole = part.new_empty(part.numel() * self.size)
        return whole, self._begin(_torch.all_gather, whole, part)

    def all_to_all(self, sent: torch.Tensor, receives: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        """Send an equal part of a tensor to each rank; gather what all send to this one, in a new tensor.

        Args:
            sent: flat, [size * n].
            receives: how many elements each rank sends to this one.
        """
        received = sent.new_empty(sum(receives))
        sends = [sent.numel() // self.size] * self.size
        return received, self._begin(_torch.all_to_all, received, sent, list(receives), sends)

    def all_reduce_in_order(
        self, rows: Sequence[Sequence[torch.Tensor]], owners: Sequence[int]
    ) -> list[torch.Tensor]:
        """Add up rows of tensors from left to right, with the same bits wherever each row is.

        Each rank adds up an equal part of the elements, so that about as much travels as in a ring.

        Args:
            rows: those of this rank, in order; tensors of one dtype, of the same shapes in each row.
            owners: the index of the rank of every row, in the order of the sum.

        Returns:
            The sums, on every rank: views of one tensor where there are several ranks.
        """
        if self.size == 1:
            return [reduce(torch.add, column) for column in zip(*rows, strict=True)]
        like = rows[0]
        length = sum(t.numel() for t in like)
        if not length:
            return list(like)
        n = -(-length // self.size)  # elements that each rank adds up
        flat = like[0].new_zeros(len(rows), self.size * n)
        for row, tensors in zip(flat, rows, strict=True):
            torch.cat([t.reshape(-1) for t in tensors], out=row[:length])
        sent = rearrange(flat, "k (r n) -> (r k n)", r=self.size)
        # As bytes, which every backend carries.
        counts = [owners.count(rank) * n * flat.itemsize for rank in range(self.size)]
        received, wait = self.all_to_all(sent.view(torch.uint8), counts)
        wait()
        by_rank = [iter(part.view(flat.dtype).split(n)) for part in received.split(counts)]
        total, wait = self.all_gather(
            reduce(torch.add, [next(by_rank[rank]) for rank in owners]).view(torch.uint8)
        )
        wait()
        pieces = total.view(flat.dtype)[:length].split([t.numel() for t in like])
        return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]

    def _begin(self, operation: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Wait:
        if self._require_carried is not None:
            self._require_carried(tensor.device)
        self._begun += 1
        number = self._begun
        with _torch.in_use(self.group):
            self._running[number] = operation(self.group, tensor, *args), (tensor, *args)

        def wait() -> None:
            work, _ = self._running[number]
            self._guard(work.wait)
            del self._running[number]

        return wait


def _nothing() -> None:
    pass
