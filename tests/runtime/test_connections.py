"""Connections between processes: who may open one, and what is left of those that end."""

from __future__ import annotations

import os
import select
import socket
import time

import pytest

from ppfunc.runtime.control import connections, sockets
from ppfunc.runtime.control.connections import WATCH, Connections
from ppfunc.runtime.control.sockets import Stream, Who
from tests.clock import busy


class Watcher:
    """Notes what it notices."""

    def __init__(self):
        self.seen = []

    def greet(self, peer):
        self.seen.append(("greet", peer))

    def hear(self, peer, message):
        self.seen.append((message, peer))

    def lose(self, stream):
        self.seen.append(("lose", stream.peer))


@pytest.fixture
def listening():
    listener, watcher = Connections(0, [1], 5.0), Watcher()
    yield listener, watcher
    listener.close()


@pytest.fixture
def opened():
    """Opens the stream of rank 1 to a listener: its other end."""
    streams = []

    def open_to(listener, watched):
        streams.append(Stream(0, watched))
        streams[-1].attach(sockets.connect(listener.address, [], Who(1, watched), 5.0), 5.0)
        return streams[-1]

    yield open_to
    for stream in streams:
        stream.close()


def received(stream, channel):
    poll, end = select.poll(), time.monotonic() + 5
    poll.register(stream.socket, select.POLLIN)
    while (message := stream.next(0, channel)) is None and not stream.ended and time.monotonic() < end:
        poll.poll(100)
    return message


def until(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("watched", [True, False])
def test_a_connection_that_was_given_up_before_it_was_answered_is_not_taken_for_the_next_one(
    listening, opened, watched
):
    listener, watcher = listening
    listener.send(listener.stream(1, watched), 0, WATCH, b"early")
    with pytest.raises(OSError):
        sockets.connect(listener.address, [], Who(1, watched), 0.1)
    listener.start(watcher)
    time.sleep(0.1)
    assert watcher.seen == []
    assert received(opened(listener, watched), WATCH) == b"early"
    assert ("lose", 1) not in watcher.seen


def test_a_connection_that_has_ended_keeps_no_thread_busy(listening, opened):
    listener, watcher = listening
    listener.start(watcher)
    theirs = opened(listener, False)
    listener.send(listener.stream(1), 0, b"tree", b"unread")
    time.sleep(0.1)
    theirs.socket.close()  # with something unread: a reset
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2 * busy()


def test_strangers_that_connect_hold_up_nobody(listening, opened, monkeypatch):
    """They say nothing, or noise, short or long; the first of too many are sent away."""
    monkeypatch.setattr(connections, "_STRANGERS", 20)
    listener, watcher = listening
    listener.start(watcher)
    strangers = []
    for n in range(100):
        stranger = socket.create_connection(("127.0.0.1", listener.address.port), 5)
        strangers.append(stranger)
        stranger.sendall((b"", b"\0", os.urandom(28), b"\xff" * 28 + os.urandom(50_000))[n % 4])
    theirs = opened(listener, True)
    theirs.send(0, WATCH, b"hello")
    assert until(lambda: len(watcher.seen) == 2)
    assert set(watcher.seen) == {("greet", 1), (b"hello", 1)}  # by two threads, in either order
    for stranger in strangers:
        stranger.close()


def test_messages_of_one_channel_come_in_order_and_older_generations_are_dropped(listening, opened):
    listener, watcher = listening
    listener.start(watcher)
    theirs, ours = opened(listener, False), listener.stream(1)
    for generation, channel, data in ((0, b"a", b"1"), (1, b"a", b"2"), (0, b"b", b"3"), (1, b"b", b"4")):
        theirs.send(generation, channel, data)
    assert until(lambda: ours.socket is not None)
    assert received(ours, b"a") == b"1"
    assert received(ours, b"b") == b"3"
    assert ours.next(1, b"b") == b"4"
    assert ours.next(1, b"a") == b"2"
    assert ours.next(1, b"a") is None
