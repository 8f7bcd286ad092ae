"""Links between processes: TCP connections along a tree and between pairs, and a thread that watches them."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from .errors import GONE, LinkError
from .interrupts import let_interrupts
from .rendezvous import Rendezvous
from .sockets import Address, Connection, connect, hosts, listen, welcome

_WATCHED = ("watch", "tree")  # channels of the tree, opened ahead of time
_PATIENCE = 1.0  # seconds to wait for the ranks above to decide
_ANSWERS = 0.5  # seconds to wait for the ranks that live to say whom they wait for
_PROBE = 0.2  # seconds between looks after neighbours that have not come
_SPINS = 200  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_KEPT = 16  # failures that a rank which comes late hears of

# Lets other processes run that wait for this core. The one that a message is for may be one of them.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class SocketLinks:
    """The :class:`~ppfunc.runtime.control.Links` of a process.

    A thread watches a connection to each neighbour in the tree. Where one ends, or a failure is published, it tells the
    highest rank of the tree that can be reached, which takes the first as the failure of this generation and tells it
    down. No store has to live for that.

    Args:
        rendezvous: where ranks find each other's addresses.
        gone: the text of the failure that a rank is gone.
    """

    def __init__(self, rendezvous: Rendezvous, gone: Callable[[int], str]) -> None:
        self.rank, self.size, self.generation = rendezvous.rank, rendezvous.size, 0
        self.waiting_on: int | None = None
        self._rendezvous, self._describe = rendezvous, gone
        self._parent = None if self.rank == 0 else (self.rank - 1) // 2
        self._children = [child for child in (2 * self.rank + 1, 2 * self.rank + 2) if child < self.size]
        self._neighbours = self._children if self._parent is None else [self._parent, *self._children]
        self._streams: dict[tuple[int, str], Connection] = {}
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._decided: dict[int, tuple[int, str]] = {}  # by generation: steps committed before, failure
        self._deferred: list[tuple[int, str]] = []  # failures that came between a vote and its outcome
        self._gone: set[int] = set()
        self._voted: int | None = None
        self._committed = 0
        self._asked: dict[str, int] = {}  # questions of others, and the neighbour that brought each
        self._answers: dict[int, int | None] = {}  # by rank: whom it waits for
        self._questions = 0
        self._closed = False
        self._woken, self._wake = socket.socketpair()  # for the thread that waits in recv
        self._noted, self._note = socket.socketpair()  # for the thread that watches
        for end in (self._woken, self._wake, self._noted, self._note):
            end.setblocking(False)
        for channel in _WATCHED:
            self._streams |= {(neighbour, channel): Connection(neighbour, channel) for neighbour in self._neighbours}
        self._listener = listen()
        self._address = Address(hosts(), self._listener.getsockname()[1], secrets.token_hex(16))
        rendezvous.write(f"address/{self.rank}", json.dumps(self._address))
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._watch, name="ppfunc links", daemon=True)
        self._thread.start()

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        if self._stream(peer, channel).send(self.generation, data):
            _ring(self._note)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        stream = self._stream(peer, channel)
        end, spins = time.monotonic() + self._rendezvous.timeout, _SPINS
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
                self._sleep(stream, end)

    def _problem(self, stream: Connection) -> LinkError | None:
        decided = self._decided.get(self.generation)
        if decided is not None and (self._voted is None or decided[0] <= self._voted):
            return LinkError(stream.peer, "failed", "a rank has failed")
        if stream.ended or (self._voted is None and stream.peer in self._gone):
            return LinkError(stream.peer, "gone", GONE)
        return None

    def _sleep(self, stream: Connection, end: float) -> None:
        """Wait until there is something to look at."""
        left = end - time.monotonic()
        if left <= 0:
            limit = self._rendezvous.timeout
            raise LinkError(stream.peer, "late", f"rank {self.rank} waited for rank {stream.peer}, which has not answered in {limit:g} s")
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if stream.socket is not None and not stream.ended:
            poll.register(stream.socket, select.POLLIN)
        with let_interrupts():
            poll.poll(1000 * left)
        with suppress(BlockingIOError):
            self._woken.recv(1 << 12)

    def _stream(self, peer: int, channel: str) -> Connection:
        """A stream; the higher rank of a pair connects to the lower one."""
        stream = self._streams.get((peer, channel))
        if stream is None:
            with self._changed:
                stream = self._streams.setdefault((peer, channel), Connection(peer, channel))
        if stream.socket is None and peer < self.rank and channel not in _WATCHED:
            self.waiting_on = peer
            if not self._connect(stream, self._rendezvous.wait(f"address/{peer}", peer, self.check)):
                raise LinkError(peer, "gone", GONE)
            self.waiting_on = None
        return stream

    # -- steps -----------------------------------------------------------------------------

    def check(self, peer: int | None = None) -> None:
        """Raise where a failure has been published, or this peer is gone, or any neighbour where none is given."""
        if self._closed:
            raise RuntimeError("got a call on a P2P() that has been closed; make a new one, on every rank")
        if self.generation in self._decided:
            raise LinkError(-1, "failed", "a rank has failed")
        for neighbour in self._gone if peer is None else self._gone & {peer}:
            raise LinkError(neighbour, "gone", GONE)

    def begin(self, step: int) -> None:
        self.check()

    def vote(self, step: int) -> None:
        with self._changed:
            self.check()
            self._voted = step

    def commit(self, step: int) -> None:
        with self._changed:
            if self._parent is None:
                self.check()
            self._committed = step + 1
            self._settle()

    def _settle(self) -> None:
        """The outcome of a vote is known: take up what has failed meanwhile."""
        self._voted = None
        deferred, self._deferred = self._deferred, []
        for generation, failure in deferred:
            self._report(generation, failure)

    # -- failures --------------------------------------------------------------------------

    def publish(self, failure: str) -> str:
        with self._changed:
            mine = self.generation
            self._voted, self._deferred = None, []
            self._report(mine, failure)
            if self._closed or not self._changed.wait_for(lambda: mine in self._decided, _PATIENCE):
                self._decide(mine, self._committed, failure)  # the ranks above are frozen
            self.waiting_on = None
            self.generation += 1
            return self._decided[mine][1]

    def await_failure(self) -> None:
        """Wait a while for a failure to be published."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.generation in self._decided, _PATIENCE)

    def _report(self, generation: int, failure: str) -> None:
        """Bring a failure to the rank that decides."""
        if generation in self._decided:
            return
        if self._parent is not None and self._parent not in self._gone:
            self._tell(self._parent, "failed", generation, failure)
        elif self._voted is not None:
            self._deferred.append((generation, failure))
        else:
            self._decide(generation, self._committed, failure)

    def _decide(self, generation: int, committed: int, failure: str) -> None:
        if generation not in self._decided:
            self._decided[generation] = committed, failure
            self._decided.pop(min(self.generation, generation) - _KEPT, None)
            for child in self._children:
                self._tell(child, "decided", generation, committed, failure)
            self._changed.notify_all()
            _ring(self._wake)

    def suspect(self, peer: int) -> int:
        with self._changed:
            self._questions += 1
            self._answers = {self.rank: peer}
            for neighbour in self._neighbours:
                self._tell(neighbour, "whom", f"{self.rank}.{self._questions}")
            self._changed.wait_for(lambda: len(self._answers) == self.size, _ANSWERS)
            return _culprit(self.rank, dict(self._answers))

    # -- the thread that watches -----------------------------------------------------------

    def _tell(self, peer: int, *message: object) -> None:
        if self._stream(peer, "watch").send(0, json.dumps(message).encode()):
            _ring(self._note)

    def _hear(self, peer: int, kind: str, *message: Any) -> None:
        if kind == "failed":
            self._report(*message)
        elif kind == "decided":
            self._decide(*message)
        elif kind == "whom" and message[0] not in self._asked:
            (question,) = message
            self._asked[question] = peer
            self._tell(peer, "for", question, self.rank, self.waiting_on)
            for neighbour in self._neighbours:
                if neighbour != peer:
                    self._tell(neighbour, "whom", question)
        elif kind == "for":
            question, rank, awaited = message
            if question == f"{self.rank}.{self._questions}":
                self._answers[rank] = awaited
                self._changed.notify_all()
            elif question in self._asked:
                self._tell(self._asked[question], "for", question, rank, awaited)

    def _lose(self, peer: int) -> None:
        """A neighbour is gone, which is a failure of the first generation that has none."""
        self._gone.add(peer)
        self._report(self._undecided, self._describe(peer))
        _ring(self._wake)

    @property
    def _undecided(self) -> int:
        """The first generation that has no failure."""
        return max([self.generation, *(generation + 1 for generation in self._decided)])

    def _watch(self) -> None:
        greeting: dict[int, socket.socket] = {}
        try:
            self._watch_until_closed(greeting)
        finally:  # a watch that fails must not leave neighbours waiting
            self._closed = True
            self._let_go(greeting)

    def _watch_until_closed(self, greeting: dict[int, socket.socket]) -> None:
        pause, probed = 0.001, time.monotonic()
        while not self._closed:
            poll = select.poll()
            for reader in (self._listener, self._noted, *greeting.values()):
                poll.register(reader, select.POLLIN)
            with self._changed:
                streams = {s.fileno: s for s in self._streams.values() if s.socket is not None and not s.ended}
            for fd, stream in streams.items():
                poll.register(fd, select.POLLIN * (stream.channel == "watch") | select.POLLOUT * stream.backlog)
            missing = [n for n in self._neighbours if n not in self._gone and self._streams[n, "watch"].socket is None]
            for fd, _ in poll.poll(1000 * pause if missing else None):
                self._serve(fd, streams, greeting)
            if self._parent in missing:
                self._seek_parent()
            if missing and time.monotonic() - probed > _PROBE:
                self._probe(missing)
                probed = time.monotonic()
            pause = min(2 * pause, 0.05)

    def _serve(self, fd: int, streams: Mapping[int, Connection], greeting: dict[int, socket.socket]) -> None:
        """Do what a descriptor is ready for."""
        if fd == self._listener.fileno():
            with suppress(OSError):  # whoever knocked is gone again
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                greeting[connection.fileno()] = connection
        elif fd == self._noted.fileno():
            self._noted.recv(1 << 12)
        elif fd in greeting:
            connection = greeting.pop(fd)
            if (who := welcome(connection, self._address.token)) is not None:
                self._adopt(connection, *who)
        else:
            streams[fd].flush()
            if streams[fd].channel == "watch":
                self._listen_to(streams[fd])

    def _adopt(self, connection: socket.socket, peer: int, channel: str) -> None:
        """Begin a stream that a peer has opened; tell it what has failed before."""
        with self._changed:
            self._stream(peer, channel).attach(connection)
            if channel == "watch":
                for generation, (committed, failure) in self._decided.items():
                    self._tell(peer, "decided", generation, committed, failure)
                self._changed.notify_all()
        _ring(self._wake)

    def _listen_to(self, stream: Connection) -> None:
        with self._changed:
            while (message := stream.next(0)) is not None:
                self._hear(stream.peer, *json.loads(message))
            if stream.ended and not self._closed:
                self._lose(stream.peer)

    def _probe(self, missing: list[int]) -> None:
        """Find out whether neighbours that have not come are gone; the store tells when the one above comes."""
        for peer in missing:
            if not self._rendezvous.alive(peer) and self._streams[peer, "watch"].socket is None:
                with self._changed:
                    self._lose(peer)

    def _seek_parent(self) -> None:
        """Connect to the rank above once it is there."""
        assert self._parent is not None
        try:
            address = self._rendezvous.read(f"address/{self._parent}")
        except LinkError as error:  # the store is gone
            with self._changed:
                self._decide(self._undecided, self._committed, self._describe(error.peer))
                self._gone.add(self._parent)
            return
        if address is not None:
            for channel in _WATCHED[::-1]:
                if not self._connect(self._streams[self._parent, channel], address):
                    with self._changed:
                        self._lose(self._parent)
                    return
            _ring(self._wake)

    def _connect(self, stream: Connection, address: str) -> bool:
        connection = connect(Address(*json.loads(address)), self.rank, stream.channel)
        if connection is not None:
            stream.attach(connection)
        return connection is not None

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once; after a failure, once those below have been told. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._have_been_told(), _PATIENCE)
        self._closed = True
        with suppress(OSError):
            self._note.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _have_been_told(self) -> bool:
        """Whether the ranks below have heard of a failure: one that has not come yet would only see that this one is gone."""
        return not self._decided or all(c in self._gone or self._streams[c, "watch"].socket is not None for c in self._children)

    def _let_go(self, greeting: Mapping[int, socket.socket]) -> None:
        for stream in list(self._streams.values()):
            stream.close()
        for end in (self._listener, self._woken, self._wake, self._noted, self._note, *greeting.values()):
            end.close()


