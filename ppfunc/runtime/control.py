"""Keep the ranks of a pipeline together: a step begins, ends or fails on all of them, told along a binary tree."""

from __future__ import annotations

import ctypes
import json
import struct
import threading
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import zip_longest
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from ppfunc.stage import LeafSignature

from .errors import AgreementError, FailureRecord, LinkError
from .interrupts import hold_interrupts
from .transport import Failure, LossPart, Mode

_TREE, _KEY, _TEXT = "tree", "key", "text"  # channels
_BEGIN, _SHAPES, _GATHER, _END = b"B", b"S", b"G", b"E"  # messages along the tree
_CALLS = {_BEGIN: "begins a step", _SHAPES: "begins a step", _GATHER: "gathers texts", _END: "ends a step"}
_HEAD = struct.Struct("<qii")  # of messages at the end of a step: steps ended; a rank in training mode, one in evaluation mode, or -1
_LATER = 0.05  # seconds for a step that has ended on all ranks to return what its caller needs


class Links(Protocol):
    """Messages of bytes between ranks, and one place where the first failure is decided.

    Messages of one channel from one rank to another arrive in order. ``generation`` counts the failures that this rank
    has taken notice of, by ``publish``; messages that were sent in an earlier generation are dropped.

    A rank decides alone whether it fails a step until it votes. From then on only rank 0 does, and tells by a message
    down the tree: either it has committed the step, and no failure can undo it, or a failure came first.

    A call that raises an interrupt, such as KeyboardInterrupt, has done nothing, and may be made again.
    """

    rank: int
    size: int

    @property
    def generation(self) -> int: ...

    def send(self, peer: int, channel: str, data: bytes) -> None:
        """Send a message of any length without waiting for the peer; one that is gone does not get it."""
        ...

    def recv(self, peer: int, channel: str) -> bytes:
        """Receive the next message.

        Raises:
            LinkError: there is none, and the peer is gone or late, or a failure has been published; after ``vote(step)``
                a failure that was published when rank 0 had committed that step is no reason.
        """
        ...

    def begin(self, step: int) -> None:
        """Raise where a failure has been published, or a neighbour in the tree is gone.

        Raises:
            LinkError: with that rank.
        """
        ...

    def vote(self, step: int) -> None:
        """From now on this rank cannot fail this step.

        Raises:
            LinkError: a failure has been published.
        """
        ...

    def commit(self, step: int) -> None:
        """From now on nobody can. Called on rank 0, and on the others once its message has come.

        Raises:
            LinkError: on rank 0, a failure has been published.
        """
        ...

    def publish(self, failure: str) -> str:
        """Publish a failure of this generation and begin the next one.

        Returns:
            The failure that was published first, the same on every rank that can be reached.
        """
        ...

    def suspect(self, peer: int) -> int:
        """The rank that holds up a peer which is late: the peer, or the one that it waits for itself, and so on."""
        ...

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once."""
        ...


class StepRunning(RuntimeError):
    """A step was called while another one runs on the same transport; the running one is not disturbed."""

    refused = False  # whether `fail` has heard of it


class Control:
    """The control half of a transport with one rank in each process (or thread), over its links.

    Rank r has the parent (r - 1) // 2 and the children 2r + 1 and 2r + 2. Steps begin down the tree, and end up and
    down again, with the losses on the way.

    Args:
        links: carry the messages; closed with it.
    """

    def __init__(self, links: Links) -> None:
        self.links, self.rank, self.size = links, links.rank, links.size
        self.ended = 0  # steps that have ended on this rank
        self._parent = None if self.rank == 0 else (self.rank - 1) // 2
        self._children = [child for child in (2 * self.rank + 1, 2 * self.rank + 2) if child < self.size]
        self._running = threading.Lock()
        self._interrupts: list[BaseException] = []  # of the last step's end
        self._made = 0  # step functions
        self._unmade: str | None = None  # why one could not be made

    @property
    def generation(self) -> int:
        return self.links.generation

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.size:
            raise ValueError(
                f"the schedule is for {ranks} ranks, the transport has {self.size}; "
                f"build the schedule with ranks={self.size}, or start {ranks} processes"
            )
        return (self.rank,)

    def register_step(self) -> int:
        self._made += 1
        return self._made

    def abandon_step(self, cause: Exception) -> None:
        failure = Failure(self.rank, None, None, cause)
        self._unmade = failure.reason
        self.fail(failure)

    def tear_down(self) -> None:
        """End what else than control messages peers may be waiting on; called after a failure has been published."""

    # -- agreement -------------------------------------------------------------------------

    def begin(self, call: str, key: str | None, source: int) -> str:
        if not self._running.acquire(blocking=False):
            raise StepRunning(
                "got a step while another step runs on the same P2P(); the order of their messages would differ between "
                "ranks: wait for the first, or make a P2P() for each thread, in the same order on every rank"
            )
        if self._unmade is not None:  # the peers have lost a step by it, this rank has not: the batches would not be the same
            raise RuntimeError(f"a step function could not be made ({self._unmade}); mend that, and make a new P2P() on every rank")
        rank = self.rank
        if self._interrupts:
            interrupt, self._interrupts = self._interrupts[0], []
            raise interrupt
        if key is None and rank == source:
            raise ValueError(f"inputs: got None on rank {rank}, which tells the others their shapes; give it the inputs")
        self.links.begin(self.ended)
        mine = f"{call}; shapes from rank {source}; steps ended: {self.ended}"
        if self._parent is None:
            told, shapes = mine, key if source == 0 else None
        else:
            told, shapes = json.loads(self._recv(self._parent, _BEGIN))
            self._compare(mine, told)
        self._send_down(_BEGIN, json.dumps([told, shapes]).encode())
        if shapes is None:
            shapes = self._shapes(key, source)
        if key is not None:
            self._compare(key, shapes)
        return shapes

    def _shapes(self, key: str | None, source: int) -> str:
        """The key of a rank other than 0, which tells rank 0, which tells all."""
        if self.rank == source:
            assert key is not None
            self.links.send(0, _KEY, json.dumps(key).encode())
        shapes = self.links.recv(source, _KEY) if self._parent is None else self._recv(self._parent, _SHAPES)
        self._send_down(_SHAPES, shapes)
        return str(json.loads(shapes))

    def _compare(self, mine: str, told: str) -> None:
        if mine != told:
            here, there = _differences(mine, told)
            mend = "make the same calls of the same step functions, with the same schedule and with batches of the same shapes"
            if "steps ended" in here:
                mend = "go on from the same point: load the same checkpoint on every rank, and make a new P2P()"
            raise AgreementError(
                f"the ranks disagree on the step that begins: rank {self.rank} has {here}, rank 0 has {there}; every rank must {mend}"
            )

    def all_gather(self, text: str) -> list[str]:
        texts = {self.rank: text}
        for child in self._children:
            texts |= {int(rank): theirs for rank, theirs in json.loads(self._recv(child, _GATHER)).items()}
        if self._parent is not None:
            self._send(self._parent, _GATHER, json.dumps(texts).encode())
            texts = {int(rank): theirs for rank, theirs in json.loads(self._recv(self._parent, _GATHER)).items()}
        self._send_down(_GATHER, json.dumps(texts).encode())
        return [texts[rank] for rank in range(self.size)]

    def send_text(self, peer: int, text: str) -> None:
        self.links.send(peer, _TEXT, text.encode(errors="surrogatepass"))

    def recv_text(self, peer: int) -> str:
        return self.links.recv(peer, _TEXT).decode(errors="surrogatepass")

    # -- the end of a step -----------------------------------------------------------------

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        after: Callable[[], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        """End a step, as in :class:`~ppfunc.runtime.transport.ControlTransport`; ``after`` gives the sum once all are at their ends."""
        gathered, modes = self._gather(losses, parts, mode)
        with hold_interrupts(_LATER):
            total = self._settle(gathered, parts, modes, self._interrupts)
            if after is not None:
                total = after()
            self._running.release()
        self.ended += 1  # not where a signal has acted at the exit: the next step then finds that this rank has got one less
        return total

    def _gather(
        self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart], mode: Mode
    ) -> tuple[dict[int, bytes], tuple[int, int]]:
        """The losses of this rank and those below it, by stage, once all of these are at their ends, and a rank in either mode."""
        training, evaluation = (self.rank if mode == name else -1 for name in ("training", "evaluation"))
        gathered = {stage: _bytes_of(losses[stage], part.leaf) for stage, part in parts.items() if part.rank == self.rank}
        for child in self._children:
            modes, data = self._counted(child)
            training, evaluation = max(training, modes[0]), max(evaluation, modes[1])
            for stage, part in sorted(parts.items()):
                if _below(child, part.rank):
                    gathered[stage], data = bytes(data[: part.leaf.nbytes]), data[part.leaf.nbytes :]
        if training >= 0 and evaluation >= 0:
            raise AgreementError(
                f"the ranks disagree on the mode of their modules: training on rank {training}, evaluation on rank "
                f"{evaluation}; call train() or "
                f"eval() on every rank (where a stage is frozen on purpose, leave its outermost module in training mode)"
            )
        return gathered, (training, evaluation)

    def _settle(
        self, gathered: dict[int, bytes], parts: Mapping[int, LossPart], modes: tuple[int, int], interrupts: list[BaseException]
    ) -> torch.Tensor | None:
        """Learn the outcome and tell it. Interrupts wait for the next step, which then fails on all ranks: this one may have
        ended on some already."""
        step, links = self.ended, self.links
        if self._parent is None:
            total = _total({stage: _tensor(gathered[stage], part.leaf.shape, part.leaf.dtype) for stage, part in parts.items()})
            summed = b"" if total is None else ctypes.string_at(total.data_ptr(), total.nbytes)
        else:
            losses = b"".join(data for _, data in sorted(gathered.items()))
            _insist(interrupts, links.vote, step)
            _insist(interrupts, self._send, self._parent, _END, _HEAD.pack(step, *modes) + losses)
            _, summed = _insist(interrupts, self._counted, self._parent)
            total = _tensor(summed, *_form(parts)) if parts else None
        _insist(interrupts, links.commit, step)
        for child in self._children:
            _insist(interrupts, self._send, child, _END, _HEAD.pack(step, *modes) + summed)
        return total

    def _counted(self, peer: int) -> tuple[tuple[int, int], bytes]:
        """The modes and the losses that a peer tells at the end of the step that this rank ends, too."""
        data = self._recv(peer, _END)
        theirs, *modes = _HEAD.unpack_from(data)
        if theirs != self.ended:
            self._compare(f"steps ended: {self.ended}", f"steps ended: {theirs}")
        return (modes[0], modes[1]), data[_HEAD.size :]

    # -- messages along the tree -----------------------------------------------------------

    def _send(self, peer: int, kind: bytes, data: bytes) -> None:
        self.links.send(peer, _TREE, kind + data)

    def _send_down(self, kind: bytes, data: bytes) -> None:
        for child in self._children:
            self._send(child, kind, data)

    def _recv(self, peer: int, kind: bytes) -> bytes:
        data = self.links.recv(peer, _TREE)
        if data[:1] != kind:
            raise AgreementError(
                f"the ranks disagree on what comes next: rank {self.rank} {_CALLS[kind]}, rank {peer} "
                f"{_CALLS[data[:1]]}; every rank must make the same calls in the same order"
            )
        return data[1:]

    # -- failures --------------------------------------------------------------------------

    def fail(self, failure: Failure) -> BaseException:
        """Publish a failure, begin the next generation, and return the error to raise.

        Returns:
            The cause itself where it arose here outside the program; else the first failure, which rank it was and where.
        """
        cause, rank = failure.cause, self.rank
        if isinstance(cause, StepRunning) and not cause.refused:
            cause.refused = True
            return cause
        interrupts: list[BaseException] = []
        with hold_interrupts():
            try:
                mine = _insist(interrupts, FailureRecord.of, failure, rank, self.links.suspect)
                first = FailureRecord.read(_insist(interrupts, self.links.publish, mine.write()))
            finally:
                self.tear_down()
                if self._running.locked():
                    self._running.release()
        if interrupts:
            raise interrupts[0] from cause
        if first == mine and failure.instruction is None and not isinstance(cause, LinkError):
            return cause
        return first.error(rank)

    def close(self) -> None:
        """End all connections: peers that still use this transport raise. Idempotent."""
        self.links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _insist(interrupts: list[BaseException], call: Callable[..., Any], *args: Any) -> Any:
    """Make a call again for as long as it is interrupted."""
    while True:
        try:
            return call(*args)
        except Exception:
            raise
        except BaseException as interrupt:
            interrupts.append(interrupt)


def _differences(one: str, other: str) -> tuple[str, str]:
    """Of two lines, the terms that differ.

    >>> _differences("call 2; f; seed None", "call 3; f; seed (0, 1)")
    ('call 2; seed None', 'call 3; seed (0, 1)')
    """
    pairs = [(a, b) for a, b in zip_longest(one.split("; "), other.split("; "), fillvalue="nothing") if a != b]
    return "; ".join(a for a, _ in pairs), "; ".join(b for _, b in pairs)


def _below(top: int, rank: int) -> bool:
    """Whether a rank is in the tree under ``top``, or is it.

    >>> [rank for rank in range(15) if _below(2, rank)]
    [2, 5, 6, 11, 12, 13, 14]
    """
    while rank > top:
        rank = (rank - 1) // 2
    return rank == top


def _total(losses: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The sum over the microbatches of all stages, in the order of the stages."""
    return torch.cat([losses[stage] for stage in sorted(losses)]).sum(0) if losses else None


def _form(parts: Mapping[int, LossPart]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the sum."""
    leaves = [part.leaf for part in parts.values()]
    return leaves[0].shape[1:], reduce(torch.promote_types, (leaf.dtype for leaf in leaves))


def _bytes_of(tensor: torch.Tensor, leaf: LeafSignature) -> bytes:
    assert (tensor.shape, tensor.dtype) == (leaf.shape, leaf.dtype), (tensor.shape, tensor.dtype, leaf)
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _tensor(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
