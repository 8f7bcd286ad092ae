"""Gathers of parameters run beside compute: begun by UNSHARD, waited for where the stage computes."""

from __future__ import annotations

from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

import ppfunc as pp
from ppfunc.runtime.transport.collective import Collective
from ppfunc.schedule import looped_bfs
from tests.models import dense, problem, squared
from tests.simulated.groups import in_threads, simulated_nccl

SCHEDULE = looped_bfs(1, 2, 4)


def train(rank, size, shard, gaps):
    """Train two steps; the operators issued between each all-gather of the second and its wait."""
    params, inputs, targets = problem(4, 2)
    held = {s: {"w": tree["w"].cuda()} for s, tree in params.items()}
    mesh = DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("pp", "dp"))
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", data="dp"), shard=shard, timeout=30) as transport:
        trainer = pp.Trainer([dense] * 4, squared, SCHEDULE, pp.optim.sgd(0.1), transport)
        state, _ = trainer.step(trainer.init(held), inputs.cuda(), targets.cuda())
        gaps[rank] = []
        state, metrics = trainer.step(state, inputs.cuda(), targets.cuda())
        return metrics.loss.cpu()


def test_stages_compute_while_the_next_one_is_gathered(simulate):
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

    with simulated_nccl(), mock.patch.object(Collective, "all_gather", noted):
        sharded = in_threads(2, train, "params", gaps)
    with simulated_nccl():
        whole = in_threads(2, train, "none", {})
    assert all(torch.allclose(a, b) for a, b in zip(sharded, whole, strict=True))
    for first, *others in gaps.values():
        assert len(others) >= 3
        assert min(others) > first, gaps
