"""Communicators of NCCL: on the device of the parameters, opened side by side, ended without a trace."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.ports import _torch
from ppfunc.schedule import place_communication, remove_tail
from tests.builders import BUILDERS
from tests.clock import busy
from tests.models import dense, problem, squared
from tests.simulated import guard, nccl
from tests.simulated.cases import on_device

SCHEDULE = remove_tail(pp.one_f_one_b(2, 4))


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    """No process has set the environment before."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)


def steps(rank, size, schedule, count=1):
    params, inputs, targets = on_device(problem(schedule))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * len(params), squared, schedule, transport)
        held = {k: params[k] for k in schedule.model_stages_of(rank)}
        return [step(held, inputs, targets)[0].item() for _ in range(count)]


def in_a_worker(rank, size):
    params, inputs, targets = on_device(problem(SCHEDULE))
    answers = []
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * size, squared, SCHEDULE, transport)

        def work():
            before = torch.cuda.current_device()
            loss, grads = step({rank: params[rank]}, inputs, targets)
            answers.append((before, torch.cuda.current_device(), grads[rank]["w"].device.index, loss.device))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    return answers


def test_a_step_in_another_thread_connects_on_the_device_of_its_parameters(ranks):
    """The current device is a thread's own: rank 1 connected on that of rank 0."""
    for rank, [(before, after, index, device)] in enumerate(ranks(in_a_worker)):
        assert before == after == 0
        assert index == device.index == rank


def on_the_host(rank, size, schedule, count):
    made, (params, inputs, targets) = [], problem(schedule)
    dist.barrier()
    made.append(count().made)
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * len(params), squared, schedule, transport)
        with pytest.raises(
            (ValueError, pp.PipelineError),
            match=r"on the device cpu, whose tensors the backend 'nccl'.*new_group\(backend='gloo'\)",
        ):
            step({s: params[s] for s in schedule.model_stages_of(rank)}, inputs, targets)
    dist.barrier()
    return [*made, count().made]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "data_parallel"])
def test_parameters_that_nccl_does_not_carry_are_refused_before_anything_connects(ranks, name):
    """Under ``data_parallel`` no stage sends a message: the error was that of the collective that sums."""
    for before, after in ranks(on_the_host, remove_tail(BUILDERS[name](2, 4)), lambda: ranks.count):
        assert before == after


def on_one_device(rank, size, count):
    params, inputs, targets = optree.tree_map(lambda t: t.to("cuda:0"), problem(SCHEDULE))
    dist.barrier()
    before = count().made
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * size, squared, SCHEDULE, transport)
        with pytest.raises((ValueError, pp.PipelineError), match="ranks 0 and 1 compute on one device"):
            step({rank: params[rank]}, inputs, targets)
    dist.barrier()
    assert count().made == before


def test_two_ranks_on_one_device_are_refused_before_anything_connects(ranks):
    ranks(on_one_device, lambda: ranks.count)


def test_parameters_on_two_devices_of_a_rank_are_refused(ranks):
    def scattered(rank, size):
        schedule = remove_tail(pp.interleaved_1f1b(2, 4, 2))
        params, inputs, targets = problem(schedule)
        held = {s: {"w": params[s]["w"].to(torch.device("cuda", s // 2))} for s in (rank, rank + 2)}
        with pp.P2P(timeout=30) as transport:
            step = pp.value_and_grad([dense] * 4, squared, schedule, transport)
            with pytest.raises(
                (ValueError, pp.PipelineError),
                match="cuda:1, and the communicators of the rank are on cuda:0",
            ):
                step(held, *on_device((inputs, targets)))

    ranks(scattered)


def failing(rank, size):
    """Rank 1 fails while receives of later microbatches run, whose communicator ends late."""
    fails, schedule = threading.Event(), place_communication(remove_tail(pp.gpipe(2, 4)), lookahead=2)

    def stage(params, x):
        if fails.is_set() and rank == 1:  # no step is traced anew for it
            raise KeyError("the stage fails")
        return dense(params, x)

    params, inputs, targets = on_device(problem(schedule))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([stage] * size, squared, schedule, transport, engine=pp.engines.functional)
        step({rank: params[rank]}, inputs, targets)
        fails.set()
        with pytest.raises(pp.PipelineError, match="the stage fails"):
            step({rank: params[rank]}, inputs, targets)
        gc.collect()
        y = torch.empty(3, 4, dtype=torch.float64, device="cuda")  # of the size of a message
        fails.clear()
        assert step({rank: params[rank]}, inputs, targets)[0].isfinite()
    return y.device.index


def test_memory_that_a_late_communicator_may_write_is_not_used_anew(ranks):
    with mock.patch.object(_torch, "_ABORT", 0.2):
        assert ranks(failing, abort_takes=2.0) == [0, 1]


def test_the_environment_is_set_once(ranks):
    ranks(steps, SCHEDULE, 2)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert ranks.count.faults == []


def test_a_choice_of_the_user_stays(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    ranks(steps, SCHEDULE)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_communicators_are_few_and_begin_side_by_side(ranks, size):
    """One for each neighbour and direction; those of a rank begin at the same time."""
    schedule = remove_tail(pp.one_f_one_b(size, size))
    together = threading.Barrier(4 * (size - 1))
    begin = nccl.ProcessGroupNCCL.eager_connect_single_device

    def begun(self, device):
        together.wait(20)
        return begin(self, device)

    with mock.patch.object(nccl.ProcessGroupNCCL, "eager_connect_single_device", begun):
        ranks(steps, schedule, size=size)
    assert ranks.count.made == size + 4 * (size - 1)  # the user's, and both ends of each
    assert not ranks.count.alive()


def test_nothing_connects_in_the_middle_of_a_step(ranks):
    """The first sum over places did, whose all-to-all no communicator had run before."""
    connect, late = nccl.ProcessGroupNCCL._connect, []

    def connecting(self, kind, *given):
        if kind not in self._connected and threading.current_thread().name.startswith("rank"):
            late.append(kind)
        connect(self, kind, *given)

    with mock.patch.object(nccl.ProcessGroupNCCL, "_connect", connecting):
        ranks(steps, remove_tail(pp.dualpipe(2, 4)))
    assert late == []


WITHOUT_CLOSE = """
from tests.simulated import guard, names
from tests.simulated.groups import in_threads, simulated_nccl
names.install()
import torch, ppfunc as pp
from ppfunc.schedule import place_communication, remove_tail
from tests.models import dense, problem, squared
kept, schedule = [], remove_tail(pp.one_f_one_b(2, 4))
def steps(rank, size):
    params, inputs, targets = problem(schedule)
    transport = pp.P2P(timeout=30)
    kept.append(transport)
    step = pp.value_and_grad([dense] * 2, squared, schedule, transport)
    return step({rank: {"w": params[rank]["w"].cuda()}}, inputs.cuda(), targets.cuda())[0].item()
with names.simulated(devices=2), simulated_nccl():
    print(in_threads(2, steps))
"""


@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_a_process_that_ends_without_close_ends_its_communicators():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT_CLOSE]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120 * busy())
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
