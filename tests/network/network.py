"""Carry messages between simulated ranks: each takes a seeded time, and faults strike."""

import signal
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

import torch

from ppfunc._checks import require_one_of
from ppfunc.runtime.control.tree import Verdict
from ppfunc.runtime.values.errors import LinkError
from ppfunc.stage.process import receive
from tests.network.scheduler import Scheduler

KINDS = ("raise", "interrupt", "kill", "freeze", "delay", "drop")


class InjectedError(RuntimeError):
    """The exception of a fault of kind ``"raise"``."""


class RankStopped(Exception):
    """Ends the thread of a rank that was killed, or froze, once all others have ended."""


class Fault(NamedTuple):
    """Something that goes wrong on one rank, once.

    Args:
        kind: one of:

            * ``"raise"``: the operation raises an :class:`InjectedError`, or the next one that may: none does
              while a failure is published, or once the rank cannot fail the step that ends.
            * ``"interrupt"``: a KeyboardInterrupt.
            * ``"kill"``: the rank stops. Each connection delivers all that it has sent, or nothing; then its
              peers notice.
            * ``"freeze"``: the rank stops for ``seconds``; for ever if they are None.
            * ``"delay"``: the next message that it sends takes ``seconds`` more.
            * ``"drop"``: the next message that it sends never arrives, nor do later ones on its connection.
        rank: where.
        at: the operation, counted from 0 on that rank.
        seconds: of virtual time.
    """

    kind: str
    rank: int
    at: int
    seconds: float | None = None


def require_possible(faults: tuple[Fault, ...], ranks: int) -> None:
    """Raise ValueError for a fault that cannot happen."""
    for fault in faults:
        require_one_of("kind", fault.kind, KINDS)
        if not 0 <= fault.rank < ranks or fault.at < 0:
            raise ValueError(f"got {fault}, expected a rank from 0 to {ranks - 1} and an operation from 0 on")
        if (fault.seconds is None) != (fault.kind != "delay") and fault.kind != "freeze":
            raise ValueError(f"got {fault}; seconds go with a delay, and may go with a freeze")


def interrupt() -> None:
    """Send SIGINT to the rank of this thread."""
    receive(signal.default_int_handler, signal.SIGINT, None)


@dataclass(slots=True)
class Member:
    """Holds the state of one rank.

    Args:
        operations: how many it has begun.
        generation: how many failures it has taken notice of.
        heard: of how many failures it has heard.
        lost: peers of which it knows that they are gone.
        waits: the peer that it waits for, and for what.
        due: faults that are to strike.
        voted: the step that it will not fail, while it waits to hear if rank 0 has committed it.
        settling: whether a step that it has voted for or committed has not yet ended here.
        ended: the error of every further operation, where there can be none.
    """

    operations: int = 0
    generation: int = 0
    heard: int = 0
    lost: set[int] = field(default_factory=set)
    waits: tuple[int, str] | None = None
    due: list[Fault] = field(default_factory=list)
    voted: int | None = None
    settling: bool = False
    ended: Exception | None = None


