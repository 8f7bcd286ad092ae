"""Connect processes that prove to each other that they have a key, and carry messages without waiting."""

import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_HEADER = struct.Struct("<I8sQ")  # generation, channel, bytes that follow
_OF_A_LINK = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LONGEST = 32767  # seconds that keep-alive takes
_ANSWER = 5.0  # seconds for a host to answer an attempt to connect
_PAUSE = 0.05  # seconds between attempts
_LONG = 100  # bytes of a name at most
_STRANGER = 20.0  # seconds for each message by which a connection proves that it has the key


class Address(NamedTuple):
    """Name the place where a process listens, and the key (hexadecimal) that proves who may connect."""

    host: str
    port: int
    key: str


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"ppfunc {name}", daemon=True).start()
    return future


class Stream:
    """Carries messages over a connection, whose link has failed once it is silent for ``limit`` seconds.

    Attributes:
        ended: whether nothing more can come.
        link_error: says that the link failed, while the process of the peer may live.
    """

    def __init__(self, connection: socket.socket, limit: float) -> None:
        self.socket = connection
        self.ended = False
        self.link_error: TimeoutError | None = None
        self._inbox = bytearray()
        self._arrived: dict[bytes, deque[tuple[int, bytes]]] = defaultdict(deque)  # by channel
        self._lock = threading.Lock()  # of what is sent
        with suppress(OSError):  # it has ended already, which is noticed when it is read
            _detect_silence(connection, limit)

    @property
    def cut(self) -> bool:
        """Tell whether the link has failed, or probes of the kernel are not answered.

        The host of a stopped process would answer them.
        """
        if self.ended or not hasattr(socket, "TCP_INFO"):
            return self.link_error is not None
        try:
            _, _, retransmits, probes = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
        except OSError:
            return False
        return max(retransmits, probes) > 1

    def send(self, generation: int, channel: bytes, data: bytes) -> None:
        """Send. A long message waits for the peer to read. A peer that has ended receives nothing."""
        try:
            with self._lock:
                self.socket.sendall(_HEADER.pack(generation, channel, len(data)) + data)
        except OSError as error:
            self._end(error)  # earlier messages of the peer can still be read

    def next(self, generation: int, channel: bytes) -> bytes | None:
        """Take the next message of a channel and generation; drop older messages, leave newer messages."""
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
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
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

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until the stream can be read, or has ended."""
        poll = select.poll()
        with suppress(ValueError):  # closed by another thread
            poll.register(self.socket, select.POLLIN)
            poll.poll(1000 * seconds)

    def _end(self, error: OSError) -> None:
        if not self.ended and error.errno in _OF_A_LINK:
            self.link_error = TimeoutError(error.strerror)
        self.ended = True

    def close(self) -> None:
        """End the connection at both ends, and for threads that read it. Takes no lock."""
        self.ended = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _detect_silence(connection: socket.socket, limit: float) -> None:
    """Let the kernel end a connection once the peer's host is silent for ``limit`` seconds, not earlier."""
    probe = int(min(max(1.0, limit / 4), _LONGEST))
    options = [("TCP_NODELAY", 1), ("TCP_KEEPIDLE", probe), ("TCP_KEEPINTVL", probe), ("TCP_KEEPCNT", 3)]
    options.append(("TCP_USER_TIMEOUT", int(1000 * min(max(1.0, limit), _LONGEST))))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Accepts connections, each authenticated in a thread: a stranger that is silent holds up nobody.

    Args:
        host: an address of this host.
        limit: seconds for a peer to take a message.
        welcome: called in a thread with the name that a peer gives itself, and the connection.
        wanted: number of connections to expect; OSError is raised if there are too few descriptors.
    """

    def __init__(
        self, host: str, limit: float, welcome: Callable[[str, socket.socket], None], wanted: int
    ) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        for spare in [self.socket.dup() for _ in range(wanted)]:
            spare.close()
        self.address = Address(host, self.socket.getsockname()[1], secrets.token_hex(16))
        self._limit, self._welcome, self._closed = limit, welcome, False
        in_thread(self._accept, "accepts")

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self.socket.accept()
                in_thread(partial(self._admit, connection), "admits")
            except (OSError, RuntimeError):  # closed, or out of descriptors or threads
                time.sleep(_PAUSE)

    def _admit(self, connection: socket.socket) -> None:
        key = bytes.fromhex(self.address.key)
        with _exchange(connection, min(self._limit, _STRANGER)) as exchange:
            deliver_challenge(exchange, key)
            answer_challenge(exchange, key)
            who = exchange.recv_bytes(_LONG).decode()
        _wait_for(connection, self._limit)
        self._welcome(who, connection)

    def close(self) -> None:
        """Stop listening. Takes no lock."""
        self._closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.socket.close()


def connect(
    address: Address, who: str, limit: float, closed: Callable[[], bool] = lambda: False
) -> socket.socket:
    """Connect to a listener, which calls ``welcome(who, connection)``, however often its host is silent.

    Args:
        limit: seconds.
        closed: tells whether the connection is not wanted any more.

    Raises:
        ConnectionRefusedError: it does not listen any more, or is another one.
        TimeoutError: no answer within ``limit`` seconds; the link may have failed, the process be busy.
    """
    end, key = time.monotonic() + limit, bytes.fromhex(address.key)
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), min(_ANSWER, limit))
            with _exchange(connection, limit) as exchange:
                answer_challenge(exchange, key)
                deliver_challenge(exchange, key)
                exchange.send_bytes(who.encode())
            return connection
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            if closed() or time.monotonic() > end:
                raise TimeoutError(f"no answer in {limit:g} s: {error}") from error
            time.sleep(_PAUSE)


def _wait_for(connection: socket.socket, seconds: float) -> None:
    """Let reads and sends raise BlockingIOError after ``seconds``."""
    connection.setblocking(True)
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, interval)


@contextmanager
def _exchange(connection: socket.socket, patience: float) -> Iterator[Connection]:
    """Exchange messages that wait, for ``patience`` seconds each. Close the connection if that fails.

    Raises:
        ConnectionRefusedError: the other end does not have the key.
    """
    _wait_for(connection, patience)
    try:
        with Connection(os.dup(connection.fileno())) as exchange:
            yield exchange
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError):
            raise ConnectionResetError("it has closed the connection") from error
        if isinstance(error, (AuthenticationError, AssertionError, struct.error)):
            raise ConnectionRefusedError("it does not have the key") from error
        raise


def own_host(towards: str | None) -> str:
    """Return an address of this host at which others reach it.

    It is that of the interface that ``GLOO_SOCKET_IFNAME`` names, as for gloo itself; else of the one that
    leads to the host ``towards``, or where that is this host, of the default route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            import fcntl

            request = struct.pack("256s", interface.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    for host in filter(None, (towards, "192.0.2.1")):
        with suppress(OSError):
            (family, kind, _, _, place), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: asks for the source address
                source = str(probe.getsockname()[0])
            if not source.startswith("127.") and source != "::1":
                return source
    return "127.0.0.1"
