"""Define the ports of a step: sums among ranks, and a transport for its messages and its control.

The methods of a transport here are right where no rank lives in another process: :class:`InProcess` inherits
them, for tests, notebooks, one GPU, and torch.func transforms from outside. Any other transport has to define
all of them, see :func:`without_method`.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import accumulate, chain, product
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import naming_arguments, require_one_of
from ppfunc.stage import LeafSignature
from ppfunc.stage.device import available

from ..values.arguments import LaidOut
from ..values.buffers import Buffers, Compared, Tag, moved
from ..values.errors import AgreementError, Failure, PipelineError
from . import _torch

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
        size: number of ranks.
        index: number of this rank among them.
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
        """Forget the communicator; return the operations under way on it."""
        under_way: list[_torch.UnderWay] = [([work], tensors) for work, tensors in self._running.values()]
        self.group = None
        self._running.clear()
        return under_way

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        """Replace a contiguous tensor by the sum, or the largest, of the tensors of all ranks."""
        return _nothing if self.size == 1 else self._begin(_torch.all_reduce, tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor, part: torch.Tensor) -> Wait:
        """Write this rank's part of the sum of tensors [size * n] into ``part``, [n]."""
        if self.size == 1:
            part.copy_(tensor)
            return _nothing
        return self._begin(_torch.reduce_scatter, part, tensor)

    def all_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """Concatenate the tensors [n] of all ranks, in their order: a new tensor [size * n]."""
        if self.size == 1:
            return part, _nothing
        whole = part.new_empty(part.numel() * self.size)
        return whole, self._begin(_torch.all_gather, whole, part)

    def all_to_all(
        self, sent: torch.Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> tuple[torch.Tensor, Wait]:
        """Send a part of a flat tensor to each rank; gather the parts for this rank in a new tensor.

        Args:
            receives, sends: number of elements that each rank sends to this one, and gets from it.
        """
        received = sent.new_empty(sum(receives))
        return received, self._begin(_torch.all_to_all, received, sent, list(receives), list(sends))

    def all_reduce_in_order(
        self, rows: Sequence[Sequence[torch.Tensor]], owners: Sequence[int]
    ) -> list[torch.Tensor]:
        """Add up rows of tensors from left to right, with the same bits wherever each row is.

        Each rank adds up an equal part of the elements, so that about as much travels as in a ring.

        Args:
            rows: rows of this rank, in order; tensors of one dtype, of the same shapes in each row.
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
        sends = [len(rows) * n * flat.itemsize] * self.size
        received, wait = self.all_to_all(sent.view(torch.uint8), counts, sends)
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


class CollectiveOnPaper(Collective):
    """Stands for a collective: holds its tensors until it is waited for, and moves nothing."""

    @classmethod
    def of(cls, other: Collective) -> Collective:
        """Return a stand-in for a collective, with its size and index."""
        return cls(other.size, other.index)

    def _begin(self, operation: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Wait:
        return [tensor, *args].clear


Call = Callable[[Buffers], None]
"""One entry of a compiled program: reads and writes the buffers of the running step, and nothing else."""


class Route(NamedTuple):
    """Name the messages of one direction from one rank to another.

    Args:
        direction: see :class:`Tag`.
        sender, receiver: two ranks.
    """

    direction: str
    sender: int
    receiver: int


class Transfer(NamedTuple):
    """Describe one end of one message.

    Args:
        outgoing: whether this is the sending end.
        tag: the name of the message; the tensors are popped from, or put into, ``buffers.values[tag]``.
        peer: the rank at the other end.
        leaves: shape and dtype of each tensor, agreed at both ends before data moves.
        device: device of received tensors.
    """

    outgoing: bool
    tag: Tag
    peer: int
    leaves: tuple[LeafSignature, ...]
    device: torch.device


_SMALL = 2**14  # bytes of tensors that travel in one buffer
_ALIGNED = 64  # bytes between the beginnings of tensors


def aligned(size: int) -> int:
    """Return the bytes that a tensor takes in a buffer with others."""
    return -(-size // _ALIGNED) * _ALIGNED


def joining(transfer: Transfer) -> Callable[[list[torch.Tensor]], list[torch.Tensor]] | None:
    """Make a function that moves small tensors of a list into a buffer, which lives as long as any of them.

    Returns:
        The function, which returns the tensors that travel, the buffer first; None for one or two tensors.
    """
    small = {n: leaf for n, leaf in enumerate(transfer.leaves) if 0 < leaf.nbytes <= _SMALL}
    if len(small) < 3:
        return None
    starts = [0, *accumulate(aligned(leaf.nbytes) for leaf in small.values())]

    def join(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        buffer = torch.empty(starts[-1], dtype=torch.uint8, device=transfer.device)
        alone = [t for n, t in enumerate(tensors) if n not in small]
        for at, (n, leaf) in zip(starts, small.items(), strict=False):
            part = buffer[at : at + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            tensors[n] = part.copy_(tensors[n]) if transfer.outgoing else part
        return [buffer, *alone]

    return join


class LossPart(NamedTuple):
    """Describe the losses of one stage of the schedule: the rank that computes them, and their form.

    Args:
        rank: the rank that computes them.
        leaf: signature of all of them beside each other, ``[microbatches of the stage, *shape of a loss]``:
            weighted; ``[2, ...]`` with those before they were weighted, if the loss of each is wanted.
        each: their microbatches, if the loss of each is wanted.
    """

    rank: int
    leaf: LeafSignature
    each: tuple[int, ...] = ()


def sum_up(losses: Sequence[torch.Tensor], parts: Mapping[int, LossPart]) -> torch.Tensor:
    """Sum the losses of all stages.

    Args:
        losses: losses of each stage of ``parts``, ascending.

    Returns:
        What :meth:`Transport.end` returns.
    """
    weighted, rows = apart(losses, [part for _, part in sorted(parts.items())])
    total = torch.cat(weighted).sum(0)
    return torch.stack([total, *(rows[m] for m in sorted(rows))]) if rows else total


def apart(
    losses: Iterable[torch.Tensor], parts: Iterable[LossPart]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Take losses apart: weighted ones by stage, and unweighted ones by microbatch, summed over stages.

    The latter are empty unless the loss of each microbatch is wanted.
    """
    weighted, rows = [], dict[int, torch.Tensor]()
    for loss, part in zip(losses, parts, strict=True):
        weighted.append(loss[0] if part.each else loss)
        for m, row in zip(part.each, loss[1] if part.each else (), strict=True):
            rows[m] = rows[m] + row if m in rows else row
    return weighted, rows


def form_of_sum(parts: Mapping[int, LossPart]) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the dtype of the result of :func:`sum_up`."""
    part = next(iter(parts.values()))
    microbatches = {m for each in parts.values() for m in each.each}
    shape = (1 + len(microbatches), *part.leaf.shape[2:]) if part.each else part.leaf.shape[1:]
    return shape, reduce(torch.promote_types, (part.leaf.dtype for part in parts.values()))


def to_text(losses: torch.Tensor) -> str:
    """Write the bytes of losses as hexadecimal digits."""
    losses = losses.detach().cpu().contiguous()
    return ctypes.string_at(losses.data_ptr(), losses.nbytes).hex()


def of_text(text: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Read the text of :func:`to_text`."""
    if not text:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).view(shape)


