"""Carry messages between ranks in separate processes, point to point, over torch.distributed.

A route has a communicator of its own, and so have the ranks along an axis. Communicators open in threads, so
that a rank that fails, or a frozen store, holds up no other.
"""

import json
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ppfunc import _logs
from ppfunc._checks import naming_arguments, require_type
from ppfunc.stage.device import record_sleeping_event, unique_name
from ppfunc.stage.process import hold_interrupts

from ..control.connections import in_thread
from ..control.control import Control
from ..control.links import Rendezvous, SocketLinks, give_way
from ..control.tree import Answer
from ..ports import _torch
from ..ports.protocols import (
    Among,
    Axes,
    Call,
    Collective,
    Route,
    ShardWhat,
    Transfer,
    grid_of,
    joining,
    named,
    require_shardable,
)
from ..values.buffers import Buffers
from ..values.errors import CLOSED, Failure, LinkError
from .mapped import Receiver, Sender, open_mapped, plain

_log = _logs.room("transport")


class P2P(Control):
    """Carries messages of a pipeline with one process per rank.

    Tensors from a rank to another have communicators of their own, made at the first step and after a
    failure: operations of one NCCL communicator run in the order in which they were issued, whoever the peer
    is, a send and a receive of one batch side by side, and nobody must wait for another. Under gloo there is
    also one for each kind of message, and between processes of one host memory that both map is in its place.
    Control messages take TCP connections along a binary tree, so no GPU has to be waited for, and a process
    that ends is noticed at once. Under gloo the store of the user's group is asked only until the ranks have
    met, so that it may end with its process. A rank that is late is named, not those that wait for it.

    The group may be of gloo, of any engine of NCCL that torch has (``nccl``, ``nccl2``, ``nccl-lazy``,
    ``nccl-legacy``), for which the communicators are of ``ProcessGroupNCCL``, or of a registered backend that
    has ``send`` and ``recv``, whose own function makes them. One for another kind of device is taken for one
    like NCCL, one for the CPU for one like gloo, whose rank hears of a failed peer at its limit of time.

    Under NCCL a step returns when the GPUs of all ranks have done it, within ``timeout``: what has only been
    given to a GPU may fail, or be lost with a peer, after others have gone on.
    It runs on the device of the parameters, in any thread. All parameters of a rank are on one device.
    The first transport sets ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` to 0 where the environment does not have it:
    what fails then fails the step, and does not end the process.

    A rank in a collective of a stage, over ``model``, ``experts`` or ``context``, raises at once when a peer
    of that axis fails or ends; where one is stopped, when the limit of that group is over. In a collective
    between steps, or over another group, it raises when a process of the group ends, or at its limit, which
    ``init_process_group(timeout=...)`` gives: nothing can wake it earlier, and ``timeout`` here does not
    change that.

    Torch's flight recorder (``TORCH_FR_BUFFER_SIZE``) has the operations of NCCL under the names of these
    communicators, such as ``ppfunc/0-1`` for messages from rank 0 to rank 1. Under gloo it has sums and
    gathers, without a name; it has no messages of gloo, nor through mapped memory. The room ``transport`` of
    the log, ``PPFUNC_LOGS=transport``, has all communicators.

    Every rank makes its transports over a group in the same order, and so its step functions over a
    transport. One is returned when all ranks have made theirs. After a failure that all ranks survive, also
    of this constructor, the next transport that all make works. A step returns on all ranks, once each is at
    its end, or fails on all of them: where it has not begun, at the next call. One step runs at a time.

    Signals with Python handlers, such as Ctrl-C, act between the calls of a step, and fail it as an error
    does: the other ranks name this one, and the step can be tried again. From the vote of a rank, when it is
    done with its part, they wait until the step has ended on all ranks. Then the handler runs that was there
    when the signal came. What it raises takes the result of this rank, and every rank refuses the next step.

    Over a mesh, several pipelines train together, and a step begins, ends and fails on all of them.
    ``PipelineError.rank`` counts the ranks of the mesh. The ranks along the axes ``pipe`` and ``model`` run
    the same batch: loaders are sharded over data ranks only. In their first step, and after a failure, ranks
    compare the values of what they are given of it; other batches only by ``checksum_every`` of a trainer.
    None is given where stages of a rank do not read it.

    Args:
        group: an initialised process group; its ranks, in order, are the ranks of the pipeline. The default
            group where none is given.
        timeout: seconds to wait for a peer; that of the group where none is given.
        mesh: mesh whose ranks train together, in the place of a group.
        axes: the names of its axes; ``Axes()``, which has one, where none is given.
        mapped: whether messages take memory, not gloo, where two processes of a host can map it, on Linux.
            It holds each until it is received, not until the sender has waited, and keeps what held the most
            at a time until 1,000 to 2,000 messages of the same route have not needed it.
        shard: state that a :class:`ppfunc.Trainer` cuts over the data ranks. ``"optimizer"``: each data rank
            keeps a shard of the optimizer's state and updates its shard of the parameters, which are then
            gathered. ``"params"``: each data rank also keeps a shard of the parameters. Each stage is
            gathered before it computes and freed afterwards, at most two at a time. Numbers agree with
            ``"none"`` to rounding. Parameters that cannot be cut evenly are whole on every rank.

    Raises:
        RuntimeError: torch.distributed has not been initialised, or this process is not in the group.
        TypeError: ``mesh`` is no DeviceMesh, or ``axes`` no Axes.
        ValueError: the timeout is no number of seconds, the backend of the group for the device that computes
            carries no messages, the axes do not fit the mesh, or there is no data axis to shard over.
        PipelineError: a rank, or the store of the group, is gone or late, or has failed.
    """

    @naming_arguments
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        *,
        mesh: DeviceMesh | None = None,
        axes: Axes | None = None,
        shard: ShardWhat = "none",
        mapped: bool = True,
    ) -> None:
        try:
            with hold_interrupts():
                rendezvous = _pair_up(group, timeout, mesh)
                with nullcontext() if rendezvous is None else rendezvous.opening():
                    _require_group(group, timeout, mesh, axes, shard)
                    assert rendezvous is not None
                    self._open(rendezvous, mesh, axes or Axes(), mapped)
                    self.shard: ShardWhat = shard
        except BaseException:
            if hasattr(self, "_collectives"):
                self.close()
            raise

    def _open(self, rendezvous: Rendezvous, mesh: DeviceMesh | None, axes: Axes, mapped: bool) -> None:
        grid = None if mesh is None else grid_of(mesh, axes, dist.get_rank())
        if rendezvous.queued:
            _torch.prepare_nccl()
        self._rendezvous = rendezvous
        links = SocketLinks(rendezvous)
        weakref.finalize(self, links.close)
        super().__init__(links, grid)
        self.links: SocketLinks
        self.backend, self._queued = rendezvous.backend, rendezvous.queued
        self._pair_groups = pairs = PairGroups(rendezvous, links, self.pipeline, mapped)
        self.post, self.wait = pairs.post, pairs.wait
        self._groups: list[Any] = []  # the communicators that are open
        self._collectives: dict[Among, Collective] = {}
        self._aborts, self._synchronizing = _torch.Aborts(), False
        self.mesh, self.axes = mesh, axes
        # The threads of the links must not keep a transport that is dropped.
        status, unblock = weakref.WeakMethod(self._status), weakref.WeakMethod(self._unblock)
        links.status = lambda: (status() or Answer)()
        links.on_failure = lambda committed: (method := unblock()) and method(committed)

    # -- control ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return torch.device(self._rendezvous.carried)

    def fail(self, failure: Failure) -> BaseException:
        with self.hold_interrupts():
            try:
                return super().fail(failure._replace(cause=self._explained(failure.cause)))
            finally:
                _let_go(failure.cause)

    def _explained(self, cause: BaseException) -> BaseException:
        """Translate an error of a backend into an error that names the peer.

        If a connection has ended, wait a while for a failure to be published: it says who is gone, or why.
        """
        rank = self.links.rank
        read = lost(rank, cause)
        if not isinstance(read, LinkError) or read.kind == "failed":
            return cause
        if self.links.closed:  # while the step runs: peers have let go of what they shared with this rank
            return RuntimeError(CLOSED)
        if read.kind != "late":
            self.links.await_failure(read.peer)
        elif read is not cause and len(self.grid.together) > 1:  # the answers of the ranks tell who is late
            text = str(cause).splitlines()[0]
            late = LinkError(rank, "late", f"rank {rank} waited in a collective of its stage ({text})")
            late.__cause__ = cause
            return late
        return cause

    def _status(self) -> Answer:
        begun = {}
        for axis, group in self._stage_groups().items():
            with suppress(RuntimeError, ValueError):  # it has ended, after a failure or by its owner
                begun["-".join(map(str, self.grid.along((axis,))))] = _torch.begun_in(group)
        return Answer(None, self._running.locked(), self.ended, begun)

    def _unblock(self, committed: int) -> None:
        """End the communicators of a step that has failed, which under NCCL hold up the GPU until then.

        Called by the thread that watches. A step that was committed before is finished: its last collectives
        have begun on all ranks, or will.
        """
        if self._queued and (self._executing or self._synchronizing) and committed <= self.ended:
            self._begin_aborts()

    def synchronize(self) -> None:
        """Wait for the GPU: a step that has ended on the host may still fail there, or wait for peers."""
        device = self._pair_groups.device
        if not self._queued or device is None:
            return
        self._synchronizing, peer = True, (self.links.rank + 1) % self.links.size
        try:
            ended = in_thread(record_sleeping_event(device).synchronize, "waits for the GPU")
            self.links.settle(peer, ended, "what it has given its GPU, which has not ended,")
        finally:
            self._synchronizing = False

    def _begin_aborts(self) -> None:
        """Begin to abort the NCCL communicators of a step, and the user's own that its stages may use."""
        self._aborts.begin([*self._groups, *self._in_stages()])

    def _in_stages(self) -> list[Any]:
        """Return the user's communicators over the axes of stages, if a stage that runs may use them."""
        return list(self._stage_groups().values()) if self._executing else []

    def _stage_groups(self) -> dict[str, Any]:
        """Return the user's communicators of several ranks over the axes of stages, by axis."""
        groups: dict[str, Any] = {}
        for axis in self.axes.of_stages if self.mesh is not None else ():
            assert self.mesh is not None
            if self.mesh.size(self.grid.axes.index(axis)) > 1:
                with suppress(RuntimeError, ValueError):  # the mesh, or torch.distributed, knows it no more
                    groups[axis] = self.mesh.get_group(axis)
        return groups

    def tear_down(self) -> None:
        ended, groups = self.disconnect(), self._stage_groups() if self._executing else {}
        if groups:
            self._unusable = (
                "an earlier step has failed in the middle of a stage, whose collectives may hang: the"
                f" process group of the axis {' and '.join(map(repr, groups))} has been ended; make a new"
                " mesh and a new P2P() on every rank"
            )
            ended += [_torch.forget_group(self.mesh, axis) for axis in groups]
        groups.clear()  # the last references are dropped aside
        _torch.drop_aside(ended)

    def close(self) -> None:
        """End all connections: peers that still use this transport raise. Idempotent.

        A step that runs here in another thread fails, and frees its own connections.
        """
        with self.hold_interrupts():
            super().close()
            if self._running.acquire(blocking=False):
                try:
                    self.disconnect()
                finally:
                    self._running.release()
            elif self._queued:  # which would not hear of it from peers
                self._begin_aborts()

    # -- data ------------------------------------------------------------------------------

    def connect(self, routes: Iterable[Route], devices: Iterable[torch.device]) -> None:
        pairs, device = self._pair_groups, self.device
        for device in devices:
            pairs.require_carried(device, f"a stage of rank {self.rank} computes on the device {device}")
            pairs.device = device
        if self._queued:
            pairs.require_own_device(device, self._world.gather_texts)
        holders: list[tuple[Any, Opening]] = [*pairs.unconnected(routes)]
        # In one order on all ranks, which are on their way here: they have just compared facts.
        for among, collective in sorted(self._collectives.items(), key=lambda item: named(item[0])):
            if collective.group is None and collective.size > 1:
                members = self._members(among)
                name = f"{named(among)[0]}/{'-'.join(map(str, members))}"
                holders.append((collective, Opening(name, members)))
        opened = open_groups(
            self._rendezvous, self.links, [opening for _, opening in holders], device, self._groups
        )
        for (holder, opening), group in zip(holders, opened, strict=True):
            holder.group = group
            how = "memory that both map" if isinstance(group, Sender | Receiver) else type(group).__name__
            _log.info("opened %s among ranks %s: %s", opening.name, list(opening.members), how)

    def collective(self, among: Among) -> Collective:
        members = self._members(among)
        place = members.index(self.links.rank)
        guard = partial(self._guarded, members[(place + 1) % len(members)])
        return self._collectives.setdefault(
            among, Collective(len(members), place, guard, self._require_carried)
        )

    def _require_carried(self, device: torch.device) -> None:
        """Raise ValueError for a collective on a device whose tensors NCCL does not carry; gloo takes all."""
        if self._queued:
            place = f"rank {self.links.rank} sums or gathers tensors on the device {device}"
            self._pair_groups.require_carried(device, place)

    def _guarded(self, peer: int, wait: Callable[[], None]) -> None:
        """Wait for a collective. Any of its ranks may be late; ``suspect`` finds out which."""
        self.links.waiting_on = peer
        try:
            wait()
        except RuntimeError as error:
            read = lost(peer, error)
            if isinstance(read, LinkError) and read.kind == "late":
                raise read from error
            raise  # the connection has ended: who is gone, or why, is about to be told
        self.links.waiting_on = None

    def _members(self, among: Among) -> tuple[int, ...]:
        if isinstance(among, tuple) and any(isinstance(axis, str) for axis in among):
            return self.grid.along(among)  # type: ignore[arg-type]
        if isinstance(among, tuple):
            return tuple(self.pipeline[rank] for rank in among)  # type: ignore[index]
        return tuple(range(self.grid.size))

    def disconnect(self) -> list[Any]:
        """Drop every communicator, which ends with its last reference: peers that wait on one raise at once.

        The next step makes new ones. Of a step that has ended nothing is under way, see :meth:`synchronize`.
        """
        ended, device = self._groups[:], self._pair_groups.device
        self._groups.clear()
        if ended:
            _log.info("ended %d communicators", len(ended))
        under_way = [*self._pair_groups.let_go()]
        for collective in self._collectives.values():
            under_way += collective.let_go()
        if self._queued:
            if under_way and device is not None:
                _torch.drop_when_done(device, under_way)
            self._aborts.begin([*ended, *self._in_stages()])
            self._aborts.wait()
        return ended


