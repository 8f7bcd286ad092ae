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
from .suspects import Answer, find_culprit

_WATCHED = ("watch", "tree")  # channels of the tree, opened ahead of time
_PATIENCE = 1.0  # seconds to wait until others have been told
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_PROBE = 0.5  # seconds between looks after ranks that have not come; more where these take long
_SPINS = 200  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_KEPT = 16  # failures that a rank which comes late hears of

# Lets other processes run that wait for this core. The one that a message is for may be one of them.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class SocketLinks:
    """The :class:`~ppfunc.runtime.control.Links` of a process.

    A thread watches a connection to each neighbour in the tree. Where one ends, or a failure is published, it tells the
    highest rank of the tree that can be reached, which takes the first as the failure of this generation and tells it
    down. No store has to live for that. Another thread meets the ranks: it asks the store for the address of the rank above, and
    looks after those that have not come; the other addresses travel along the tree.

    Args:
        rendezvous: where ranks find each other's addresses.
        gone: the text of the failure that a rank is gone.
    """

    def __init__(self, rendezvous: Rendezvous, gone: Callable[[int], str]) -> None:
        self.rank, self.size, self.generation = rendezvous.rank, rendezvous.size, 0
        self.waiting_on: int | None = None
        self.status: Callable[[], Answer] = Answer  # what else this rank says of itself to those that wait for it
        self.on_failure: Callable[[int], None] = lambda committed: None  # takes the number of steps that were committed before
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
        self._answers: dict[int, Answer] = {}  # by rank
        self._read: dict[int, int] = {}  # by child: the last failure that all ranks from there down have read
        self._told_read = -1
        self._questions = 0
        self._cut_off = False  # whether the rank above has not answered
        self._closed = False
        self._woken, self._wake = socket.socketpair()  # for the thread that waits in recv
        self._noted, self._note = socket.socketpair()  # for the thread that watches
        for end in (self._woken, self._wake, self._noted, self._note):
            end.setblocking(False)
        for channel in _WATCHED:
            self._streams |= {(neighbour, channel): Connection(neighbour, channel) for neighbour in self._neighbours}
        self._listener = listen()
        self._address = Address(hosts(), self._listener.getsockname()[1], secrets.token_hex(16))
        self._addresses = {self.rank: json.dumps(self._address)}  # of the ranks that have come
        rendezvous.write(f"address/{self.rank}", self._addresses[self.rank])
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._watch, name="ppfunc links", daemon=True)
        self._thread.start()
        if self.size > 1:
            threading.Thread(target=self._meet, name="ppfunc meeting", daemon=True).start()

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
        left = self._left(stream.peer, end)
        if stream.ended:  # since it was looked at
            return
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if stream.socket is not None:
            poll.register(stream.socket, select.POLLIN)
        with let_interrupts():
            poll.poll(1000 * left)
        with suppress(BlockingIOError):
            self._woken.recv(1 << 12)

    def _left(self, peer: int, end: float) -> float:
        """Seconds to wait for a peer; raises where none are left."""
        left = end - time.monotonic()
        if left <= 0:
            limit = self._rendezvous.timeout
            raise LinkError(peer, "late", f"rank {self.rank} waited for rank {peer}, which has not answered in {limit:g} s")
        return left

    def _stream(self, peer: int, channel: str) -> Connection:
        """A stream; the higher rank of a pair connects to the lower one."""
        stream = self._streams.get((peer, channel))
        if stream is None:
            with self._changed:
                stream = self._streams.setdefault((peer, channel), Connection(peer, channel))
        if stream.socket is None and peer < self.rank and channel not in _WATCHED:
            self._reach(stream)
        return stream

    def _reach(self, stream: Connection) -> None:
        """Connect to a peer once it has come; one that is busy may take its time to answer."""
        peer, end = stream.peer, time.monotonic() + self._rendezvous.timeout
        self.waiting_on = peer
        while stream.socket is None:
            self.check()
            left = self._left(peer, end)
            if peer in self._addresses:
                if self._connect(stream, self._addresses[peer]) is False:
                    raise LinkError(peer, "gone", GONE)
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(1 << 12)
                poll = select.poll()
                poll.register(self._woken, select.POLLIN)
                with let_interrupts():
                    poll.poll(min(50.0, 1000 * left))
        self.waiting_on = None

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
            if self._closed or not self._changed.wait_for(lambda: mine in self._decided, 0.0 if self._cut_off else _ALONE):
                self._decide(mine, self._committed, failure)  # the ranks above are frozen
            self.waiting_on, self._cut_off = None, False
            self.generation += 1
            return self._decided[mine][1]

    def await_failure(self, peer: int) -> None:
        """Wait a while for a failure to be published, or to hear that this peer is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.generation in self._decided or peer in self._gone, _PATIENCE)

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
            self._pass_on_read()
            self._changed.notify_all()
            _ring(self._wake)
            if generation == self.generation:
                self.on_failure(committed)

    def _pass_on_read(self) -> None:
        """Tell the rank above that the ranks from here down have read a failure, so that those above may leave."""
        read = self._read_by_all
        if read > self._told_read and self._parent is not None and self._parent not in self._gone:
            self._told_read = read
            self._tell(self._parent, "read", read)

    @property
    def _read_by_all(self) -> int:
        """The last failure that this rank has read, and all that live from here down."""
        return min([max(self._decided, default=-1), *(self._read.get(c, -1) for c in self._children if c not in self._gone)])

    def suspect(self, peer: int) -> tuple[int, str]:
        with self._changed:
            self._questions += 1
            self._answers = {self.rank: self._answer(peer)}
            for neighbour in self._neighbours:
                self._tell(neighbour, "whom", f"{self.rank}.{self._questions}")
            self._changed.wait_for(lambda: len(self._answers) == self.size or self.generation in self._decided, _ANSWERS)
            self._cut_off = self._parent is not None and self._parent not in self._answers
            return find_culprit(self.rank, dict(self._answers))

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to one that waits. Whatever ``status`` raises, a question must not end the watch."""
        try:
            return self.status()._replace(awaits=awaits)
        except Exception:
            return Answer(awaits)

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
            self._tell(peer, "for", question, self.rank, self._answer(self.waiting_on))
            for neighbour in self._neighbours:
                if neighbour != peer:
                    self._tell(neighbour, "whom", question)
        elif kind == "for":
            question, rank, answer = message
            if question == f"{self.rank}.{self._questions}":
                self._answers[rank] = Answer(*answer)
                self._changed.notify_all()
            elif question in self._asked:
                self._tell(self._asked[question], "for", question, rank, answer)
        elif kind == "read":
            self._read[peer] = message[0]
            self._pass_on_read()
            self._changed.notify_all()
        elif kind == "at":
            self._learn({int(rank): address for rank, address in message[0].items()}, peer)

    def _lose(self, peer: int) -> None:
        """A neighbour is gone, which is a failure of the first generation that has none."""
        if peer not in self._gone:
            self._gone.add(peer)
            self._report(self._undecided, self._describe(peer))
            self._pass_on_read()
            self._changed.notify_all()
            _ring(self._wake)

    def _learn(self, addresses: Mapping[int, str], teacher: int) -> None:
        """Pass on the addresses of ranks that have come."""
        new = {rank: address for rank, address in addresses.items() if rank not in self._addresses}
        self._addresses |= new
        for neighbour in self._neighbours:
            if new and neighbour != teacher:
                self._tell(neighbour, "at", new)
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
        while not self._closed:
            poll = select.poll()
            for reader in (self._listener, self._noted, *greeting.values()):
                poll.register(reader, select.POLLIN)
            with self._changed:
                streams = {s.fileno: s for s in self._streams.values() if s.socket is not None and not s.ended}
            for fd, stream in streams.items():
                poll.register(fd, select.POLLIN * (stream.channel == "watch") | select.POLLOUT * stream.backlog)
            for fd, _ in poll.poll():
                self._serve(fd, streams, greeting)

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
        """Begin a stream that a peer has opened."""
        with self._changed:
            self._stream(peer, channel).attach(connection)
            if channel == "watch":
                self._greet(peer)
        _ring(self._wake)

    def _greet(self, neighbour: int) -> None:
        """Tell a neighbour that has come where the others are, and what has failed before."""
        self._tell(neighbour, "at", self._addresses)
        if neighbour != self._parent:
            for generation, (committed, failure) in self._decided.items():
                self._tell(neighbour, "decided", generation, committed, failure)
        self._changed.notify_all()

    def _listen_to(self, stream: Connection) -> None:
        with self._changed:
            while (message := stream.next(0)) is not None:
                self._hear(stream.peer, *json.loads(message))
            if stream.ended and not self._closed:
                self._lose(stream.peer)

    # -- the thread that meets the others --------------------------------------------------

    def _meet(self) -> None:
        """Connect to the rank above, and look after those that have not come, until all have. Only here a frozen store holds
        up anything."""
        pause, probe, met = 0.001, time.monotonic() + _PROBE, self._parent is None
        while not self._closed and not (met and len(self._addresses) == self.size):
            try:
                met = met or self._meet_parent()
                if time.monotonic() > probe:
                    probe = self._probe()
            except LinkError as error:  # the store is gone
                self._lose_store(error.peer)
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _meet_parent(self) -> bool:
        """Connect to the rank above once it is there. Returns whether there is nothing left to do."""
        assert self._parent is not None
        address = self._rendezvous.read(f"address/{self._parent}")
        if address is None:
            return self._parent in self._gone
        for channel in _WATCHED[::-1]:
            stream = self._streams[self._parent, channel]
            while stream.socket is None and not self._closed:
                if self._connect(stream, address) is False:
                    with self._changed:
                        self._lose(self._parent)
                    return True
        with self._changed:
            self._greet(self._parent)
        _ring(self._wake)
        _ring(self._note)
        return True

    def _lose_store(self, server: int) -> None:
        """The store is gone, and with it the way to the ranks that have not come."""
        with self._changed:
            if server != self.rank:  # it is that of another rank
                self._report(self._undecided, self._describe(server))
            if self._parent is not None and self._streams[self._parent, "watch"].socket is None:
                self._decide(self._undecided, self._committed, self._describe(server))
                self._gone.add(self._parent)
            self._changed.notify_all()

    def _probe(self) -> float:
        """Find out which ranks that have not come are gone: the highest rank looks after all. Returns when to look again."""
        began = time.monotonic()
        for peer in self._neighbours if self._parent is not None else range(1, self.size):
            if peer in self._addresses or peer in self._gone:
                continue
            if not self._rendezvous.alive(peer) or self._rendezvous.read(f"left/{peer}") is not None:
                with self._changed:
                    if peer not in self._addresses:
                        self._lose(peer)
        now = time.monotonic()
        return now + max(_PROBE, 10 * (now - began))

    def _connect(self, stream: Connection, address: str) -> bool | None:
        """Connect to a peer. Returns False where nobody listens there, None where nobody has answered yet."""
        try:
            connection = connect(Address(*json.loads(address)), self.rank, stream.channel)
        except TimeoutError:
            return None
        if connection is None:
            return False
        stream.attach(connection)
        return True

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once. Idempotent.

        After a failure, once the ranks below have read it: this process may serve the store, and one that has not read it would
        only see that it is gone.
        """
        if not self._closed and len(self._addresses) < self.size:  # who has not met this rank cannot see its connections end
            telling = threading.Thread(target=self._leave, name="ppfunc leaving", daemon=True)
            with suppress(RuntimeError):  # the interpreter is ending, and with it the process
                telling.start()
                telling.join(_PATIENCE)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._read_by_all == max(self._decided, default=-1), _PATIENCE)
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._note.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _leave(self) -> None:
        """Say in the store that this rank has closed its transport."""
        with suppress(LinkError):
            self._rendezvous.write(f"left/{self.rank}", "")

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
