"""Failures in the middle of anything, over the simulated NCCL: the steps after them are right."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from tests.models import dense, problem, same_bits, squared
from tests.simulated import names
from tests.simulated.cases import cases, on_device, on_host
from tests.simulated.kernels import Work
from tests.simulated.nccl import ProcessGroupNCCL

_PATIENCE = 0.3  # seconds in which an abort would come
ERRORS = (KeyError, RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt)
BUILDS = (
    *(("one_f_one_b", None), ("gpipe", None), ("zb_h1", None), ("dualpipe", None)),
    *(("dualpipev", "two_streams"), ("dualpipev", "interleaved")),
)


def while_posting(rank, size, build, overlapped, armed):
    """Rank 0 fails while rank 1 posts a message, three times; then two steps, and a sum of the user's."""
    schedule, posting = getattr(pp, build)(2, 4), armed[2]

    def stage(params, x):
        if armed[rank].is_set():
            armed[rank].clear()
            assert posting.wait(10)
            raise KeyError("told to fail")
        return dense(params, x)

    params, inputs, targets = on_device(problem(schedule))
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    results, sums = [], []
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad(
            [stage] * len(params), squared, schedule, transport, engine=pp.engines.eager,
            overlapped=overlapped and getattr(pp, overlapped)(),
        )  # fmt: skip
        results.append(step(own, inputs, targets))
        for _ in range(3):
            posting.clear()
            dist.barrier()
            armed[rank].set()
            with pytest.raises(pp.PipelineError, match="rank 0 failed at .*told to fail"):
                step(own, inputs, targets)
            dist.barrier()
            armed[rank].clear()
            results += [step(own, inputs, targets) for _ in range(2)]
            total = torch.ones(1, device="cuda")
            dist.all_reduce(total)
            sums.append(total.item())
    return on_host(results), sums


def holding_up(name, at, armed):
    """Let rank 1 stay in an operation of NCCL, before it or after it, while the others fail."""
    real = getattr(ProcessGroupNCCL, name)

    def call(self, *arguments):
        before = real(self, *arguments) if at == "after" else None
        if names.device().index == 1 and armed[1].is_set():
            armed[1].clear()
            armed[2].set()
            end = time.monotonic() + _PATIENCE
            while not self._ending and time.monotonic() < end:
                time.sleep(0.005)
        return real(self, *arguments) if at == "before" else before

    return mock.patch.object(ProcessGroupNCCL, name, call)


@pytest.mark.parametrize(
    ("name", "at", "build", "overlapped"),
    cases(
        [
            (name, at, *how)
            for name in ("send", "recv")
            for at in ("before", "after")
            for how in (("one_f_one_b", None), ("dualpipev", "two_streams"), ("dualpipev", "interleaved"))
        ],
        [("recv", "before", "one_f_one_b", None), ("recv", "after", "dualpipev", "two_streams")],
    ),
)
def test_steps_are_right_after_one_that_fails_while_another_rank_posts(ranks, name, at, build, overlapped):
    schedule = getattr(pp, build)(2, 4)
    params, *given = problem(schedule)
    loss, grads = pp.value_and_grad([dense] * len(params), squared, schedule)(params, *given)
    armed = {n: threading.Event() for n in range(3)}  # no step is traced anew for an event
    with holding_up(name, at, armed):
        told = ranks(while_posting, build, overlapped, armed)
    for results, sums in told:
        assert sums == [2.0] * 3
        for mine, own in results:
            assert torch.equal(mine, loss)
            assert same_bits(own, {s: grads[s] for s in own})
    assert not ranks.count.faults, ranks.count.faults
    assert not ranks.count.alive()


class Fuses:
    """Let ranks act at a number of what they do: give operations to NCCL, wait for them, compute."""

    def __init__(self):
        self.of_thread = threading.local()  # no step is traced anew for it

    @property
    def left(self):
        return vars(self.of_thread)

    def light(self, rank, number, act):
        self.left[rank] = [number, act]

    def burn(self):
        rank = names.device().index
        if rank in self.left and threading.current_thread().name == f"rank {rank}":
            self.left[rank][0] -= 1
            if not self.left[rank][0]:
                self.left.pop(rank)[1]()

    def around(self, kind, name, after=True):
        """Burn before an operation, and after it."""
        real = getattr(kind, name)

        def call(*arguments):
            self.burn()
            result = real(*arguments)
            if after:
                self.burn()
            return result

        return mock.patch.object(kind, name, call)

    def at_ends(self):
        """Burn at the end of a group, which ends all the same, and issues nothing if that raises."""
        real = ProcessGroupNCCL._end_coalescing

        def call(group):
            try:
                self.burn()
            except BaseException:
                group._coalesced.clear()
                real(group)
                raise
            return real(group)

        return mock.patch.object(ProcessGroupNCCL, "_end_coalescing", call)


