"""Exchanges between experts run beside compute: operators are issued between each and the wait for it."""

from __future__ import annotations

from unittest import mock

import optree
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ppfunc as pp
from tests.models import same_bits, squared
from tests.sharded_models import expert_params, experts, random
from tests.simulated.cases import cases
from tests.simulated.groups import in_threads, simulated_nccl
from tests.simulated.nccl import ProcessGroupNCCL

SCHEDULE = pp.dualpipev(1, 4)


def twice(mesh):
    """Exchange twice as often as the others do."""
    once = experts(mesh)
    return lambda p, x: once(p, once(p, x))


def alone(mesh):
    """Exchange nothing."""
    return lambda p, x: x + torch.tanh(x @ p["shared"]) @ p["route"] @ p["up"] @ p["down"]


def step(rank, size, overlapped, kinds=(experts, experts), engine=pp.engines.graph):
    """Loss and gradients of the second step, on the host."""
    mesh = DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("pp", "ep"))
    params = {s: expert_params(s) for s in range(SCHEDULE.stages)}
    batch = random((16, 3, 4), rank), random((16, 3, 4), 2 + rank)
    held, inputs, targets = optree.tree_map(lambda t: t.cuda(), (params, *batch))
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", "ep", experts="ep"), timeout=30) as transport:
        stages = [kind(mesh["ep"]) for kind in kinds]
        run = pp.value_and_grad(stages, squared, SCHEDULE, transport, engine=engine, overlapped=overlapped)
        run(held, inputs, targets)
        return optree.tree_map(lambda t: t.cpu(), run(held, inputs, targets))


@pytest.mark.parametrize("seed", cases(range(4), [1]))
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    ("first", "last"),
    cases([(twice, experts), (experts, twice), (twice, alone), (alone, experts)], [(twice, alone)]),
)
def test_pairs_with_unequal_numbers_of_exchanges_give_the_same_bits(ranks, first, last, remat, seed):
    kinds, engine = (first, last), pp.engines.graph(remat=remat)
    apart, together = (ranks(step, how, kinds, engine, seed=seed) for how in (None, pp.interleaved()))
    assert same_bits(apart, together)


def test_one_computes_while_the_other_exchanges(simulate):
    gpu, exchange = simulate(devices=2), ProcessGroupNCCL.alltoall_base
    gaps = {0: [], 1: []}

    def noted(self, out, *arguments):
        work, stream = exchange(self, out, *arguments), gpu.current(out.device.index)
        wait, before = work.wait, stream.issued

        def waited(*limit):
            gaps[out.device.index].append(stream.issued - before)
            return wait(*limit)

        work.wait = waited
        return work

    results, least = [], []
    for overlapped in (None, pp.interleaved()):
        with simulated_nccl(), mock.patch.object(ProcessGroupNCCL, "alltoall_base", noted):
            results.append(in_threads(2, step, overlapped))
        # of the exchanges that pairs have, two in each program of a step, which are those with most between
        pairs = str(SCHEDULE).count("OVERLAP_F_B")
        least.append(min(sorted(gap)[-2 * 4 * pairs] for gap in gaps.values()))
        gaps.update({0: [], 1: []})
    assert same_bits(*results)
    apart, together = least
    assert apart <= 2 < 5 <= together, least
