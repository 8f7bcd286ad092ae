"""Gathers of parameters run beside compute: begun by UNSHARD or STEP, waited for where the stage computes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Collective
from ppfunc.schedule import looped_bfs
from tests.models import dense, problem, squared
from tests.simulated.groups import in_threads, simulated_nccl

SCHEDULE = looped_bfs(1, 2, 4)


def peak(rank, size, shard, stages, gpu):
    """Take two steps; return the bytes of the device in the second, above those before it."""
    generator = torch.Generator().manual_seed(0)
    held = {s: {"w": torch.randn(64, 64, generator=generator).cuda()} for s in range(stages)}
    inputs, targets = torch.randn(2, 2, 64, generator=generator).cuda()
    mesh = DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("pp", "dp"))
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", data="dp"), shard=shard, timeout=30) as transport:
        schedule, optimizer = looped_bfs(1, 2, stages), pp.optim.sgd(0.1)
        trainer = pp.Trainer([dense] * stages, squared, schedule, optimizer, transport, on_nonfinite="ignore")
        state, _ = trainer.step(trainer.init(held), inputs, targets)
        del held
        torch.cuda.synchronize()
        torch.distributed.barrier()
        before = gpu.memory.now(rank)
        gpu.memory.reset_peak(rank)
        trainer.step(state, inputs, targets)
        torch.cuda.synchronize()
        return gpu.memory.peak[rank] - before


def test_the_memory_of_whole_parameters_is_that_of_some_stages(simulate):
    """However many there are, beside their own shards and gradients."""
    gpu, whole = simulate(devices=2), 64 * 64 * 4
    with simulated_nccl():
        few, many = (max(in_threads(2, peak, "params", stages, gpu)) for stages in (4, 8))
        uncut = min(in_threads(2, peak, "none", 8, gpu))
    assert many < few + whole
    assert many < 5 * whole < 8 * whole < uncut


def train(rank, size, shard, count, gaps):
    """Train a step, and then several together, whose all-gathers are noted."""
    params, inputs, targets = problem(4, 2)
    held = {s: {"w": tree["w"].cuda()} for s, tree in params.items()}
    mesh = DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("pp", "dp"))
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", data="dp"), shard=shard, timeout=30) as transport:
        trainer = pp.Trainer(
            [dense] * 4, squared, SCHEDULE, pp.optim.adamw(0.1), transport, on_nonfinite="ignore"
        )
        state, _ = trainer.step(trainer.init(held), inputs.cuda(), targets.cuda())
        gaps[rank] = []
        state, metrics = trainer.steps(state, [(inputs.cuda(), targets.cuda())] * count)
        return torch.stack([each.loss.cpu() for each in metrics])


@pytest.fixture
def gaps(simulate):
    """By rank, the operators issued between each all-gather and its wait, in the order of the waits."""
    gpu, gaps, gather = simulate(devices=2), {0: [], 1: []}, Collective.all_gather

    def issued(device):
        return sum(stream.issued for stream in gpu.streams(device.index))

    def noted(self, part):
        whole, wait = gather(self, part)
        before = issued(part.device)

        def waited():
            gaps[part.device.index].append(issued(part.device) - before)
            wait()

        return whole, waited

    with mock.patch.object(Collective, "all_gather", noted):
        yield gaps


def close(some, others):
    return all(torch.allclose(a, b) for a, b in zip(some, others, strict=True))


def test_stages_compute_while_the_next_one_is_gathered(gaps):
    with simulated_nccl():
        sharded = in_threads(2, train, "params", 1, gaps)
        assert close(sharded, in_threads(2, train, "none", 1, {}))
    for first, *others in gaps.values():
        assert len(others) >= 3
        assert min(others) > first, gaps


def test_stages_are_updated_and_compute_while_new_parameters_are_gathered(gaps):
    """Each gather was waited for where it began."""
    with simulated_nccl():
        sharded = in_threads(2, train, "optimizer", 2, gaps)
        assert close(sharded, in_threads(2, train, "none", 2, {}))
    for each in gaps.values():
        assert len(each) == 8
        assert min(each) > 0, gaps