def fail(error):
    raise error("told to fail")


def close_beside(transport):
    threading.Thread(target=transport.close).start()
    time.sleep(0.01)


def anywhere(rank, size, seed, fuses):
    """Rounds of steps of which some fail, and of two that are right; what went wrong."""
    draw, wrong = random.Random(seed), []
    build, overlapped = draw.choice(BUILDS)
    schedule = getattr(pp, build)(size, 2 * size)
    engines = ["graph"] if overlapped else ["graph", "eager", "functional"]
    engine = getattr(pp.engines, draw.choice(engines))
    how = {"engine": engine, "overlapped": overlapped and getattr(pp, overlapped)()}

    def stage(params, x):
        if engine is not pp.engines.graph:
            fuses.burn()
        return dense(params, x)

    params, *given = problem(schedule)
    loss, grads = pp.value_and_grad([dense] * len(params), squared, schedule)(params, *given)
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    arguments = on_device((own, *given))

    def outcome(step):
        try:
            found, gradients = on_host(step(*arguments))
        except (pp.PipelineError, *ERRORS):
            return "fails"
        finally:
            fuses.left.pop(rank, None)
        same = torch.equal(found, loss) and same_bits(gradients, {s: grads[s] for s in own})
        return "right" if same else "wrong"

    transport = None
    for round in range(4):
        if transport is None:
            transport = pp.P2P(timeout=30)
            step = pp.value_and_grad([stage] * len(params), squared, schedule, transport, **how)
            wrong += [] if outcome(step) == "right" else [(round, "first")]
        for number in range(draw.randint(1, 3)):
            victims = {draw.randrange(size): (draw.randrange(1, 40), draw.choice([*ERRORS, "close"]))}
            if draw.random() < 0.3:
                victims[draw.randrange(size)] = draw.randrange(1, 40), draw.choice(ERRORS)
            if rank in victims:
                at, what = victims[rank]
                act = partial(close_beside, transport) if what == "close" else partial(fail, what)
                fuses.light(rank, at, act)
            outcomes = [None] * size
            dist.all_gather_object(outcomes, outcome(step))
            if outcomes not in (["right"] * size, ["fails"] * size):
                wrong.append((round, number, victims, outcomes))
            if any(what == "close" for _, what in victims.values()):
                transport.close()
                transport = None
                break
        else:
            wrong += [(round, "after")] * ([outcome(step), outcome(step)] != ["right", "right"])
    if transport is not None:
        transport.close()
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    return wrong + ["sum"] * (total.item() != size)


@pytest.mark.filterwarnings("ignore:the loss is differentiated")  # programs are made anew while a fuse burns
def test_steps_are_right_after_failures_anywhere(ranks, pytestconfig):
    """In a few cases; with ``--large`` in a hundred."""
    for seed in range(100) if pytestconfig.getoption("--large") else (1, 3):
        fuses, size = Fuses(), 4 if seed % 5 == 4 else 2
        with ExitStack() as stack:
            for name in ("send", "recv"):
                stack.enter_context(fuses.around(ProcessGroupNCCL, name))
            stack.enter_context(fuses.around(ProcessGroupNCCL, "_start_coalescing", after=False))
            stack.enter_context(fuses.at_ends())
            stack.enter_context(fuses.around(Work, "wait"))
            takes = seed % 3 * 0.05
            wrong = ranks(anywhere, seed, fuses, size=size, seed=seed, abort_takes=takes)
        assert not any(wrong), (seed, wrong)
        assert not ranks.gpu.races, (seed, ranks.gpu.races[0])
        assert not ranks.count.faults, (seed, ranks.count.faults)
        assert not ranks.count.alive(), seed
