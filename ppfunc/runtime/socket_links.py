"""Links between processes: TCP connections along a tree and between pairs, and a thread that watches them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .connections import TREE, WATCH, Connections
from .errors import CLOSED, GONE, LinkError
from .failure_tree import FailureTree, Verdict
from .meeting import Meeting
from .rank_tree import RankTree
from .rendezvous import Rendezvous
from .sockets import Address, Connection
from .suspects import Answer, Questions, find_culprit

_PATIENCE = 1.0  # seconds to wait until others have been told
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_LOOK = 0.05  # seconds between looks after a failure, of one that waits for a peer to come
_SPINS = 200  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message

# Lets other processes run that wait for this core. The one that a message is for may be one of them.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class SocketLinks:
    """The :class:`~ppfunc.runtime.links.Links` of a process.

    A thread watches a connection to each neighbour in the tree. Where one ends, or a failure is published, the tree decides
    on it (:class:`~ppfunc.runtime.failure_tree.FailureTree`); no store has to live for that. Another thread brings the ranks
    together (:class:`~ppfunc.runtime.meeting.Meeting`).

    Args:
        rendezvous: where ranks find each other's addresses.
        gone: the text of the failure that a rank is gone.
    """

    def __init__(self, rendezvous: Rendezvous, gone: Callable[[int], str]) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.waiting_on: int | None = None
        self.status: Callable[[], Answer] = Answer  # what else this rank says of itself to those that wait for it
        self.on_failure: Callable[[int], None] = lambda committed: None  # takes the number of steps that were committed before
        self._timeout, self._describe = rendezvous.timeout, gone
        self._tree = RankTree.over(range(self.size), self.rank)
        self._connections = Connections(self.rank, self._tree.neighbours)
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._failures = FailureTree(self._tree, self._tell, self._heed)
        self._questions = Questions(self.rank, self._tree.neighbours, self._tell, lambda: self._answer(self.waiting_on))
        self._cut_off = False  # whether the rank above has not answered
        self._meeting = Meeting(rendezvous, self._tree, self._connections.address, self._tell, self._failures.gone)
        self._connections.start(self)
        if self.size > 1:
            threading.Thread(target=self._meeting.run, args=(self,), name="ppfunc meeting", daemon=True).start()

    @property
    def generation(self) -> int:
        return self._failures.generation

    @property
    def closed(self) -> bool:
        return self._connections.closed

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        self._connections.send(self._stream(peer, channel), self.generation, data)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        stream = self._stream(peer, channel)
        end, spins = time.monotonic() + self._timeout, _SPINS
        self.waiting_on = peer
        while True:
            problem = self._problem(stream)  # looked for before the message, which may have come before it
            if (message := stream.next(self.generation)) is not None:
                self.waiting_on = None
                return message
            if problem is not None:
                raise problem
            if spins:
                spins -= 1
                give_way()
            else:
                left = self._left(peer, end)
                if not stream.ended:  # since it was looked at
                    self._connections.wait(left, stream)

    def _problem(self, stream: Connection) -> Exception | None:
        if self.closed:
            return RuntimeError(CLOSED)
        if self._failures.stopped:
            return LinkError(stream.peer, "failed", "a rank has failed")
        if stream.ended or self._failures.lost(stream.peer):
            return LinkError(stream.peer, "gone", GONE)
        return None

    def _left(self, peer: int, end: float) -> float:
        """Seconds to wait for a peer; raises where none are left."""
        left = end - time.monotonic()
        if left <= 0:
            raise LinkError(peer, "late", f"rank {self.rank} waited for rank {peer}, which has not answered in {self._timeout:g} s")
        return left

    def _stream(self, peer: int, channel: str) -> Connection:
        """A stream; the higher rank of a pair connects to the lower one, that of a tree ahead of time."""
        stream = self._connections.stream(peer, channel)
        if stream.socket is None and peer < self.rank and channel != TREE:
            self._reach(stream)
        return stream

    def _reach(self, stream: Connection) -> None:
        """Connect to a peer once it has come; one that is busy may take its time to answer."""
        peer, end = stream.peer, time.monotonic() + self._timeout
        self.waiting_on = peer
        while stream.socket is None:
            self.check()
            left = self._left(peer, end)
            if peer not in self._meeting.addresses:
                self._connections.wait(min(_LOOK, left))
            elif self._connections.open(stream, self._meeting.addresses[peer]) is False:
                raise LinkError(peer, "gone", GONE)
        self.waiting_on = None

    # -- steps and failures ----------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(CLOSED)
        if self._failures.stopped:
            raise LinkError(-1, "failed", "a rank has failed")
        for neighbour in self._failures.gone:
            raise LinkError(neighbour, "gone", GONE)

    def vote(self, step: int) -> None:
        with self._changed:
            self.check()
            self._failures.vote(step)

    def commit(self, step: int) -> None:
        with self._changed:
            if self.rank == 0:
                self.check()
            self._failures.commit(step)

    def publish(self, failure: str) -> str:
        with self._changed:
            mine = self.generation
            self._failures.publish(failure)
            patience = 0.0 if self._cut_off else _ALONE
            if self.closed or not self._changed.wait_for(lambda: mine in self._failures.verdicts, patience):
                self._failures.decide(mine, failure)  # the ranks above are frozen
            self.waiting_on, self._cut_off = None, False
            return self._failures.notice()

    def await_failure(self, peer: int) -> None:
        """Wait a while for a failure to be published, or to hear that this peer is gone."""
        failures = self._failures
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.generation in failures.verdicts or peer in failures.gone, _PATIENCE)

    def _heed(self, generation: int, verdict: Verdict) -> None:
        self._alert()
        if generation == self.generation:
            self.on_failure(verdict.committed)

    def suspect(self, peer: int) -> tuple[int, str]:
        with self._changed:
            questions, parent = self._questions, self._tree.parent
            questions.ask(self._answer(peer))
            self._changed.wait_for(lambda: len(questions.answers) == self.size or self.generation in self._failures.verdicts, _ANSWERS)
            self._cut_off = parent is not None and parent not in questions.answers
            return find_culprit(self.rank, dict(questions.answers))

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to one that waits. Whatever ``status`` raises, a question must not end the watch."""
        try:
            return self.status()._replace(awaits=awaits)
        except Exception:
            return Answer(awaits)

    # -- what the thread that watches has noticed ------------------------------------------

    def greet(self, peer: int) -> None:
        """Tell a neighbour that has come where the others are, and what has failed before."""
        with self._changed:
            self._meeting.greet(peer)
            self._failures.greet(peer)
            self._alert()

    def hear(self, peer: int, kind: str, *message: Any) -> None:
        with self._changed:
            for part in (self._failures, self._questions, self._meeting):
                part.hear(peer, kind, *message)
            self._alert()

    def lose(self, peer: int) -> None:
        """A rank is gone."""
        with self._changed:
            self._failures.lose(peer, self._describe(peer))
            self._alert()

    def _tell(self, neighbour: int, kind: str, *message: object) -> None:
        self._connections.send(self._connections.stream(neighbour, WATCH), 0, json.dumps([kind, *message]).encode())

    def _alert(self) -> None:
        """Wake all that wait here: something has changed."""
        self._changed.notify_all()
        self._connections.wake()

    # -- and the one that meets the others ----------------------------------------------------

    def join(self, parent: int, address: Address) -> None:
        """Connect to the rank above, or lose it."""
        for channel in (TREE, WATCH):
            stream = self._connections.stream(parent, channel)
            while stream.socket is None and not self.closed:
                if self._connections.open(stream, address) is False:
                    return self.lose(parent)
        self.greet(parent)

    def miss(self, peer: int) -> None:
        """A rank that has not come is gone, unless it has come meanwhile."""
        with self._changed:
            if peer not in self._meeting.addresses:
                self.lose(peer)

    def lose_store(self, server: int) -> None:
        """The store is gone with the rank that serves it, and so is the way to the ranks that have not come."""
        parent, failures = self._tree.parent, self._failures
        with self._changed:
            if server != self.rank:
                failures.report(failures.undecided, self._describe(server))
            if parent is not None and self._connections.stream(parent, WATCH).socket is None:
                failures.decide(failures.undecided, self._describe(server))
                failures.gone.add(parent)
            self._alert()

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once. Idempotent.

        After a failure, once the ranks below have read it: this process may serve the store, and one that has not read it would
        only see that it is gone.
        """
        if not self.closed:
            self._meeting.leave()
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._failures.read_by_all == self._failures.last, _PATIENCE)
            self._connections.closed = True
            self._changed.notify_all()
        self._connections.close()
