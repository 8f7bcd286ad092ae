"""Own the connections of a process: accept them, open them, and read those that are watched."""

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from .sockets import Address, Stream, Who, admit, connect, hosts, in_thread, listen

WATCH = b"watch"  # the channel of streams that are watched
_PATIENCE = 1.0  # seconds for messages to leave before the end
_PAUSE = 0.05  # seconds between attempts
_FIRST, _LONGEST = 1.0, 16.0  # seconds for a host to answer at the first attempt to connect, and at most
_STRANGERS = 64  # unauthenticated connections at most; anybody may open one


class Connections:
    """Owns the connections of a process, by peer. The higher rank of two opens them.

    A neighbour in the tree has a second, watched one, which a thread reads. Threads use this object until it
    is closed. A subclass has the methods that they call: ``welcome`` for a new neighbour, ``receive`` for its
    messages, ``note_end`` for a stream that has ended.

    Args:
        rank: this one.
        neighbours: those in the tree.
        limit: seconds that a link may be silent.

    Attributes:
        address: where this process listens.
        addresses: of the ranks that have come.
        changed: guards state that threads share; notified when it changes.
        closed: whether all connections have ended, or are about to.
    """

    welcome: Callable[[int], None]
    receive: Callable[[int, bytes], None]
    note_end: Callable[[Stream], None]

    def __init__(self, rank: int, neighbours: Sequence[int], limit: float) -> None:
        self.rank, self.closed = rank, False
        self._listener, self._hosts = listen(), hosts()
        self._neighbours, self._limit = neighbours, limit
        both = ((peer, watched) for peer in neighbours for watched in (False, True))
        self._streams = {each: Stream(*each) for each in both}
        for spare in [self._listener.dup() for _ in self._streams]:  # too few descriptors raise here
            spare.close()
        self._strangers: list[socket.socket] = []
        self.changed = threading.Condition(threading.RLock())
        self.address = Address(self._hosts, self._listener.getsockname()[1], secrets.token_hex(16))
        self.addresses = {rank: self.address}
        _OPEN.add(self)

    def stream(self, peer: int, watched: bool = False) -> Stream:
        """Return the stream to a peer, which may not be connected yet."""
        stream = self._streams.get((peer, watched))
        if stream is None:
            stream = self._streams.setdefault((peer, watched), Stream(peer, watched))
            self.dial()
        return stream

    @property
    def connected(self) -> bool:
        """Tell whether all neighbours have been connected."""
        return all(self.stream(peer, True).socket for peer in self._neighbours)

    def dial(self) -> None:
        """Begin to connect to ranks that have come."""
        with self.changed:
            for stream in list(self._streams.values()):
                if stream.peer < self.rank and stream.peer in self.addresses and not stream.dialled:
                    stream.dialled = True
                    in_thread("ppfunc connects", self._dial, stream)

    def _dial(self, stream: Stream) -> None:
        """Connect, however long it takes. A peer that no longer listens is gone."""
        who, patience = Who(self.rank, stream.watched), _FIRST
        while not self.closed:
            try:
                connection = connect(self.addresses[stream.peer], self._hosts, who, patience)
            except OSError:
                patience = min(2 * patience, _LONGEST)
                time.sleep(_PAUSE)
                continue
            if connection is not None:
                return self._attach(stream, connection)
            stream.close()
            return self.note_end(stream)

    def accept(self) -> None:
        """Accept connections, each authenticated in a thread. Drop the oldest if too many wait for that."""
        while not self.closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors, or whoever connected is gone again
                time.sleep(_PAUSE)
                continue
            self._strangers.append(connection)
            if len(self._strangers) > _STRANGERS:
                with suppress(OSError):  # its thread closes it
                    self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
            in_thread("ppfunc admits", self._admit, connection)

    def _admit(self, connection: socket.socket) -> None:
        try:
            who = admit(connection, self.address.key, self._limit)
        except OSError:
            return
        finally:
            with suppress(ValueError):  # it was dropped
                self._strangers.remove(connection)
        self._attach(self.stream(*who), connection)

    def _attach(self, stream: Stream, connection: socket.socket) -> None:
        """Begin to use a connection. If it is watched, this thread goes on to read it."""
        if stream.attach(connection, self._limit):
            if stream.watched:
                self.welcome(stream.peer)
            with self.changed:
                self.changed.notify_all()
            if stream.watched:
                self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        try:
            while True:
                while (message := stream.next(0, WATCH)) is not None:
                    self.receive(stream.peer, message)
                if stream.ended:  # it may have been while it was written
                    return
                stream.wait()
        finally:  # a neighbour must not wait for a thread that has failed
            stream.close()
            self.note_end(stream)

    def drain(self) -> None:
        """Wait a while until all messages are sent."""
        until = time.monotonic() + _PATIENCE
        for stream in list(self._streams.values()):
            stream.drain(until)

    def end(self) -> None:
        """End all connections at once. Takes no lock, so that it may be called in a finalizer."""
        self.closed = True
        ends: list[Stream | socket.socket] = [*self._streams.values(), *self._strangers]
        for end in ends:
            end.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def abandon(self) -> None:
        """Close sockets that a forked child has inherited, without locks: a thread may have held them."""
        self.closed = True
        for stream in self._streams.values():
            if stream.socket is not None:
                stream.socket.close()
        self._listener.close()


_OPEN: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close connections in a forked child: peers would not notice that its parent has ended.

    Those of gloo stay open: a peer that waits for data of the parent is released when the child ends.
    """
    for connections in _OPEN:
        connections.abandon()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
