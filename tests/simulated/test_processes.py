"""Ranks in two processes, each with devices of its own, over the simulated NCCL and a ``TCPStore``."""

from __future__ import annotations

import os
import threading
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.schedule import remove_tail
from tests.builders import BUILDERS
from tests.conftest import Processes
from tests.models import dense, problem, same_bits, squared
from tests.simulated import names
from tests.simulated.cases import cases
from tests.simulated.groups import member_in_pool


@pytest.fixture(scope="module")
def pool(installed):
    """Two processes that no other tests share: their devices are simulated before their first backward."""
    processes = Processes(2)
    processes(install)
    yield processes
    processes.close()


def install(rank, size):
    names.install()


def moved(tree, device):
    return optree.tree_map(lambda t: t.to(device), tree)


def compare(rank, size, name, seed=0):
    """Two steps, or evaluations, on the device against the CPU alone."""
    schedule = remove_tail(BUILDERS[name](size, 2 * size))
    params, inputs, targets = problem(schedule)
    stages = [dense] * len(params)
    make = pp.evaluate if schedule.forward_only else pp.value_and_grad
    wanted = make(stages, squared, schedule)(params, inputs, targets)
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    with member_in_pool(rank, size, seed=seed + rank) as (gpu, count):
        with pp.P2P(timeout=30) as transport:
            step = make(stages, squared, schedule, transport)
            for _ in range(2):
                found = moved(step(*moved((own, inputs, targets), "cuda")), "cpu")
                if schedule.forward_only:
                    assert torch.equal(found, wanted)
                else:
                    assert torch.equal(found[0], wanted[0])
                    assert same_bits(found[1], {s: wanted[1][s] for s in own})
        assert not count.alive()
        assert not gpu.races, gpu.races[0]


@pytest.mark.parametrize("name", cases(BUILDERS, ["dualpipe"]))
def test_two_processes_give_the_bits_of_the_cpu(pool, name):
    pool(compare, name)


@pytest.mark.large
@pytest.mark.parametrize("seed", range(50))
def test_no_interleaving_between_processes_changes_a_bit(pool, seed):
    pool(compare, ["1f1b", "dualpipe", "zbv"][seed % 3], 2 * seed)


def failing(rank, size):
    """A stage fails in one process, then in the other; both are told, and what they do next is right."""
    fails = threading.Event()  # no step is traced anew for an event

    def stage(params, x):
        if fails.is_set():
            raise KeyError("told to fail")
        return dense(params, x)

    schedule = pp.one_f_one_b(size, 4)
    with member_in_pool(rank, size, seed=rank, abort_takes=0.2) as (gpu, count):
        params, inputs, targets = moved(problem(schedule), "cuda")
        with pp.P2P(timeout=20) as transport:
            step = pp.value_and_grad([stage] * 2, squared, schedule, transport, engine=pp.engines.functional)
            loss, _ = step({rank: params[rank]}, inputs, targets)
            for victim in (1, 0):
                if rank == victim:
                    fails.set()
                with pytest.raises(pp.PipelineError, match=f"rank {victim} failed"):
                    step({rank: params[rank]}, inputs, targets)
                fails.clear()
                for _ in range(2):
                    again, _ = step({rank: params[rank]}, inputs, targets)
                    assert torch.equal(loss, again)
                dist.all_reduce(total := torch.ones(1, device="cuda"))
                assert total.item() == size
        assert not gpu.races, gpu.races[0]
        assert not count.faults, count.faults


def test_a_failure_in_one_process_is_named_in_both(pool):
    pool(failing)


def as_two_hosts(rank, size):
    with mock.patch.dict(os.environ, NCCL_HOSTID=f"rank{rank}"), member_in_pool(rank, size) as (gpu, _):
        torch.cuda.set_device(0)
        (params, *given), schedule = problem(2, 4), pp.one_f_one_b(2, 4)
        wanted, _ = pp.value_and_grad([dense] * 2, squared, schedule)(params, *given)
        held, *there = moved(({rank: params[rank]}, *given), "cuda")
        with pp.P2P(timeout=20) as transport:
            found, _ = pp.value_and_grad([dense] * 2, squared, schedule, transport)(held, *there)
        assert torch.equal(found.cpu(), wanted)
        assert not gpu.races, gpu.races[0]


def test_two_processes_that_pass_for_two_hosts_share_a_device(pool):
    """As NCCL takes them."""
    pool(as_two_hosts)


def tensor_parallel(rank, size):
    """A stage that sums over the ranks of an axis: its gradients are those of the whole stage."""
    w = problem(1, 2)[0][0]["w"]
    inputs, targets = problem(1, 2)[1:]
    wanted, whole = pp.value_and_grad([dense], squared, pp.gpipe(1, 2))({0: {"w": w}}, inputs, targets)
    with member_in_pool(rank, size, seed=rank) as (gpu, _):
        mesh = init_device_mesh("cuda", (1, size), mesh_dim_names=("pp", "tp"))

        def rows(params, x):
            x = pp.collectives.pvary(x, mesh["tp"])
            return torch.tanh(pp.collectives.psum(x.chunk(size, 1)[rank] @ params["w"], mesh["tp"]))

        with pp.P2P(mesh=mesh, axes=pp.Axes("pp", model="tp")) as transport:
            step = pp.value_and_grad([rows], squared, pp.gpipe(1, 2), transport)
            mine = {0: {"w": w.chunk(size)[rank].cuda()}}
            loss, grads = moved(step(mine, inputs.cuda(), targets.cuda()), "cpu")
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(grads[0]["w"], whole[0]["w"].chunk(size)[rank], rtol=1e-12, atol=1e-14)
        assert not gpu.races, gpu.races[0]


def test_collectives_inside_stages_run_on_the_device(pool):
    pool(tensor_parallel)
