"""Stages timed on a machine that others use."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import ppfunc as pp
from ppfunc.tuning import stages
from ppfunc.tuning.stages import Pace
from tests.models import squared


def test_stages_are_timed_at_the_first_pace_of_the_machine():
    """What was timed first is timed again beside the others, in rounds of which each takes its own time."""

    schedule = pp.schedule.append_tail(pp.one_f_one_b(1, 3))

    def step(work):
        return None, pp.simulate(schedule, pp.Costs(work * slow, slow, slow, step=slow))

    def first():
        nonlocal slow
        slow = next(paces)
        return step(3)

    def other():
        nonlocal runs
        runs += 1
        return step(5)

    pace, paces, slow, runs = Pace(), itertools.repeat(1), 1, 0
    assert pace.timed(first)[0]["forward"] == (3,)
    paces = itertools.chain.from_iterable([n, n] for n in itertools.cycle([2, 9, 4]))
    (timed,) = pace.timed(other)
    assert runs == 1 + stages._LEAST
    assert {kind: pytest.approx(seconds) for kind, seconds in timed.items()} == {
        "forward": (5,), "backward_input": (1,), "backward_weight": (1,), "step": (1,)
    }  # fmt: skip
    paces = itertools.chain.from_iterable([n, 1] for n in itertools.cycle([2, 9, 4]))
    pace.timed(other)
    assert runs == 2 + stages._LEAST + stages._MOST


class Waits(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        time.sleep(0.01)
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def multiplies(params, x):
    return x @ params["w"]


def waits(params, x):
    return Waits.apply(x @ params["w"])


@pytest.mark.parametrize("stage", [multiplies, waits])
def test_seconds_are_those_of_the_thread_unless_a_stage_waits(stage):
    """What other processes take of the core of one that computes is not counted; what it waits for is."""
    trainer = pp.Trainer(
        [stage], squared, pp.one_f_one_b(1, 3), pp.optim.sgd(0.1), engine=pp.engines.functional
    )
    state, x = trainer.init({0: {"w": torch.randn(4, 4)}}), torch.randn(3, 4)
    pace, threads = Pace(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (timed,) = pace.timed(lambda: trainer.record(state, x, x))
    finally:
        torch.set_num_threads(threads)
    assert pace._clock is (time.perf_counter if stage is waits else time.thread_time)
    assert (timed["forward"][0] >= 0.01) == (stage is waits)
