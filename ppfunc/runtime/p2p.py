"""Ranks in separate processes: point-to-point messages over torch.distributed."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.stage.interrupts import hold_interrupts, let_interrupts

from . import _torch
from .collective import Among, Collective
from .control import Control
from .errors import CLOSED, Failure, LinkError, PipelineError, gone
from .grid import Axes, grid_of
from .opening import open_group
from .pair_groups import CARRIES, PairGroups, lost
from .rendezvous import Rendezvous
from .socket_links import SocketLinks
from .suspects import Answer
from .transport import Call, LossPart, Mode, Route, Transfer

_DRAIN = 1.0  # seconds for what a step that has failed has given the GPU


def _whole_or_closed(make: Callable[..., None]) -> Callable[..., None]:
    """Hold back interrupts in a constructor of a transport, which every rank counts; close it where one came: peers hear of it."""

    @wraps(make)
    def made(self: P2P, *args: Any, **kwargs: Any) -> None:
        try:
            with hold_interrupts():
                make(self, *args, **kwargs)
        except BaseException:
            if hasattr(self, "_collectives"):
                self.close()
            raise

    return made


class P2P(Control):
    """The transport of a pipeline with one process per rank.

    Tensors from a rank to another have communicators of their own, made at the first step and after a failure: operations of
    one NCCL communicator run in the order in which they were issued, whoever the peer is, a send and a receive of one batch
    side by side, and nobody must wait for another. Under gloo there is one for each kind of message, too: a connection is
    locked while something is written to it, and what arrives on it meanwhile keeps a thread spinning. Control messages take
    TCP connections along a binary tree, so no GPU has to be waited for, and a process that ends is noticed at once. Under
    gloo the store of the user's group is asked only until the ranks have met, so that it may end with its process. A rank
    that is late is named, not those that wait for it.

    Under NCCL a step returns when the GPUs of all ranks have done it, within ``timeout``: what has only been given to a GPU may
    fail, or be lost with a peer, after others have gone on.

    A rank in a collective of a stage, over the axis ``model``, raises at once when a peer of that axis fails or ends; where one is
    stopped, when the limit of that group is over. In a collective between steps, or over a group that is no axis of ``mesh``, it
    raises when a process of the group ends, or at its limit, which ``init_process_group(timeout=...)`` gives: nothing can wake it
    earlier, and ``timeout`` here does not change that.

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

    @_whole_or_closed
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        *,
        mesh: DeviceMesh | None = None,
        axes: Axes | None = None,
    ) -> None:
        group = _group_of(group, mesh, axes)
        axes = axes or Axes()
        grid = None if mesh is None else grid_of(mesh, axes, dist.get_rank())
        try:
            self._rendezvous = Rendezvous(group, timeout, None if mesh is None else mesh.mesh.flatten().tolist())
            links = SocketLinks(self._rendezvous, partial(gone, reporter=self._rendezvous.rank))
        except LinkError as error:
            raise PipelineError(error.peer, None, None, error.reason, reported_by=dist.get_rank(group)) from error
        super().__init__(links, grid)
        self.links: SocketLinks
        self.backend = self._rendezvous.backend
        self._pair_groups = PairGroups(self._rendezvous, links, self.line)
        self._collectives: dict[Among, Collective] = {}
        self._aborts, self._synchronizing = _torch.Aborts(), False
        self.mesh, self.axes = mesh, axes
        links.status, links.on_failure = self._status, self._unblock
        weakref.finalize(self, links.close)

    # -- control ---------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return torch.device(CARRIES[self.backend])

    def fail(self, failure: Failure) -> BaseException:
        with self.hold_interrupts():
            try:
                return super().fail(failure._replace(cause=self._explained(failure.cause)))
            finally:
                _let_go(failure.cause)

    def _explained(self, cause: BaseException) -> BaseException:
        """An error of a backend, as what it says of a peer; where a connection has ended, who is gone, or why, is about to be told."""
        peers, here = self.grid.model, self.grid.model.index(self.links.rank)
        read = lost(peers[(here + 1) % len(peers)], cause)
        if not isinstance(read, LinkError) or read.kind == "failed":
            return cause
        if self.links.closed:  # while the step runs: peers have let go of what they shared with this rank
            return RuntimeError(CLOSED)
        if read.kind == "gone":
            self.links.await_failure(read.peer)
        elif read is not cause and len(peers) > 1:  # in a collective of a stage: which rank is late, its answers tell
            read.__cause__ = cause
            return read
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
        if self.backend == "nccl" and (self._executing or self._synchronizing) and committed <= self.ended:
            self._begin_aborts()

    def synchronize(self) -> None:
        """Wait for the GPU, on which a step may fail that has ended on the host, and which has what the peers have sent."""
        if self.backend != "nccl" or self.links.size == 1:
            return
        peer = (self.links.rank + 1) % self.links.size
        self._synchronizing, self.links.waiting_on = True, peer
        try:
            if not _torch.synchronize_stream(self._rendezvous.timeout, self._raise_if_failed):
                raise LinkError(
                    peer, "late", f"rank {self.links.rank} waited for what it has given its GPU, which has not ended in "
                    f"{self._rendezvous.timeout:g} s"
                )  # fmt: skip
        finally:
            self._synchronizing = False
        self.links.waiting_on = None

    def _raise_if_failed(self) -> None:
        """Raise if a rank has failed meanwhile, or an interrupt has come."""
        with let_interrupts():
            self.links.check()

    def _begin_aborts(self) -> None:
        """Begin to end the NCCL communicators in which a step may be, that of the user in its stages, too."""
        self._aborts.begin([*self._pair_groups.groups, *self._in_stages(), *_connected(self._collectives.values())])

    def _in_stages(self) -> list[Any]:
        """The user's communicator over the axis ``model``, where a step runs in whose stages there may be collectives."""
        if self._executing and self.mesh is not None and self.axes.model is not None and len(self.grid.model) > 1:
            with suppress(RuntimeError, ValueError):  # the mesh, or torch.distributed, knows the group no more
                return [self.mesh.get_group(self.axes.model)]
        return []

    def tear_down(self) -> None:
        ended = self._disconnect()
        if self._in_stages():
            assert self.axes.model is not None
            self._unusable = (
                f"an earlier step has failed in the middle of a stage, whose collectives may hang: the process group of the axis "
                f"{self.axes.model!r} has been ended; make a new mesh and a new P2P() on every rank"
            )
            ended.append(_torch.forget_group(self.mesh, self.axes.model))
        _torch.drop_aside(ended)

    def end(self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart], mode: Mode = "mixed") -> torch.Tensor | None:
        total = super().end(losses, parts, mode)
        if self.links.closed:  # by another thread, which has left this to the step
            self._disconnect()
        return total

    def close(self) -> None:
        """End all connections: peers that still use this transport raise. A step that runs here, in another thread, fails, and
        lets go of what it uses itself. Idempotent."""
        with self.hold_interrupts():
            super().close()
            if self._running.acquire(blocking=False):
                try:
                    self._disconnect()
                finally:
                    self._running.release()
            elif self.backend == "nccl":  # which would not hear of it from peers
                self._begin_aborts()

    # -- data ------------------------------------------------------------------------------

    def connect(self, routes: Iterable[Route]) -> None:
        self._pair_groups.connect(routes)
        for among, collective in sorted(self._collectives.items()):  # every rank is on its way here: they have just compared facts
            if collective.group is None and collective.size > 1:
                members = self._members(among)
                collective.group = open_group(self._rendezvous, self.links, f"{among}/{'-'.join(map(str, members))}", members)

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
            read = lost(peer, error)
            if isinstance(read, LinkError) and read.kind == "late":
                raise read from error
            raise  # the connection has ended: who is gone, or why, is about to be told
        self.links.waiting_on = None

    def _members(self, among: Among) -> tuple[int, ...]:
        return {"data": self.grid.data, "model": self.grid.model, "world": tuple(range(self.grid.size))}[among]

    def post(self, batch: Sequence[Transfer]) -> Call | None:
        return self._pair_groups.post(batch)

    def wait_recv(self, transfer: Transfer) -> Call | None:
        return self._pair_groups.wait_recv(transfer)

    def wait_send(self, transfer: Transfer) -> Call | None:
        return self._pair_groups.wait_send(transfer)

    def _disconnect(self) -> list[Any]:
        """Let go of every communicator, which ends with its last reference: peers that wait on one raise at once. The next step makes
        new ones.

        Of a step that has ended, nothing is under way, see :meth:`synchronize`.
        """
        ended = [*self._pair_groups.groups, *_connected(self._collectives.values())]
        if self.backend == "nccl":
            self._begin_aborts()
            self._aborts.wait()
            with suppress(RuntimeError):  # the GPU has failed
                _torch.synchronize_stream(_DRAIN)  # what it runs may use the memory that is let go here
        self._pair_groups.let_go()
        for collective in self._collectives.values():
            collective.let_go()
        return ended


def _connected(collectives: Iterable[Collective]) -> list[Any]:
    """Their communicators, as far as they are connected."""
    return [collective.group for collective in collectives if collective.group is not None]


def _group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None, axes: Axes | None) -> dist.ProcessGroup:
    """The process group of these arguments of :class:`P2P`; raises where they are wrong, or do not go together."""
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
    return group


def _let_go(error: BaseException | None) -> None:
    """Clear our frames from a traceback: a stored exception would keep the connection open."""
    seen: set[int] = set()  # an exception that was raised again may be a cause of its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__package__") == __package__:
                with suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__
