"""Ranks find each other again after any failure that all survive, and nothing of a dropped transport
stays.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.control import tree
from ppfunc.runtime.control.links import Rendezvous
from ppfunc.runtime.values.errors import Failure, FailureRecord, LinkError
from tests.models import squared


def caught(call, *args, **named):
    """The type and text of what a call raises, and the rank that it names."""
    try:
        call(*args, **named)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return None, "", None


def meet(timeout=20.0):
    """A transport over which all ranks exchange something."""
    with pp.P2P(timeout=timeout) as transport:
        transport.require_same("met")
        dist.barrier()
    return True


WRONG = {"mesh": "no mesh", "group": 30, "timeout": -1}


def refused(rank, ranks, who, name):
    """One rank gives wrong arguments; the others wait for it."""
    return caught(pp.P2P, **({name: WRONG[name]} if rank == who else {"timeout": 20})), meet(), meet()


def step(transport, stages=(0, 1)):
    x = torch.ones(4, 2)
    run = pp.value_and_grad([lambda w, x: x @ w] * 2, squared, pp.gpipe(2, 2), transport)
    return run({stage: torch.ones(2, 2) for stage in stages}, x, x)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("who", [0, 1])
def test_ranks_meet_again_after_a_constructor_that_was_refused_on_one(two, who, name, soon):
    """The n-th transport of each rank was taken for the same one, and one that was refused did not count.

    A group that is none was taken for the world; a timeout that is none was waited for, and not published.
    """
    began = time.monotonic()
    for rank, (seen, *met) in enumerate(two(refused, who, name)):
        assert met == [True, True]
        if rank == who:
            assert seen[0] in ("TypeError", "ValueError") and f"{name}: got {WRONG[name]!r}" in seen[1]
        else:
            assert seen[0] == "PipelineError" and seen[2] == who and f"Error: {name}: got" in seen[1]
    assert time.monotonic() - began < 10 * soon


@contextmanager
def few_descriptors(free):
    """Leave this process so many descriptors that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))  # also numbers between those in use
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def without_descriptors(rank, ranks, who):
    """One rank can open no more files as it makes its transport."""
    with few_descriptors(2) if rank == who else nullcontext():  # enough to listen, too few to connect
        seen = caught(pp.P2P, timeout=20)
    return seen, meet()


@pytest.mark.parametrize("who", [0, 1])
def test_a_constructor_without_descriptors_is_published(fresh, who):
    """The others waited for their whole limit, and read that a living rank is stopped."""
    answers = fresh(2)(without_descriptors, who)
    assert answers[who][0][0] == "OSError" and answers[who][1]
    (name, text, named), met = answers[1 - who]
    assert (name, named, met) == ("PipelineError", who, True) and "Too many open files" in text


def connects_without_descriptors(rank, ranks, who):
    """One rank can open no more files in its first step, which connects; then all take it again."""
    with pp.P2P(timeout=20) as transport:
        transport.require_same("met")
        step(pp.InProcess())  # imports what a step needs
        began = time.monotonic()
        with few_descriptors(1) if rank == who else nullcontext():
            seen = caught(step, transport, [rank])
        seconds = time.monotonic() - began
        dist.barrier()
        step(transport, [rank])
    return seen, seconds


@pytest.mark.parametrize("who", [0, 1])
def test_a_communicator_without_descriptors_is_published(fresh, who, soon):
    """gloo failed in a thread before it had an address, for which its rank waited; another one was named."""
    for rank, (seen, seconds) in enumerate(fresh(2)(connects_without_descriptors, who)):
        name, text, named = seen
        assert (name, named) == (("RuntimeError", None) if rank == who else ("PipelineError", who)), seen
        assert "Too many open files" in text and seconds < soon


def test_the_rank_whose_store_does_not_answer_is_named():
    """A rank above in the tree was, where the ranks had not all connected: it answers as little."""
    rendezvous = object.__new__(Rendezvous)
    rendezvous._server = 0
    with pytest.raises(LinkError, match="serves the store of the process group, which has not") as caught:
        rendezvous._ask(partial(time.sleep, 0.2), seconds=0.01)
    record = FailureRecord.of(Failure(3, None, None, caught.value), 3, suspect=lambda peer: (1, "asleep"))
    assert (record.rank, "rank 1" in record.reason) == (0, False)


def misses(rank, ranks, who):
    """Some ranks miss a transport. The others wait in vain; then all make the next one."""
    seen = None
    if rank not in who:
        seen = caught(pp.P2P, timeout=2)
    dist.barrier()
    return seen, meet()


@pytest.mark.parametrize("who", [[0], [1], [3], [1, 2], [0, 1, 3]], ids=str)
def test_ranks_meet_again_after_a_transport_that_some_have_missed(four, who):
    """Of several that were missing, one was expected in the next round, the others in this one."""
    for rank, (seen, met) in enumerate(four(misses, who)):
        assert met
        if rank not in who:
            name, text, named = seen
            assert (name, named) == ("PipelineError", who[0]) and "has not come" in text


def stops_before_it_tells_that_all_have_met(rank, ranks):
    """Rank 1 learns from rank 0 that all have met, and stops before it tells rank 3."""
    if rank == 1:
        tree.TreeMessages.send_down = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        seen = caught(pp.P2P, timeout=4)
        dist.group.WORLD.get_group_store().set("seen", "")
        return seen
    with pp.P2P(timeout=60):
        while not dist.group.WORLD.get_group_store().check(["seen"]):
            time.sleep(0.1)


def test_a_rank_that_others_have_met_is_not_said_to_be_missing(fresh):
    processes = fresh(4)
    processes.start(stops_before_it_tells_that_all_have_met)
    name, text, named = processes.answers(stopped=1)[3]
    assert (name, named) == ("PipelineError", 1) and "has not come" not in text, text


def misses_a_save(rank, ranks, who, root):
    """One rank misses a save, then all save, and load."""
    seen = None
    if rank != who:
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        before = group.options._timeout
        dist.distributed_c10d._set_pg_timeout(before.__class__(seconds=2), dist.group.WORLD)
        seen = caught(pp.checkpoint.save, root, {"step": 1})
        dist.distributed_c10d._set_pg_timeout(before, dist.group.WORLD)
    dist.barrier()
    pp.checkpoint.save(root, {"step": 2, "w": torch.ones(3)})
    return seen, pp.checkpoint.load(root, like={"step": 0, "w": torch.zeros(3)})["step"]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_ranks_save_and_load_after_a_save_that_one_has_missed(fresh, tmp_path, who):
    """No later save or load of that group worked, and both sides named the wrong rank."""
    for rank, (seen, loaded) in enumerate(fresh(3)(misses_a_save, who, str(tmp_path))):
        assert loaded == 2
        if rank != who:
            assert seen[0] == "RankError" and f"rank {who} has " in seen[1], seen


def drops(rank, ranks):
    """Threads and descriptors after transports that were dropped, not closed."""

    def look():
        gc.collect()
        dist.barrier()
        time.sleep(0.3)
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def drop():
        transport = pp.P2P(timeout=20)
        step(transport, [rank])
        dist.barrier()

    drop()
    before = look()
    for _ in range(5):
        drop()
    return before, look()


def test_a_transport_that_is_dropped_is_closed(two):
    """The thread that watches held it: 1 thread and 19 to 31 descriptors each."""
    for before, after in two(drops):
        assert all(now <= then + 1 for now, then in zip(after, before, strict=True)), (before, after)
