"""Own the connections of a process, and watch those to its neighbours in the tree."""

import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ppfunc.stage.interrupts import act_on_interrupts

from .sockets import Address, Bell, Stream, Who, admit, connect, hosts, listen

WATCH = b"watch"  # the channel of streams that are watched
_PATIENCE = 1.0  # seconds for the thread to end
_LOOK = 0.05  # seconds between looks whether a signal has come
_FIRST, _LONGEST = 1.0, 16.0  # seconds for a host to answer at the first attempt to connect, and at most
_PAUSE = 0.05  # seconds between attempts
_STRANGERS = 64  # unauthenticated connections at most; anybody may open one


class Watcher(Protocol):
    """Notices what happens on watched connections, in the threads of :class:`Connections`."""

    def greet(self, peer: int) -> None: ...
    def hear(self, peer: int, message: bytes) -> None: ...
    def lose(self, stream: Stream) -> None: ...


class Connections:
    """The connections of a process, by peer, and a thread that accepts new ones and watches them.

    The thread ends when its watcher is dropped. Neighbours in the tree have a second, watched connection.

    Args:
        rank: this one.
        neighbours: those in the tree.
        limit: seconds that a link may be silent.

    Attributes:
        address: where this process listens.
        closed: whether all have ended, or are about to.
    """

    def __init__(self, rank: int, neighbours: Sequence[int], limit: float) -> None:
        self.closed = False
        self._rank, self._limit, self._hosts = rank, limit, hosts()
        both = ((peer, watched) for peer in neighbours for watched in (False, True))
        self._streams = {each: Stream(*each) for each in both}
        self._strangers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()  # of these two
        self._listener = listen()
        self.address = Address(self._hosts, self._listener.getsockname()[1], secrets.token_hex(16))
        self._woken, self._noted = Bell(), Bell()  # wake who waits for messages, and the watching thread
        self._owned: tuple[socket.socket | Bell, ...] = (self._listener, self._woken, self._noted)
        self._thread = threading.Thread(target=self._watch, name="ppfunc links", daemon=True)
        self._watcher: Callable[[], Watcher | None] = lambda: None

    def start(self, watcher: Watcher) -> None:
        """Begin to watch."""
        _OPEN.add(self)
        self._watcher = weakref.ref(watcher)
        self._thread.start()

    def stream(self, peer: int, watched: bool = False) -> Stream:
        """Return the stream to a peer, which may not be connected yet."""
        stream = self._streams.get((peer, watched))
        if stream is None:
            with self._lock:
                stream = self._streams.setdefault((peer, watched), Stream(peer, watched))
        return stream

    def streams(self) -> list[Stream]:
        """Return all streams."""
        with self._lock:
            return list(self._streams.values())

    def send(self, stream: Stream, generation: int, channel: bytes, data: bytes) -> None:
        """Send without waiting. The watching thread sends the rest."""
        if stream.send(generation, channel, data):
            self._noted.ring()

    def dial(self, address: Address, *streams: Stream) -> None:
        """Begin to connect streams to a peer, once each."""
        with self._lock:
            new = [stream for stream in streams if not stream.dialled]
            for stream in new:
                stream.dialled = True
        if new:
            _in_thread("ppfunc connects", self._dial, address, new)

    def _dial(self, address: Address, streams: list[Stream]) -> None:
        """Connect, however long it takes. Report a peer that no longer listens as lost."""
        for stream in streams:
            patience = _FIRST
            while not self.closed:
                try:
                    connection = connect(address, self._hosts, Who(self._rank, stream.watched), patience)
                except OSError:
                    patience = min(2 * patience, _LONGEST)
                    time.sleep(_PAUSE)
                    continue
                if connection is None:
                    stream.ended = True
                    self._call("lose", stream)
                    self._woken.ring()
                else:
                    self._attach(stream, connection)
                break

    def _attach(self, stream: Stream, connection: socket.socket) -> None:
        try:
            stream.attach(connection, self._limit)
        except OSError:  # it has ended meanwhile
            stream.ended = True
        self._noted.ring()
        if stream.watched:
            self._call("greet", stream.peer)
        self._woken.ring()

    def _call(self, name: str, *args: Any) -> None:
        watcher = self._watcher()
        if watcher is not None:
            getattr(watcher, name)(*args)

    def wait(self, seconds: float, stream: Stream | None = None) -> None:
        """Wait for data on a stream, if one is given, or for :meth:`wake`. Interrupts act meanwhile."""
        poll = select.poll()
        try:
            poll.register(self._woken, select.POLLIN)
            if stream is not None and stream.socket is not None:
                poll.register(stream.socket, select.POLLIN)
        except ValueError:  # closed by another thread
            return
        act_on_interrupts()
        poll.poll(1000 * min(seconds, _LOOK))
        act_on_interrupts()
        self._woken.silence()

    def wake(self) -> None:
        """Wake the thread that waits."""
        self._woken.ring()

    # -- the thread ------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self.closed and self._watcher() is not None:
                self._watch_once()
        finally:  # a watch that fails must not leave neighbours waiting
            self._end()

    def _end(self) -> None:
        self.closed = True
        with self._lock:
            strangers = list(self._strangers.values())
        for stranger in strangers:
            _wake_reader(stranger)
        for end in (*self.streams(), *self._owned):
            end.close()

    def _watch_once(self) -> None:
        poll, streams = select.poll(), {}
        poll.register(self._listener, select.POLLIN)
        poll.register(self._noted, select.POLLIN)
        for stream in self.streams():
            events = select.POLLIN * stream.watched | select.POLLOUT * stream.backlog
            if events and stream.socket is not None and not stream.ended:
                streams[stream.socket.fileno()] = stream
                poll.register(stream.socket, events)
        for fd, _ in poll.poll():
            if fd in streams:
                self._read(streams[fd])
            elif fd == self._noted.fileno():
                self._noted.silence()
            else:
                with suppress(OSError):  # whoever connected is gone again
                    self._accept(self._listener.accept()[0])

    def _read(self, stream: Stream) -> None:
        stream.flush()
        while stream.watched and (message := stream.next(0, WATCH)) is not None:
            self._call("hear", stream.peer, message)
        if stream.ended and stream.watched and not self.closed:
            self._call("lose", stream)

    def _accept(self, connection: socket.socket) -> None:
        """Authenticate a new connection in a thread. Drop the oldest if too many wait for that."""
        with self._lock:
            self._strangers[id(connection)] = connection
            first = next(iter(self._strangers.values())) if len(self._strangers) > _STRANGERS else None
        if first is not None:
            _wake_reader(first)
        _in_thread("ppfunc admits", self._admit, connection)

    def _admit(self, connection: socket.socket) -> None:
        try:
            who = admit(connection, self.address.key, self._limit)
            self._attach(self.stream(*who), connection)
        except OSError:
            connection.close()
        finally:
            with self._lock:
                del self._strangers[id(connection)]

    def close(self) -> None:
        """End all connections."""
        self.closed = True
        self._noted.ring()
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def abandon(self) -> None:
        """Close sockets that a forked child has inherited, without locks: a thread may have held them."""
        self.closed = True
        inherited = [stream.socket for stream in self._streams.values() if stream.socket is not None]
        for end in (*self._owned, *inherited):
            end.close()


def _in_thread(name: str, work: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # the interpreter is ending
        threading.Thread(target=work, args=args, name=name, daemon=True).start()


def _wake_reader(connection: socket.socket) -> None:
    """End a connection that a thread reads."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_OPEN: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close connections in a forked child: peers would not notice that its parent has ended.

    Those of gloo stay open: a peer that waits for data of the parent is released when the child ends.
    """
    for connections in _OPEN:
        connections.abandon()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
