"""Hold the connections of a process to its peers: opened, accepted, and closed in a forked child."""

import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future

from .connections import Address, Listener, Stream, connect, in_thread
from .rendezvous import Rendezvous


class PeerStreams:
    """Holds the streams between this process and its peers.

    Args:
        rendezvous: has the rank of this process, an address of its host, and the seconds for a peer to take a
            message.
        neighbours: the peers that have a stream for messages both ways, and one that is watched. Between
            others each sender opens one.
        watch: begins to watch the stream of a peer.
        changed: guards what threads share; notified of new streams.

    Raises:
        OSError: too few descriptors for the streams of neighbours.

    Attributes:
        incoming, outgoing: for messages, by peer.
        watched: by neighbour.
        closed: whether all connections have ended, or are about to.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        neighbours: Collection[int],
        watch: Callable[[int, Stream], None],
        changed: threading.Condition,
    ) -> None:
        self._rank, self._limit = rendezvous.rank, rendezvous.timeout
        self._watch, self._changed = watch, changed
        self.closed = False
        self.incoming: dict[int, Stream] = {}
        self.outgoing: dict[int, Stream] = {}
        self.watched: dict[int, Stream] = {}
        self._dials: dict[tuple[int, str], Future[None]] = {}  # connections that are being opened
        self.listener = Listener(rendezvous.host, self._limit, self.welcome, 2 * len(neighbours))
        _OPEN.add(self)

    @property
    def all(self) -> list[Stream]:
        """List all streams."""
        return [*self.incoming.values(), *self.outgoing.values(), *self.watched.values()]

    def open(self, peer: int, kind: str, address: Address, settle: Callable[[Future[None]], object]) -> None:
        """Open a connection to a peer.

        Args:
            kind: ``"tree"`` for messages both ways, ``"watched"`` or ``"one way"``.
            settle: waits for it.
        """

        def dial() -> None:
            connection = connect(address, f"{self._rank} {kind}", self._limit, lambda: self.closed)
            self._attach(peer, kind, connection, self.outgoing)

        if (peer, kind) not in self._dials:  # which an interrupt has left
            self._dials[peer, kind] = in_thread(dial, "connects")
        try:
            settle(self._dials[peer, kind])
        finally:
            if self._dials[peer, kind].done():
                del self._dials[peer, kind]

    def welcome(self, who: str, connection: socket.socket) -> None:
        """Use a connection that a peer has opened; ``who`` is the rank and the kind that it announced."""
        rank, _, kind = who.partition(" ")
        self._attach(int(rank), kind, connection, self.incoming)

    def _attach(self, peer: int, kind: str, connection: socket.socket, one_way: dict[int, Stream]) -> None:
        stream = Stream(connection, self._limit)
        tables = {"tree": [self.incoming, self.outgoing], "watched": [self.watched], "one way": [one_way]}
        with self._changed:
            for table in tables[kind]:
                table[peer] = stream
            if self.closed:
                stream.close()
            if kind == "watched":
                self._watch(peer, stream)
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections. Idempotent. Takes no lock, so that it may be called in a finalizer."""
        self.closed = True
        self.listener.close()
        for stream in self.all:
            stream.close()


_OPEN: weakref.WeakSet[PeerStreams] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close connections in a forked child: peers would not notice that its parent has ended.

    Those of gloo stay open: a peer that waits for data of the parent is released when the child ends.
    """
    for streams in _OPEN:
        streams.closed = True
        for inherited in (streams.listener.socket, *(stream.socket for stream in streams.all)):
            inherited.close()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
