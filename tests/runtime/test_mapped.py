"""Messages through memory that two processes map: both ends in this process, or in two."""

from __future__ import annotations

import fcntl
import gc
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.transport import mapped
from ppfunc.runtime.transport.mapped import Receiver, Sender, open_mapped
from ppfunc.runtime.values.errors import LinkError
from tests.clock import busy
from tests.models import squared


class Links:
    """Those of one of two ranks, whose messages are in queues; ``wait_for`` as in ``SocketLinks``."""

    def __init__(self, rank, mine, theirs, limit=20.0):
        self.rank, self.mine, self.theirs, self.limit, self.looks = rank, mine, theirs, limit, 0
        self.receivers = ()

    def send(self, peer, channel, data):
        self.theirs.put(data)

    def recv(self, peer, channel):
        return self.mine.get(timeout=10)

    def wait_for(self, peer, ready, pause, spins=0):
        end = time.monotonic() + self.limit * busy()
        while (result := ready()) is None:
            self.looks += 1
            if spins:
                spins -= 1
                continue
            if time.monotonic() > end:
                raise LinkError(peer, "late", "it has not answered")
            pause()
        return result


def linked():
    first, second = queue.SimpleQueue(), queue.SimpleQueue()
    return Links(0, first, second), Links(1, second, first)


def route(links=None, members=(0, 1), wanted=(True, True)):
    """The ends of a route, that of the first member first."""
    links = links or linked()
    with ThreadPoolExecutor() as threads:
        ends = threads.map(lambda rank: open_mapped(links[rank], "way", members, wanted[rank]), members)
    return tuple(ends)


def descriptors():
    gc.collect()  # what earlier tests have left
    return len(os.listdir("/proc/self/fd"))


def expected(receiver, *likes):
    """A function that takes the next message that is not expected yet."""
    return partial(receiver.take, receiver.expect(), [(like.shape, like.dtype) for like in likes])


def require_equal(got, sent):
    assert len(got) == len(sent) and all(map(torch.equal, got, sent))


def burst(ends, *sizes):
    """Send a message of each size before the first is received."""
    sender, receiver = ends
    sent = [torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)]
    for tensor in sent:
        sender.send([tensor])
    for tensor in sent:
        require_equal(expected(receiver, tensor)(), [tensor])


@contextmanager
def sends_after(seconds, sender, tensor):
    """Send a tensor later, in a thread that ends first."""
    timer = threading.Timer(seconds, sender.send, ([tensor],))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def memory_of(end):
    return os.fstat(end._memory).st_blocks * 512