def sum_texts(texts: Iterable[Mapping[str, str]], parts: Mapping[int, LossPart]) -> str:
    """Sum the losses of all stages in their order, so that all ranks get the same bits.

    Args:
        texts: the losses of every rank, as :func:`to_text` writes them, by stage.
        parts: the form of the losses.

    Returns:
        The sum, as :func:`to_text` writes it.
    """
    of_stage = dict(chain.from_iterable(text.items() for text in texts))
    leaves = [(of_stage[str(stage)], part.leaf) for stage, part in sorted(parts.items())]
    return to_text(sum_up([of_text(text, leaf.shape, leaf.dtype) for text, leaf in leaves], parts))


Mode = Literal["training", "evaluation", "mixed"]
"""The mode of all modules that run in the stages of a process; mixed also where there are none."""


class Transport(Protocol):
    """Carries tensors between ranks, and keeps the ranks together. A context manager that closes itself.

    ``post`` and ``wait`` are called while a program is compiled. They return the call that does it in every
    step, or None where nothing has to be done. All other methods act at once.

    Attributes:
        ended: counts the steps whose results the caller gets. Where they are lost instead, as by a handler
            that raises, the next step is refused on all ranks.
        has_peers: other processes may run ranks, with which this one has to agree.
        has_other_pipelines: other pipelines may hold the stages of this one.
        mixes_batches: stages communicate with ranks of other batches: none of these may be left out.
        compares_layouts: :meth:`ready` knows the ranks that compute parts of the same stages.
        mesh: ranks that train together, as a mesh; None for one pipeline.
        axes: the names of its axes.
        shard: state that a trainer cuts over the data ranks.
        device: device of tensors that belong to no stage.
        generation: the number of failures so far; what was agreed before a failure has to be agreed again.
    """

    ended: int
    has_peers: bool
    has_other_pipelines: bool
    mixes_batches: bool
    compares_layouts: bool
    mesh: DeviceMesh | None
    axes: Axes
    shard: ShardWhat

    @property
    def device(self) -> torch.device: ...

    @property
    def generation(self) -> int: ...

    def connect(self, routes: Iterable[Route], devices: Iterable[torch.device]) -> None:
        """Open the communicators of these routes and of the collectives. Collective, idempotent.

        Args:
            routes: directions of the messages of all ranks.
            devices: devices of the stages of this rank.

        Raises:
            ValueError: the tensors of a device cannot be carried.
        """
        return

    def collective(self, among: Among) -> Collective:
        """Return the operations among these ranks, or of this one alone. Called before ``connect``."""
        return Collective()

    def post(self, batch: Sequence[Transfer]) -> Call | None:
        """Post sends and receives as one batch, in the order given."""
        return None

    def wait(self, transfer: Transfer) -> Call | None:
        """Wait until a receive is in ``buffers.values``, or a send no longer needs its tensors; free them."""

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        """Return the ranks of a pipeline of ``ranks`` that live in this process.

        Raises:
            ValueError: the number does not fit.
        """
        return tuple(range(ranks))

    def register_step(self) -> int:
        """Return the number of a new step function; ranks make theirs in the same order."""
        return 0

    def making_step(self) -> AbstractContextManager[object]:
        """Enter a context in which a step function is made.

        Where it raises, the peers are told, and no step can be run with this transport any more; after an
        interrupt, it may be made again.
        """
        return nullcontext()

    def all_gather(self, text: str) -> list[str]:
        """Gather the text of every process of the pipeline, by rank. Collective."""
        return [text]

    def gather(self, text: str, axes: Sequence[str] | None = None) -> dict[int, str]:
        """Gather the texts of the ranks along these axes of the mesh, by default of all that train together;
        by number among these. Collective.
        """
        return {0: text}

    def require_same(self, facts: str, axes: Sequence[str] | None = None) -> None:
        """Raise AgreementError on every rank if the facts of two ranks differ. Collective.

        Args:
            facts: terms separated by ``"; "``.
            axes: the ranks along these axes of the mesh compare them; by default all that train together.
        """
        return

    def send_text(self, peer: int, text: str) -> None:
        """Send a text of any length, without waiting until the peer receives it."""
        raise AssertionError("ranks of one process need no texts")

    def recv_text(self, peer: int) -> str:
        """Receive the next text of a peer."""
        raise AssertionError("ranks of one process need no texts")

    def begin(self, call: str, key: str | None, source: int, common: str = "") -> str:
        """Begin a step: every rank compares ``call``, and gets the ``key`` of rank ``source``.

        Args:
            call: terms that all ranks of this batch have to agree on, separated by ``"; "``.
            key: names the shapes of the batch; None on ranks that were not given the batch.
            source: a rank whose key is not None.
            common: terms that all ranks that train together have to agree on.

        Raises:
            AgreementError: a rank makes another call, or has another key; on every rank.
        """
        assert key is not None  # one process holds the first stage, and so the batch
        return key

    def ready(self, layouts: LaidOut) -> None:
        """Announce that this rank is about to execute a step, and wait for the ranks that compute parts of
        the same stage: no collective of theirs begins if one of them has failed before.

        Raises:
            AgreementError: one of them was given arguments that lie otherwise over a mesh.
        """
        return

    def rest(self) -> None:
        """Announce that no rank enters a collective of a stage before the next step: no failure ends one."""
        return

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        compared: Sequence[Compared] = (),
        changed: Mapping[str, str] | None = None,
    ) -> torch.Tensor | None:
        """End a step: returns once every rank is at its end, so that a step fails on all ranks or on none.

        Equivalent to, with the ``losses`` of all ranks together:
        ``torch.cat([losses[s] for s in sorted(parts)]).sum(0)``. :func:`sum_up` has it.

        Args:
            losses: the weighted losses of the stages of this process, as ``parts`` says.
            parts: the form of the losses of all ranks, the same everywhere; empty where there is no loss.
            mode: mode of the modules of this process.
            compared: comparisons that the devices of this process have made.
            changed: changes of values that its stages read beside arguments, by name of the stage.

        Raises:
            AgreementError: a comparison shows a difference; or the modules of one rank are in training mode,
                those of another in evaluation mode; or ranks have changed unlike values that a stage reads.

        Returns:
            The sum, on every rank, None where ``parts`` is empty. If the loss of each microbatch is wanted,
            the sum and below it those losses, ``[1 + m, *shape of a loss]``.
        """

    def hold_interrupts(self) -> AbstractContextManager[object]:
        """Delay interrupts around a step, as :class:`~ppfunc.stage.process.hold_interrupts` does.

        With no rank in another process, nothing is delayed: interrupts act at once, since a step that they
        end leaves no peer behind.
        """
        return nullcontext()

    def fail(self, failure: Failure) -> BaseException:
        """Tell the peers, abort the communicators that they may wait on, and return the error to raise."""

    def close(self) -> None:
        """Close all connections."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class InProcess(Transport):
    """Carries messages of a pipeline whose ranks all live in this process and this thread.

    The calls of all ranks run in one order in which everything that a call consumes has been produced before,
    so none ever waits: a message is an entry of ``buffers.values``, moved to the consumer's device where that
    differs. It owns nothing, so steps may share it, also between threads.
    """

    generation, ended, has_peers, has_other_pipelines = 0, 0, False, False
    compares_layouts, mixes_batches = False, False
    mesh: DeviceMesh | None = None
    axes, device = Axes(), torch.device("cpu")
    shard: ShardWhat = "none"

    def __repr__(self) -> str:
        return "InProcess()"

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        compared: Sequence[Compared] = (),
        changed: Mapping[str, str] | None = None,
    ) -> torch.Tensor | None:
        for values, require in compared:
            require(values)
        last = losses[max(parts)].device if parts else None
        return sum_up([losses[stage].to(last) for stage in sorted(parts)], parts) if parts else None

    def fail(self, failure: Failure) -> BaseException:
        if failure.instruction is None or isinstance(failure.cause, AgreementError):
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

    def wait(self, transfer: Transfer) -> Call | None:
        tag, device = transfer.tag, transfer.device
        if transfer.outgoing or not available():
            return None

        def move(buffers: Buffers) -> None:
            buffers.values[tag] = moved(buffers.values[tag], device)

        return move


def without_method(transport: object) -> list[str]:
    """List the methods and attributes of a :class:`Transport` that an object lacks, or has as defaults."""
    names = (name for name in (*Transport.__annotations__, *vars(Transport)) if not name.startswith("_"))
    own = type(transport)
    return [
        name
        for name in names
        if not hasattr(transport, name) or getattr(own, name, None) is getattr(Transport, name, transport)
    ]
