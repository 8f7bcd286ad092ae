"""A plan whose residuals are computed again in part, run by four processes in the order that it predicts."""

from __future__ import annotations

import time

import torch

import ppfunc as pp
from ppfunc.schedule import Costs, Op, plan, simulate
from ppfunc.schedule.instruction import COMPUTE
from tests.models import problem, same_bits, squared

TIME = 0.02
COSTS = Costs(TIME, TIME, TIME / 10, weight_share=1, recompute=TIME, offload=TIME)


class Sleeping(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(TIME)
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        time.sleep(TIME)
        return gy


def sleeping(params, x):
    return torch.tanh(Sleeping.apply(x) @ params["w"])


def planned(rank, ranks, schedule):
    params, inputs, targets = problem(4, 8)
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([sleeping] * 4, squared, schedule, transport, engine=pp.engines.eager)
        held = {rank: params[rank]}
        step(held, inputs, targets)
        (loss, grads), timeline = step.record(held, inputs, targets)
        ends = [(str(i), end) for row in timeline.rows() for i, _, end in row if i.op in COMPUTE]
        return loss, grads, ends


def test_a_plan_runs_in_the_order_that_it_predicts(four):
    made = plan(4, 8, COSTS, cap=2, placement="loop", chunks=1, effort=0.05)
    assert Op.RECOMPUTE in made.schedule.ops and max(made.memory) <= 2
    params, inputs, targets = problem(4, 8)
    wanted = pp.value_and_grad([sleeping] * 4, squared, pp.gpipe(4, 8), engine=pp.engines.eager)(
        params, inputs, targets
    )
    answers = four(planned, made.schedule)
    assert all(same_bits(loss, wanted[0]) for loss, _, _ in answers)
    assert same_bits({s: g for _, grads, _ in answers for s, g in grads.items()}, wanted[1])
    timeline = simulate(made.schedule, COSTS)
    paper = {str(i): float(end) for row in timeline.rows() for i, _, end in row}
    ran = dict(answers[0][2])
    # Of what ends well apart on paper; this machine may do other things between.
    pairs = [(a, b) for a in ran for b in ran if paper[a] + 2 * TIME < paper[b]]
    assert sum(ran[a] < ran[b] for a, b in pairs) >= 0.98 * len(pairs)
