"""Ranks in separate processes: point-to-point messages over torch.distributed."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from ppfunc.schedule.formats.text import parse_instruction
from ppfunc.stage import LeafSignature

from .control import Control
from .errors import AgreementError, PipelineError
from .meeting import Meeting, give_way
from .transport import Failure, Route, Tag, Thunk, Transfer, Values, as_bytes

# Dtypes that every backend can carry; anything else travels as its bytes.
_PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
_OWN = {__name__, Control.__module__, Meeting.__module__}


class _Line:
    """A communicator of two ranks; ``group`` is None once it has been torn down."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group: dist.ProcessGroup | None = group
        self.peer = peer  # rank of the other end within the group


class P2P:
    """The transport of a pipeline with one process per rank.

    Messages of a pair of ranks have communicators of their own, made from the store of the
    user's group: operations of one NCCL communicator run in the order in which they were
    issued, whoever the peer is, and no pair must wait for another. Under NCCL a pair has one,
    whose operations of a step go as one batch. Under gloo it has one for each way and kind of
    message: a connection is locked while something is written to it, and what arrives on it
    meanwhile keeps a thread spinning. Small facts (which step begins, that it has ended, signatures)
    travel over gloo on the host, so that no GPU has to be waited for.

    Every rank makes its transports over a group in the same order, and so its step functions over a
    transport. A step returns on all ranks, once each is at its end, or fails on all of them.

    Args:
        group: an initialised process group; its ranks, in order, are the ranks of the
            pipeline. The default group where none is given.
        timeout: seconds to wait for a peer; that of the group's backend where none is given.

    Raises:
        RuntimeError: torch.distributed has not been initialised, or this process is not in the group.
        ValueError: the group has another backend than gloo or NCCL for the device that computes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()")
        self._user_group = group if group is not None else dist.group.WORLD
        if self._user_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError("P2P got a process group of which this process is not a member")
        self._meeting = Meeting(self._user_group, timeout)
        self.rank, self.size, self.backend = self._meeting.rank, self._meeting.size, self._meeting.backend
        self._control = Control(self._meeting)
        self._enrolled = 0
        self._lines: dict[str, _Line] = {}
        self._pending: dict[Tag, tuple[list[dist.Work], list[torch.Tensor]]] = {}

    @property
    def generation(self) -> int:
        return self._meeting.generation

    # -- beginnings ------------------------------------------------------------------------

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.size:
            raise ValueError(
                f"the schedule is for {ranks} ranks, the process group has {self.size}; "
                f"build the schedule with ranks={self.size} or start {ranks} processes"
            )
        return (self.rank,)

    def connect(self, routes: Iterable[Route]) -> None:
        for route in sorted(routes):
            name = self._name(route)
            if self.rank in route.ranks and name not in self._lines:
                above = self.rank == max(route.ranks)
                self._lines[name] = _Line(self._meeting.open(name, int(above), 2), int(not above))

    def _name(self, route: Route) -> str:
        """The name of the communicator that messages of a route take, the same at both ends."""
        if self.backend == "nccl":
            return f"pair/{min(route.ranks)}-{max(route.ranks)}"
        return f"{route.direction}/{route.sender}-{route.receiver}"

    def _line(self, transfer: Transfer) -> _Line:
        ends = (self.rank, transfer.peer) if transfer.outgoing else (transfer.peer, self.rank)
        return self._lines[self._name(Route(transfer.tag.direction, *ends))]

    def enroll(self) -> int:
        self._enrolled += 1
        return self._enrolled

    def share(self, text: str) -> list[str]:
        return self._control.share(text)

    def begin(self, call: str, key: str | None) -> str:
        return self._control.begin(call, key)

    def end(self) -> None:
        self._control.end()

    def tell(self, rank: int, peer: int, text: str) -> None:
        self._control.tell(peer, text)

    def hear(self, rank: int, peer: int) -> str:
        return self._control.hear(peer)

    # -- messages --------------------------------------------------------------------------

    def post(self, rank: int, batch: Sequence[Transfer], values: Values) -> Thunk | None:
        if self.backend != "nccl":
            ends = [self._end(t, values) for t in batch]
            return _in_turn([give_way, *ends, give_way] if any(t.outgoing for t in batch) else ends)
        by_peer: dict[int, list[Transfer]] = {}
        for transfer in batch:
            by_peer.setdefault(transfer.peer, []).append(transfer)
        return _in_turn([self._coalesced(part, values) for part in by_peer.values()])

    def _coalesced(self, batch: list[Transfer], values: Values) -> Thunk:
        """The thunk that posts what goes over the one communicator of a pair as one operation."""
        line, ends = self._line(batch[0]), [self._end(t, values) for t in batch]
        pending, tags = self._pending, [t.tag for t in batch]

        def post_coalesced() -> None:
            line.group._start_coalescing()
            for end in ends:
                end()
            work = line.group._end_coalescing()
            for tag in tags:
                pending[tag] = [work], pending[tag][1]

        return post_coalesced

    def _end(self, transfer: Transfer, values: Values) -> Thunk:
        return self._sender(transfer, values) if transfer.outgoing else self._receiver(transfer)

    def _sender(self, transfer: Transfer, values: Values) -> Thunk:
        line = self._line(transfer)
        tag, pending, peer, wire = transfer.tag, self._pending, line.peer, _wire(transfer)
        meeting, rank = self._meeting, transfer.peer

        def send() -> None:
            tensors = wire([t.contiguous() for t in values.pop(tag)])
            meeting.waiting_on = rank
            pending[tag] = [line.group.send([t], peer, 0) for t in tensors], tensors
            meeting.waiting_on = None

        return send

    def _receiver(self, transfer: Transfer) -> Thunk:
        line = self._line(transfer)
        tag, pending, peer, wire = transfer.tag, self._pending, line.peer, _wire(transfer)
        made = [(leaf.shape, leaf.dtype) for leaf in transfer.leaves]
        meeting, rank, device = self._meeting, transfer.peer, transfer.device

        def receive() -> None:
            buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made]
            meeting.waiting_on = rank
            pending[tag] = [line.group.recv([t], peer, 0) for t in wire(buffers)], buffers
            meeting.waiting_on = None

        return receive

    def arrive(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        tag, pending, peer, meeting = transfer.tag, self._pending, transfer.peer, self._meeting

        def arrive() -> None:
            works, tensors = pending.pop(tag)
            meeting.waiting_on = peer
            for work in works:
                work.wait()
            meeting.waiting_on = None
            values[tag] = tuple(tensors)

        return arrive

    def release(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        tag, pending, peer, meeting = transfer.tag, self._pending, transfer.peer, self._meeting

        def release() -> None:
            meeting.waiting_on = peer
            for work in pending.pop(tag)[0]:
                work.wait()
            meeting.waiting_on = None

        return release

    def spread(
        self, owner: int, tensors: tuple[torch.Tensor, ...], leaves: tuple[LeafSignature, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        if self.size == 1:
            return tensors
        if self.backend == "nccl":
            if self.rank != owner:
                tensors = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves)
            root = dist.get_global_rank(self._user_group, owner)
            self.end()  # a broadcast that a rank does not come to would hold up all that its GPU is given later
            for tensor in tensors:
                dist.broadcast(tensor, root, group=self._user_group)
            return tensors
        host, here = self._control.group, self.rank == owner
        peers = [r for r in range(self.size) if r != owner] if here else [owner]
        if not here:
            tensors = tuple(torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves)
        move = host.send if here else host.recv
        for peer, work in [(peer, move([t], peer, 0)) for peer in peers for t in tensors]:
            self._meeting.wait(work, peer)
        return tensors

    # -- failures --------------------------------------------------------------------------

    def fail(self, failure: Failure) -> BaseException:
        late = _timed_out(failure.cause) and self._meeting.waiting_on is not None
        if late:
            failure = failure._replace(context=f"; it waited for rank {self._meeting.waiting_on}, which has not answered")
        first = self._first_failure(failure)
        self._tear_down()
        _let_go(failure.cause)
        if first is not None:
            return first
        if failure.instruction is None and not late:
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

    def _first_failure(self, failure: Failure) -> AgreementError | PipelineError | None:
        """The failure that another rank published first, or a rank that is gone; None where this rank is the first.

        A rank publishes before it tears down what its peers wait on, so a lost connection
        without a publication is a lost process.
        """
        missed = self._meeting.waiting_on
        lost = _connection_lost(failure.cause) and missed is not None
        rank, position, instruction, reason = failure.rank, failure.position, failure.instruction, failure.reason
        if lost:
            where = "" if instruction is None else f" (rank {failure.rank} was at {instruction}, step {position})"
            rank, position, instruction, reason = missed, None, None, f"its process is gone or out of reach{where}"
        elif isinstance(failure.cause, AgreementError):
            reason = str(failure.cause)
        mine = json.dumps([rank, position, instruction and str(instruction), reason, isinstance(failure.cause, AgreementError)])
        first = self._meeting.first_failure(mine)
        if first in (mine, None) and not lost:
            return None
        rank, position, text, reason, disagreement = json.loads(first or mine)
        if disagreement:
            return AgreementError(f"{reason} [found by rank {rank}]")
        if first is None and lost:
            reason += "; neither is the store, so another rank may have failed first"
        return PipelineError(rank, position, text and parse_instruction(text), reason, reported_by=self.rank)

    def _tear_down(self) -> None:
        """End every communicator: peers that wait on one raise at once. The next step makes new ones."""
        groups = [line.group for line in self._lines.values()]
        self._control.close()
        self._control = Control(self._meeting)
        for line in self._lines.values():
            line.group = None
        self._lines.clear()
        self._pending.clear()
        if self.backend == "nccl":
            for group in groups:
                group.abort()
        self._meeting.move_on()


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of the transport in a traceback, which may be kept: a connection ends with the last that holds it."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") in _OWN:
                with suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__


def _connection_lost(cause: BaseException) -> bool:
    """Whether an exception is the backend's word for a peer that is gone."""
    if isinstance(cause, dist.DistNetworkError):
        return True
    return isinstance(cause, RuntimeError) and any(s in str(cause) for s in ("Connection closed", "Connection reset", "Broken pipe"))


def _timed_out(cause: BaseException) -> bool:
    """Whether an exception is the backend's word for a peer that has not answered in time."""
    return isinstance(cause, RuntimeError) and "Timed out waiting" in str(cause)


def _in_turn(thunks: list[Thunk]) -> Thunk:
    """One thunk that calls these."""
    if len(thunks) == 1:
        return thunks[0]

    def call_all() -> None:
        for thunk in thunks:
            thunk()

    return call_all


def _wire(transfer: Transfer) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """How the tensors of a transfer travel: as they are, or as their bytes where a backend may not know the dtype."""
    if all(leaf.dtype in _PLAIN and 0 not in leaf.shape for leaf in transfer.leaves):
        return lambda tensors: tensors
    return lambda tensors: [t if t.dtype in _PLAIN else as_bytes(t) for t in tensors if t.numel()]