def _pair_up(group: Any, timeout: float | None, mesh: DeviceMesh | None) -> Rendezvous | None:
    """Pair up this call with the calls of all ranks.

    Each call of a rank counts, also a call that is refused: else later calls would not meet.

    Returns:
        The rendezvous, or None if the ranks are not known.
    """
    if not dist.is_available() or not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    shared: Any = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    if lacking := _torch.lacking(shared):
        raise ValueError(
            f"P2P got a process group with the backend {_torch.backend_of(shared)!r}, which lacks {lacking};"
            " make one with torch.distributed.new_group(backend='gloo') and give it as P2P(group), or lower a"
            " trainer over 'fake' by OnPaper(mesh=mesh, axes=axes)"
        )
    return Rendezvous("ppfunc/transports", shared, timeout if _is_limit(timeout) else None, ranks)


def _is_limit(timeout: object) -> bool:
    """Tell whether this is a limit of time: None, or seconds that a lock can wait."""
    return timeout is None or (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and 0 < timeout <= threading.TIMEOUT_MAX
    )


def _require_group(
    group: dist.ProcessGroup | None,
    timeout: float | None,
    mesh: DeviceMesh | None,
    axes: Axes | None,
    shard: ShardWhat,
) -> None:
    """Raise where these arguments of :class:`P2P` are wrong, or do not go together."""
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None  # a number, or a group
    wanted = (
        (
            "group",
            None if group is outside else group,
            dist.ProcessGroup,
            "a group, or none after init_process_group(backend) of torch; P2P(mesh=mesh) takes a mesh",
        ),
        ("mesh", mesh, DeviceMesh, "a DeviceMesh, such as torch's init_device_mesh makes"),
        ("axes", axes, Axes, "ppfunc.Axes('pp', data='dp')"),
    )
    for name, value, kind, expected in wanted:
        require_type(name, value, kind | None, expected)
    if not _is_limit(timeout):
        raise ValueError(
            f"timeout: got {timeout!r}, expected seconds, more than 0 and at most {threading.TIMEOUT_MAX:g}"
        )
    if group is not None and mesh is not None:
        raise ValueError(
            "P2P got a process group and a mesh; expected P2P(group), or P2P(mesh=mesh, axes=axes)"
        )
    if axes is not None and mesh is None:
        raise ValueError(f"axes: got {axes}, and no mesh that has them; give mesh= as well")
    require_shardable(axes, shard)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()"
        )
    if group is outside or (mesh is not None and dist.get_rank() not in mesh.mesh):
        what = "process group" if mesh is None else "mesh"
        raise RuntimeError(
            f"P2P got a {what} of which this process is not a member; call it on its ranks only"
        )


