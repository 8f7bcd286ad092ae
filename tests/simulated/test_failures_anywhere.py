"""Failures in the middle of anything, over the simulated NCCL: the steps after them are right."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from tests.models import dense, problem, same_bits, squared
from tests.simulated import names
from tests.simulated.cases import cases, on_device, on_host
from tests.simulated.nccl import ProcessGroupNCCL

_PATIENCE = 0.3  # seconds in which an abort would come


def while_posting(rank, size, build, overlapped, armed):
    """Rank 0 fails while rank 1 posts a message, three times; then two steps, and a sum of the user's."""
    schedule, posting = getattr(pp, build)(2, 4), armed[2]

    def stage(params, x):
        if armed.get(rank):
            armed.pop(rank)
            assert posting.wait(10)
            raise KeyError("told to fail")
        return dense(params, x)

    params, inputs, targets = on_device(problem(schedule))
    own = {s: params[s] for s in {schedule.model_stages[s] for s in schedule.stages_of(rank)}}
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
            armed[rank] = True
            with pytest.raises(pp.PipelineError, match="rank 0 failed at .*told to fail"):
                step(own, inputs, targets)
            dist.barrier()
            armed.pop(rank, None)
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
        if names.device().index == 1 and armed.pop(1, None):
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
    armed = {2: threading.Event()}
    with holding_up(name, at, armed):
        told = ranks(while_posting, build, overlapped, armed)
    for results, sums in told:
        assert sums == [2.0] * 3
        for mine, own in results:
            assert torch.equal(mine, loss)
            assert same_bits(own, {s: grads[s] for s in own})
    assert not ranks.count.faults, ranks.count.faults
    assert not ranks.count.alive()
