"""Connections between processes: who may open one, and what is left of those that end."""

from __future__ import annotations

import os
import select
import socket
import time

import pytest

from ppfunc.runtime import connections, sockets
from ppfunc.runtime.connections import TREE, WATCH, Connections
from ppfunc.runtime.sockets import Connection


class Watcher:
    """Notes what it hears of."""

    def __init__(self):
        self.seen = []

    def greet(self, peer):
        self.seen.append(("greet", peer))

    def hear(self, peer, kind, *message):
        self.seen.append((kind, peer, *message))

    def lose(self, peer):
        self.seen.append(("lose", peer))


@pytest.fixture
def listening():
    own, watcher = Connections(0, [1]), Watcher()
    yield own, watcher
    own.close()


@pytest.fixture
def opened():
    """Opens the stream of rank 1 to a listener: its other end."""
    streams = []

    def open_to(own, channel):
        streams.append(Connection(0, channel))
        streams[-1].attach(sockets.connect(own.address, 1, channel))
        return streams[-1]

    yield open_to
    for stream in streams:
        stream.close()


def received(stream):
    poll, end = select.poll(), time.monotonic() + 5
    poll.register(stream.socket, select.POLLIN)
    while (message := stream.next(0)) is None and not stream.ended and time.monotonic() < end:
        poll.poll(100)
    return message


@pytest.mark.parametrize("channel", [WATCH, TREE])
def test_a_connection_that_was_given_up_before_it_was_answered_is_not_taken_for_the_next_one(listening, opened, monkeypatch, channel):
    own, watcher = listening
    own.send(own.stream(1, channel), 0, b"early")
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(sockets, "_SOON", 0.1)
        sockets.connect(own.address, 1, channel)
    own.start(watcher)
    time.sleep(0.1)
    assert watcher.seen == []
    assert received(opened(own, channel)) == b"early"
    assert ("lose", 1) not in watcher.seen


def test_a_connection_that_has_ended_keeps_no_thread_busy(listening, opened):
    own, watcher = listening
    own.start(watcher)
    theirs = opened(own, TREE)
    own.send(own.stream(1, TREE), 0, b"unread")
    time.sleep(0.1)
    theirs.socket.close()  # with something unread: a reset
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2


def test_strangers_that_connect_hold_up_nobody(listening, opened, monkeypatch):
    """They say nothing, a part of a greeting, noise, or more than that; the first of too many are sent away."""
    monkeypatch.setattr(connections, "_KNOCKING", 20)
    own, watcher = listening
    own.start(watcher)
    strangers = []
    for n in range(100):
        stranger = socket.create_connection(("127.0.0.1", own.address.port), 5)
        strangers.append(stranger)
        stranger.sendall((b"", b"\0", os.urandom(28), b"\xff" * 28 + os.urandom(50_000))[n % 4])
    theirs = opened(own, WATCH)
    theirs.send(0, b'["hello"]')
    assert strangers[0].recv(1) == b""
    end = time.monotonic() + 5
    while len(watcher.seen) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert watcher.seen == [("greet", 1), ("hello", 1)]
    for stranger in strangers:
        stranger.close()
