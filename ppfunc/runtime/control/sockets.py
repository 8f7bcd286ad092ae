"""Carry messages over TCP without waiting, between peers that prove to each other that they have the key."""

import errno
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

_HEADER = struct.Struct("<I8sQ")  # generation, channel, bytes that follow
_WHO = struct.Struct("<I?")
_NO_ROUTE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_OF_A_LINK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LONGEST = 32767  # seconds that keep-alive takes


class Address(NamedTuple):
    """Where a process listens.

    Args:
        hosts: addresses of its host, one of which should be in reach.
        port: TCP.
        key: hexadecimal; both ends of a connection prove that they have it.
    """

    hosts: list[str]
    port: int
    key: str


class Who(NamedTuple):
    """The other end of a connection, and whether it carries what is to be noticed at once."""

    rank: int
    watched: bool


class Bell:
    """Wakes a thread that polls it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # full: it rings already; closed: nobody polls
            self._writer.send(b".")

    def silence(self) -> None:
        with suppress(OSError):
            self._reader.recv(1 << 12)

    def close(self) -> None:
        for end in (self._reader, self._writer):
            end.close()


class Stream:
    """Messages to and from a peer; those to send wait here until it is connected.

    Attributes:
        dialled: whether this end has begun to connect.
        ended: whether nothing more can come.
        link_error: the error by which the link failed, while the process of the peer may live.
    """

    def __init__(self, peer: int, watched: bool) -> None:
        self.peer, self.watched = peer, watched
        self.socket: socket.socket | None = None
        self.dialled = self.ended = False
        self.link_error: OSError | None = None
        self._inbox, self._outbox = bytearray(), bytearray()
        self._arrived: dict[bytes, deque[tuple[int, bytes]]] = defaultdict(deque)  # by channel
        self._generation = 0
        self._lock = threading.Lock()

    def attach(self, connection: socket.socket, limit: float) -> None:
        """Use a connection, whose link has failed once it is silent for ``limit`` seconds."""
        connection.setblocking(False)
        probe = int(min(max(1.0, limit / 4), _LONGEST))
        options = [("TCP_NODELAY", 1), ("TCP_KEEPIDLE", probe), ("TCP_KEEPINTVL", probe), ("TCP_KEEPCNT", 3)]
        options.append(("TCP_USER_TIMEOUT", int(1000 * min(max(1.0, limit), _LONGEST))))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            if self.socket is None and not self.ended:
                self.socket, connection = connection, None  # type: ignore[assignment]
                self._flush()
        if connection is not None:
            connection.close()

    @property
    def backlog(self) -> bool:
        return bool(self._outbox) and self.socket is not None and not self.ended

    @property
    def cut(self) -> bool:
        """Tell whether probes of the kernel are not answered, as the host of a stopped process would."""
        if self.socket is None or not hasattr(socket, "TCP_INFO"):
            return False
        try:
            _, _, retransmits, probes = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
        except OSError:
            return False
        return max(retransmits, probes) > 1

    def send(self, generation: int, channel: bytes, data: bytes) -> bool:
        """Send without waiting. Returns whether something is left for :meth:`flush`."""
        with self._lock:
            self._outbox += _HEADER.pack(generation, channel, len(data)) + data
            self._flush()
            return self.backlog

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox and self.socket is not None and not self.ended:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)  # what the peer sent before can still be read

    def next(self, generation: int, channel: bytes) -> bytes | None:
        """Take the next message of a channel and generation; drop older ones, leave newer ones."""
        if generation > self._generation:
            self._generation = generation
            for queue in self._arrived.values():
                while queue and queue[0][0] < generation:
                    queue.popleft()
        arrived = self._arrived[channel]
        while not (arrived and arrived[0][0] == generation):
            if not self._take():
                return None
        return arrived.popleft()[1]

    def _take(self) -> bool:
        """Take one message from the connection. Returns False where none is complete."""
        inbox, size = self._inbox, _HEADER.size
        while True:
            if len(inbox) >= size:
                sent, channel, length = _HEADER.unpack_from(inbox)
                if len(inbox) >= size + length:
                    if sent >= self._generation:
                        data = bytes(inbox[size : size + length])
                        self._arrived[channel.rstrip(b"\0")].append((sent, data))
                    del inbox[: size + length]
                    return True
            if not self._receive():
                return False

    def _receive(self) -> bool:
        if self.socket is None:
            return False
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(error)
            return False
        self._inbox += data
        self.ended = self.ended or not data
        return bool(data)

    def _end(self, error: OSError) -> None:
        self.ended = True
        if error.errno in _OF_A_LINK:
            self.link_error = error

    def close(self) -> None:
        with self._lock:
            self.ended = True
            if self.socket is not None:
                self.socket.close()


def listen() -> socket.socket:
    """Listen on a port of any interface."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


def hosts() -> list[str]:
    """Return addresses of this host, first those that others are most likely to reach.

    They are those of the interfaces that ``GLOO_SOCKET_IFNAME`` names, as for gloo itself, if it is set.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return [_interface(name) for name in os.environ["GLOO_SOCKET_IFNAME"].split(",")]
    addresses = []
    with suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in entries]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the source address of the default route
        addresses.append(probe.getsockname()[0])
    return [*dict.fromkeys(addresses), "127.0.0.1"]


def _interface(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


def connect(address: Address, own_hosts: list[str], who: Who, patience: float) -> socket.socket | None:
    """Connect to a listener. Returns None where it does not listen any more, or is another one.

    Raises:
        OSError: no host has answered within ``patience`` seconds; the link may fail, the process be busy.
    """
    names = [name for name in address.hosts if not name.startswith("127.")] or address.hosts
    if address.hosts == own_hosts:
        names = ["127.0.0.1", *names]
    failure: OSError | None = None
    refused = False
    for name in names:
        try:
            connection = socket.create_connection((name, address.port), patience)
            with _exchange(connection, patience) as exchange:
                answer_challenge(exchange, bytes.fromhex(address.key))
                deliver_challenge(exchange, bytes.fromhex(address.key))
                exchange.send_bytes(_WHO.pack(*who))
            return connection
        except (ConnectionRefusedError, ConnectionAbortedError):
            refused = True
        except OSError as error:
            if error.errno not in _NO_ROUTE or not refused:
                failure = error
    if refused and (failure is None or failure.errno in _NO_ROUTE):
        return None
    raise failure or OSError("got no address")


def admit(connection: socket.socket, key: str, patience: float) -> Who:
    """Return who has connected to this listener.

    Raises:
        OSError: it does not have the key, or has not proved it within ``patience`` seconds.
    """
    with _exchange(connection, patience) as exchange:
        deliver_challenge(exchange, bytes.fromhex(key))
        answer_challenge(exchange, bytes.fromhex(key))
        return Who(*_WHO.unpack(exchange.recv_bytes(_WHO.size)))


@contextmanager
def _exchange(connection: socket.socket, patience: float) -> Iterator[Connection]:
    """Exchange messages that wait, for ``patience`` seconds each.

    Raises:
        ConnectionAbortedError: the other end does not have the key.
    """
    connection.setblocking(True)
    seconds = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)
    try:
        with Connection(os.dup(connection.fileno())) as exchange:
            yield exchange
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError):
            raise ConnectionResetError("it has closed the connection") from error
        if isinstance(error, (AuthenticationError, AssertionError, struct.error)):
            raise ConnectionAbortedError("it does not have the key") from error
        raise
