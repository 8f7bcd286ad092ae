"""A process that ends, is stopped or gives up is named by all others, wherever it was: real processes under
gloo.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.runtime.control.links import Rendezvous, SocketLinks
from ppfunc.runtime.ports import _torch
from ppfunc.runtime.transport import p2p
from tests.clock import busy
from tests.unseen import Unseen

D, MICROBATCHES = 4, 4
LAYOUTS = {
    "2 ranks": ((2,), ("pp",)),
    "3 ranks": ((3,), ("pp",)),
    "4 ranks": ((4,), ("pp",)),
    "pipe x data": ((2, 2), ("pp", "dp")),
    "pipe x tensor": ((2, 2), ("pp", "tp")),
}
SIZES = {name: torch.Size(shape).numel() for name, (shape, _) in LAYOUTS.items()}
OPEN: list[Any] = []  # transports end with their process: one that is closed is taken for one that is gone


class Seen(NamedTuple):
    """What has ended the training of a rank, when, and after how many steps."""

    kind: str
    rank: int | None
    text: str
    at: float
    ended: int


# -- the training of one rank ------------------------------------------------------------------


class Run:
    """One rank of a pipeline of any layout: over data ranks with their reductions, over tensor ranks with a
    sum in each stage.
    """

    def __init__(self, layout, limit=60.0, before=lambda place: None, begun=lambda: None):
        (shape, names), generator = LAYOUTS[layout], torch.Generator().manual_seed(0)
        self.transport = transport = over(shape, names, limit, begun)
        OPEN.append(transport)
        mesh, ranks = transport.mesh, transport.size

        def stage(params, x):
            before("stage")
            if "tp" in names:
                x = pp.collectives.pvary(x, mesh["tp"])
            y = torch.tanh(Noted.apply(x @ params["w"], before))
            return pp.collectives.psum(y, mesh["tp"]) if "tp" in names else y

        def squared(y, target):
            before("loss")
            return (y - target).square().mean()

        def update(grads, state, params, **options):
            before("optimizer")
            return plain.update(grads, state, params, **options)

        plain = pp.optim.sgd(1e-2)
        params = {transport.rank: {"w": torch.randn(D, D, generator=generator)}}
        inputs, targets = (torch.randn(3 * MICROBATCHES, D, generator=generator) for _ in range(2))
        schedule = pp.one_f_one_b(ranks, MICROBATCHES)
        if "tp" in names:
            step = pp.value_and_grad(
                [stage] * ranks, squared, schedule, transport, engine=pp.engines.functional
            )
            self.step = lambda: step(params, inputs, targets)
        else:
            optimizer = pp.optim.Optimizer(plain.init, update)
            trainer = pp.Trainer(
                [stage] * ranks,
                squared,
                schedule,
                optimizer,
                transport=transport,
                engine=pp.engines.functional,
            )
            state = trainer.init(params)
            self.step = lambda: trainer.step(state, inputs, targets)


class Noted(torch.autograd.Function):
    """Says that its backward begins."""

    @staticmethod
    def forward(x, before):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.before = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        ctx.before("backward")
        return gradient, None


def over(shape, names, limit, begun):
    """A transport; ``begun`` is called once torch, whose errors name nobody, has made the mesh."""
    if len(names) == 1:
        begun()
        return pp.P2P(timeout=limit, mapped=shape != (3,))  # of three ranks, the messages go over gloo
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dist.barrier()
    begun()
    if "tp" in names:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), mesh.get_group("tp"))
    axes = pp.Axes(pipe="pp", data="dp" if "dp" in names else None, model="tp" if "tp" in names else None)
    return pp.P2P(mesh=mesh, axes=axes, timeout=limit)


def watched(call):
    """What a call raises, as seen by this rank."""
    try:
        call()
        kind, error = "nothing", None
    except BaseException as raised:
        kind, error = type(raised).__name__, raised
    ended = OPEN[-1].ended if OPEN else -1
    return Seen(kind, getattr(error, "rank", None), str(error), time.time(), ended)


def warm(rank, size):
    """Import what a step needs, in all processes."""
    dist.barrier()


# -- at every place ----------------------------------------------------------------------------

PLACES = {  # the function at whose call a rank fails, and which call
    "constructor": (Rendezvous, "publish", 1),
    "meeting": (SocketLinks, "welcome", 1),
    "first agreement": (pp.P2P, "require_same", 1),
    "connecting": (p2p, "receive_address", 1),
    "tracing": ("stage", None, 1),
    "ready": (pp.P2P, "ready", 1),
    "forward": ("stage", None, 5),
    "loss": ("loss", None, 4),
    "backward": ("backward", None, 4),
    "optimizer": ("optimizer", None, 2),
    "vote": (SocketLinks, "vote", 2),
    "commit": (SocketLinks, "commit", 2),
    "begin": (pp.P2P, "begin", 3),
    "outside": (None, None, 0),
}


def leave():
    raise SystemExit(0)


def raise_error():
    raise ArithmeticError("armed")


ENDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(0)": lambda: sys.exit(0),
    "raise": raise_error,
}


def fails_at(rank, size, layout, victim, place, end):
    """One rank ends at a place, the others go on until they hear of it."""
    owner, name, number = PLACES[place]
    calls = Unseen()

    def count():
        if next(calls) >= number:  # who is told of it once may try again
            ENDS[end]()

    def before(where):
        if rank == victim and where == owner:
            count()

    if rank == victim and name is not None:
        plain = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (count(), plain(*args, **kwargs))[1])

    def train():
        run = Run(layout, before=before)
        for n in range(1000):
            if n == 3 and rank == victim and place == "outside":
                ENDS[end]()
            run.step()

    seen = watched(train)
    if seen.kind == "SystemExit" or (
        rank == victim and place in ("constructor", "outside")
    ):  # where nothing runs that tells it
        sys.exit(1)
    return tuple(seen)


# By name of the seed, how many tries, and how many of them where tests are large. The layout, the victim and
# the moment follow from a seed.
TRIES = {"kill_seed": (2, 200), "interrupt_seed": (3, 300), "stop_seed": (1, 40), "slow_seed": (1, 20)}


def cases():
    """Layout, victim, place, end. What is raised within the end of a step, or in a thread, is nothing that
    can be raised there.
    """
    every = [
        (layout, victim, place, "SIGKILL")
        for layout in LAYOUTS
        for victim in range(SIZES[layout])
        for place in PLACES
    ]
    every += [("3 ranks", victim, place, "os._exit(0)") for victim in range(3) for place in PLACES]
    raising = [place for place in PLACES if place not in ("meeting", "vote", "commit")]
    every += [
        ("3 ranks", victim, place, end)
        for victim in range(3)
        for place in raising
        for end in ("sys.exit(0)", "raise")
    ]
    return [case for case in every if case[2] not in impossible(*case[:2])]


def few(cases, seed=5):
    """A case of every place, and one in the middle of a stage whose ranks wait for each other in it."""
    chooser = random.Random(seed)
    return [
        *(chooser.choice([case for case in cases if case[2] == place]) for place in PLACES),
        ("pipe x tensor", 1, "forward", "SIGKILL"),
    ]


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        every = cases() if metafunc.config.getoption("--large") else few(cases())
        metafunc.parametrize(("layout", "victim", "place", "end"), every, ids=str)
    for name, (count, many) in TRIES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(many if metafunc.config.getoption("--large") else count))


def impossible(layout, victim):
    """Places where this rank never is."""
    (shape, names), own = LAYOUTS[layout], set()
    stage_of = victim // (SIZES[layout] // shape[0])
    own |= {"loss"} if stage_of < shape[0] - 1 else set()
    own |= {"optimizer"} if "tp" in names else set()
    own |= {"vote"} if victim == 0 else set()
    return own


def test_a_rank_that_fails_is_named_wherever_it_was(fresh, soon, layout, victim, place, end):
    processes = fresh(SIZES[layout])
    processes(warm)
    processes.start(fails_at, layout, victim, place, end)
    require_named(processes, victim, soon, gone=end != "raise" or place in ("constructor", "outside"))


def require_named(processes, victim, soon, gone, since=None):
    """Every other rank has named the victim, within some seconds of its end or of the first that has; what
    each has seen.
    """
    answers = {rank: answer and Seen(*answer) for rank, answer in enumerate(processes.answers())}
    told = answers.pop(victim)
    assert gone is None or (told is None) == gone, told
    for rank, seen in answers.items():
        assert (seen.kind, seen.rank) == ("PipelineError", victim), (rank, seen)
    times = [seen.at for seen in answers.values()]
    assert max(times) - (min(times) if since is None else since) < soon
    return told, answers


# -- at random times ---------------------------------------------------------------------------


def terminated(number, frame):
    raise RuntimeError("terminated")


def trains(rank, size, layout, limit, steps, folder):
    """Train until something is raised, or for some steps; who raises an error of its own leaves."""
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts tests in the background has it ignored

    def train():
        run = Run(layout, limit, begun=(folder / str(rank)).touch)
        while steps is None or run.transport.ended < steps:
            run.step()

    seen = watched(train)
    if seen.kind not in ("PipelineError", "nothing"):
        if not OPEN:
            sys.exit(1)
        OPEN[-1].close()
    return tuple(seen)


def strike(processes, victim, number, delay, folder):
    """Send a signal to a rank so many seconds after it has begun to train; when that was."""
    while not (folder / str(victim)).exists():
        time.sleep(0.001)
    time.sleep(delay)
    at = time.time()
    os.kill(processes.workers[victim].pid, number)
    return at


def drawn(seed, span=0.5):
    chooser = random.Random(seed)
    layout = chooser.choice(list(LAYOUTS))
    victim = 0 if seed % 2 else chooser.randrange(SIZES[layout])
    return layout, victim, chooser.uniform(0.0, span)


def test_a_rank_that_is_killed_at_any_time_is_named(fresh, soon, tmp_path, kill_seed):
    layout, victim, delay = drawn(kill_seed)
    processes = fresh(SIZES[layout])
    processes(warm)
    processes.start(trains, layout, 60.0, None, tmp_path)
    since = strike(processes, victim, signal.SIGKILL, delay, tmp_path)
    require_named(processes, victim, soon, gone=True, since=since)


def test_a_rank_that_is_interrupted_at_any_time_is_named_and_no_step_is_torn(
    fresh, soon, tmp_path, interrupt_seed
):
    """By KeyboardInterrupt, or by what the handler of SIGTERM raises."""
    layout, victim, delay = drawn(interrupt_seed)
    processes = fresh(SIZES[layout])
    processes(warm)
    processes.start(trains, layout, 60.0, None, tmp_path)
    number = random.Random(interrupt_seed).choice([signal.SIGINT, signal.SIGTERM])
    since = strike(processes, victim, number, delay, tmp_path)
    told, others = require_named(processes, victim, soon, gone=None, since=since)
    if told is not None:
        # What the handler raises is an ordinary error: in a stage, it is one of the stage.
        kinds = {signal.SIGINT: ("KeyboardInterrupt",), signal.SIGTERM: ("RuntimeError", "PipelineError")}[
            number
        ]
        assert told.kind in kinds and (number == signal.SIGINT or "terminated" in told.text), told
        assert {seen.ended for seen in others.values()} == {told.ended}, (told, others)


def test_a_rank_that_is_stopped_is_named_not_those_that_wait_for_it(fresh, tmp_path, stop_seed):
    """Also by the ranks that wait for it, or for those that do, in a collective."""
    layout, victim, delay = drawn(stop_seed, 2.0)
    limit = 6.0
    processes = fresh(SIZES[layout])
    processes(warm)
    processes.start(trains, layout, limit, None, tmp_path)
    strike(processes, victim, signal.SIGSTOP, delay, tmp_path)
    for rank, answer in enumerate(processes.answers(stopped=victim)):
        if rank != victim:
            seen = Seen(*answer)
            assert (seen.kind, seen.rank) == ("PipelineError", victim), (rank, seen)


def test_a_rank_that_is_slow_within_the_limit_raises_no_alarm(fresh, tmp_path, slow_seed):
    layout, victim, delay = drawn(slow_seed, 0.3)
    processes = fresh(SIZES[layout])
    processes(warm)
    processes.start(trains, layout, 60.0, 40, tmp_path)
    strike(processes, victim, signal.SIGSTOP, delay, tmp_path)
    time.sleep(3.0)  # longer than whatever is waited for without a limit
    os.kill(processes.workers[victim].pid, signal.SIGCONT)
    for rank, answer in enumerate(processes.answers()):
        seen = Seen(*answer)
        assert (seen.kind, seen.ended) == ("nothing", 40), (rank, seen)


def is_late(rank, size):
    """Rank 2 computes for longer than the limit; ranks 0, 1 and 3 wait for it, or for those that do."""

    def before(place):
        if place == "stage" and rank == 2 and OPEN and OPEN[-1].ended == 1:
            time.sleep(6.0)

    run = Run("4 ranks", limit=2.0, before=before)
    run.step()
    seen = watched(run.step)
    dist.barrier()
    return tuple(seen)


def test_a_rank_that_is_late_is_named_not_those_that_wait_for_it(fresh):
    processes = fresh(4)
    processes(warm)
    for seen in processes(is_late):
        assert Seen(*seen)[:2] == ("PipelineError", 2), seen


def keeps_the_error(rank, size):
    """The first rank fails in its last backward, while the others wait in a sum over all ranks; each keeps
    what it was told.
    """
    calls = Unseen()

    def before(place):
        if place == "backward" and next(calls) == MICROBATCHES + 1 and rank == 0:
            time.sleep(0.2)
            raise ArithmeticError("armed")

    run = Run("3 ranks", before=before)
    try:
        run.step()
    except Exception as error:
        at = time.time()
        time.sleep(4.0)
        return at, str(error)


def test_an_error_that_is_kept_holds_up_nobody(fresh, soon):
    processes = fresh(3)
    processes(warm)
    seen = processes(keeps_the_error)
    assert all("armed" in text for _, text in seen), seen
    assert max(at for at, _ in seen) - min(at for at, _ in seen) < min(soon, 3.0), seen


def leaves_a_sum_under_way(rank, size):
    """The first rank fails when it has begun a sum over all ranks; the other waits for what the first would
    have sent it before.
    """
    calls, ones = Unseen(), torch.ones(4)

    def before(place):
        if place == "stage" and next(calls) == 5 and rank == 0:  # it is traced before
            time.sleep(0.5)  # until the other waits
            OPEN[-1].collective("world").all_reduce(ones)
            raise ArithmeticError("armed")

    began, run = time.monotonic(), Run("2 ranks", limit=10.0, before=before)
    seen = watched(run.step)
    return seen.text, time.monotonic() - began


def test_a_sum_that_is_under_way_holds_up_nobody(fresh):
    """gloo ends a communicator when what is under way on it has ended."""
    processes = fresh(2)
    processes(warm)
    for text, seconds in processes(leaves_a_sum_under_way):
        assert "failed at 0F" in text and seconds < 8 * busy()


# -- who leaves, and who skips a call ----------------------------------------------------------


def host_leaves(rank, size, victim):
    """A rank fails while others are busy; rank 0, which serves the store, leaves as soon as it has heard of
    it.
    """

    def before(place):
        if place == "stage" and OPEN and OPEN[-1].ended == 2:
            if rank == victim:
                raise ArithmeticError("armed")
            time.sleep(0.3 * (rank > 1))

    def train():
        run = Run("4 ranks", before=before)
        while True:
            run.step()

    seen = watched(train)
    if rank == 0:
        os._exit(0)
    return tuple(seen)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_host_of_the_store_may_leave_after_a_failure(fresh, soon, victim):
    processes = fresh(4)
    processes(warm)
    processes.start(host_leaves, victim)
    for rank, answer in enumerate(processes.answers()):
        if rank > 0:
            seen = Seen(*answer)
            assert (seen.kind, seen.rank) == ("PipelineError", victim), (rank, seen)
            assert "armed" in seen.text
            if rank == victim:
                assert seen.ended == 2


def closes(rank, size, victim):
    """One rank closes its transport before it has met anybody, and lives on."""
    if rank == victim:
        pp.P2P(timeout=60.0).close()
        return None
    time.sleep(0.5)
    return tuple(watched(lambda: Run("3 ranks").step()))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_closes_before_the_others_have_come_is_named(fresh, victim):
    processes = fresh(3)
    processes(warm)
    processes.start(closes, victim)
    for rank, answer in enumerate(processes.answers()):
        if rank != victim:
            seen = Seen(*answer)
            assert (seen.kind, seen.rank) == ("PipelineError", victim), (rank, seen)


def skips(rank, size, victim, folder):
    """One rank makes a call less than the others, and does something else until they have ended."""
    run = Run("3 ranks", limit=4.0)
    for _ in range(3):
        run.step()
    if rank == victim:
        while len(os.listdir(folder)) < size - 1:
            time.sleep(0.05)
        return None
    seen = watched(run.step)
    (folder / str(rank)).touch()
    return tuple(seen)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_skips_a_call_is_named_as_such(fresh, victim, tmp_path):
    processes = fresh(3)
    processes(warm)
    processes.start(skips, victim, tmp_path)
    for rank, answer in enumerate(processes.answers()):
        if rank != victim:
            seen = Seen(*answer)
            assert (seen.kind, seen.rank) == ("PipelineError", victim), (rank, seen)
            assert f"rank {victim} has not begun the step after 3 steps" in seen.text


# -- what NCCL needs ---------------------------------------------------------------------------


def test_the_communicators_of_a_step_that_has_failed_are_ended_while_it_runs_those_of_one_that_has_ended_are_not():  # noqa: E501
    """The thread that watches is told how many steps had been committed when a rank failed."""
    aborted = []

    class Group:
        abort = lambda self: aborted.append(self)  # noqa: E731

    one, other = Group(), Group()
    state = {"_executing": True, "_synchronizing": False, "_groups": [one, other], "_in_stages": list}
    transport = SimpleNamespace(_queued=True, ended=3, _aborts=_torch.Aborts(), **state)
    transport._begin_aborts = partial(pp.P2P._begin_aborts, transport)
    unblock = partial(pp.P2P._unblock, transport)
    unblock(4)  # step 3 was committed: its last collectives finish
    transport._executing = False
    unblock(3)  # between steps
    transport._aborts.wait()
    assert aborted == []
    for state in ("_executing", "_synchronizing"):
        setattr(transport, state, True)
        unblock(3)  # before step 3 was committed
        unblock(3)
        transport._aborts.wait()
        assert len(aborted) == 2 and {*aborted} == {one, other}
        setattr(transport, state, False)
        aborted.clear()


class Coalescing:
    """A communicator whose block fails at its end too, where asked."""

    def __init__(self, fails=False):
        self.fails = fails

    def _start_coalescing(self):
        pass

    def _end_coalescing(self):
        if self.fails:
            raise RuntimeError("a consequence")
        return "work"


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_error_of_a_coalesced_block_is_told_and_its_work_is_kept(fails):
    with pytest.raises(ValueError, match="the cause"), _torch.coalesced(Coalescing(fails)) as kept:
        raise ValueError("the cause")
    assert kept == ([] if fails else ["work"])


def test_an_abort_that_does_not_end_holds_up_nobody_for_ever(monkeypatch):
    monkeypatch.setattr(_torch, "_ABORT", 0.01)
    group, lock = Coalescing(), threading.Lock()
    monkeypatch.setitem(_torch._OPEN, group, lock)
    with lock, pytest.raises(RuntimeError, match="being aborted"), _torch.coalesced(group):
        pass
    with _torch.coalesced(group) as works:
        assert lock.locked()
    assert works == ["work"] and not lock.locked()