def _let_go(error: BaseException | None) -> None:
    """Clear frames of transports and collectives from a traceback: a stored exception would keep the
    connection open.
    """
    seen: set[int] = set()  # an exception that was raised again may be a cause of its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__package__") in (__package__, _torch.__package__):
                with suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__


# -- communicators


# Dtypes that every backend can carry; anything else travels as its bytes.
_PLAIN = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
_CHANNEL = "open"
_LATER = 30.0  # seconds
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "aborted",
)  # in messages of backends


class Opening(NamedTuple):
    """Describe a communicator to open.

    Args:
        name: the same at all members, taken anew after each failure.
        members: ranks, in the same order at all of them.
        messages: whether it carries messages from the first of two members to the second, and nothing else;
            else, sums and gathers.
        mapped: whether these messages may go through memory that both map.
    """

    name: str
    members: Sequence[int]
    messages: bool = False
    mapped: bool = False


class _PairGroup:
    """Holds the communicator of a route, whose sender is its rank 0.

    ``group`` is None until it is connected, and again after a failure.
    """

    group: Any = None


class PairGroups:
    """Owns the communicators of this rank with others, and knows the messages under way on them.

    Args:
        rendezvous, links: rendezvous and links of the transport.
        line: the ranks of the pipeline.
        mapped: whether messages take memory, as of :class:`P2P`.
    """

    def __init__(self, rendezvous: Rendezvous, links: SocketLinks, line: Sequence[int], mapped: bool) -> None:
        self._links, self._line, self._mapped = links, line, mapped
        self._rank, self._backend = line.index(links.rank), rendezvous.backend
        self._carried, self._queued = rendezvous.carried, rendezvous.queued
        self._pairs: dict[str, _PairGroup] = {}
        # That of the buffers of the running step. Messages through mapped memory have numbers.
        self._pending: dict[Any, _torch.UnderWay | int] = {}
        self.device: torch.device | None = None  # of what is connected

    def let_go(self) -> list[_torch.UnderWay]:
        """Forget all communicators and mapped memory; return the operations under way on communicators."""
        under_way = [each for each in self._pending.values() if not isinstance(each, int)]
        self._pending.clear()
        self.device = None
        for pair in self._pairs.values():
            pair.group = None
        return under_way

    def unconnected(self, routes: Iterable[Route]) -> Iterator[tuple[_PairGroup, Opening]]:
        """List the communicators of these routes that are not open."""
        wanted: dict[str, Opening] = {}
        # In one order on all ranks, so that nobody waits in a circle; every other pair of a chain at the same
        # time.
        for route in sorted(routes, key=lambda route: (min(route.sender, route.receiver) % 2, route)):
            if self._rank in (route.sender, route.receiver) and route.sender != route.receiver:
                members = self._line[route.sender], self._line[route.receiver]
                name = self._name(route)
                wanted.setdefault(name, Opening(name, members, True, self._mapped))
        for name, opening in wanted.items():
            pair = self._pairs.setdefault(name, _PairGroup())
            if pair.group is None:
                yield pair, opening

    def require_carried(self, device: torch.device, place: str) -> None:
        """Raise ValueError for a device whose tensors are not carried.

        Args:
            place: user of the device, for the error.
        """
        if device.type != self._carried:
            other = next(
                (name for name, kind in _torch.CARRIES.items() if kind == device.type), "another backend"
            )
            raise ValueError(
                f"{place}, whose tensors the backend {self._backend!r} of its process group does not carry;"
                f" move its parameters to a device of type {self._carried!r}, or give P2P a group of"
                f" {other!r}, such as torch.distributed.new_group(backend={other!r})"
            )
        if self.device not in (None, device):
            raise ValueError(
                f"{place}, and the communicators of the rank are on {self.device}; move all parameters of"
                f" the rank to {self.device}, or make a new P2P() on every rank"
            )

    def require_own_device(self, device: torch.device, gather: Callable[[str], dict[int, str]]) -> None:
        """Raise ValueError on all ranks where two compute on one device, which NCCL does not take.

        As NCCL does, it takes ranks of different ``NCCL_HOSTID`` for those of different hosts.

        Args:
            gather: gathers texts of all ranks, which all call.
        """
        name = unique_name(device)
        names = gather(json.dumps(name and [os.environ.get("NCCL_HOSTID"), name]))
        first: dict[str, int] = {}
        for rank, name in sorted(names.items()):
            if name != "null" and first.setdefault(name, rank) != rank:
                raise ValueError(
                    f"ranks {first[name]} and {rank} compute on one device ({json.loads(name)[1]}), expected"
                    " one for each under NCCL; move the parameters of each rank to a device of its own, or"
                    " give P2P a group of 'gloo' and compute on the CPU"
                )

    def _name(self, route: Route) -> str:
        """Return the name of the communicator of a route, the same at both ends."""
        way = f"{self._line[route.sender]}-{self._line[route.receiver]}"
        # NCCL takes the messages of one way in order; those of both ways in one batch would wait for each
        # other, each send for a receive.
        return way if self._queued else f"{route.direction}/{way}"

    def _pair(self, transfer: Transfer) -> _PairGroup:
        ends = (self._rank, transfer.peer) if transfer.outgoing else (transfer.peer, self._rank)
        return self._pairs[self._name(Route(transfer.tag.direction, *ends))]

    def post(self, batch: Sequence[Transfer]) -> Call:
        for device in {transfer.device for transfer in batch}:
            self.require_carried(device, f"a stage of rank {self._rank} computes on the device {device}")
        yielding = False
        if self._queued:
            by_way: dict[tuple[int, bool], list[Transfer]] = {}
            for transfer in batch:
                by_way.setdefault((transfer.peer, transfer.outgoing), []).append(transfer)
            calls = [self._coalesced(part) for part in by_way.values()]
        else:
            # Receives first: a send may wait for a peer that sends at the same time.
            ends = sorted(batch, key=lambda each: each.outgoing)
            calls = [self._mapped_end(t) if self._is_mapped(t) else self._end(t) for t in ends]
            yielding = any(t.outgoing and not self._is_mapped(t) for t in batch)

        def post_all(buffers: Buffers) -> None:
            # Its receive is to be posted before a send, which takes another round trip otherwise.
            if yielding:
                give_way()
            for call in calls:
                call(buffers)
            if yielding:  # to take in what it delivers
                give_way()

        return calls[0] if len(calls) == 1 and not yielding else post_all

    def _is_mapped(self, transfer: Transfer) -> bool:
        """Tell whether a message goes through mapped memory, until its route is opened again."""
        return isinstance(self._pair(transfer).group, Sender | Receiver)

    def _mapped_end(self, transfer: Transfer) -> Call:
        """Make the call that sends or expects a message through mapped memory."""
        pair, tag = self._pair(transfer), transfer.tag

        def send(buffers: Buffers) -> None:
            pair.group.send(plain(buffers.values.pop(tag)))

        def expect(buffers: Buffers) -> None:
            buffers.pending[tag] = pair.group.expect()

        return send if transfer.outgoing else expect

    def _coalesced(self, batch: list[Transfer]) -> Call:
        """Post the messages of a communicator as one operation.

        The tensors are there before: a full GPU may hold up what makes them, longer than an abort waits.
        """
        pair, ends = self._pair(batch[0]), [self._prepared(transfer) for transfer in batch]

        def post_coalesced(buffers: Buffers) -> None:
            posts = [prepare(buffers) for prepare in ends]
            with _torch.coalesced(pair.group) as works:
                for post in posts:
                    post(works)

        return post_coalesced

    def _end(self, transfer: Transfer) -> Call:
        prepare = self._prepared(transfer)
        return lambda buffers: prepare(buffers)([])

    def _prepared(self, transfer: Transfer) -> Callable[[Buffers], Callable[[list[Any]], None]]:
        """Make the call that makes the tensors of an end of a message, and returns the call that posts them.

        The latter adds its works to a list.
        """
        pair, wire, rank = self._pair(transfer), _wire(transfer), self._line[transfer.peer]
        outgoing, tag, _, leaves, device = transfer
        forms = [(leaf.shape, leaf.dtype) for leaf in leaves]
        # In a queue the messages of a batch are one operation.
        join = None if self._queued else joining(transfer)

        def prepare(buffers: Buffers) -> Callable[[list[Any]], None]:
            if outgoing:
                tensors = plain(buffers.values.pop(tag))
            else:
                tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
            posted = wire(tensors if join is None else join(tensors))

            def post(works: list[Any]) -> None:
                self._pending, group = buffers.pending, pair.group
                buffers.pending[tag] = works, posted if outgoing else tensors
                begun = (group.send([t], 1, 0) if outgoing else group.recv([t], 0, 0) for t in posted)
                try:
                    works.extend(filter(None, begun))  # none yet for what is coalesced
                except RuntimeError as error:
                    raise lost(rank, error) from error

            return post

        return prepare

    def wait(self, transfer: Transfer) -> Call | None:
        """Make the call that waits for a posted transfer, if there is anything to wait for."""
        outgoing, tag, peer, links = transfer.outgoing, transfer.tag, self._line[transfer.peer], self._links
        pair, forms = self._pair(transfer), [(leaf.shape, leaf.dtype) for leaf in transfer.leaves]

        def take(buffers: Buffers) -> None:
            buffers.values[tag] = pair.group.take(buffers.pending.pop(tag), forms)

        if self._is_mapped(transfer):
            return None if outgoing else take

        def finish(buffers: Buffers) -> None:
            works, tensors = buffers.pending.pop(tag)
            links.waiting_on = peer
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise lost(peer, error) from error
            links.waiting_on = None
            if not outgoing:
                buffers.values[tag] = tuple(tensors)

        return finish


