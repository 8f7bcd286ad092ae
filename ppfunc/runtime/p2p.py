"""Ranks in separate processes: point-to-point messages over torch.distributed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ppfunc.schedule.formats.text import parse_instruction
from ppfunc.stage import LeafSignature

from .errors import AgreementError, PipelineError
from .transport import Failure, Tag, Thunk, Transfer, Values

# Dtypes that every backend can carry; anything else travels as its bytes.
_PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
_LINE = 1024  # bytes of a control message


class _Pair:
    """The communicator of one pair of ranks; ``group`` is None once it has been torn down."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group: dist.ProcessGroup | None = group
        self.peer = peer  # rank of the other end within the pair


class P2P:
    """The transport of a pipeline with one process per rank.

    Messages of a pair of ranks have a communicator of their own, made from the store of the
    user's group: operations of one NCCL communicator run in the order in which they were
    issued, whoever the peer is, and no pair must wait for another. Small facts (which step
    begins, signatures) travel over gloo on the host, so that no GPU has to be waited for.

    Args:
        group: an initialised process group; its ranks, in order, are the ranks of the
            pipeline. The default group where none is given.
        timeout: seconds to wait for a peer; that of the group's backend where none is given.

    Raises:
        RuntimeError: torch.distributed has not been initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("P2P got no process group; call torch.distributed.init_process_group first, or use InProcess()")
        self._user_group = group if group is not None else dist.group.WORLD
        if self._user_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError("P2P got a process group of which this process is not a member")
        self.rank = dist.get_rank(self._user_group)
        self.size = dist.get_world_size(self._user_group)
        self.backend = dist.get_backend(self._user_group)
        self.timeout = timedelta(seconds=timeout) if timeout is not None else dist.distributed_c10d.default_pg_timeout
        store = self._user_group.get_group_store()
        # The n-th transport that each rank makes over a group is the same transport.
        number = store.add(f"ppfunc/transports/{self.rank}", 1)
        self._store = dist.PrefixStore(f"ppfunc/{number}", store)
        self.generation = 0
        self._calls = self._shared = 0
        self._control: dist.ProcessGroup | None = None
        self._pairs: dict[int, _Pair] = {}
        self._waiting_on: int | None = None
        self._pending: dict[Tag, tuple[list[dist.Work], list[torch.Tensor]]] = {}

    # -- beginnings ------------------------------------------------------------------------

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.size:
            raise ValueError(
                f"the schedule is for {ranks} ranks, the process group has {self.size}; "
                f"build the schedule with ranks={self.size} or start {ranks} processes"
            )
        return (self.rank,)

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        for low, high in sorted({(min(e), max(e)) for e in edges}):
            if self.rank in (low, high):
                peer = high if self.rank == low else low
                if peer not in self._pairs:
                    self._pairs[peer] = _Pair(self._open(f"pair/{low}-{high}", int(self.rank == high), 2), int(self.rank == low))

    def _open(self, name: str, rank: int, size: int, backend: str | None = None) -> dist.ProcessGroup:
        """A communicator of its own, known to no registry: it ends when it is let go."""
        backend = backend or self.backend
        store = dist.PrefixStore(f"{self.generation}/{name}", self._store)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, self.timeout)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        raise ValueError(f"the process group has the backend {backend!r}; P2P knows 'gloo' and 'nccl'")

    @property
    def _host(self) -> dist.ProcessGroup:
        """The control group, opened once every rank is there."""
        if self._control is None:
            self._store.set(f"{self.generation}/here/{self.rank}", "")
            for peer in range(self.size):
                self._wait_for(f"{self.generation}/here/{peer}", f"rank {peer} to begin")
            self._control = self._open("control", self.rank, self.size, "gloo")
        return self._control

    def share(self, text: str) -> list[str]:
        self._shared += 1
        place = f"{self.generation}/shared/{self._shared}"
        self._store.set(f"{place}/{self.rank}", text)
        return [self._wait_for(f"{place}/{peer}", f"rank {peer} to share what it knows") for peer in range(self.size)]

    def _wait_for(self, key: str, what: str) -> str:
        """The value of ``key`` in the store; a peer's failure ends the wait."""
        end = time.monotonic() + self.timeout.total_seconds()
        pause = 0.001
        while not self._store.check([key]):
            if self._store.check([f"{self.generation}/failure"]):
                raise ConnectionError("a peer has failed")  # ``fail`` puts its name in
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} waited {self.timeout.total_seconds():g} s for {what}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self._store.get(key).decode()

    def begin(self, call: str, key: str | None) -> str:
        if self.size == 1:
            assert key is not None
            return key
        self._calls += 1
        mine = f"call {self._calls}, {call}"
        theirs = key
        if self.rank > 0:
            told, _, theirs = self._receive_line(self.rank - 1).rpartition("\n")
            if told != mine or (key is not None and key != theirs):
                raise AgreementError(
                    f"the ranks disagree on the step that begins: rank {self.rank} has {mine}: {key or 'no inputs'}, "
                    f"rank {self.rank - 1} has {told}: {theirs}; every rank must make the same calls, with the same "
                    f"schedule and with batches of the same shapes"
                )
        if theirs is None:
            raise ValueError("inputs: got None on rank 0, which tells the others their shapes; give it the inputs, whoever holds the first stage")
        if self.rank + 1 < self.size:
            self._send_line(self.rank + 1, f"{mine}\n{theirs}")
        return theirs

    # -- texts -----------------------------------------------------------------------------

    def _send_line(self, peer: int, line: str) -> None:
        """Send a short line in one message of fixed size."""
        data = line.encode().ljust(_LINE)
        assert len(data) == _LINE, line
        self._waiting_on = peer
        self._host.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], peer, 0).wait()

    def _receive_line(self, peer: int) -> str:
        self._waiting_on = peer
        data = torch.empty(_LINE, dtype=torch.uint8)
        self._host.recv([data], peer, 0).wait()
        return bytes(data.tolist()).decode().rstrip()

    def tell(self, rank: int, peer: int, text: str) -> None:
        data = text.encode()
        self._send_line(peer, str(len(data)))
        self._host.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], peer, 0).wait()

    def hear(self, rank: int, peer: int) -> str:
        data = torch.empty(int(self._receive_line(peer)), dtype=torch.uint8)
        self._host.recv([data], peer, 0).wait()
        return bytes(data.tolist()).decode()

    # -- messages --------------------------------------------------------------------------

    def post(self, rank: int, batch: Sequence[Transfer], values: Values) -> Thunk | None:
        by_peer: dict[int, list[Transfer]] = {}
        for transfer in batch:
            by_peer.setdefault(transfer.peer, []).append(transfer)
        posts = [self._post_pair(self._pairs[peer], part, values) for peer, part in by_peer.items()]
        return _in_turn(posts)

    def _post_pair(self, pair: _Pair, batch: list[Transfer], values: Values) -> Thunk:
        """The thunk that posts what goes over one pair; as one coalesced operation where the backend has that."""
        ends = [self._sender(pair, t, values) if t.outgoing else self._receiver(pair, t) for t in batch]
        if self.backend != "nccl":
            return _in_turn(ends)
        pending, tags = self._pending, [t.tag for t in batch]

        def post_coalesced() -> None:
            pair.group._start_coalescing()
            for end in ends:
                end()
            work = pair.group._end_coalescing()
            for tag in tags:
                pending[tag] = [work], pending[tag][1]

        return post_coalesced

    def _sender(self, pair: _Pair, transfer: Transfer, values: Values) -> Thunk:
        tag, pending, peer, wire = transfer.tag, self._pending, pair.peer, _wire(transfer)

        def send() -> None:
            tensors = wire([t.contiguous() for t in values.pop(tag)])
            pending[tag] = [pair.group.send([t], peer, 0) for t in tensors], tensors

        return send

    def _receiver(self, pair: _Pair, transfer: Transfer) -> Thunk:
        tag, pending, peer, wire = transfer.tag, self._pending, pair.peer, _wire(transfer)
        made = [(leaf.shape, leaf.dtype) for leaf in transfer.leaves]
        device = transfer.device

        def receive() -> None:
            buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made]
            pending[tag] = [pair.group.recv([t], peer, 0) for t in wire(buffers)], buffers

        return receive

    def arrive(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        tag, pending, peer = transfer.tag, self._pending, transfer.peer

        def arrive() -> None:
            works, tensors = pending.pop(tag)
            self._waiting_on = peer
            for work in works:
                work.wait()
            values[tag] = tuple(tensors)

        return arrive

    def release(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        tag, pending, peer = transfer.tag, self._pending, transfer.peer

        def release() -> None:
            self._waiting_on = peer
            for work in pending.pop(tag)[0]:
                work.wait()

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
            for tensor in tensors:
                dist.broadcast(tensor, root, group=self._user_group)
            return tensors
        self._waiting_on = owner if self.rank != owner else None
        if self.rank == owner:
            works = [self._host.send([t], r, 0) for r in range(self.size) if r != owner for t in tensors]
        else:
            tensors = tuple(torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves)
            works = [self._host.recv([t], owner, 0) for t in tensors]
        for work in works:
            work.wait()
        return tensors

    # -- failures --------------------------------------------------------------------------

    def fail(self, failure: Failure) -> BaseException:
        late = _timed_out(failure.cause) and self._waiting_on is not None
        if late:
            failure = failure._replace(context=f"; it waited for rank {self._waiting_on}, which has not answered")
        first = self._first_failure(failure)
        self._tear_down()
        if first is not None:
            return first
        if failure.instruction is None and not late:
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

    def _first_failure(self, failure: Failure) -> PipelineError | None:
        """The failure that another rank published first, or a rank that is gone; None where this rank is the first.

        A rank publishes before it tears down what its peers wait on, so a lost connection
        without a publication is a lost process.
        """
        lost = _connection_lost(failure.cause) and self._waiting_on is not None
        rank, position, instruction, reason = failure.rank, failure.position, failure.instruction, failure.reason
        if lost:
            where = "" if instruction is None else f" (rank {failure.rank} was at {instruction}, step {position})"
            rank, position, instruction, reason = self._waiting_on, None, None, f"its process is gone or out of reach{where}"
        mine = json.dumps([rank, position, instruction and str(instruction), reason])
        try:
            first = self._store.compare_set(f"{self.generation}/failure", "", mine).decode()
        except dist.DistError:
            first = mine  # the process that served the store may be the one that is gone
        if first == mine and not lost:
            return None
        rank, position, text, reason = json.loads(first)
        return PipelineError(rank, position, text and parse_instruction(text), reason, reported_by=self.rank)

    def _tear_down(self) -> None:
        """End every communicator: peers that wait on one raise at once. The next step makes new ones."""
        groups = [self._control, *(pair.group for pair in self._pairs.values())]
        self._control = None
        for pair in self._pairs.values():
            pair.group = None
        self._pairs.clear()
        self._pending.clear()
        if self.backend == "nccl":
            for group in groups:
                if group is not None:
                    group.abort()
        self.generation += 1
        self._calls = self._shared = 0


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
    return lambda tensors: [t if t.dtype in _PLAIN else _bytes(t) for t in tensors if t.numel()]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)
