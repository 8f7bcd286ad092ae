"""Steps that fail over the simulated NCCL, and transports that end, or do not: named, quiet, and no race."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import product
from threading import Event
from types import SimpleNamespace
from unittest import mock

import optree
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.runtime.ports import _torch
from ppfunc.runtime.transport import p2p
from tests.models import dense, new_trainer, problem, same_bits, squared
from tests.simulated import names
from tests.simulated.cases import cases
from tests.simulated.nccl import ProcessGroupNCCL


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails where it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails["B"].is_set():
            ctx.fails["B"].clear()
            raise KeyError("told to fail")
        return gradient, None


def failing(rank, size, schedule, at, victim):
    """A step that fails on one rank, between two that do not: who is named, and what the others give."""
    told = {"F": Event(), "B": Event()}  # no step is traced anew for an event

    def stage(params, x):
        if told["F"].is_set():
            told["F"].clear()
            raise KeyError("told to fail")
        return _Fails.apply(dense(params, x), told)

    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(schedule))
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([stage] * len(params), squared, schedule, transport, engine=pp.engines.eager)
        results = [step(own, inputs, targets)]
        if rank == victim:
            told[at].set()
        with pytest.raises(pp.PipelineError) as caught:
            step(own, inputs, targets)
        for event in told.values():
            event.clear()
        beside = torch.ones(3, 4, dtype=torch.float64, device="cuda")  # where memory is handed out again
        results.append(step(own, inputs, targets))
        assert beside.eq(1).all()
        return caught.value.rank, optree.tree_map(lambda t: t.cpu(), results)


@pytest.mark.parametrize(
    ("at", "victim", "takes"), cases(product("FB", (0, 1), (0.0, 0.3)), [("F", 1, 0.3), ("B", 0, 0.0)])
)
def test_a_failure_is_named_and_the_next_step_is_right(ranks, at, victim, takes):
    schedule = pp.one_f_one_b(2, 4)
    loss, grads = pp.value_and_grad([dense] * 2, squared, schedule)(*problem(schedule))
    for named, results in ranks(failing, schedule, at, victim, abort_takes=takes):
        assert named == victim
        for mine, own in results:
            assert torch.equal(mine, loss)
            assert same_bits(own, {s: grads[s] for s in own})
    assert not ranks.count.alive()


@pytest.mark.parametrize("at", ["F", "B"])
def test_memory_of_a_failed_step_lives_until_nothing_writes_into_it(ranks, at, monkeypatch):
    """The abort takes longer than anybody waits for it."""
    monkeypatch.setattr(_torch, "_ABORT", 0.1)
    schedule = pp.gpipe(2, 4)
    assert [named for named, _ in ranks(failing, schedule, at, 0, abort_takes=1.0)] == [0, 0]


def breaking(name, armed):
    """Let an operation of NCCL raise, on ranks that are armed, once on each."""
    real = getattr(ProcessGroupNCCL, name)

    def call(self, *arguments):
        if (rank := names.device().index) in armed:
            armed.discard(rank)
            if name == "_end_coalescing":  # the group has ended all the same, and issues nothing
                self._coalesced.clear()
                real(self)
            raise RuntimeError("told to fail")
        return real(self, *arguments)

    return mock.patch.object(ProcessGroupNCCL, name, call)


def failing_message(rank, size, schedule, victim, armed):
    """A step in which a rank cannot post a message, between two others: its error, and what those give."""
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(schedule))
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([dense] * len(params), squared, schedule, transport)
        results = [step(own, inputs, targets)]
        if rank == victim:
            armed.add(rank)
        with pytest.raises(pp.PipelineError) as caught:
            step(own, inputs, targets)
        results.append(step(own, inputs, targets))
        return str(caught.value), optree.tree_map(lambda t: t.cpu(), results)


@pytest.mark.parametrize(
    ("name", "build", "victim"),
    cases(
        product(["send", "recv", "_end_coalescing"], ["one_f_one_b", "zb_h1", "dualpipev"], (0, 1)),
        [("send", "zb_h1", 0), ("recv", "dualpipev", 1), ("_end_coalescing", "one_f_one_b", 1)],
    ),
)
def test_a_message_that_cannot_be_posted_is_named_and_the_next_step_is_right(ranks, name, build, victim):
    schedule, armed = getattr(pp, build)(2, 4), set()
    params, *given = problem(schedule)
    loss, grads = pp.value_and_grad([dense] * len(params), squared, schedule)(params, *given)
    with breaking(name, armed):
        told = ranks(failing_message, schedule, victim, armed, abort_takes=0.1)
    for error, results in told:
        assert f"rank {victim} failed at" in error and "told to fail" in error, error
        assert "SEND" in error or "RECV" in error, error  # the first of those that are posted together
        for mine, own in results:
            assert torch.equal(mine, loss)
            assert same_bits(own, {s: grads[s] for s in own})
    assert not ranks.count.alive()


def failing_update(rank, size, shard, at, armed):
    """Two data ranks, of which one fails in a sum, the update or a gather of a step between two others."""
    sgd, axes = pp.optim.sgd(1e-2), pp.Axes("pp", "dp")

    def update(*arguments, **options):
        if at == "update" and rank in armed:
            armed.discard(rank)
            raise KeyError("told to fail")
        return sgd.update(*arguments, **options)

    mesh = init_device_mesh("cuda", (1, size), mesh_dim_names=("pp", "dp"))
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(2, 2))
    schedule = pp.looped_bfs(1, 2, 2)
    optimizer = sgd._replace(update=update)
    with new_trainer([dense] * 2, squared, schedule, optimizer, mesh, axes=axes, shard=shard) as trainer:
        state, first = trainer.step(trainer.init(params), inputs, targets)
        if rank == 1:
            armed.add(rank)
        with pytest.raises(pp.PipelineError, match="rank 1 failed at .*told to fail"):
            trainer.step(state, inputs, targets)
        state, second = trainer.step(state, inputs, targets)
        return second.loss.item() < first.loss.item()


@pytest.mark.parametrize(
    ("shard", "at"),
    cases(
        [
            *product(["none", "optimizer", "params"], ["update", "allreduce"]),
            *product(["optimizer", "params"], ["_allgather_base", "_reduce_scatter_base"]),
        ],
        [("none", "update"), ("params", "_allgather_base"), ("optimizer", "allreduce")],
    ),
)
def test_a_failure_of_an_update_is_named_and_the_next_step_is_right(ranks, shard, at):
    armed = set()
    with nullcontext() if at == "update" else breaking(at, armed):
        assert ranks(failing_update, shard, at, armed, abort_takes=0.1) == [True, True]
    assert not ranks.count.alive()


def beside_a_sum(rank, size, shard):
    """A stage of one data rank fails while the other waits for it in a sum over both."""
    fails = Event()

    def stage(params, x):
        if fails.is_set():
            raise KeyError("told to fail")
        return dense(params, x)

    mesh = init_device_mesh("cuda", (1, size), mesh_dim_names=("pp", "dp"))
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(1, 2))
    with new_trainer(
        [stage], squared, pp.gpipe(1, 2), pp.optim.sgd(1e-2), mesh, axes=pp.Axes("pp", "dp"), shard=shard,
        engine=pp.engines.functional,
    ) as trainer:  # fmt: skip
        state, first = trainer.step(trainer.init(params), inputs, targets)
        if rank == 1:
            fails.set()
        with pytest.raises(pp.PipelineError, match="rank 1 failed"):
            trainer.step(state, inputs, targets)
        fails.clear()
        state, second = trainer.step(state, inputs, targets)
        return second.loss.item() < first.loss.item()


@pytest.mark.parametrize("shard", cases(["none", "optimizer"], ["none"]))
def test_a_failure_ends_the_sums_of_the_others(ranks, shard):
    assert ranks(beside_a_sum, shard, abort_takes=0.2) == [True, True]
    assert not ranks.count.alive()


def late(rank, size, schedule):
    """One rank computes for longer than the limit."""
    slow = [False]

    def stage(params, x):
        if slow[0]:
            time.sleep(2)
        return dense(params, x)

    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(schedule))
    with pp.P2P(timeout=0.7) as transport:
        step = pp.value_and_grad([stage] * 2, squared, schedule, transport, engine=pp.engines.functional)
        step({rank: params[rank]}, inputs, targets)
        slow[0] = rank == 1
        with pytest.raises(pp.PipelineError) as caught:
            step({rank: params[rank]}, inputs, targets)
        return caught.value.rank


def test_a_rank_that_is_late_is_named(ranks):
    assert ranks(late, pp.gpipe(2, 2)) == [1, 1]


def on_a_gpu_that_fails(rank, size, fails):
    """What the host has only given to the GPU of rank 1 fails; then a step that does not."""
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(2, 4))
    found = []
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, 4), transport)
        for armed in (False, True, False):
            if rank == 1:
                fails[0] = armed
            try:
                step({rank: params[rank]}, inputs, targets)
                found.append(None)
            except RuntimeError as error:
                found.append((getattr(error, "rank", rank), "device-side assert" in str(error)))
        return found, transport.ended


def test_a_step_has_not_ended_before_the_gpus_have_done_it(ranks):
    fails, event = [False], p2p.record_sleeping_event

    def synchronize():
        raise RuntimeError("CUDA error: device-side assert triggered")

    def failing_event(device):
        return SimpleNamespace(synchronize=synchronize) if fails[0] and device.index == 1 else event(device)

    with mock.patch.object(p2p, "record_sleeping_event", failing_event):
        assert ranks(on_a_gpu_that_fails, fails) == [([None, (1, True), None], 2)] * 2
