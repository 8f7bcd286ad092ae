"""Connections between processes: who may open one, and what is left of those that end."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from ppfunc.runtime.control.connections import Address, Listener, Stream, connect
from tests.clock import busy


class Welcomed(dict):
    """Connections by who has opened them."""

    def __init__(self):
        super().__init__()
        self.come = threading.Event()

    def __call__(self, who, connection):
        self[who] = Stream(connection, 5.0)
        self.come.set()


@pytest.fixture
def welcomed():
    """Who has connected to ``listener``."""
    return Welcomed()


@pytest.fixture
def listener(welcomed):
    listener = Listener("127.0.0.1", 5.0, welcomed, 1)
    yield listener
    listener.close()
    for stream in welcomed.values():
        stream.close()


def received(stream, channel, generation=0):
    end = time.monotonic() + 5
    while (message := stream.next(generation, channel)) is None:
        if stream.ended or time.monotonic() > end:
            return None
        stream.wait(0.1)
    return message


def test_who_connects_is_known_and_is_heard(listener, welcomed):
    stream = Stream(connect(listener.address, "watched 1", 5.0), 5.0)
    stream.send(0, b"watch", b"hello")
    assert welcomed.come.wait(5) and received(welcomed["watched 1"], b"watch") == b"hello"
    stream.close()


def test_a_connection_that_has_ended_keeps_no_thread_busy(listener, welcomed):
    stream = Stream(connect(listener.address, "watched 1", 5.0), 5.0)
    assert welcomed.come.wait(5)
    stream.send(0, b"tree", b"unread")
    welcomed["watched 1"].close()  # with something unread: a reset
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.2 * busy()
    stream.close()


def test_strangers_that_connect_hold_up_nobody(listener, welcomed):
    """They say nothing, or noise, short or long."""
    strangers = []
    for n in range(100):
        stranger = socket.create_connection(("127.0.0.1", listener.address.port), 5)
        strangers.append(stranger)
        stranger.sendall((b"", b"\0", os.urandom(28), b"\xff" * 28 + os.urandom(50_000))[n % 4])
    stream = Stream(connect(listener.address, "watched 1", 5.0), 5.0)
    assert welcomed.come.wait(5) and welcomed.keys() == {"watched 1"}
    for each in (*strangers, stream):
        each.close()


def test_who_does_not_answer_in_time_is_not_taken_for_gone():
    """A TimeoutError is an OSError, and was taken for a host where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts nothing
        address = Address("127.0.0.1", silent.getsockname()[1], "00" * 16)
        with pytest.raises(TimeoutError, match="no answer in 0.1 s"):
            connect(address, "watched 0", 0.1)
    with pytest.raises(ConnectionRefusedError):
        connect(address, "watched 0", 0.1)


def test_who_has_another_key_is_refused(listener, welcomed):
    with pytest.raises(ConnectionRefusedError, match="the key"):
        connect(listener.address._replace(key="11" * 16), "watched 0", 5.0)
    assert not welcomed


@pytest.mark.parametrize("limit", [8.0, 30.0, 1800.0])
def test_a_link_may_be_silent_for_the_whole_limit(limit, pair):
    """It was taken for dead after 6.8 to 10 s, whatever the limit."""
    ours, _ = pair(limit)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    idle, between, count, user = (
        ours.socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options
    )
    assert limit - 4 <= idle + between * count <= limit and user == 1000 * limit


@pytest.fixture
def pair():
    """Makes two ends of a connection."""
    streams = []

    def make(limit=5.0):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends = socket.create_connection(server.getsockname()), server.accept()[0]
        streams.extend(Stream(end, limit) for end in ends)
        return streams[-2:]

    yield make
    for stream in streams:
        stream.close()


def test_messages_of_one_channel_come_in_order_and_older_generations_are_dropped(pair):
    theirs, ours = pair()
    for generation, channel, data in ((0, b"a", b"1"), (1, b"a", b"2"), (0, b"b", b"3"), (1, b"b", b"4")):
        theirs.send(generation, channel, data)
    assert received(ours, b"a") == b"1"
    assert received(ours, b"b") == b"3"
    assert ours.next(1, b"b") == b"4"
    assert ours.next(1, b"a") == b"2"
    assert ours.next(1, b"a") is None


def test_a_message_that_no_socket_holds_arrives_whole(pair):
    """What comes behind it stays behind it."""
    (theirs, ours), long = pair(), os.urandom(20_000_000)

    def send():
        theirs.send(0, b"a", long)
        theirs.send(0, b"a", b"short")

    thread = threading.Thread(target=send)
    thread.start()
    assert received(ours, b"a") == long and received(ours, b"a") == b"short"
    thread.join()
