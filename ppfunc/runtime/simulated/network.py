"""Carries messages between simulated ranks: each takes a seeded time, and faults strike."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple

from ..control import LinkError
from .scheduler import Scheduler

DATA = "data "  # how the channels begin that carry tensors
KINDS = ("raise", "interrupt", "kill", "freeze", "delay", "drop")


class InjectedError(RuntimeError):
    """The exception of a fault of kind ``"raise"``."""


class RankStopped(Exception):
    """Ends the thread of a rank that was killed, or froze, once all others have ended."""


class Fault(NamedTuple):
    """Something that goes wrong on one rank, once.

    Args:
        kind: ``"raise"``: an :class:`InjectedError` out of the operation; once the rank cannot fail the step that ends,
            out of the first operation after it. ``"interrupt"``: a KeyboardInterrupt. ``"kill"``: the rank stops; of what
            it has sent, each connection delivers all or nothing, then its peers notice. ``"freeze"``: the rank stops for
            ``seconds``, for ever where there are none. ``"delay"``: the next message that it sends takes ``seconds``
            more. ``"drop"``: that message never arrives, nor do those after it on its connection.
        rank: where.
        at: the operation, counted from 0 on that rank.
        seconds: of virtual time.
    """

    kind: str
    rank: int
    at: int
    seconds: float | None = None


class Published(NamedTuple):
    """A failure, and how many steps rank 0 had committed before it."""

    text: str
    committed: int


@dataclass(slots=True)
class Member:
    """The state of one rank.

    Args:
        operations: how many it has begun.
        generation: how many failures it has taken notice of.
        heard: of how many failures it has heard.
        lost: why a peer will send nothing more, by rank.
        waits: the peer that it waits for, and for what.
        due: faults that are to strike.
        voted: the last step of which it has said that it will not fail it.
        voting: whether it waits to hear if rank 0 has committed that step.
        settling: whether that step has not yet ended here.
        stopped: whether it has been killed, froze for ever or has closed its transport.
    """

    operations: int = 0
    generation: int = 0
    heard: int = 0
    lost: dict[int, LinkError] = field(default_factory=dict)
    waits: tuple[int, str] | None = None
    due: list[Fault] = field(default_factory=list)
    voted: int = -1
    voting: bool = False
    settling: bool = False
    stopped: bool = False


class Stream:
    """One direction of a connection: delivers in order what is sent, each message after a time of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last = 0.0
        self._broken = self._torn = False
        self.under_way = 0
        self.arrived: deque[bytes] = deque()

    def send(self, seconds: float, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` once the message has arrived; never where ``seconds`` is infinite, nor for messages after that one."""
        self._broken |= seconds == inf
        if not (self._broken or self._torn):
            self._last = max(self._last, self._scheduler.now + seconds)
            self.under_way += 1
            self._scheduler.after(self._last - self._scheduler.now, partial(self._arrive, deliver))

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if not self._torn:
            self.under_way -= 1
            deliver()

    def tear(self) -> None:
        """Lose what is under way, and what will be sent."""
        self._torn, self.under_way = True, 0


class Network:
    """Owns the messages, failures and clock of a simulation. Arguments as of :class:`Simulated`."""

    def __init__(self, ranks: int, seed: int, faults: tuple[Fault, ...], timeout: float, latency: float) -> None:
        _require(ranks, faults, timeout, latency)
        self.faults, self.timeout, self.latency = faults, timeout, latency
        self.scheduler = Scheduler(seed)
        self.members = [Member() for _ in range(ranks)]
        self.trace: list[str] = []
        self.published: list[Published] = []  # by generation
        self.committed = 0  # steps, by rank 0
        self._streams: dict[tuple[Any, ...], Stream] = defaultdict(partial(Stream, self.scheduler))

    # -- operations ------------------------------------------------------------------------

    def operation(self, rank: int, text: str) -> None:
        """Begin an operation of a rank: faults strike, then others may run."""
        member = self.members[rank]
        if member.stopped:
            raise RankStopped(f"rank {rank} has stopped, or closed its transport")
        member.due += [fault for fault in self.faults if (fault.rank, fault.at) == (rank, member.operations)]
        self.log(f"rank {rank}.{member.operations} {text}")
        member.operations += 1
        for fault in [f for f in member.due if f.kind not in ("delay", "drop") and not (f.kind == "raise" and member.settling)]:
            member.due.remove(fault)
            self._strike(rank, fault)
        self.scheduler.wait(rank)

    def log(self, text: str) -> None:
        self.trace.append(f"{self.scheduler.now:.6f} {text}")

    def wait(self, rank: int, peer: int, text: str, ready: Callable[[], bool], stream: Stream) -> None:
        """Wait for a peer, or for what it has sent on a stream and is still under way.

        Raises:
            LinkError: it is in vain.
        """
        member = self.members[rank]
        member.waits = peer, text
        deadline = self.scheduler.now + self.timeout
        self.scheduler.wait(rank, lambda: ready() or self.trouble(rank, peer, member.voting, stream) is not None, deadline)
        error = self.trouble(rank, peer, member.voting, stream) or LinkError(peer, "late", self._lateness(rank))
        member.waits = None
        if not ready():
            self.log(f"rank {rank} gives up: {error}")
            raise error

    def trouble(self, rank: int, peer: int, excused: bool, stream: Stream | None = None) -> LinkError | None:
        """Why a rank need not go on with a peer, as far as it knows.

        Args:
            excused: whether a failure after the step that the rank has voted for was committed is no reason.
            stream: where what is under way is a reason to go on.
        """
        member = self.members[rank]
        if member.heard > member.generation:
            if not (excused and self.published[member.generation].committed > member.voted):
                return LinkError(peer, "failed", "a failure has been published")
        return None if stream is not None and stream.under_way else member.lost.get(peer)

    def _lateness(self, rank: int) -> str:
        chain, waits = self._chain(rank)
        told = "".join(f"; rank {r} waits for {self.members[r].waits[1]} of rank {p}" for r, p in zip(chain, waits, strict=False))
        deadlock = "; a deadlock" if len(waits) == len(chain) else ""
        return f"rank {waits[0]} has not answered within {self.timeout:g} s{deadlock}{told}"

    def _chain(self, rank: int) -> tuple[list[int], list[int]]:
        """The ranks of which each waits for the next, and those they wait for; as many where it is a circle."""
        chain, waits = [rank], []
        while (at := self.members[chain[-1]].waits) is not None:
            waits.append(at[0])
            if at[0] in chain:
                break
            chain.append(at[0])
        return chain, waits

    def suspect(self, peer: int) -> int:
        """The rank that holds up a peer."""
        return self._chain(peer)[0][-1]

    # -- faults ----------------------------------------------------------------------------

    def delay(self, rank: int) -> float:
        """Seconds that the next message of a rank takes; infinite where it never arrives."""
        member = self.members[rank]
        seconds = self.scheduler.random.uniform(0, self.latency)
        for fault in [f for f in member.due if f.kind in ("delay", "drop")]:
            member.due.remove(fault)
            self.log(f"rank {rank} {fault.kind}")
            seconds += inf if fault.kind == "drop" else fault.seconds
        return seconds

    def soon(self, event: Callable[[], None]) -> None:
        """Let an event happen after a seeded delay."""
        self.scheduler.after(self.scheduler.random.uniform(0, self.latency), event)

    def _strike(self, rank: int, fault: Fault) -> None:
        if self.scheduler.random.random() < 0.5:  # in the middle of the operation
            self._sleep(rank, self.scheduler.random.uniform(0, 3 * self.latency))
        self.log(f"rank {rank} {fault.kind}")
        match fault.kind:
            case "raise":
                raise InjectedError(f"operation {fault.at} of rank {rank} fails")
            case "interrupt":
                raise KeyboardInterrupt
            case "kill":
                self._end(rank, "gone", "its process is gone")
                self._stop(rank)
            case "freeze" if fault.seconds is None:
                self._stop(rank)
            case "freeze":
                self._sleep(rank, fault.seconds)

    def _sleep(self, rank: int, seconds: float) -> None:
        until = self.scheduler.now + seconds
        self.scheduler.after(seconds, lambda: None)
        self.scheduler.wait(rank, lambda: self.scheduler.now >= until)

    def _stop(self, rank: int) -> None:
        self.scheduler.wait(rank, lambda: self.scheduler.over)
        self.members[rank].stopped = True
        raise RankStopped(f"rank {rank} has stopped")

    def _end(self, rank: int, kind: str, reason: str) -> None:
        """End the connections of a rank; peers notice later, each at its time."""
        if kind == "gone":
            for (_, sender, *_), stream in self._streams.items():
                if sender == rank and self.scheduler.random.random() < 0.5:
                    stream.tear()
        error = LinkError(rank, kind, f"rank {rank}: {reason}")
        for member in self.members:
            if member is not self.members[rank]:
                self.soon(partial(member.lost.setdefault, rank, error))

    def close(self, rank: int) -> None:
        """Close the connections of a rank; what it has sent still arrives."""
        self._end(rank, "closed", "it has closed its transport")
        self.members[rank].stopped = True

    # -- messages and failures ----------------------------------------------------------------

    def stream(self, rank: int, sender: int, receiver: int, channel: str) -> Stream:
        """The connection that a rank knows by this name; after a failure it is another."""
        return self._streams[self.members[rank].generation, sender, receiver, channel]

    def commit(self, step: int) -> None:
        """Commit a step on rank 0.

        Raises:
            LinkError: a failure has been published, whether rank 0 has heard of it or not.
        """
        root = self.members[0]
        if len(self.published) > root.generation:
            raise LinkError(0, "failed", "a failure has been published")
        root.voted, root.settling, self.committed = step, True, step + 1

    def publish(self, rank: int, text: str) -> str:
        """Publish a failure, lose the data that is under way, and begin the next generation."""
        member = self.members[rank]
        generation = member.generation
        if generation == len(self.published):
            self.published.append(Published(text, self.committed))
            for peer in self.members:
                self.soon(partial(self._hear, peer, generation + 1))
        for (at, sender, receiver, channel), stream in self._streams.items():
            if at == generation and rank in (sender, receiver) and channel.startswith(DATA):
                stream.tear()
        member.generation = generation + 1
        return self.published[generation].text

    def _hear(self, member: Member, failures: int) -> None:
        member.heard = max(member.heard, failures)


def _require(ranks: int, faults: tuple[Fault, ...], timeout: float, latency: float) -> None:
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks, expected at least 1")
    if not (0 < timeout < inf and 0 <= latency < inf):
        raise ValueError(f"got timeout={timeout} and latency={latency}, expected finite seconds")
    for fault in faults:
        if fault.kind not in KINDS:
            raise ValueError(f"got a fault of kind {fault.kind!r}, expected one of {', '.join(KINDS)}")
        if not 0 <= fault.rank < ranks or fault.at < 0:
            raise ValueError(f"got {fault}, expected a rank from 0 to {ranks - 1} and an operation from 0 on")
        if (fault.seconds is None) != (fault.kind != "delay") and fault.kind != "freeze":
            raise ValueError(f"got {fault}; seconds go with a delay, and may go with a freeze")
