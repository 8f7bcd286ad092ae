"""Messages over TCP between processes: streams that never wait, and how they are opened."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from hmac import compare_digest
from typing import NamedTuple

_HEADER = struct.Struct("<IQ")  # generation, bytes that follow
_NAME = 8  # bytes of the name of a channel
_GREETING = struct.Struct(f"<16sI{_NAME}s")  # token of the listener, rank, channel
_SOON = 2.0  # seconds for a host to answer
_WELCOME, _HEARD = b"+", b"!"


class Address(NamedTuple):
    """Where a process listens.

    Args:
        hosts: names of its host, one of which should be in reach.
        port: TCP.
        token: hexadecimal; who connects has to know it.
    """

    hosts: list[str]
    port: int
    token: str


class Bell:
    """Wakes a thread that polls it."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        for end in (self._heard, self._rung):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # full: it rings already; closed: nobody is there
            self._rung.send(b".")

    def silence(self) -> None:
        with suppress(OSError):  # silent already; closed
            self._heard.recv(1 << 12)

    def close(self) -> None:
        for end in (self._heard, self._rung):
            end.close()


class Connection:
    """One connection, or what is to be sent over it once it is there."""

    def __init__(self, peer: int, channel: str) -> None:
        self.peer, self.channel = peer, channel
        self.socket: socket.socket | None = None
        self.ended = False
        self._inbox, self._outbox = bytearray(), bytearray()
        self._lock = threading.Lock()

    def attach(self, connection: socket.socket) -> None:
        """Begin with what has waited for the connection."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):  # a host that is gone
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = connection
        self.flush()

    @property
    def fileno(self) -> int:
        return -1 if self.socket is None else self.socket.fileno()

    @property
    def backlog(self) -> bool:
        return bool(self._outbox) and self.socket is not None and not self.ended

    def send(self, generation: int, data: bytes) -> bool:
        """Send without waiting. Returns whether something is left for :meth:`flush`."""
        with self._lock:
            self._outbox += _HEADER.pack(generation, len(data)) + data
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
        except OSError:
            self.ended = True  # what the peer sent before can still be read

    def next(self, generation: int) -> bytes | None:
        """The next message of a generation that is there; older ones are dropped, and newer ones stay."""
        inbox = self._inbox
        while True:
            if len(inbox) >= _HEADER.size:
                sent, length = _HEADER.unpack_from(inbox)
                if sent > generation:
                    return None
                if len(inbox) >= _HEADER.size + length:
                    data = bytes(inbox[_HEADER.size : _HEADER.size + length])
                    del inbox[: _HEADER.size + length]
                    if sent == generation:
                        return data
                    continue
            if not self._receive():
                return None

    def _receive(self) -> bool:
        if self.socket is None:
            return False
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._inbox += data
        self.ended = self.ended or not data
        return bool(data)

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
    """Addresses of this host, those first that others can be expected to reach.

    They are those of the interfaces that ``GLOO_SOCKET_IFNAME`` names, as for gloo itself, if it is set.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return [_interface(name) for name in os.environ["GLOO_SOCKET_IFNAME"].split(",")]
    found = []
    with suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the source address of the default route
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]


def _interface(name: str) -> str:
    """The IPv4 address of a network interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


def connect(address: Address, rank: int, channel: str) -> socket.socket | None:
    """Open a connection to a listener, which adopts it; None where no host answers as that listener.

    Raises:
        ValueError: the name of the channel is too long for the greeting.
        TimeoutError: a host that may be the one has not answered; it may be busy, or its process may be stopped.
    """
    if len(channel.encode()) > _NAME:
        raise ValueError(f"channel: got {channel!r}, expected a name of at most {_NAME} bytes; make it shorter")
    names = ["127.0.0.1", *address.hosts] if address.hosts == hosts() else address.hosts
    busy: TimeoutError | None = None
    for name in names:
        try:
            connection = socket.create_connection((name, address.port), _SOON)
        except OSError:
            continue
        try:
            connection.sendall(_GREETING.pack(bytes.fromhex(address.token), rank, channel.encode()))
            if connection.recv(1) == _WELCOME:
                connection.sendall(_HEARD)
                return connection
        except TimeoutError as error:
            busy = error
        except OSError:
            pass
        connection.close()
    if busy is not None:
        raise busy
    return None


class Who(NamedTuple):
    """The other end of a connection."""

    rank: int
    channel: str


def welcome(connection: socket.socket, token: str) -> Who | None:
    """Read and answer who has connected to this listener; None where it does not know the token."""
    with suppress(OSError):
        greeting = connection.recv(_GREETING.size)
        if len(greeting) == _GREETING.size:
            shown, rank, channel = _GREETING.unpack(greeting)
            if compare_digest(shown, bytes.fromhex(token)):
                connection.sendall(_WELCOME)
                return Who(rank, channel.rstrip(b"\0").decode())
    connection.close()
    return None


def has_heard(connection: socket.socket) -> bool:
    """Whether who has connected has the answer. One that has not had it in time has gone, and connects again."""
    with suppress(OSError):
        if connection.recv(1) == _HEARD:
            return True
    connection.close()
    return False