_OPEN: WeakSet[SocketLinks] = WeakSet()


def _leave_to_parent() -> None:
    """Close, in a child that was forked, the connections that it has inherited: peers would not notice that its parent has ended.

    Those of gloo stay open: a peer that waits for data of the parent already is let go when the child ends.
    """
    for links in _OPEN:  # without their locks, which another thread may have held
        links._closed = True
        inherited = (stream.socket for stream in links._streams.values())
        for end in (links._listener, links._woken, links._wake, links._noted, links._note, *inherited):
            if end is not None:
                end.close()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _ring(bell: socket.socket) -> None:
    with suppress(OSError):  # full: it rings already; closed: nobody is there
        bell.send(b".")


def _culprit(rank: int, awaited: Mapping[int, int | None]) -> int:
    """The rank that holds up this one: at the end of the chain of those that wait for each other.

    A rank that does not answer is frozen, or cut off by a frozen one on the way through the tree.

    >>> _culprit(0, {0: 1, 1: 2, 2: None})
    2
    >>> _culprit(3, {3: 2, 1: 0})  # 0 lies between 3 and 2
    0
    """
    seen, suspect = {rank}, rank
    while (following := awaited.get(suspect)) is not None and following not in seen:
        seen.add(following)
        suspect = following
    if suspect in awaited:
        return suspect if following is None else awaited[rank] or 0  # in a circle: whom this rank waits for
    return next(r for r in _path(rank, suspect) if r not in awaited)


def _path(one: int, other: int) -> list[int]:
    """The way through the tree.

    >>> _path(3, 5)
    [3, 1, 0, 2, 5]
    """
    up, down = [one], [other]
    while up[-1] != down[-1]:
        longer = up if up[-1] > down[-1] else down
        longer.append((longer[-1] - 1) // 2)
    return up + down[-2::-1]