def test_any_tensors_arrive_whichever_is_waited_for_first():
    sender, receiver = route()
    kinds = torch.float64, torch.bfloat16, torch.int8, torch.uint8
    sent = [
        [(1000 * torch.randn(n)).to(kind)] for kind in kinds for n in (1, 7, 4096 // kind.itemsize, 300_001)
    ]
    sent += [
        [t for tensors in sent for t in tensors],
        [],
        [torch.ones(0, 3), torch.randn(2, 3, dtype=torch.complex64)],
    ]
    early = [expected(receiver, *tensors) for tensors in sent[:5]]
    for tensors in sent:
        sender.send(tensors)
    takes = early + [expected(receiver, *tensors) for tensors in sent[5:]]
    for take, tensors in reversed(list(zip(takes, sent, strict=True))):
        require_equal(take(), tensors)


def test_memory_is_that_of_the_messages_under_way():
    """Slots are used again, and those are given up that became too small."""
    ends = route()
    for size in [*range(1000, 400_000, 9001), *range(400_000, 0, -20001), *range(1000, 400_000, 30001)]:
        burst(ends, size, size // 2, size // 3)
    assert memory_of(ends[1]) <= 3 * (1.25 * 400_000 + 4096)


def test_a_small_message_takes_no_large_slot():
    ends, big, small = route(), 2**20, 20_000
    for _ in range(3):
        burst(ends, *[big] * 4)
        burst(ends, *[small] * 4, *[big] * 4)
    assert memory_of(ends[1]) == 4 * big + 4 * 20_480


def test_memory_that_messages_leave_unused_goes_back():
    """As often as sizes change. Steady messages keep theirs."""
    ends, big, small = route(), 2**20, 20_000
    with patch.object(mapped, "_UNUSED", 20):
        for _ in range(5):
            burst(ends, *[big] * 4)
            assert memory_of(ends[1]) >= 4 * big
            for _ in range(40):
                burst(ends, small)
            assert memory_of(ends[1]) <= 2 * 20_480

        burst(ends, big, big, small)
        with patch.object(os, "posix_fallocate", None):
            for _ in range(30):
                burst(ends, big, big, small)
        assert memory_of(ends[1]) == 2 * big + 20_480


def test_memory_that_cannot_be_had_is_named():
    sender, _ = route(linked(), (1, 0))
    error = OSError(28, "No space left on device")
    with (
        patch.object(os, "posix_fallocate", side_effect=error),
        pytest.raises(
            MemoryError,
            match=r"rank 1 cannot map 20,480 bytes .* rank 0.*\(No space left on device\); .*mapped=False",
        ),
    ):
        sender.send([torch.ones(20_000, dtype=torch.uint8)])


def full(rank, ranks):
    """What a step raises that has no memory for messages on rank 0, and whether the next one works."""
    params, x = {rank: torch.tensor(2.0 + rank)}, torch.linspace(0, 1, 8)[:, None]
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([scaled] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        failing = patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
        with failing if rank == 0 else nullcontext(), pytest.raises(pp.PipelineError) as raised:
            step(params, x, x)
        return raised.value.rank, str(raised.value), step(params, x, x)[0]


def test_a_step_without_memory_for_a_message_fails_on_all_ranks(two):
    for rank, text, loss in two(full):
        assert rank == 0 and "with rank 1" in text and "mapped=False" in text
        assert torch.isfinite(loss)


def test_threads_of_other_transports_open_routes_while_one_waits():
    """Each looks at the receivers of its own links alone, whose ends do not keep them alive."""
    (first, links), (_, others) = linked(), linked()
    _, receiver = route((first, links))
    ended, interval = threading.Event(), sys.getswitchinterval()

    def opens():
        last = deque(maxlen=100)
        while not ended.is_set():
            last.append(Receiver(others, 0, [os.dup(receiver._reads) for _ in range(3)]))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(opens)
            try:
                with patch.object(mapped, "_SLEEP", 0):
                    for _ in range(20_000):
                        receiver._pause()
            finally:
                ended.set()
            opening.result()
    finally:
        sys.setswitchinterval(interval)
    assert [end() for end in links.receivers] == [receiver]
    assert len(others.receivers) <= 101 and not any(end() for end in others.receivers)


def test_a_full_pipe_holds_up_no_rank_for_ever():
    """Both ranks send more than their pipes take before either waits for a message."""
    links = linked()
    (sender_0, receiver_1), (sender_1, receiver_0) = route(links), route(links, (1, 0))
    for sender in (sender_0, sender_1):
        fcntl.fcntl(sender._writes, fcntl.F_SETPIPE_SZ, 4096)  # of 256 records
    for receiver in (receiver_0, receiver_1):
        fcntl.fcntl(receiver._writes, fcntl.F_SETPIPE_SZ, 4096)

    posted = threading.Barrier(2, timeout=30)

    def rank(sender, receiver):
        sent = [torch.tensor([n]) for n in range(400)]
        for _ in range(2):
            takes = [expected(receiver, t) for t in sent]
            posted.wait()
            for tensor in sent:
                sender.send([tensor])
            for tensor, take in zip(sent, takes, strict=True):
                require_equal(take(), [tensor])

    with ThreadPoolExecutor() as threads:
        for ended in [threads.submit(rank, sender_0, receiver_0), threads.submit(rank, sender_1, receiver_1)]:
            ended.result()
    assert sender_0._size <= 2 * 400 * 4096


def test_who_waits_sleeps():
    links = linked()
    sender, receiver = route(links)
    take = expected(receiver, torch.ones(3))
    with sends_after(0.5, sender, torch.ones(3)):
        start = time.perf_counter()
        require_equal(take(), [torch.ones(3)])
    assert time.perf_counter() - start > 0.4
    assert links[1].looks < 100


def shared_files():
    """List the files of shared memory; other processes of this machine make locks there meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def test_an_end_that_is_gone_is_told_and_nothing_is_left():
    before, files = descriptors(), shared_files()
    for drops in (0, 1):
        ends = list(route())
        ends[0].send([torch.ones(5)])
        first, second = expected(ends[1], torch.ones(5)), expected(ends[1], torch.ones(5))
        del ends[0 if drops == 0 else 1]
        if drops == 0:  # what it has sent arrives all the same
            require_equal(first(), [torch.ones(5)])
            with pytest.raises(LinkError, match="gone or out of reach") as told:
                second()
        else:
            del first, second
            with pytest.raises(LinkError, match="gone or out of reach") as told:
                ends[0].send([torch.ones(5)])
        assert told.value.kind == "gone"
        del ends[:], told
        first = second = None
        assert descriptors() == before
    assert shared_files() == files


def test_a_route_of_before_a_failure_disturbs_no_other():
    """Its receiver may still be there: what waits on another route took its end for that of the peer."""
    links = linked()
    old, (sender, receiver) = list(route(links)), route(links)
    del old[0]
    take = expected(receiver, torch.ones(2))
    with sends_after(0.3, sender, torch.ones(2)):
        require_equal(take(), [torch.ones(2)])


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_both_ends_do_without_where_one_does_not_want_it(wanted):
    before = descriptors()
    assert route(wanted=wanted) == (None, None)
    assert descriptors() == before


def test_both_ends_do_without_where_it_cannot_be_had():
    """The process that the sender names is another one here; there are no descriptors left."""
    before, readlink, pipe2, calls = descriptors(), os.readlink, os.pipe2, []

    def second_is_refused(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(24, "Too many open files")
        return pipe2(*args)

    def another(path):
        calls.append(path)
        return readlink(path) + "?" * (len(calls) == 6)  # the last that the receiver asks for

    with patch.object(os, "pipe2", second_is_refused):
        assert route() == (None, None)
    assert descriptors() == before

    calls.clear()
    with patch.object(os, "readlink", another):
        assert route() == (None, None)
    assert descriptors() == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_no_other_user_reads_it():
    sender, receiver = route()
    sender.send([torch.ones(5)])
    for path, _ in [*sender.offer[:1], (f"/proc/{os.getpid()}/fd/{receiver._reads}", "")]:
        assert subprocess.run(["cat", path], user=65534, capture_output=True).returncode
    assert not subprocess.run(["head", "-c", "4", sender.offer[0][0]], capture_output=True).returncode


def scaled(w, x):
    return torch.tanh(w * x)


def ways(rank, ranks, wants):
    """The kinds of the routes of a step, and its loss."""
    params, x = {rank: torch.tensor(2.0 + rank)}, torch.linspace(0, 1, 8)[:, None]
    with pp.P2P(timeout=30, mapped=wants[rank]) as transport:
        step = pp.value_and_grad([scaled] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        loss, grads = step(params, x, x)
        return {type(group) for group in transport._groups}, loss, grads[rank]


def test_ranks_of_a_host_map_memory_unless_one_does_not_want_it(two):
    results = {wants: two(ways, wants) for wants in [(True, True), (True, False), (False, True)]}
    for wants, ranks in results.items():
        for (kinds, *numbers), (_, *others) in zip(ranks, results[True, True], strict=True):
            assert kinds == ({Sender, Receiver} if all(wants) else {torch.distributed.ProcessGroupGloo})
            assert all(map(torch.equal, numbers, others))
