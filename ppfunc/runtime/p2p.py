"""Ranks in separate processes: point-to-point messages over torch.distributed."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _torch
from .buffers import Buffers
from .collective import Among, Collective
from .control import Control
from .errors import GONE, Failure, LinkError, PipelineError, gone
from .grid import Axes, grid_of
from .links import SocketLinks, give_way
from .opening import open_gloo
from .rendezvous import Rendezvous
from .suspects import Answer
from .transport import Call, Link, LossPart, Mode, Transfer

# Dtypes that every backend can carry; anything else travels as its bytes.
_PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
_OWN = {__name__, *(own.__module__ for own in (Collective, Control, Rendezvous, SocketLinks, open_gloo))}  # whose frames hold connections
_DRAIN = 1.0  # seconds for what a step has given the GPU
_LOST = ("Connection closed", "Connection reset", "Broken pipe", "Connection refused", "aborted")  # in messages of backends


class _Channel:
    """A communicator of two ranks; ``group`` is None until it is connected, and again after a failure."""

    def __init__(self) -> None:
        self.group: Any = None


class P2P(Control):
    """The transport of a pipeline with one process per rank.

    Tensors of a pair of ranks have communicators of their own, made at the first step and after a failure: operations of
    one NCCL communicator run in the order in which they were issued, whoever the peer is, and no pair must wait for
    another. Under NCCL a pair has one, whose operations of a step go as one batch. Under gloo it has one for each way
    and kind of message: a connection is locked while something is written to it, and what arrives on it meanwhile keeps
    a thread spinning. Control messages take TCP connections along a binary tree, so no GPU has to be waited for, and a
    process that ends is noticed at once. Under gloo the store of the user's group is asked only until the ranks have met,
    so that it may end with its process. A rank that is late is named, not those that wait for it; those that wait in a
    collective of a stage raise when the limit of the group of that axis is over.

    Every rank makes its transports over a group in the same order, and so its step functions over a transport. A step
    returns on all ranks, once each is at its end, or fails on all of them. One step runs at a time.

    Over a mesh, several pipelines train together, and a step begins, ends and fails on all of them. The ranks along the
    axes ``pipe`` and ``model`` run the same batch, and agree on it. ``PipelineError.rank`` counts the ranks of the mesh.

    Args:
        group: an initialised process group; its ranks, in order, are the ranks of the pipeline. The default group where
            none is given.
        timeout: seconds to wait for a peer; that of the group where none is given.
        mesh: in the place of a group, a mesh whose ranks train together.
        axes: the names of its axes; ``Axes()``, which has one, where none is given.

    Raises:
        RuntimeError: torch.distributed has not been initialised, or this process is not in the group.
        TypeError: something else than a mesh, or its axes.
        ValueError: the group has another backend than gloo or NCCL for the device that computes, or the axes do not fit the mesh.
        PipelineError: the store of the group does not answer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        *,
        mesh: DeviceMesh | None = None,
        axes: Axes | None = None,
    ) -> None:
        wanted = (
            ("mesh", mesh, DeviceMesh, "a DeviceMesh, such as torch's init_device_mesh makes"),
            ("axes", axes, Axes, "ppfunc.Axes('pp', data='dp')"),
        )
        for name, value, kind, expected in wanted:
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}")
        if group is not None and mesh is not None:
            raise ValueError("P2P got a process group and a mesh; expected P2P(group), or P2P(mesh=mesh, axes=axes)")
        if axes is not None and mesh is None:
            raise ValueError(f"axes: got {axes}, and no mesh that has them; give the mesh, too")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()")
        group = group if group is not None else dist.group.WORLD
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # a number, or a group
        if group is None or group is outside:
            raise RuntimeError("P2P got a process group of which this process is not a member")
        axes = axes or Axes()
        grid = None if mesh is None else grid_of(mesh, axes, dist.get_rank())
        self._user_group = group if mesh is None else mesh.get_group(axes.pipe)
        try:
            self._rendezvous = Rendezvous(group, timeout, None if mesh is None else mesh.mesh.flatten().tolist())
            links = SocketLinks(self._rendezvous, partial(gone, reporter=self._rendezvous.rank))
        except LinkError as error:
            raise PipelineError(error.peer, None, None, error.reason, reported_by=dist.get_rank(group)) from error
        super().__init__(links, grid)
        self.links: SocketLinks
        links.status, links.on_failure = self._status, self._unblock
        weakref.finalize(self, links.close)
        self.backend = self._rendezvous.backend
        self._channels: dict[str, _Channel] = {}
        self._collectives: dict[Among, Collective] = {}
        self.mesh, self.axes = mesh, axes
        self._pending: dict[Any, Any] = {}  # that of the buffers of the running step

    # -- control ---------------------------------------------------------------------------

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        after: Callable[[], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        if self.backend != "nccl" or not parts:
            return super().end(losses, parts, mode, after)
        # A broadcast that a rank does not come to would hold up all that its GPU is given later: agree on the host first.
        return super().end({}, {}, mode, lambda: self._sum(losses, parts))

    def _sum(self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart]) -> torch.Tensor:
        """The sum of the losses of all ranks, on the device."""
        device, shared = torch.device("cuda", torch.cuda.current_device()), []
        for stage, part in sorted(parts.items()):
            here = part.rank == self.rank
            part_losses = losses[stage].contiguous() if here else torch.empty(part.leaf.shape, dtype=part.leaf.dtype, device=device)
            dist.broadcast(part_losses, self._rendezvous.ranks[self.line[part.rank]], group=self._user_group)
            shared.append(part_losses)
        return torch.cat(shared).sum(0)

    def fail(self, failure: Failure) -> BaseException:
        with self.hold_interrupts():
            failure = failure._replace(cause=self._explained(failure.cause))
            try:
                return super().fail(failure)
            finally:
                _let_go(failure.cause)

    def _explained(self, cause: BaseException) -> BaseException:
        """An error of a backend, as what it says of a peer; where a connection has ended, who is gone, or why, is about to be told."""
        here = self.grid.model.index(self.links.rank)
        lost = _lost(self.grid.model[(here + 1) % len(self.grid.model)], cause)
        if not isinstance(lost, LinkError) or lost.kind == "failed":
            return cause
        if lost.kind == "gone":
            self.links.await_failure(lost.peer)
            return cause
        if lost is not cause and len(self.grid.model) > 1:  # in a collective of a stage: which rank is late, its answers tell
            lost.__cause__ = cause
            return lost
        return cause

    def _status(self) -> Answer:
        peers = self.grid.model if len(self.grid.model) > 1 else ()
        return Answer(None, self._running.locked(), self.ended, peers, self._stage_collectives() if peers else 0)

    def _stage_collectives(self) -> int:
        """How many collectives of stages this rank has begun; 0 where their group has ended, after a failure or by its owner."""
        assert self.mesh is not None and self.axes.model is not None
        try:
            return _torch.begun_in(self.mesh.get_group(self.axes.model))
        except (RuntimeError, ValueError):  # the mesh, or torch.distributed, knows the group no more
            return 0

    def _unblock(self, committed: int) -> None:
        """End the communicators of a step that has failed, which under NCCL hold up the GPU until then.

        Called by the thread that watches. A step that was committed before is finished: its last collectives have begun on all
        ranks, or will.
        """
        if self.backend == "nccl" and self._executing and committed <= self.ended:
            owned = [channel.group for channel in self._channels.values()] + [c.group for c in self._collectives.values()]
            for group in owned:
                self._abort(group)

    def tear_down(self) -> None:
        if self._executing and self.mesh is not None and self.axes.model is not None and len(self.grid.model) > 1:
            self._unusable = (
                f"an earlier step has failed in the middle of a stage, whose collectives may hang: the process group of the axis "
                f"{self.axes.model!r} has been ended; make a new mesh and a new P2P() on every rank"
            )
            _torch.end_group(self.mesh, self.axes.model)
        self._disconnect()

    def close(self) -> None:
        with self.hold_interrupts():
            super().close()
            self._disconnect()

    # -- data ------------------------------------------------------------------------------

    def connect(self, links: Iterable[Link]) -> None:
        # In one order on all ranks, so that nobody waits in a circle; every other pair of a chain at the same time.
        for link in sorted(links, key=lambda link: (min(link.sender, link.receiver) % 2, link)):
            if self.rank in (link.sender, link.receiver) and link.sender != link.receiver:
                name = self._name(link)
                channel = self._channels.setdefault(name, _Channel())
                if channel.group is None:
                    channel.group = self._open(name, sorted((self.line[link.sender], self.line[link.receiver])))

        for among, collective in sorted(self._collectives.items()):  # every rank is on its way here: they have just compared facts
            if collective.group is None and collective.size > 1:
                members = self._members(among)
                collective.group = self._open(f"{among}/{'-'.join(map(str, members))}", members)

    def _open(self, name: str, members: Sequence[int]) -> Any:
        """A communicator of some ranks."""
        name = f"{self.generation}/{name}"
        if self.backend == "nccl":
            return self._rendezvous.open_nccl(name, members.index(self.links.rank), len(members))
        return open_gloo(self.links, name, members, self._rendezvous.timeout)

    def collective(self, among: Among) -> Collective:
        members = self._members(among)
        place = members.index(self.links.rank)
        made = Collective(len(members), place, partial(self._guarded, members[(place + 1) % len(members)]))
        return self._collectives.setdefault(among, made)

    def _guarded(self, peer: int, wait: Callable[[], None]) -> None:
        """Wait for a collective, in which this rank may wait for any other: for one that is late, ``suspect`` finds which."""
        self.links.waiting_on = peer
        try:
            wait()
        except RuntimeError as error:
            lost = _lost(peer, error)
            if isinstance(lost, LinkError) and lost.kind == "late":
                raise lost from error
            raise  # the connection has ended: who is gone, or why, is about to be told
        self.links.waiting_on = None

    def _members(self, among: Among) -> tuple[int, ...]:
        return {"data": self.grid.data, "model": self.grid.model, "world": tuple(range(self.grid.size))}[among]

    def _name(self, link: Link) -> str:
        """The name of the communicator that messages of a link take, the same at both ends."""
        sender, receiver = self.line[link.sender], self.line[link.receiver]
        if self.backend == "nccl":
            return f"pair/{min(sender, receiver)}-{max(sender, receiver)}"
        return f"{link.direction}/{sender}-{receiver}"

    def _channel(self, transfer: Transfer) -> _Channel:
        ends = (self.rank, transfer.peer) if transfer.outgoing else (transfer.peer, self.rank)
        return self._channels[self._name(Link(transfer.tag.direction, *ends))]

    def post(self, batch: Sequence[Transfer]) -> Call | None:
        if self.backend == "nccl":
            by_peer: dict[int, list[Transfer]] = {}
            for transfer in batch:
                by_peer.setdefault(transfer.peer, []).append(transfer)
            calls = [self._coalesced(part) for part in by_peer.values()]
        else:
            calls = [self._end(transfer) for transfer in batch]
        yielding = self.backend != "nccl" and any(transfer.outgoing for transfer in batch)

        def post_all(buffers: Buffers) -> None:
            self._pending = buffers.pending
            if yielding:  # its receive is to be posted before a send, which takes another round trip otherwise
                give_way()
            for call in calls:
                call(buffers)
            if yielding:  # to take in what it delivers
                give_way()

        return post_all if calls else None

    def _coalesced(self, batch: list[Transfer]) -> Call:
        """Posts what goes over the one communicator of a pair as one operation."""
        channel, calls = self._channel(batch[0]), [self._end(transfer) for transfer in batch]
        tags = [transfer.tag for transfer in batch]

        def post_coalesced(buffers: Buffers) -> None:
            _torch.start_coalescing(channel.group)
            for call in calls:
                call(buffers)
            work = _torch.end_coalescing(channel.group)
            for tag in tags:
                buffers.pending[tag] = [work], buffers.pending[tag][1]

        return post_coalesced

    def _end(self, transfer: Transfer) -> Call:
        return self._sender(transfer) if transfer.outgoing else self._receiver(transfer)

    def _sender(self, transfer: Transfer) -> Call:
        channel, tag, wire, rank = self._channel(transfer), transfer.tag, _wire(transfer), self.line[transfer.peer]
        peer = int(rank > self.links.rank)

        def send(buffers: Buffers) -> None:
            tensors = wire([t.contiguous() for t in buffers.values.pop(tag)])
            try:
                buffers.pending[tag] = [channel.group.send([t], peer, 0) for t in tensors], tensors
            except RuntimeError as error:
                raise _lost(rank, error) from error

        return send

    def _receiver(self, transfer: Transfer) -> Call:
        channel, tag, wire, rank = self._channel(transfer), transfer.tag, _wire(transfer), self.line[transfer.peer]
        peer, device = int(rank > self.links.rank), transfer.device
        made = [(leaf.shape, leaf.dtype) for leaf in transfer.leaves]

        def receive(buffers: Buffers) -> None:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made]
            try:
                buffers.pending[tag] = [channel.group.recv([t], peer, 0) for t in wire(tensors)], tensors
            except RuntimeError as error:
                raise _lost(rank, error) from error

        return receive

    def wait_recv(self, transfer: Transfer) -> Call | None:
        tag, wait = transfer.tag, self._waiter(transfer)

        def take(buffers: Buffers) -> None:
            buffers.values[tag] = tuple(wait(buffers))

        return take

    def wait_send(self, transfer: Transfer) -> Call | None:
        wait = self._waiter(transfer)

        def let_go(buffers: Buffers) -> None:
            wait(buffers)

        return let_go

    def _waiter(self, transfer: Transfer) -> Callable[[Buffers], list[torch.Tensor]]:
        """Waits for what was posted for a transfer, and returns its tensors."""
        tag, peer, links = transfer.tag, self.line[transfer.peer], self.links

        def wait(buffers: Buffers) -> list[torch.Tensor]:
            works: list[Any]
            tensors: list[torch.Tensor]
            works, tensors = buffers.pending.pop(tag)
            links.waiting_on = peer
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise _lost(peer, error) from error
            links.waiting_on = None
            return tensors

        return wait

    def _disconnect(self) -> None:
        """End every communicator: peers that wait on one raise at once. The next step makes new ones.

        What a step that has ended has given the GPU is let finish: others have ended it, too.
        """
        if self.backend == "nccl" and not self._executing:
            _torch.finish_soon(_DRAIN)
        self._pending.clear()
        for channel in self._channels.values():
            group, channel.group = channel.group, None
            self._abort(group)
        for collective in self._collectives.values():
            self._abort(collective.let_go())

    def _abort(self, group: Any) -> None:
        if self.backend == "nccl" and group is not None:
            group.abort()


def _let_go(error: BaseException | None) -> None:
    """Clear our frames from a traceback: a stored exception would keep the connection open."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") in _OWN:
                with suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__


def _lost(peer: int, error: BaseException) -> BaseException:
    """The error of a backend, as what it says of the peer where it does."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "Timed out waiting" in text:
        return LinkError(peer, "late", f"it has not answered in time ({text.splitlines()[0]})")
    if isinstance(error, dist.DistNetworkError) or any(words in text for words in _LOST):
        return LinkError(peer, "gone", GONE)
    return error


def _wire(transfer: Transfer) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """How the tensors of a transfer travel: as they are, or as their bytes where a backend may not know the dtype."""
    if all(leaf.dtype in _PLAIN and 0 not in leaf.shape for leaf in transfer.leaves):
        return lambda tensors: tensors
    return lambda tensors: [t if t.dtype in _PLAIN else _as_bytes(t) for t in tensors if t.numel()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)
