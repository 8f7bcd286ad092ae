"""Connections between processes: who may open one, and what is left of those that end."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from ppfunc.runtime.control import connections, sockets
from ppfunc.runtime.control.socket_links import SocketLinks
from ppfunc.runtime.control.sockets import Stream, Who
from tests.clock import busy
from tests.runtime.test_control import Keys


class Early(Keys):
    """A rendezvous of two ranks, in which something happens before connections are accepted."""

    def __init__(self, before=lambda address: None):
        super().__init__({}, 0, 2)
        self.before = before

    def publish(self, address):
        super().publish(address)
        self.before(address)


@pytest.fixture
def listening():
    """Makes the links of rank 0."""
    made = []

    def make(before=lambda address: None):
        made.append(SocketLinks(Early(before)))
        return made[-1]

    yield make
    for links in made:
        links.close()


@pytest.fixture
def opened():
    """Opens the stream of rank 1 to rank 0: its other end."""
    streams = []

    def open_to(links, watched):
        streams.append(Stream(0, watched))
        streams[-1].attach(sockets.connect(links.address, [], Who(1, watched), 5.0), 5.0)
        return streams[-1]

    yield open_to
    for stream in streams:
        stream.close()


def received(stream, channel, generation=0):
    end = time.monotonic() + 5
    while (message := stream.next(generation, channel)) is None:
        if stream.ended or time.monotonic() > end:
            return None
        stream.wait(0.1)
    return message


@pytest.mark.parametrize("watched", [True, False])
def test_a_connection_that_was_given_up_before_it_was_answered_is_not_taken_for_the_next_one(
    listening, opened, watched
):
    def give_up(address):
        with pytest.raises(OSError):
            sockets.connect(address, [], Who(1, watched), 0.1)

    links = listening(give_up)
    links.send(1, "tree", b"early")
    time.sleep(0.1)
    theirs = opened(links, watched)
    if watched:
        assert json.loads(received(theirs, b"watch"))[0] == "at"
    else:
        assert received(theirs, b"tree") == b"early"
    links.check()  # nobody is gone


@pytest.mark.parametrize("watched", [True, False])
def test_a_connection_that_has_ended_keeps_no_thread_busy(listening, opened, watched):
    links = listening()
    theirs = opened(links, watched)
    links.send(1, "tree", b"unread")
    time.sleep(0.1)
    theirs.socket.close()  # with something unread: a reset
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2 * busy()


def test_strangers_that_connect_hold_up_nobody(listening, opened, monkeypatch):
    """They say nothing, or noise, short or long; the first of too many are sent away."""
    monkeypatch.setattr(connections, "_STRANGERS", 20)
    links, strangers = listening(), []
    for n in range(100):
        stranger = socket.create_connection(("127.0.0.1", links.address.port), 5)
        strangers.append(stranger)
        stranger.sendall((b"", b"\0", os.urandom(28), b"\xff" * 28 + os.urandom(50_000))[n % 4])
    theirs = opened(links, True)
    theirs.send(0, b"watch", b'["whom"]')
    assert [json.loads(received(theirs, b"watch"))[0] for _ in range(2)] == ["at", "is"]
    links.check()
    for stranger in strangers:
        stranger.close()


@pytest.fixture
def pair():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    streams = Stream(0, False), Stream(1, False)
    for stream, end in zip(streams, ends, strict=True):
        stream.attach(end, 5.0)
    yield streams
    for stream in streams:
        stream.close()


def test_messages_of_one_channel_come_in_order_and_older_generations_are_dropped(pair):
    theirs, ours = pair
    for generation, channel, data in ((0, b"a", b"1"), (1, b"a", b"2"), (0, b"b", b"3"), (1, b"b", b"4")):
        theirs.send(generation, channel, data)
    assert received(ours, b"a") == b"1"
    assert received(ours, b"b") == b"3"
    assert ours.next(1, b"b") == b"4"
    assert ours.next(1, b"a") == b"2"
    assert ours.next(1, b"a") is None


def test_messages_that_no_socket_holds_cross_without_waiting(pair):
    """Both send before either receives; a message behind a long one stays behind it."""
    long = os.urandom(20_000_000)
    for stream in pair:
        stream.send(0, b"a", long)
        stream.send(0, b"a", b"short")
    assert all(received(stream, b"a") == long for stream in pair)
    assert all(received(stream, b"a") == b"short" for stream in pair)
