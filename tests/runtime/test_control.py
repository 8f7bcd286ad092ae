"""Ranks agree along a tree: over links in memory, over sockets between threads, and over sockets between processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict, deque
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ppfunc.runtime import _torch
from ppfunc.runtime.control import Control, LinkError, StepRunning, gone
from ppfunc.runtime.errors import AgreementError, PipelineError
from ppfunc.runtime.inprocess import InProcess
from ppfunc.runtime.links import SocketLinks
from ppfunc.runtime.p2p import P2P
from ppfunc.runtime.transport import Failure, LossPart
from ppfunc.stage import LeafSignature

SOON = 2.0  # seconds; the timeouts of the transports below are far longer


# -- links in memory ---------------------------------------------------------------------------


class Memory:
    """What the links of all ranks share."""

    def __init__(self, size):
        self.size = size
        self.boxes = defaultdict(deque)
        self.changed = threading.Condition()
        self.failures, self.committed = {}, 0


class MemoryLinks:
    def __init__(self, memory, rank):
        self.memory, self.rank, self.size, self.generation, self.voted = memory, rank, memory.size, 0, None

    def send(self, peer, channel, data):
        with self.memory.changed:
            self.memory.boxes[self.rank, peer, channel].append((self.generation, data))
            self.memory.changed.notify_all()

    def recv(self, peer, channel):
        box = self.memory.boxes[peer, self.rank, channel]
        with self.memory.changed:
            while True:
                while box and box[0][0] <= self.generation:
                    generation, data = box.popleft()
                    if generation == self.generation:
                        return data
                self._check(peer)
                if not self.memory.changed.wait(5):
                    raise LinkError(peer, "late", f"rank {self.rank} waited for rank {peer}")

    def _check(self, peer):
        failed = self.memory.failures.get(self.generation)
        if failed and (self.voted is None or failed[0] <= self.voted):
            raise LinkError(peer, "failed", "a rank has failed")

    def begin(self, step):
        self._check(0)

    def vote(self, step):
        with self.memory.changed:
            self._check(0)
            self.voted = step

    def commit(self, step):
        with self.memory.changed:
            if self.rank == 0:
                self._check(0)
                self.memory.committed = step + 1
            self.voted = None

    def publish(self, failure):
        with self.memory.changed:
            first = self.memory.failures.setdefault(self.generation, (self.memory.committed, failure))
            self.memory.changed.notify_all()
            self.generation, self.voted = self.generation + 1, None
            return first[1]

    def suspect(self, peer):
        return peer

    def close(self):
        pass


class Keys:
    """A rendezvous of threads."""

    def __init__(self, keys, rank, size):
        self.keys, self.rank, self.size, self.timeout = keys, rank, size, 10.0

    def write(self, key, text):
        self.keys[key] = text

    def read(self, key):
        return self.keys.get(key)

    def alive(self, peer):
        return True

    def wait(self, key, peer, check):
        while key not in self.keys:
            check(peer)
            time.sleep(0.001)
        return self.keys[key]


def in_memory(size):
    memory = Memory(size)
    return lambda rank: MemoryLinks(memory, rank)


def over_sockets(size):
    keys = {}
    return lambda rank: SocketLinks(Keys(keys, rank, size), partial(gone, reporter=rank))


def in_threads(kind, size, work):
    """What ``work(rank, control)`` returns or raises on each rank; a failure is told, and what is to be raised is returned."""
    make, answers = kind(size), {}

    def run(rank):
        control = Control(make(rank))
        try:
            answers[rank] = work(rank, control)
        except BaseException as error:
            answers[rank] = control.fail(Failure(rank, None, None, error))
        finally:
            done.wait()
            control.close()

    done = threading.Barrier(size)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers[rank] for rank in range(size)]


KINDS = pytest.mark.parametrize("kind", [in_memory, over_sockets])


def leaf(*shape, dtype=torch.float32):
    return LeafSignature(shape, dtype, False)


@KINDS
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_step_begins_with_the_key_and_ends_with_the_loss_of_any_rank(kind, size):
    generator = torch.Generator().manual_seed(0)
    values = {stage: torch.randn(5, 3, generator=generator) for stage in range(3)}
    parts = {stage: LossPart((stage * 5 + 1) % size, leaf(5, 3)) for stage in (2, 0, 1)}
    want = InProcess().end(values, parts)

    def work(rank, control):
        own = {stage: values[stage] for stage, part in parts.items() if part.rank == rank}
        told = []
        totals = []
        for source in range(size):
            told.append(control.begin("f; seed 3", f"key {source}" if rank == source else None, source))
            totals.append(control.end(own, parts))
        control.begin("no loss", "k", 0)
        assert control.end({}, {}) is None
        return told, totals

    for told, totals in in_threads(kind, size, work):
        assert told == [f"key {source}" for source in range(size)]
        assert all(torch.equal(total, want) for total in totals)


@KINDS
def test_texts_go_between_any_two_ranks_and_to_all(kind):
    size, long = 7, "é\udcff; \n" * 300_000

    def work(rank, control):
        gathered = control.all_gather(f"{rank} {long if rank == 5 else ''}")
        for peer in range(size):
            if peer != rank:
                control.send_text(peer, f"{rank} to {peer}")
                control.send_text(peer, long if (rank, peer) in ((1, 6), (6, 1)) else "")
        heard = {peer: (control.recv_text(peer), control.recv_text(peer)) for peer in range(size) if peer != rank}
        return gathered, heard, control.all_gather("again")

    for rank, (gathered, heard, again) in enumerate(in_threads(kind, size, work)):
        assert gathered == [f"{peer} {long if peer == 5 else ''}" for peer in range(size)]
        assert again == ["again"] * size
        for peer, (short, other) in heard.items():
            assert short == f"{peer} to {rank}"
            assert other == (long if {rank, peer} == {1, 6} else "")


@KINDS
@pytest.mark.parametrize("who", [0, 3, 6])
@pytest.mark.parametrize(
    ("term", "here", "there"),
    [("seed", "seed 4", "seed 3"), ("key", "float32[2]", "float32[3]"), ("source", "shapes from rank 5", "shapes from rank 0")],
)
def test_a_disagreement_is_named_on_every_rank_by_the_terms_that_differ(kind, who, term, here, there):
    def work(rank, control):
        own = rank == who
        call = f"step function 1 (f); seed {4 if own and term == 'seed' else 3}; weights 1"
        key = "float32[2]" if own and term == "key" else "float32[3]"
        return control.begin(call, key, 5 if own and term == "source" else 0) and control.end({}, {})

    errors = in_threads(kind, 7, work)
    for error in errors:
        assert isinstance(error, AgreementError)
        assert here in str(error) and there in str(error)
        assert "weights" not in str(error) and "step function 1" not in str(error)
        assert "rank 0" in str(error)
        assert who == 0 or f"rank {who}" in str(error)
    assert len({str(error).partition(" [found by")[0] for error in errors}) == 1


@KINDS
def test_other_calls_on_the_same_tree_are_told(kind):
    def work(rank, control):
        return control.all_gather("x") if rank == 2 else control.begin("f", "k", 0) and control.end({}, {})

    for error in in_threads(kind, 5, work):
        assert isinstance(error, AgreementError)
        assert "what comes next" in str(error)


@KINDS
@pytest.mark.parametrize("who", [0, 1, 5])
def test_a_failure_is_told_to_every_rank_and_the_next_step_works(kind, who):
    def work(rank, control):
        failures = []
        for armed in (False, True, False):
            try:
                control.begin("f", "k", 0)
                if armed and rank == who:
                    raise ArithmeticError("x" * 20_000_000)
                control.end({}, {})
            except Exception as error:
                failures.append(control.fail(Failure(rank, None, None, error)))
        return failures, control.generation, control.ended

    for rank, (failures, generation, ended) in enumerate(in_threads(kind, 7, work)):
        (error,) = failures
        assert isinstance(error, ArithmeticError if rank == who else PipelineError)
        assert rank == who or error.rank == who
        assert rank == who or len(str(error)) < 3000
        assert (generation, ended) == (1, 2)


class Interrupting:
    """Links one of whose calls is interrupted, once."""

    def __init__(self, links, method):
        self._links, self._method = links, method

    def __getattr__(self, name):
        def call(*args):
            if name == self._method:
                self._method = None
                raise KeyboardInterrupt
            return getattr(self._links, name)(*args)

        return call if name in ("send", "recv", "vote", "commit") else getattr(self._links, name)


@pytest.mark.parametrize(
    ("who", "method", "outcome"),
    [
        (0, "recv", "failed"),  # before anything is decided
        (0, "commit", "apart"),
        (0, "send", "apart"),
        (1, "vote", "apart"),
        (1, "send", "apart"),
        (4, "recv", "apart"),
        (4, "commit", "apart"),
    ],
)
def test_an_interrupt_at_the_end_fails_the_step_on_all_ranks_or_is_told_before_the_next(who, method, outcome):
    """Where the other ranks may have ended the step, this one ends it too and raises after; they are a step apart then."""

    def work(rank, control):
        links, outcomes = control.links, []
        while len(outcomes) < 3 and "steps ended" not in str(outcomes[-1:]):
            try:
                control.begin("f", "k", 0)
                if rank == who and not outcomes:
                    control.links = Interrupting(links, method)
                control.end({}, {})
                outcomes.append(None)
            except BaseException as error:
                control.links = links
                outcomes.append(control.fail(Failure(rank, None, None, error)))
        return outcomes

    answers = in_threads(in_memory, 5, work)
    for rank, outcomes in enumerate(answers):
        if rank == who:
            assert isinstance(outcomes[0], KeyboardInterrupt)
        else:
            assert [isinstance(o, PipelineError) for o in outcomes[:2]] == ([True, False] if outcome == "failed" else [False, True])
        if outcome == "failed":
            assert outcomes[1:] == [None, None]
        else:
            assert isinstance(outcomes[-1], AgreementError)
            assert "steps ended: 0" in str(outcomes[-1]) and "steps ended: 1" in str(outcomes[-1])
            assert "load the same checkpoint" in str(outcomes[-1])


def test_a_step_within_a_step_is_refused_and_does_not_disturb_it():
    control = Control(MemoryLinks(Memory(1), 0))
    control.begin("f", "k", 0)
    with pytest.raises(StepRunning, match="another step runs") as caught:
        control.begin("f", "k", 0)
    assert control.fail(Failure(0, None, None, caught.value)) is caught.value
    assert control.generation == 0
    control.end({}, {})
    control.begin("f", "k", 0)
    control.end({}, {})


def test_a_rank_without_the_batch_that_tells_its_shapes_is_refused():
    with pytest.raises(ValueError, match="inputs: got None on rank 0"):
        Control(MemoryLinks(Memory(1), 0)).begin("f", None, 0)


# -- processes ---------------------------------------------------------------------------------


def step(transport, rank, ranks, call="f"):
    """A step that does nothing but end, with a loss on the last rank."""
    parts = {ranks - 1: LossPart(ranks - 1, leaf(8))}
    losses = {ranks - 1: torch.arange(8.0)} if rank == ranks - 1 else {}
    try:
        transport.begin(call, "k" if rank == 0 else None, 0)
        return transport.end(losses, parts)
    except BaseException as cause:
        raise transport.fail(Failure(rank, None, None, cause)) from None


def caught(call, *args):
    start = time.perf_counter()
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), time.perf_counter() - start
    return None, "", None, time.perf_counter() - start


def everything(rank, ranks):
    with P2P(timeout=60) as transport:
        losses = [step(transport, rank, ranks) for _ in range(3)]
        apart = caught(step, transport, rank, ranks, f"f; seed {rank // 2}")
        losses.append(step(transport, rank, ranks))
        if rank == 0:
            transport.send_text(0, ranks - 1, "hello")
        if rank == ranks - 1:
            assert transport.recv_text(ranks - 1, 0) == "hello"
        texts = transport.all_gather(str(rank))
        dist.barrier()
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.begin("f", "k", 0)
    return losses, apart, texts


def test_processes_agree(four):
    for losses, (name, text, _, seconds), texts in four(everything):
        assert losses == [28.0] * 4
        assert name == "AgreementError"
        assert "seed 0" in text and "seed 1" in text
        assert seconds < SOON
        assert texts == ["0", "1", "2", "3"]


def the_timeout_of_the_group(rank, ranks):
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=7))
    with P2P(group) as transport:
        return transport._rendezvous.timeout


def test_the_timeout_is_that_of_the_group(two):
    assert two(the_timeout_of_the_group) == [7.0, 7.0]


@pytest.mark.parametrize(("victim", "how", "steps"), [(3, 0, None), (0, 1, 0), (0, "kill", 2), (1, "kill", 2)])
def test_a_rank_whose_process_ends_is_named_by_all_others(fresh, victim, how, steps):
    processes = fresh(4)
    processes.start(dies_told, victim, how, steps)
    for rank, answer in enumerate(processes.answers(60)):
        if rank == victim:
            assert answer is None
            continue
        name, _, named, seconds = answer
        assert (name, named) == ("PipelineError", victim)
        assert seconds < SOON


def dies_told(rank, ranks, victim, how, steps):
    dist.barrier()
    transport = None if rank == victim and steps is None else P2P(timeout=60)
    for _ in range(steps or 0):
        step(transport, rank, ranks)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(how)
    return caught(step, transport, rank, ranks)


def frozen(rank, ranks, victim):
    transport = P2P(timeout=2)
    step(transport, rank, ranks)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return caught(step, transport, rank, ranks)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_frozen_rank_is_named_by_all_others(fresh, victim):
    processes = fresh(4)
    processes.start(frozen, victim)
    for rank, end in enumerate(processes._ends):
        if rank != victim:
            name, _, named, seconds = processes._answer(end, 60)
            assert (name, named) == ("PipelineError", victim)
            assert seconds < 2 + SOON


def interrupted(rank, ranks, steps):
    """One rank gets signals at any moment; how many steps each rank was given, and how it ended."""
    transport = P2P(timeout=20)
    dist.barrier()
    stop, done, outcome = threading.Event(), 0, []

    def strike():
        while not stop.wait(0.0031):
            os.kill(os.getpid(), signal.SIGINT)

    def raising(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raising)
    threading.Thread(target=strike).start() if rank == 1 else None
    try:
        while done < steps and len(outcome) < 40:
            try:
                step(transport, rank, ranks)
                done += 1
            except KeyboardInterrupt:
                outcome.append("interrupt")
            except Exception as error:
                outcome.append(f"{type(error).__name__}: {error}")
                if "steps ended" in str(error):
                    break
    except KeyboardInterrupt:
        outcome.append("outside")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop.set()
    signal.signal(signal.SIGINT, before)
    return done, transport._control.ended, outcome


def test_private_names_of_torch_are_there():
    import inspect

    group = torch.distributed.distributed_c10d.ProcessGroup
    assert hasattr(group, "get_group_store"), "ppfunc.runtime._torch.store_of"
    assert hasattr(group, "_get_backend"), "ppfunc.runtime._torch.timeout_of"
    assert hasattr(dist, "ProcessGroupGloo"), "ppfunc.runtime._torch.ProcessGroupGloo"
    assert "delete_key" in dir(dist.Store)
    assert inspect.ismodule(_torch)
