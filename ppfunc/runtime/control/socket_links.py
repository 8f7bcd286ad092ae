"""Links between processes, along a tree and between pairs, and the failures that are published over them."""

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from ppfunc.stage.interrupts import act_on_interrupts

from ..errors import CLOSED, GONE, FailureRecord, LinkError
from .connections import WATCH, Connections
from .failure_tree import FailureTree, Verdict
from .rendezvous import Rendezvous
from .sockets import Address, Stream
from .suspects import Answer, find_culprit
from .tree import RankTree

_PATIENCE = 1.0  # seconds for a failure to arrive
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_FRESH = 0.5  # seconds for which an answer holds
_SPINS = 200  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_LOOK = 0.02  # seconds between looks whether a signal has come, or a rank has failed

# Yield this core to waiting processes. The receiver of a message may be one of them.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class SocketLinks(Connections):
    """Implements :class:`~ppfunc.runtime.control.tree.Links` of a process by sockets.

    When the watched connection of a neighbour in the tree ends, or a failure is published,
    :class:`~.failure_tree.FailureTree` decides which failure is the first. The store need not live for that:
    only the address of the rank above is read from it, the others travel along the tree.

    Args:
        rendezvous: where ranks find each other.

    Attributes:
        waiting_on: the rank that this one waits for.
        status: describes the rest of this rank to those that wait for it.
        on_failure: called with the number of steps that were committed before a failure.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.size = rendezvous.size
        self._rendezvous, self._timeout = rendezvous, rendezvous.timeout
        self._tree = RankTree.over(range(self.size), rendezvous.rank)
        super().__init__(rendezvous.rank, self._tree.neighbours, self._timeout)
        self.waiting_on: int | None = None
        self.status: Callable[[], Answer] = Answer
        self.on_failure: Callable[[int], None] = lambda committed: None
        self._failures = FailureTree(self._tree, self._send, self._heed)
        self._answers: dict[int, tuple[float, Answer]] = {}  # by rank, and when
        self._asked = 0.0  # when all were asked last
        self._left: set[int] = set()  # neighbours that need no rank any more
        self._cut_off = False  # whether the rank above has not answered
        self._abandoned: str | None = None  # the failure that has ended the meeting
        rendezvous.publish(self.address)
        try:
            for work in (self.accept, self._meet) if self.size > 1 else ():
                threading.Thread(target=work, name=f"ppfunc links {work.__name__}", daemon=True).start()
        except RuntimeError:  # there can be no more threads
            super().end()
            raise

    @property
    def generation(self) -> int:
        return self._failures.generation

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        self.stream(peer).send(self.generation, channel.encode(), data)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        stream, name = self.stream(peer), channel.encode()
        end, spins = time.monotonic() + self._timeout, _SPINS
        self.waiting_on = peer
        while True:
            problem = self._problem(stream)  # looked for before the message, which may have come before it
            if (message := stream.next(self.generation, name)) is not None:
                self.waiting_on = None
                return message
            if problem is not None:
                raise problem
            if spins:
                spins -= 1
                give_way()
                continue
            left = end - time.monotonic()
            if left <= 0:
                waited = f"rank {self.rank} waited for rank {peer}, which has not answered"
                raise LinkError(peer, "late", f"{waited} in {self._timeout:g} s")
            self._wait(stream, min(left, _LOOK))

    def _wait(self, stream: Stream, seconds: float) -> None:
        act_on_interrupts()
        if stream.socket is not None:
            stream.wait(seconds)
        else:
            with self.changed:
                self.changed.wait(seconds)
        act_on_interrupts()

    def _problem(self, stream: Stream) -> Exception | None:
        if self.closed:
            return RuntimeError(CLOSED)
        if self._failed:
            return LinkError(stream.peer, "failed", "a rank has failed")
        if stream.ended or self._failures.lost(stream.peer):
            return LinkError(stream.peer, "gone", self._why(stream))
        return None

    @property
    def _failed(self) -> bool:
        return self._failures.stopped or self._abandoned is not None

    def _why(self, stream: Stream) -> str:
        if stream.link_error is None:
            return GONE
        return f"the link between it and rank {self.rank} has failed ({stream.link_error.strerror})"

    # -- steps and failures ----------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(CLOSED)
        if self._failed:
            raise LinkError(-1, "failed", "a rank has failed")
        for neighbour in self._failures.gone:
            raise LinkError(neighbour, "gone", self._why(self.stream(neighbour, True)))

    def vote(self, step: int) -> None:
        with self.changed:
            self.check()
            self._failures.vote(step)

    def commit(self, step: int) -> None:
        with self.changed:
            if self.rank == 0:
                self.check()
            self._failures.commit(step)

    def publish(self, failure: str) -> str:
        with self.changed:
            mine, failure = self.generation, self._abandoned or failure
            self._failures.publish(failure)
            patience = 0.0 if self.closed or self._cut_off or self._abandoned else _ALONE
            if not self.changed.wait_for(lambda: mine in self._failures.verdicts, patience):
                self._failures.decide(mine, failure)  # the ranks above are frozen
            self.waiting_on, self._cut_off = None, False
            return self._failures.notice()

    def await_failure(self, peer: int) -> None:
        """Wait a while for a failure to be published, or for this peer to be gone."""
        failures = self._failures
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or self.generation in failures.verdicts or peer in failures.gone,
                _PATIENCE,
            )

    def _heed(self, generation: int, verdict: Verdict) -> None:
        self.changed.notify_all()
        if generation == self.generation:
            self.on_failure(verdict.committed)

    def suspect(self, peer: int) -> tuple[int, str]:
        with self.changed:
            parent, since = self._tree.parent, time.monotonic() - _FRESH

            def fresh() -> dict[int, Answer]:
                return {rank: answer for rank, (at, answer) in self._answers.items() if at >= since}

            self._ask_all()
            self.changed.wait_for(
                lambda: len(fresh()) == self.size - 1 or self.generation in self._failures.verdicts, _ANSWERS
            )
            answers = fresh()
            self._cut_off = parent is not None and parent not in answers
            culprit, state = find_culprit(self.rank, answers | {self.rank: self._answer(peer)})
            if culprit not in answers and culprit not in self.addresses:
                state = f"rank {culprit} has not come"
            return culprit, state

    def _ask_all(self, but: int | None = None) -> None:
        """Ask all ranks for their states, and send them that of this one, unless they were just asked."""
        now = time.monotonic()
        if now > self._asked + _FRESH / 2:
            self._asked = now
            self._send_all("whom", but=but)
            self._send_all("is", self.rank, self._answer(self.waiting_on))

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to one that waits. Whatever ``status`` raises, the watch goes on."""
        cut = [peer for peer in self._tree.neighbours if self.stream(peer, True).cut]
        try:
            return self.status()._replace(awaits=awaits, cut=cut)
        except Exception:
            return Answer(awaits, cut=cut)

    # -- messages of neighbours, in threads ---------------------------------------------------

    def welcome(self, peer: int) -> None:
        with self.changed:
            self._send(peer, "at", self.addresses)
            self._failures.inform(peer)

    def receive(self, peer: int, message: bytes) -> None:
        kind, *facts = json.loads(message)
        with self.changed:
            if kind == "at":
                self._learn({int(rank): Address(*address) for rank, address in facts[0].items()}, peer)
            elif kind == "whom":
                self._ask_all(but=peer)
            elif kind == "is":
                self._answers[facts[0]] = time.monotonic(), Answer(*facts[1])
                self._send_all(kind, *facts, but=peer)
            elif kind == "leaves":
                self._left.add(peer)
            else:
                self._failures.receive(kind, *facts)
            self.changed.notify_all()

    def note_end(self, stream: Stream) -> None:
        with self.changed:
            neighbour = stream.peer in self._tree.neighbours and stream.peer not in self._left
            if neighbour and not self.closed:
                self._note_gone(stream.peer)
            self.changed.notify_all()

    def _note_gone(self, peer: int) -> None:
        self._failures.note_gone(peer, self._record(peer, self._why(self.stream(peer, True))))

    def _record(self, peer: int, reason: str = GONE) -> str:
        return FailureRecord(peer, None, None, reason, self.rank, False).write()

    def _learn(self, addresses: dict[int, Address], but: int | None = None) -> None:
        """Store new addresses, pass them on, and connect to those that are needed."""
        new = {rank: address for rank, address in addresses.items() if rank not in self.addresses}
        if new:
            self.addresses |= new
            self._send_all("at", new, but=but)
            self.dial()

    def _send_all(self, kind: str, *facts: object, but: int | None = None) -> None:
        for neighbour in self._tree.neighbours:
            if neighbour != but:
                self._send(neighbour, kind, *facts)

    def _send(self, neighbour: int, kind: str, *facts: object) -> None:
        self.stream(neighbour, True).send(0, WATCH, json.dumps([kind, *facts]).encode())

    # -- how the ranks meet, and part ------------------------------------------------------

    def _meet(self) -> None:
        """Read addresses and failures from the store, in a thread: a stopped store blocks that alone."""
        for kind, fact in self._rendezvous.look(self._tree.parent, self._missing):
            with self.changed:
                if kind == "at":
                    self._learn({fact[0]: fact[1]})
                elif kind == "abandoned":
                    self._abandoned = fact
                    self._failures.decide(self.generation, fact)
                elif kind == "lost":
                    self._lose_store(fact)
                elif fact not in self.addresses:
                    self._note_gone(fact)
                self.changed.notify_all()
        if self._met:
            self._rendezvous.forget()

    @property
    def _met(self) -> bool:
        return len(self.addresses) == self.size and self.connected

    def _missing(self) -> list[int] | None:
        """Return the ranks to look after that have not come: of all at rank 0. None after the meeting."""
        if self.closed or self._met:
            return None
        ranks = self._tree.members[1:] if self.rank == 0 else self._tree.neighbours
        return [rank for rank in ranks if rank not in self.addresses]

    def _lose_store(self, server: int) -> None:
        """Handle the loss of the store: ranks that have not connected can no longer be found."""
        parent, failures = self._tree.parent, self._failures
        if server != self.rank:
            failures.report(failures.undecided, self._record(server))
        if parent is not None and self.stream(parent, True).socket is None:
            failures.decide(failures.undecided, self._record(server))
            failures.gone.add(parent)

    def close(self) -> None:
        """End all connections when messages have left, so that peers that wait raise at once. Idempotent."""
        self.drain()
        self.end()

    def leave(self) -> None:
        """End all connections when this rank needs no other one. Sent messages still arrive."""
        if self._failures.verdicts:
            return self.close()
        with self.changed:
            self._send_all("leaves")
        self.drain()
        self._rendezvous.forget()
        super().end()

    def end(self) -> None:
        """End all connections at once. Ranks that have not connected yet find the failure in the store."""
        if not self.closed and not self._met:
            self.closed = True
            missing = [rank for rank in range(self.size) if rank not in self.addresses]
            verdicts = self._failures.verdicts
            failure = verdicts[max(verdicts)].failure if verdicts else self._record(self.rank)
            self._rendezvous.abandon(failure, missing if FailureRecord.read(failure).rank in missing else [])
        super().end()