class Pipe:
    """Delivers the messages of one direction of a connection in order, each after a time of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last = 0.0
        self._broken = self._torn = False
        self.under_way = 0
        self.arrived: deque[bytes] = deque()

    def send(self, seconds: float, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` once the message has arrived; never where ``seconds`` is infinite, nor for
        messages after that one.
        """
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

    def __init__(
        self, ranks: int, seed: int, faults: tuple[Fault, ...], timeout: float, latency: float
    ) -> None:
        if ranks < 1:
            raise ValueError(f"got {ranks} ranks, expected at least 1")
        if not (0 < timeout < inf and 0 <= latency < inf):
            raise ValueError(f"got timeout={timeout} and latency={latency}, expected finite seconds")
        require_possible(faults, ranks)
        self.faults, self.timeout, self.latency = faults, timeout, latency
        self.scheduler = Scheduler(seed)
        self.members = [Member() for _ in range(ranks)]
        self.trace: list[str] = []
        self.published: list[Verdict] = []  # by generation
        self.committed = 0  # steps, by rank 0
        # By generation, ranks, number of the operation, and rank: the tensors of every peer.
        self.exchanged: dict[tuple[int, tuple[int, ...], int, int], dict[int, torch.Tensor]] = defaultdict(
            dict
        )
        self._pipes: dict[tuple[int, int, int, str], Pipe] = defaultdict(partial(Pipe, self.scheduler))

    # -- operations ------------------------------------------------------------------------

    def operation(self, rank: int, text: str, *, can_fail: bool = True) -> None:
        """Begin an operation of a rank: its faults strike, then other ranks may run. With ``can_fail=False``
        faults of the kind ``"raise"`` wait.
        """
        member = self.members[rank]
        if member.ended is not None:
            raise member.ended.with_traceback(None)
        member.due += [fault for fault in self.faults if (fault.rank, fault.at) == (rank, member.operations)]
        self.log(f"rank {rank}.{member.operations} {text}")
        member.operations += 1
        later = {"delay", "drop"} if can_fail and not member.settling else {"delay", "drop", "raise"}
        for fault in [f for f in member.due if f.kind not in later]:
            member.due.remove(fault)
            self._strike(rank, fault)
        self.scheduler.wait(rank)

    def log(self, text: str) -> None:
        self.trace.append(f"{self.scheduler.now:.6f} {text}")

    def wait(self, rank: int, peer: int, text: str, ready: Callable[[], bool], pipe: Pipe) -> None:
        """Wait for a peer, or for what it has sent on a pipe and is still under way.

        Raises:
            LinkError: it is in vain.
        """
        member = self.members[rank]
        member.waits = peer, text
        deadline = self.scheduler.now + self.timeout
        self.scheduler.wait(rank, lambda: ready() or self.trouble(rank, peer, pipe) is not None, deadline)
        if ready():
            member.waits = None
            return
        error = self.trouble(rank, peer, pipe) or LinkError(peer, "late", self._lateness(rank))
        member.waits = None
        self.log(f"rank {rank} gives up: {error}")
        raise error

    def trouble(self, rank: int, peer: int, pipe: Pipe | None = None) -> LinkError | None:
        """Return why a rank need not wait for a peer, as far as it knows. A peer that is gone is no reason
        while its messages are under way on the pipe.
        """
        member = self.members[rank]
        if member.heard > member.generation and self.published[member.generation].stops(member.voted):
            return LinkError(peer, "failed", "a failure has been published")
        if peer in member.lost and not (pipe is not None and pipe.under_way):
            return LinkError(peer, "gone")
        return None

    def _lateness(self, rank: int) -> str:
        waits = self.waits(rank)
        told = "".join(f"; rank {waiting} waits for {text} of rank {peer}" for waiting, peer, text in waits)
        circle = waits[-1][1] in (waiting for waiting, _, _ in waits)
        deadlock = "; a deadlock" if circle and not self.scheduler.events else ""
        return f"rank {waits[0][1]} has not answered within {self.timeout:g} s{deadlock}{told}"

    def waits(self, rank: int) -> list[tuple[int, int, str]]:
        """List ``(rank, peer, text)``: who waits for whom and for what, from ``rank`` on, until it ends."""
        chain: list[tuple[int, int, str]] = []
        while (awaited := self.members[rank].waits) is not None and rank not in (
            waiting for waiting, _, _ in chain
        ):
            chain.append((rank, *awaited))
            rank = awaited[0]
        return chain

    # -- faults ----------------------------------------------------------------------------

    def delay(self, rank: int) -> float:
        """Return the seconds that the next message of a rank takes; infinite if it never arrives."""
        member = self.members[rank]
        seconds = self.scheduler.random.uniform(0, self.latency)
        for fault in [f for f in member.due if f.kind in ("delay", "drop")]:
            member.due.remove(fault)
            self.log(f"rank {rank} {fault.kind}")
            seconds += inf if fault.seconds is None else fault.seconds
        return seconds

    def soon(self, event: Callable[[], None]) -> None:
        """Let an event happen after a seeded delay."""
        self.scheduler.after(self.scheduler.random.uniform(0, self.latency), event)

    def _strike(self, rank: int, fault: Fault) -> None:
        if self.scheduler.random.random() < 0.5:  # in the middle of the operation
            self._sleep(rank, self.scheduler.random.uniform(0, 3 * self.latency))
        self.log(f"rank {rank} {fault.kind}")
        if fault.kind == "raise":
            raise InjectedError(f"operation {fault.at} of rank {rank} fails")
        if fault.kind == "interrupt":
            interrupt()
            return
        if fault.kind == "kill":  # what it has sent is lost on half of its connections
            for (_, sender, receiver, channel), pipe in self._pipes.items():
                if sender == rank and self.scheduler.random.random() < 0.5:
                    if pipe.under_way:
                        self.log(f"rank {rank} loses {pipe.under_way} messages to {receiver} ({channel})")
                    pipe.tear()
            self.close(rank)
        if fault.seconds is None:
            self.scheduler.wait(rank, lambda: self.scheduler.over)
            self.members[rank].ended = error = RankStopped(f"rank {rank} has stopped")
            raise error
        else:
            self._sleep(rank, fault.seconds)

    def _sleep(self, rank: int, seconds: float) -> None:
        until = self.scheduler.now + seconds
        self.scheduler.after(seconds, lambda: None)
        self.scheduler.wait(rank, lambda: self.scheduler.now >= until)

    def close(self, rank: int) -> None:
        """End the connections of a rank; peers notice later, each at its time."""
        for member in self.members:
            if member is not self.members[rank]:
                self.soon(partial(member.lost.add, rank))

    # -- messages ----------------------------------------------------------------

    def pipe(self, generation: int, sender: int, receiver: int, channel: str) -> Pipe:
        """Return a connection; each generation has its own, so that earlier messages are dropped."""
        return self._pipes[generation, sender, receiver, channel]
