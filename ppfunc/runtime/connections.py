"""Own the TCP connections of a process, and watch those whose messages have to be heard at once."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from ppfunc.stage.interrupts import let_interrupts

from .sockets import Address, Bell, Connection, Who, connect, has_heard, hosts, listen, welcome

WATCH, TREE = "watch", "tree"  # channels between neighbours of the tree, opened ahead of time; the first is watched
_PATIENCE = 1.0  # seconds for the thread to end
_KNOCKING = 256  # connections at most whose peers have not said yet who they are; anybody may open one


_Greeting = dict[int, tuple[socket.socket, Who | None]]  # who has connected, by descriptor; None where that is not known yet


class Watcher(Protocol):
    """Who hears of the connections that are watched: that one is open, has brought a message, or has ended; in the thread that watches."""

    def greet(self, peer: int) -> None: ...
    def hear(self, peer: int, kind: str, *message: Any) -> None: ...
    def lose(self, peer: int) -> None: ...


class Connections:
    """The connections of a process, by peer and channel, and a thread that accepts new ones and watches them.

    Args:
        rank: this one.
        neighbours: those in the tree.

    Attributes:
        address: where this process listens.
        closed: whether all have ended, or are about to.
    """

    def __init__(self, rank: int, neighbours: Sequence[int]) -> None:
        self.closed = False
        self._rank = rank
        self._streams = {(peer, channel): Connection(peer, channel) for peer in neighbours for channel in (WATCH, TREE)}
        self._lock = threading.Lock()  # of these
        self._woken, self._noted = Bell(), Bell()  # for the thread that waits for messages, and for the one that watches
        self._listener = listen()
        self.address = Address(hosts(), self._listener.getsockname()[1], secrets.token_hex(16))
        self._own: tuple[socket.socket | Bell, ...] = (self._listener, self._woken, self._noted)
        self._thread: threading.Thread | None = None

    def start(self, watcher: Watcher) -> None:
        """Begin to watch."""
        _OPEN.add(self)
        self._thread = threading.Thread(target=self._watch, args=(watcher,), name="ppfunc links", daemon=True)
        self._thread.start()

    def stream(self, peer: int, channel: str) -> Connection:
        """The connection to a peer, which may not be there yet."""
        stream = self._streams.get((peer, channel))
        if stream is None:
            with self._lock:
                stream = self._streams.setdefault((peer, channel), Connection(peer, channel))
        return stream

    def send(self, stream: Connection, generation: int, data: bytes) -> None:
        """Send without waiting; what is left over goes when it can."""
        if stream.send(generation, data):
            self._noted.ring()

    def open(self, stream: Connection, address: Address) -> bool | None:
        """Connect to a peer. Returns False where nobody listens there, None where nobody has answered yet."""
        try:
            connection = connect(address, self._rank, stream.channel)
        except TimeoutError:
            return None
        if connection is None:
            return False
        stream.attach(connection)
        self._noted.ring()
        return True

    def wait(self, seconds: float, stream: Connection | None = None) -> None:
        """Wait until something has come on a stream, if one is given, or :meth:`wake` is called. Interrupts act meanwhile."""
        poll = select.poll()
        try:
            poll.register(self._woken, select.POLLIN)
            if stream is not None and stream.socket is not None:
                poll.register(stream.socket, select.POLLIN)
        except ValueError:  # closed by another thread
            return
        with let_interrupts():
            poll.poll(1000 * seconds)
        self._woken.silence()

    def wake(self) -> None:
        """Wake the thread that waits."""
        self._woken.ring()

    def _watch(self, watcher: Watcher) -> None:
        greeting: _Greeting = {}
        try:
            self._watch_until_closed(watcher, greeting)
        finally:  # a watch that fails must not leave neighbours waiting
            self.closed = True
            for stream in list(self._streams.values()):
                stream.close()
            for end in (*self._own, *(connection for connection, _ in greeting.values())):
                end.close()

    def _watch_until_closed(self, watcher: Watcher, greeting: _Greeting) -> None:
        while not self.closed:
            poll = select.poll()
            for fd in (self._listener.fileno(), self._noted.fileno(), *greeting):
                poll.register(fd, select.POLLIN)
            with self._lock:
                streams = {s.fileno: s for s in self._streams.values() if s.socket is not None and not s.ended}
            for fd, stream in streams.items():
                if events := select.POLLIN * (stream.channel == WATCH) | select.POLLOUT * stream.backlog:
                    poll.register(fd, events)  # without any, one that has ended would be told again and again
            for fd, _ in poll.poll():
                if fd in streams:
                    self._read(streams[fd], watcher)
                elif fd in greeting:
                    self._greet(greeting, fd, watcher)
                elif fd == self._noted.fileno():
                    self._noted.silence()
                else:
                    with suppress(OSError):  # whoever knocked is gone again
                        connection, _ = self._listener.accept()
                        connection.setblocking(False)
                        greeting[connection.fileno()] = connection, None
                        if len(greeting) > _KNOCKING:
                            greeting.pop(next(iter(greeting)))[0].close()

    def _greet(self, greeting: _Greeting, fd: int, watcher: Watcher) -> None:
        """Hear who has connected, then that the answer has come in time; begin the stream then."""
        connection, who = greeting.pop(fd)
        if who is None:
            if (who := welcome(connection, self.address.token)) is not None:
                greeting[fd] = connection, who
        elif has_heard(connection):
            self.stream(*who).attach(connection)
            if who.channel == WATCH:
                watcher.greet(who.rank)
            self.wake()

    def _read(self, stream: Connection, watcher: Watcher) -> None:
        stream.flush()
        if stream.channel == WATCH:
            while (message := stream.next(0)) is not None:
                watcher.hear(stream.peer, *json.loads(message))
            if stream.ended and not self.closed:
                watcher.lose(stream.peer)

    def close(self) -> None:
        """End all connections."""
        self.closed = True
        self._noted.ring()
        if self._thread is not threading.current_thread() and self._thread is not None:
            self._thread.join(_PATIENCE)

    def abandon(self) -> None:
        """Close what a child that was forked has inherited, without locks, which another thread may have held."""
        self.closed = True
        inherited = (stream.socket for stream in self._streams.values() if stream.socket is not None)
        for end in (*self._own, *inherited):
            end.close()


_OPEN: WeakSet[Connections] = WeakSet()


def _leave_to_parent() -> None:
    """Close connections in a child: peers would not notice that its parent has ended.

    Those of gloo stay open: a peer that waits for data of the parent already is let go when the child ends.
    """
    for connections in _OPEN:
        connections.abandon()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
