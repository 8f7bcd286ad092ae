"""Carry messages over TCP without waiting, between peers that prove to each other that they have the key."""

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

_HEADER = struct.Struct("<I8sQ")  # generation, channel, bytes that follow
_WHO = struct.Struct("<I?")
_NO_ROUTE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_REFUSALS = (ConnectionRefusedError, ConnectionAbortedError)
_OF_A_LINK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LONGEST = 32767  # seconds that keep-alive takes
_LOOK = 1.0  # seconds between looks whether a stream has ended that cannot be written


class Address(NamedTuple):
    """Name the place where a process listens.

    Args:
        hosts: addresses of its host, one of which should be in reach.
        port: TCP.
        key: hexadecimal; both ends of a connection prove that they have it.
    """

    hosts: list[str]
    port: int
    key: str


class Who(NamedTuple):
    """Name the rank at the other end of a connection; ``watched`` if a thread reads its messages at once."""

    rank: int
    watched: bool


class Stream:
    """Sends messages to a peer and receives its own; messages wait here until the peer is connected.

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
        self._lock = threading.Lock()  # of the outbox
        self._sending = False  # whether a thread sends the rest

    def attach(self, connection: socket.socket, limit: float) -> bool:
        """Use a connection, whose link has failed once it is silent for ``limit`` seconds.

        Returns:
            False if the stream has a connection already, or has ended.
        """
        with suppress(OSError):  # it has ended meanwhile, which is noticed when it is read
            connection.setblocking(False)
            _detect_silence(connection, limit)
        with self._lock:
            if self.socket is None and not self.ended:
                self.socket = connection
                self._flush()
                return True
        connection.close()
        return False

    @property
    def cut(self) -> bool:
        """Tell whether the link has failed, or probes of the kernel are not answered.

        The host of a stopped process would answer them.
        """
        if self.socket is None or self.ended or not hasattr(socket, "TCP_INFO"):
            return self.link_error is not None
        try:
            _, _, retransmits, probes = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
        except OSError:
            return False
        return max(retransmits, probes) > 1

    def send(self, generation: int, channel: bytes, data: bytes) -> None:
        """Send without waiting. A thread sends the rest if the buffer of the socket is full."""
        with self._lock:
            self._outbox += _HEADER.pack(generation, channel, len(data)) + data
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox and self.socket is not None and not self.ended:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            if not self._sending:
                self._sending = True
                in_thread("ppfunc sends", self._send_rest)
        except OSError as error:
            self._end(error)  # earlier messages of the peer can still be read

    def _send_rest(self) -> None:
        while self._sending:
            self.wait(_LOOK, select.POLLOUT)
            with self._lock:
                self._flush()
                self._sending = bool(self._outbox) and not self.ended

    def drain(self, until: float) -> None:
        """Wait until all is sent, up to a point of ``time.monotonic``."""
        while self._outbox and not self.ended and time.monotonic() < until:
            time.sleep(0.001)

    def next(self, generation: int, channel: bytes) -> bytes | None:
        """Take the next message of a channel and generation; drop older ones, leave newer ones."""
        arrived = self._arrived[channel]
        while True:
            while arrived and arrived[0][0] <= generation:
                sent, data = arrived.popleft()
                if sent == generation:
                    return data
            if not self._read():
                return None

    def _read(self) -> bool:
        """Read the bytes that have arrived. Return False if there are none."""
        if self.socket is None:
            return False
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(error)
            return False
        self.ended = self.ended or not data
        inbox, size = self._inbox, _HEADER.size
        inbox += data
        while len(inbox) >= size:
            generation, channel, length = _HEADER.unpack_from(inbox)
            if len(inbox) < size + length:
                break
            message = bytes(inbox[size : size + length])
            self._arrived[channel.rstrip(b"\0")].append((generation, message))
            del inbox[: size + length]
        return bool(data)

    def wait(self, seconds: float = 60.0, event: int = select.POLLIN) -> None:
        """Wait until the stream can be read, or written, or has ended."""
        assert self.socket is not None
        poll = select.poll()
        with suppress(ValueError):  # closed by another thread
            poll.register(self.socket, event)
            poll.poll(1000 * seconds)

    def _end(self, error: OSError) -> None:
        if not self.ended and error.errno in _OF_A_LINK:
            self.link_error = error
        self.ended = True

    def close(self) -> None:
        """End the connection at both ends, and for threads that read it. Takes no lock."""
        self.ended = True
        if self.socket is not None:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()


def in_thread(name: str, work: Callable[..., object], *args: object) -> None:
    """Run ``work(*args)`` in a thread, unless the interpreter is ending."""
    with suppress(RuntimeError):
        threading.Thread(target=work, args=args, name=name, daemon=True).start()


def _detect_silence(connection: socket.socket, limit: float) -> None:
    """Let the kernel end a connection once the other host is silent for ``limit`` seconds, not earlier."""
    probe = int(min(max(1.0, limit / 4), _LONGEST))
    options = [("TCP_NODELAY", 1), ("TCP_KEEPIDLE", probe), ("TCP_KEEPINTVL", probe), ("TCP_KEEPCNT", 3)]
    options.append(("TCP_USER_TIMEOUT", int(1000 * min(max(1.0, limit), _LONGEST))))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen() -> socket.socket:
    """Listen on a port of any interface."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
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
    errors = []
    for name in names:
        try:
            connection = socket.create_connection((name, address.port), patience)
            with _exchange(connection, patience) as exchange:
                answer_challenge(exchange, bytes.fromhex(address.key))
                deliver_challenge(exchange, bytes.fromhex(address.key))
                exchange.send_bytes(_WHO.pack(*who))
            return connection
        except OSError as error:
            errors.append(error)
    answers = [error for error in errors if error.errno not in _NO_ROUTE]
    if answers and all(isinstance(error, _REFUSALS) for error in answers):
        return None
    raise (answers or errors)[-1]


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
