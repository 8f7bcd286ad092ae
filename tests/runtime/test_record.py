"""Recorded steps: measured timelines of the type that simulation gives."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.running import record
from ppfunc.schedule.instruction import COMPUTE
from tests.models import dense, problem, same_bits, slow, squared

M = 4


SCHEDULES = {
    "1f1b": lambda ranks: pp.one_f_one_b(ranks, M),
    "zbv": lambda ranks: pp.zbv(ranks, M),
    "dualpipev": lambda ranks: pp.dualpipev(ranks, 2 * ranks),
    "forwards": lambda ranks: pp.schedule.inference(ranks, M),
}


def require_possible(timeline, schedule, clocks=1e-9):
    """Every compute instruction takes time, ranks do one after the other, and nothing is consumed before it
    is made.
    """
    made = {}
    for rank in range(schedule.ranks):
        instructions = list(schedule.instructions(rank))
        rows = list(zip(instructions, timeline.starts[rank], timeline.ends[rank], strict=True))
        compute = [(start, end) for i, start, end in rows if i.op in COMPUTE]
        assert all(0 <= start < end <= timeline.makespan for start, end in compute)
        assert all(a[1] <= b[0] for a, b in pairwise(compute))
        made |= {
            (part.op.value, part.stage, part.microbatch): (start, end)
            for i, start, end in rows
            for part in pp.schedule.parts_of(i)
        }
    for (op, stage, m), (_, end) in made.items():
        after = schedule.successor(stage)
        if op == "F" and after is not None:
            assert made["F", after, m][0] >= end - clocks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional])
def test_a_recorded_step_returns_what_a_step_does_and_a_timeline(name, engine):
    schedule = SCHEDULES[name](2)
    params, inputs, targets = problem(schedule.stages, M, b=2)
    make = pp.evaluate if schedule.forward_only else pp.value_and_grad
    step = make([dense] * schedule.stages, squared, schedule, engine=engine)
    plain = step(params, inputs, targets)
    recorded, timeline = step.record(params, inputs, targets)
    assert same_bits(plain, recorded)
    require_possible(timeline, step.schedule)
    assert "<svg" in pp.schedule.to_svg(timeline)
    assert sum(timeline.idle) >= timeline.makespan * (1 - 1e-9)  # of two ranks, one runs at a time


def in_processes(rank, ranks, name):
    schedule = SCHEDULES[name](ranks)
    params, inputs, targets = problem(schedule.stages, M, b=2)
    held = {s: params[s] for s in schedule.model_stages_of(rank)}
    stages = [dense] * (schedule.stages - 1) + [slow]
    make = pp.evaluate if schedule.forward_only else pp.value_and_grad
    with pp.P2P(timeout=60) as transport:
        step = make(stages, squared, schedule, transport, engine=pp.engines.functional)
        step(held, inputs, targets)
        start = time.perf_counter()
        _, timeline = step.record(held, inputs, targets)
        seconds = time.perf_counter() - start
        require_possible(timeline, step.schedule)
        assert 0.01 * schedule.microbatches <= timeline.makespan <= seconds + 0.01
        at = schedule.placement[schedule.stages - 1]
        forwards = [
            end - start
            for i, start, end in zip(
                step.schedule.instructions(at), timeline.starts[at], timeline.ends[at], strict=True
            )
            for part in pp.schedule.parts_of(i)
            if (part.op.value, part.stage) == ("F", schedule.stages - 1)
        ]
        assert len(forwards) == schedule.microbatches and min(forwards) >= 0.01
        return timeline.starts, timeline.ends


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_gets_the_timeline_of_all(four, name):
    first, *others = four(in_processes, name)
    assert all(other == first for other in others)


def on_three_hosts(rank, ranks):
    """The last two ranks have clocks of their own, which run a thousand seconds ahead for each rank."""
    schedule, before = pp.one_f_one_b(ranks, M), (record.time, record._clock)
    params, inputs, targets = problem(ranks, M, b=2)
    ahead = 1000.0 * rank * (rank >= 2)
    record.time = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + ahead,
        perf_counter_ns=lambda: time.perf_counter_ns() + round(ahead * 1e9),
        time_ns=time.time_ns,
    )
    record._clock = lambda: str(ahead)
    try:
        with pp.P2P(timeout=60) as transport:
            step = pp.value_and_grad([dense] * ranks, squared, schedule, transport)
            step({rank: params[rank]}, inputs, targets)
            _, timeline = step.record({rank: params[rank]}, inputs, targets)
    finally:
        record.time, record._clock = before
    require_possible(timeline, step.schedule, clocks=0.5)
    assert timeline.makespan < 100
    return timeline.starts, timeline.ends


def test_clocks_of_other_hosts_are_aligned(four):
    first, *others = four(on_three_hosts)
    assert all(other == first for other in others)


def fail_on_rank_1(rank, ranks):
    schedule = pp.gpipe(ranks, M)
    params, inputs, targets = problem(ranks, M, b=2)

    def fragile(w, x):
        if rank == 1 and x.isnan().any():
            raise ValueError("a value that is not a number")
        return dense(w, x)

    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(
            [fragile] * ranks, squared, schedule, transport, engine=pp.engines.functional
        )
        step({rank: params[rank]}, inputs, targets)
        broken = inputs.clone()
        broken[2] = torch.nan  # in microbatch 1
        with pytest.raises(
            pp.PipelineError, match="rank 1 failed at 1F1, step .* a value that is not a number"
        ):
            step.record({rank: params[rank]}, broken, targets)
        step.record({rank: params[rank]}, inputs, targets)
        with pytest.raises(pp.AgreementError, match="recorded"):
            (step.record if rank else step)({rank: params[rank]}, inputs, targets)


def test_a_failure_of_a_recorded_step_has_its_name(two):
    two(fail_on_rank_1)
