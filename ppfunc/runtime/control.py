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
from typing import Literal, NamedTuple, Protocol, Self

import torch

from ppfunc.stage import LeafSignature

from .errors import AgreementError, Failure, FailureRecord, LinkError
from .grid import Grid, LaidOut
from .interrupts import hold_interrupts, keep_holding
from .meshes import require_alike
from .transport import LossPart, Mode

_TREE, _KEY, _TEXT = "tree", "key", "text"  # channels; a tree over some of the ranks has one with its name
_BEGIN, _SHAPES, _GATHER, _LOSSES, _END = b"B", b"S", b"G", b"L", b"E"  # messages along a tree
_CALLS = {_BEGIN: "begins a step", _SHAPES: "begins a step", _GATHER: "gathers texts", _LOSSES: "ends a step", _END: "ends a step"}
_HEAD = struct.Struct("<qii")  # of messages at the end of a step: steps ended; a rank in training mode, one in evaluation mode, or -1


class Links(Protocol):
    """Messages of bytes between ranks, and one place where the first failure is decided.

    Messages of one channel from one rank to another arrive in order. ``generation`` counts the failures that this rank
    has taken notice of, by ``publish``; messages that were sent in an earlier generation are dropped.

    A rank decides alone whether it fails a step until it votes. From then on only rank 0 does, and tells by a message
    down the tree: either it has committed the step, and no failure can undo it, or a failure came first.

    A call that raises an interrupt, such as KeyboardInterrupt, was waiting, and has done nothing.
    """

    rank: int
    size: int

    @property
    def generation(self) -> int: ...

    def send(self, peer: int, channel: str, data: bytes) -> None:
        """Send a message of any length, without waiting until the peer receives it; one that is gone does not get it.

        The first message to a peer may wait until the two are connected.

        Raises:
            LinkError: the peer is gone, or has not come in time, or a failure has been published, while they were being connected.
        """
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

    def suspect(self, peer: int) -> tuple[int, str]:
        """The rank that holds up a peer which is late, and what is known of it: the peer, or the one that it waits for itself,
        and so on."""
        ...

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once."""
        ...


class StepRunning(RuntimeError):
    """A step was called while another one runs on the same transport; the running one is not disturbed."""

    refused = False  # whether `fail` has heard of it


class Tree(NamedTuple):
    """A binary tree over some of the ranks, as one of them sees it.

    Args:
        members: the ranks; that at place n has those at 2n + 1 and 2n + 2 below it.
        place: of this rank.
        channel: of the messages.
        parent: the rank above, None at the top.
        children: the ranks below, by place.
    """

    members: tuple[int, ...]
    place: int
    channel: str
    parent: int | None
    children: dict[int, int]

    @classmethod
    def over(cls, members: tuple[int, ...], rank: int, channel: str) -> Tree:
        place = members.index(rank)
        below = (n for n in (2 * place + 1, 2 * place + 2) if n < len(members))
        return cls(members, place, channel, members[(place - 1) // 2] if place else None, {n: members[n] for n in below})


class Control:
    """The control half of a transport with one rank in each process (or thread), over its links.

    Steps begin down a tree, and end up and down again, with the losses on the way. Where several pipelines train together,
    the ranks of all of them begin, end and fail a step together; those that run the same batch also agree on it.

    Args:
        links: carry the messages; closed with it.
        grid: which ranks make which pipeline; by default all make one.
    """

    def __init__(self, links: Links, grid: Grid | None = None) -> None:
        everyone = tuple(range(links.size))
        self.links, self.grid = links, grid or Grid((everyone,), (links.rank,), links.size, links.rank)
        self.line = self.grid.line
        self.rank, self.size = self.line.index(links.rank), len(self.line)  # of the pipeline
        self.ended = 0  # steps that have ended on this rank
        self._world = Tree.over(everyone, links.rank, _TREE)
        self._replica = self._world if self.grid.replica == everyone else Tree.over(self.grid.replica, links.rank, "replica")
        self._model = Tree.over(self.grid.model, links.rank, "model") if len(self.grid.model) > 1 else None
        self._data = Tree.over(self.grid.data, links.rank, "data")
        self._line = self._replica if self.line == self.grid.replica else Tree.over(self.line, links.rank, "line")
        self._running = threading.Lock()
        self._made = 0  # step functions
        self._executing = False  # whether peers may wait for this rank in a collective of a stage
        self._unusable: str | None = None  # why, and what to do

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
        # The peers have lost a step by it, this rank has not: the batches would not be the same.
        self._unusable = f"a step function could not be made ({failure.reason}); mend that, and make a new P2P() on every rank"
        self.fail(failure)

    def hold_interrupts(self, later: bool = False) -> hold_interrupts:
        return hold_interrupts(later)

    def lose_step(self) -> None:
        self.ended -= 1

    def tear_down(self) -> None:
        """End what else than control messages peers may be waiting on; called after a failure has been published."""

    # -- agreement -------------------------------------------------------------------------

    def begin(self, call: str, key: str | None, source: int, common: str = "") -> str:
        if not self._running.acquire(blocking=False):
            raise StepRunning(
                "got a step while another step runs on the same P2P(); the order of their messages would differ between "
                "ranks: wait for the first, or make a P2P() for each thread, in the same order on every rank"
            )
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        if key is None and self.rank == source:
            raise ValueError(f"inputs: got None on rank {self.rank}, which tells the others their shapes; give it the inputs")
        self.links.begin(self.ended)
        common = f"{common}; steps ended: {self.ended}" if common else f"steps ended: {self.ended}"
        tree, first = self._replica, self.grid.lines[0][source]  # of several ranks that are given the batch, the one that tells
        if tree is not self._world:
            self._pass_down(self._world, common)
            common = ""
        mine = "; ".join(filter(None, (call, f"shapes from rank {first}", common)))
        shapes = self._pass_down(tree, mine, key if first == tree.members[0] else None)
        if shapes is None:
            shapes = self._shapes(tree, key, first)
        if key is not None:
            self._compare(key, shapes, tree.members[0])
        return shapes

    @property
    def compares_layouts(self) -> bool:
        return self._model is not None

    def ready(self, laid: LaidOut) -> None:
        if self._model is not None and len(set(self._gather_texts(self._model, laid.digest).values())) > 1:
            told = self._gather_texts(self._model, json.dumps(laid.leaves))
            require_alike({rank: json.loads(theirs) for rank, theirs in sorted(told.items())}, "the axis of the model")
        self._executing = True

    def rest(self) -> None:
        self._executing = False

    def _pass_down(self, tree: Tree, mine: str, shapes: str | None = None) -> str | None:
        """Compare what the rank at the top of a tree tells; the shapes that it tells too."""
        told = mine
        if tree.parent is not None:
            told, shapes = json.loads(self._recv(tree, tree.parent, _BEGIN))
            self._compare(mine, told, tree.members[0])
        self._send_down(tree, _BEGIN, json.dumps([told, shapes]).encode())
        return shapes

    def _shapes(self, tree: Tree, key: str | None, source: int) -> str:
        """The key of a rank that is not at the top, which tells the one that is, which tells all."""
        if self.links.rank == source:
            assert key is not None
            self.links.send(tree.members[0], _KEY, json.dumps(key).encode())
        shapes = self.links.recv(source, _KEY) if tree.parent is None else self._recv(tree, tree.parent, _SHAPES)
        self._send_down(tree, _SHAPES, shapes)
        return str(json.loads(shapes))

    def _compare(self, mine: str, told: str, other: int = 0) -> None:
        if mine != told:
            here, there = _differences(mine, told)
            mend = "make the same calls of the same step functions, with the same schedule and with batches of the same shapes"
            if "steps ended" in here:
                mend = "go on from the same point: load the same checkpoint on every rank, and make a new P2P()"
            raise AgreementError(
                f"the ranks disagree on the step that begins: rank {self.links.rank} has {here}, rank {other} has {there}; "
                f"every rank must {mend}"
            )

    def all_gather(self, text: str) -> list[str]:
        with self.hold_interrupts():
            texts = self._gather_texts(self._line, text)
        return [texts[rank] for rank in self.line]

    def require_same(self, facts: str, among: Literal["world", "peers", "data"] = "world") -> bool:
        tree = {"world": self._world, "peers": self._replica, "data": self._data}[among]
        if among == "peers" and tree is self._line:
            return False
        with self.hold_interrupts():
            texts = self._gather_texts(tree, json.dumps([self.rank, facts]))
        for rank, text in sorted(texts.items()):
            place, theirs = json.loads(text)
            if theirs != facts and (among != "peers" or place == self.rank):
                here, there = _differences(facts, theirs)
                raise AgreementError(
                    f"the ranks disagree: rank {self.links.rank} has {here}; rank {rank} has {there}; every rank must be given the same"
                )
        return True

    def _gather_texts(self, tree: Tree, text: str) -> dict[int, str]:
        """The texts of all ranks of a tree."""
        texts = {self.links.rank: text}
        for child in tree.children.values():
            texts |= {int(rank): theirs for rank, theirs in json.loads(self._recv(tree, child, _GATHER)).items()}
        if tree.parent is not None:
            self._send(tree, tree.parent, _GATHER, json.dumps(texts).encode())
            texts = {int(rank): theirs for rank, theirs in json.loads(self._recv(tree, tree.parent, _GATHER)).items()}
        self._send_down(tree, _GATHER, json.dumps(texts).encode())
        return texts

    def send_text(self, peer: int, text: str) -> None:
        with self.hold_interrupts():
            self.links.send(self.line[peer], _TEXT, text.encode(errors="surrogatepass"))

    def recv_text(self, peer: int) -> str:
        with self.hold_interrupts():
            return self.links.recv(self.line[peer], _TEXT).decode(errors="surrogatepass")

    # -- the end of a step -----------------------------------------------------------------

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        after: Callable[[], torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:
        """End a step, as in :class:`~ppfunc.runtime.transport.ControlTransport`; ``after`` gives the sum once all are at their ends."""
        if parts and after is None and self._line is not self._world:
            of_line = self._sum_of_line(losses, parts, mode)
            parts, after = {}, lambda: of_line
        gathered, modes = self._gather(self._world, _END, losses, parts, mode)
        keep_holding()
        total = self._settle(gathered, parts, modes)
        if after is not None:
            total = after()
        self._executing = False
        self.ended += 1
        self._running.release()
        return total

    def _gather(
        self, tree: Tree, kind: bytes, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart], mode: Mode
    ) -> tuple[dict[int, bytes], tuple[int, int]]:
        """The losses of this rank and those below it, by stage, once all of these have sent theirs, and a rank in either mode."""
        training, evaluation = (self.links.rank if mode == name else -1 for name in ("training", "evaluation"))
        gathered = {stage: _bytes_of(losses[stage], part.leaf) for stage, part in parts.items() if part.rank == self.rank}
        for place, child in tree.children.items():
            modes, data = self._counted(tree, child, kind)
            training, evaluation = max(training, modes[0]), max(evaluation, modes[1])
            for stage, part in sorted(parts.items()):
                if _below(place, part.rank):
                    gathered[stage], data = bytes(data[: part.leaf.nbytes]), data[part.leaf.nbytes :]
        if training >= 0 and evaluation >= 0:
            raise AgreementError(
                f"the ranks disagree on the mode of their modules: training on rank {training}, evaluation on rank "
                f"{evaluation}; call train() or "
                f"eval() on every rank (where a stage is frozen on purpose, leave its outermost module in training mode)"
            )
        return gathered, (training, evaluation)

    def _sum_of_line(self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart], mode: Mode) -> torch.Tensor | None:
        """The sum of the losses of one of several pipelines."""
        tree = self._line
        gathered, modes = self._gather(tree, _LOSSES, losses, parts, mode)
        head = _HEAD.pack(self.ended, *modes)
        if tree.parent is None:
            total, summed = _summed(gathered, parts)
        else:
            self._send(tree, tree.parent, _LOSSES, head + b"".join(data for _, data in sorted(gathered.items())))
            _, summed = self._counted(tree, tree.parent, _LOSSES)
            total = _tensor(summed, *_form(parts))
        self._send_down(tree, _LOSSES, head + summed)
        return total

    def _settle(self, gathered: dict[int, bytes], parts: Mapping[int, LossPart], modes: tuple[int, int]) -> torch.Tensor | None:
        """Learn the outcome and tell it. Interrupts are held back by now: the step may have ended on some ranks already."""
        step, links, tree = self.ended, self.links, self._world
        if tree.parent is None:
            total, summed = _summed(gathered, parts)
        else:
            links.vote(step)
            self._send(tree, tree.parent, _END, _HEAD.pack(step, *modes) + b"".join(data for _, data in sorted(gathered.items())))
            _, summed = self._counted(tree, tree.parent, _END)
            total = _tensor(summed, *_form(parts)) if parts else None
        links.commit(step)
        self._send_down(tree, _END, _HEAD.pack(step, *modes) + summed)
        return total

    def _counted(self, tree: Tree, peer: int, kind: bytes) -> tuple[tuple[int, int], bytes]:
        """The modes and the losses that a peer tells at the end of the step that this rank ends, too."""
        data = self._recv(tree, peer, kind)
        theirs, *modes = _HEAD.unpack_from(data)
        if theirs != self.ended:
            self._compare(f"steps ended: {self.ended}", f"steps ended: {theirs}", peer)
        return (modes[0], modes[1]), data[_HEAD.size :]

    # -- messages along the tree -----------------------------------------------------------

    def _send(self, tree: Tree, peer: int, kind: bytes, data: bytes) -> None:
        self.links.send(peer, tree.channel, kind + data)

    def _send_down(self, tree: Tree, kind: bytes, data: bytes) -> None:
        for child in tree.children.values():
            self._send(tree, child, kind, data)

    def _recv(self, tree: Tree, peer: int, kind: bytes) -> bytes:
        data = self.links.recv(peer, tree.channel)
        if data[:1] != kind:
            raise AgreementError(
                f"the ranks disagree on what comes next: rank {self.links.rank} {_CALLS[kind]}, rank {peer} "
                f"{_CALLS[data[:1]]}; every rank must make the same calls in the same order"
            )
        return data[1:]

    # -- failures --------------------------------------------------------------------------

    def fail(self, failure: Failure) -> BaseException:
        """Publish a failure, begin the next generation, and return the error to raise.

        Returns:
            The cause itself where it arose here outside the program; else the first failure, which rank it was and where.
        """
        cause, rank = failure.cause, self.links.rank
        failure, refused = failure._replace(rank=self.line[failure.rank]), self._unusable is not None
        if isinstance(cause, StepRunning) and not cause.refused:
            cause.refused = True
            return cause
        with self.hold_interrupts() as held:
            held.keep()
            try:
                mine = FailureRecord.of(failure, rank, self.links.suspect)
                first = FailureRecord.read(self.links.publish(mine.write()))
            finally:
                try:
                    self.tear_down()
                finally:
                    self._executing = False
                    if self._running.locked():
                        self._running.release()
        arose_here = first == mine and failure.instruction is None and not isinstance(cause, LinkError)
        if arose_here or refused:
            return cause
        return first.error(rank)

    def close(self) -> None:
        """End all connections: peers that still use this transport raise. Idempotent."""
        with self.hold_interrupts():
            self.links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _differences(one: str, other: str) -> tuple[str, str]:
    """Of two lines, the terms that differ.

    >>> _differences("call 2; f; seed None", "call 3; f; seed (0, 1)")
    ('call 2; seed None', 'call 3; seed (0, 1)')
    """
    pairs = [(a, b) for a, b in zip_longest(one.split("; "), other.split("; "), fillvalue="nothing") if a != b]
    return "; ".join(a for a, _ in pairs), "; ".join(b for _, b in pairs)


def _below(top: int, rank: int) -> bool:
    """Whether a place is in the tree under that of ``top``, or is it.

    >>> [rank for rank in range(15) if _below(2, rank)]
    [2, 5, 6, 11, 12, 13, 14]
    """
    while rank > top:
        rank = (rank - 1) // 2
    return rank == top


def _total(losses: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The sum over the microbatches of all stages, in the order of the stages."""
    return torch.cat([losses[stage] for stage in sorted(losses)]).sum(0) if losses else None


def _summed(gathered: Mapping[int, bytes], parts: Mapping[int, LossPart]) -> tuple[torch.Tensor | None, bytes]:
    """The sum of gathered losses, and its bytes."""
    total = _total({stage: _tensor(gathered[stage], part.leaf.shape, part.leaf.dtype) for stage, part in parts.items()})
    return total, b"" if total is None else ctypes.string_at(total.data_ptr(), total.nbytes)


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