def lost(peer: int, error: BaseException) -> BaseException:
    """Translate a backend's error into a LinkError of the peer, or return it if it names no link."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "Timed out waiting" in text:
        return LinkError(peer, "late", f"it has not answered in time ({text.splitlines()[0]})")
    if isinstance(error, dist.DistNetworkError) or any(words in text for words in _LOST):
        return LinkError(peer, "gone")
    return error


def _wire(transfer: Transfer) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Make the map of a transfer's tensors to the tensors that travel: bytes for dtypes that backends may not
    know.
    """
    if all(leaf.dtype in _PLAIN and 0 not in leaf.shape for leaf in transfer.leaves):
        return lambda tensors: tensors
    return lambda tensors: [t if t.dtype in _PLAIN else _as_bytes(t) for t in tensors if t.numel()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


# -- opening communicators


class _Addresses(Store):
    """Serves as the store of a gloo communicator, which leaves its address here and waits for others."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: Future[tuple[str, bytes]] = Future()  # its key and its address
        self._known, self._complete = dict[str, bytes](), threading.Event()
        self._given_up = False

    def set(self, key: str, value: Any) -> None:
        self._known[key] = bytes(value)
        self.mine.set_result((key, bytes(value)))

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        self._complete.wait()
        if self._given_up:
            raise ConnectionError("a rank has failed")

    def get(self, key: str) -> bytes:
        return self._known[key]

    def has_extended_api(self) -> bool:
        return False

    def complete(self, theirs: dict[str, bytes] | None) -> None:
        """Add the addresses of all peers and wake the threads that wait; without addresses, by an error."""
        self._given_up = theirs is None
        self._known |= theirs or {}
        self._complete.set()


def open_groups(
    rendezvous: Rendezvous,
    links: SocketLinks,
    wanted: Sequence[Opening],
    device: torch.device,
    begun: list[Any],
) -> Iterator[Any]:
    """Open communicators under the backend of the user's group; yield each in its turn.

    Under gloo, messages between two processes of a host go through memory that both map.

    Args:
        rendezvous, links: rendezvous and links of the transport.
        wanted: communicators of this rank, in an order in which no ranks wait in a circle.
        device: device of the tensors of this rank.
        begun: a list to which each communicator is added; under NCCL before it connects, so that it can be
            aborted.

    Raises:
        LinkError: a rank has failed, is gone or late.
        RuntimeError: the backend has failed to connect.
    """
    links.check()
    wanted = [one._replace(name=f"{links.generation}/{one.name}") for one in wanted]
    if rendezvous.queued:
        yield from open_nccl(rendezvous, links, wanted, device, begun)
        return
    for one in wanted:
        group = open_mapped(links, one.name, one.members, one.mapped) if one.messages else None
        if group is None and rendezvous.backend != "gloo":
            peer = one.members[(one.members.index(links.rank) + 1) % len(one.members)]
            make = partial(_make, rendezvous, one, rendezvous.timeout)
            group = links.settle(peer, in_thread(make, "opens"))
        begun.append(group or open_gloo(links, one.name, one.members, rendezvous.timeout))
        yield begun[-1]


def _make(rendezvous: Rendezvous, one: Opening, seconds: float) -> Any:
    """Make a communicator of a backend other than gloo, whose members meet in the store of the group."""
    ranks, limit = [rendezvous.ranks[member] for member in one.members], timedelta(seconds=seconds)
    store, place = PrefixStore(one.name, rendezvous.store), one.members.index(rendezvous.rank)
    return _torch.communicator(rendezvous.backend, f"ppfunc/{one.name}", store, ranks, place, limit)


def open_nccl(
    rendezvous: Rendezvous,
    links: SocketLinks,
    wanted: Sequence[Opening],
    device: torch.device,
    begun: list[Any],
) -> Iterator[Any]:
    """Open communicators of NCCL, or of another backend that queues its operations on a device: their members
    begin all of them side by side, and then connect them in order.

    While one begins, no kernel may wait for a peer: it would hold up what allocates memory.
    """
    places = [one.members.index(links.rank) for one in wanted]
    limit = 2 * rendezvous.timeout + _LATER  # who is late is found first
    dials: list[tuple[int, Future[Any]]] = []
    for one, place in zip(wanted, places, strict=True):

        def begin(one: Opening = one) -> Any:
            group = _make(rendezvous, one, limit)
            begun.append(group)
            _torch.begin_nccl(group, device)
            return group

        dials.append((one.members[(place + 1) % len(one.members)], in_thread(begin, "opens")))
    groups = [links.settle(peer, dial) for peer, dial in dials]
    for one, place, group, (peer, _) in zip(wanted, places, groups, dials, strict=True):
        connect = partial(_torch.connect_nccl, group, place, len(one.members), device, one.messages)
        links.settle(peer, in_thread(connect, "connects"))
        yield group


def open_gloo(links: SocketLinks, name: str, members: Sequence[int], timeout: float) -> Any:
    """Open a gloo communicator of some ranks, in the order given, which all come to the same call.

    gloo cannot be interrupted while it connects, and asks an address for minutes whose process has ended: it
    connects in a thread, which is left alone where a rank fails.

    Args:
        links: carry the addresses.
        name: name of the communicator, the same at all members.
        timeout: seconds for connecting, and then for each operation.

    Raises:
        LinkError: a rank has failed, is gone or late.
        RuntimeError: gloo has failed to connect.
    """
    place, others = members.index(links.rank), [member for member in members if member != links.rank]
    peer = members[(place + 1) % len(members)]
    addresses, limit = _Addresses(), timedelta(seconds=timeout)

    def opened(group: Future[Any]) -> None:
        if not addresses.mine.done():  # it has failed before, as for lack of descriptors
            addresses.mine.set_exception(group.exception())

    group = in_thread(lambda: _torch.ProcessGroupGloo(addresses, place, len(members), limit), "opens")
    group.add_done_callback(opened)
    try:
        key, address = links.settle(peer, addresses.mine)
        for other in others:
            links.send(other, _CHANNEL, json.dumps([name, key, address.hex()]).encode())
        addresses.complete(dict(receive_address(links, name, other) for other in others))
        return links.settle(peer, group)
    finally:
        addresses.complete(None)


def receive_address(links: SocketLinks, name: str, peer: int) -> tuple[str, bytes]:
    """Return the address that a peer has sent for this communicator."""
    theirs, key, address = json.loads(links.recv(peer, _CHANNEL))
    assert theirs == name, (theirs, name)
    return key, bytes.fromhex(address)
