"""Carry messages between ranks in separate processes, point to point, over torch.distributed."""

import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc import _logs
from ppfunc._checks import naming_arguments, require_type
from ppfunc.stage.device import record_sleeping_event
from ppfunc.stage.process import hold_interrupts

from ..control.connections import in_thread
from ..control.control import Control
from ..control.links import Rendezvous, SocketLinks
from ..control.tree import Answer
from ..ports import _torch
from ..ports.protocols import (
    Among,
    Axes,
    Collective,
    Route,
    ShardWhat,
    grid_of,
    named,
    require_shardable,
)
from ..values.errors import CLOSED, Failure, LinkError
from .mapped import Receiver, Sender
from .pair_groups import Opening, PairGroups, lost, open_groups

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
