"""Interrupts of real processes: a step returns or fails on all ranks, a second one disturbs nothing, and
nothing is left behind.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.ports import _torch
from tests.models import new_trainer, squared
from tests.unseen import Unseen

RATE, LEFT = 0.1, "the other rank has ended its steps"


def stage(w, x):
    return torch.tanh(x @ w)


def setting(ranks):
    normal = torch.Generator().manual_seed(0)
    params = {s: torch.randn(16, 16, generator=normal) for s in range(ranks)}
    return params, torch.randn(8, 16, generator=normal), torch.randn(8, 16, generator=normal)


def clean(ranks, steps):
    """The losses of steps that nothing disturbs."""
    params, inputs, targets = setting(ranks)
    step, losses = pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4)), []
    for _ in range(steps):
        loss, grads = step(params, inputs, targets)
        params = {s: w - RATE * grads[s] for s, w in params.items()}
        losses.append(loss.item())
    return losses


def trains_on(rank, ranks, steps, victims, seed):
    """Some ranks are interrupted, often twice in a row, while they are in a step. Losses, failures, and what
    has ended the steps early: a difference, or that the other rank has ended them.
    """
    params, inputs, targets = setting(ranks)
    params, stop, inside, draw = {rank: params[rank]}, threading.Event(), [False], random.Random(seed + rank)

    def strike():
        for _ in range(steps // 2):  # not for ever: a busy machine gets no step done between two of them
            if stop.wait(draw.uniform(0, 0.05)):
                return
            for _ in range(draw.choice((1, 2, 3))):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(draw.choice((0, 1e-5, 1e-4)))

    def interrupt(number, frame):
        # Not as the result is handed to this frame, where an interrupt takes what any function returns.
        if inside[0] and frame.f_code is not trains_on.__code__:
            raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    losses, failures, told = [], 0, ""
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        step(params, inputs, targets)
        striker = threading.Thread(target=strike, daemon=True)
        if rank in victims:
            striker.start()
        while len(losses) < steps and not told:
            try:
                inside[0] = True
                loss, grads = step(params, inputs, targets)
                inside[0] = False
            except pp.AgreementError as error:
                told = str(error)
            except (KeyboardInterrupt, pp.PipelineError) as error:
                failures += 1
                if "closed its transport" in str(error):  # told of a difference while this rank was struck
                    told = LEFT
                assert told or not isinstance(error, pp.PipelineError) or error.rank in victims, error
            else:
                params = {rank: params[rank] - RATE * grads[rank]}
                losses.append(loss.item())
            finally:
                inside[0] = False
        stop.set()
        if rank in victims:
            striker.join()  # it may not strike who comes next
    return losses, failures, told


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_interrupted_steps_fail_on_all_ranks_or_on_none(two, victims, request):
    steps = 1000 if request.config.getoption("--large") else 40
    answers = two(trains_on, steps, victims, 7, timeout=550)
    (losses, failures, told), (others, _, also) = answers
    assert losses[: len(others)] == others[: len(losses)] == clean(2, steps)[: min(len(losses), len(others))]
    for rank, mine, reason, theirs, other in (
        (0, losses, told, others, also),
        (1, others, also, losses, told),
    ):
        if reason == LEFT:  # after the last step, which an interrupt may have taken from this rank
            assert "steps ended" in other or (rank in victims and len(theirs) == steps), answers
        else:
            assert "steps ended" in reason or len(mine) == steps, answers
    assert failures or told


def is_struck_while_constructing(rank, ranks):
    """Rank 1 is interrupted before it has told the store that it makes a transport, and makes another. What
    each has heard, and a loss.
    """
    params, inputs, targets = setting(ranks)
    patch = pytest.MonkeyPatch()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def strikes(group):
        signal.raise_signal(signal.SIGUSR1)
        return store_of(group)

    store_of = _torch.store_of
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        with patch.context() as during:
            if rank == 1:
                during.setattr(_torch, "store_of", strikes)
            transport = pp.P2P(timeout=20)
        with transport:
            pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)(
                {rank: params[rank]}, inputs, targets
            )
        told = "nothing", None
    except (KeyboardInterrupt, pp.PipelineError) as error:
        told = type(error).__name__, getattr(error, "rank", None)
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        return told, step({rank: params[rank]}, inputs, targets)[0].item()


def test_ranks_agree_on_their_transports_after_an_interrupted_constructor(two):
    (theirs, loss), (mine, other) = two(is_struck_while_constructing)
    assert theirs == ("PipelineError", 1) and mine == ("KeyboardInterrupt", None)
    assert loss == other == clean(2, 1)[0]


def is_struck_while_tracing(rank, ranks):
    """Rank 1 is interrupted while its stage is traced. The error, and the losses of the next two calls."""
    params, inputs, targets = setting(ranks)
    calls = []

    def struck(w, x):
        calls.append(rank)
        if rank == 1 and len(calls) == 2:  # the first is without values
            signal.raise_signal(signal.SIGUSR1)
        return stage(w, x)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([struck] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        try:
            step({rank: params[rank]}, inputs, targets)
        except (KeyboardInterrupt, pp.PipelineError) as error:
            told = type(error).__name__, getattr(error, "rank", None)
        return *told, [step({rank: params[rank]}, inputs, targets)[0].item() for _ in range(2)]


def test_peers_hear_of_an_interrupt_while_a_stage_is_traced(two):
    (theirs, named, losses), (mine, _, others) = two(is_struck_while_tracing)
    assert (theirs, named, mine) == ("PipelineError", 1, "KeyboardInterrupt")
    assert losses == others == clean(2, 1) * 2


def is_struck_at_the_end(rank, ranks, name):
    params, inputs, targets = setting(ranks)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        commit, made = transport.links.commit, None
        if rank == 0:
            transport.links.commit = lambda n: (os.kill(os.getpid(), signal.SIGUSR1), commit(n))
        with suppress(KeyboardInterrupt):
            made = (step.lower if name == "lowering" else step)({rank: params[rank]}, inputs, targets)
        transport.links.commit = commit
        try:
            step({rank: params[rank]}, inputs, targets)
        except pp.AgreementError as error:
            return made is not None, str(error)


@pytest.mark.parametrize("name", ["lowering", "step"])
def test_a_result_that_an_interrupt_takes_is_missed_in_the_next_step_of_every_rank(two, name):
    (mine, told), (theirs, also) = two(is_struck_at_the_end, name)
    assert (mine, theirs) == (False, True)
    assert all("rank 0 has steps ended: 0, rank 1 has steps ended: 1" in text for text in (told, also)) or (
        all("steps ended" in text and "load the same checkpoint" in text for text in (told, also))
    ), (told, also)


def has_a_timer(rank, ranks, seconds):
    """A timer of rank 1 rings while its steps, or their ends, wait for rank 0, which is slow. The handler is
    there around each step alone. What has rung, and how the process would have ended otherwise.
    """
    params, inputs, targets = setting(ranks)
    rang, losses = [], []

    def handler(number, frame):
        rang.append(len(losses))

    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([stage] * ranks, squared, pp.one_f_one_b(ranks, 4), transport)
        step({rank: params[rank]}, inputs, targets)
        commit = transport.links.commit
        vote = transport.links.vote
        if rank == 0:  # the end of the step is slow, once all are there
            transport.links.commit = lambda n: (time.sleep(seconds), commit(n))
        for _ in range(3):
            if rank == 1:  # from its vote on it only waits
                transport.links.vote = lambda n: (signal.setitimer(signal.ITIMER_REAL, seconds / 2), vote(n))
                signal.signal(signal.SIGALRM, handler)
            losses.append(step({rank: params[rank]}, inputs, targets)[0].item())
            if rank == 1:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                time.sleep(0.1)
        transport.links.commit, transport.links.vote = commit, vote
    return rang, losses


def test_a_timer_around_a_step_rings_within_it(two):
    """Its signal came again after the step, whose handler was gone then: it ended the process."""
    (none, losses), (rang, others) = two(has_a_timer, 0.2)
    assert (none, rang) == ([], [0, 1, 2])
    assert losses == others == clean(2, 1) * 3


def struggles(rank, ranks, steps, every):
    """Every so many steps one fails, on either rank. Keys, descriptors, threads, objects and bytes after half
    of the steps, and all.
    """
    params, inputs, targets = setting(ranks)
    armed, looks = Unseen(), []

    def fragile(w, x):
        if armed[0]:
            raise ArithmeticError("x" * 20_000)
        return stage(w, x)

    def look():
        gc.collect()
        dist.barrier()
        keys, fds, tasks = (
            dist.distributed_c10d._get_default_store().num_keys(),
            os.listdir("/proc/self/fd"),
            os.listdir("/proc/self/task"),
        )
        dist.barrier()
        looks.append(
            (
                keys,
                len(fds),
                len(tasks),
                len(gc.get_objects()),
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            )
        )

    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(
            [fragile] * ranks, squared, pp.one_f_one_b(ranks, 4), transport, engine=pp.engines.functional
        )
        for n in range(steps):
            if n in (steps // 2, steps // 4):
                look()
            fails, who = n % every == every - 1, n // every % ranks
            armed[0] = fails and rank == who
            try:
                step({rank: params[rank]}, inputs, targets)
            except pp.PipelineError as error:
                assert fails and error.rank == who and len(str(error)) < 4000, error
            else:
                assert not fails
        look()
    return looks


def test_steps_that_fail_now_and_then_leave_nothing_behind(two, request):
    steps = 2000 if request.config.getoption("--large") else 80
    for looks in two(struggles, steps, 4, timeout=550):
        for before, after in (looks[1], looks[2]), (looks[0], looks[2]):
            slack = (8, 8, 2, 2000, 20_000)  # what the last generations have opened; objects of caches; kB
            assert all(now <= then + more for now, then, more in zip(after, before, slack, strict=True)), (
                looks
            )


def make_again_after_an_interrupt(rank, size):
    """The trainer of one rank is interrupted between its two step functions, and made again."""
    patch = pytest.MonkeyPatch()

    def interrupt(schedule):
        raise KeyboardInterrupt

    with pp.P2P(timeout=10) as transport:
        given = [stage] * 2, squared, pp.gpipe(2, 2), pp.optim.sgd(RATE)
        if rank:
            with patch.context() as during, pytest.raises(KeyboardInterrupt):
                during.setattr("ppfunc.training.trainer.forward_only", interrupt)
                new_trainer(*given, transport=transport)
        trainer = new_trainer(*given, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        _, metrics = trainer.step(trainer.init({rank: torch.eye(3, dtype=torch.float64)}), x, x)
        return metrics.loss.item()


def test_a_trainer_is_made_again_after_an_interrupt(two):
    first, second = two(make_again_after_an_interrupt)
    assert first == second > 0
