"""What a second step waits for on the host: nothing in one process, its end between processes."""

from __future__ import annotations

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import remove_tail
from tests.models import dense, problem, same_bits, squared
from tests.simulated.groups import in_threads, simulated_nccl

SCHEDULE = pp.one_f_one_b(2, 4)


def on_device(tree):
    return optree.tree_map(lambda t: t.cuda(), tree)


def on_host(tree):
    return optree.tree_map(lambda t: t.cpu(), tree)


WEIGHTS = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)


@pytest.mark.parametrize("batch", ["host", "device"])
@pytest.mark.parametrize("weights", [None, WEIGHTS, "device"], ids=["even", "host", "on the device"])
def test_no_step_in_one_process_waits(gpu, batch, weights):
    """A wait at the beginning of a step leaves the device idle until the host has issued more."""
    weights = WEIGHTS.cuda() if isinstance(weights, str) else weights
    params, *given = problem(SCHEDULE)
    inputs, targets = on_device(given) if batch == "device" else given
    step = pp.value_and_grad([dense] * 2, squared, SCHEDULE)
    held = on_device(params)
    step(held, inputs, targets, loss_weights=weights)
    gpu.waits.clear(), gpu.polls.clear()
    result = step(held, inputs, targets, loss_weights=weights)
    assert not gpu.waits, dict(gpu.waits)
    assert not gpu.polls, dict(gpu.polls)
    same = None if weights is None else WEIGHTS
    assert same_bits(on_host(result), step(params, *given, loss_weights=same))


def counted(rank, size, schedule, gpu):
    params, inputs, targets = on_device(problem(schedule))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * 2, squared, schedule, transport)
        step({rank: params[rank]}, inputs, targets)
        torch.distributed.barrier()
        if rank == 0:
            gpu.waits.clear(), gpu.polls.clear()
        torch.distributed.barrier()
        step({rank: params[rank]}, inputs, targets)
        torch.distributed.barrier()
        counts = dict(gpu.waits), dict(gpu.polls)
        torch.distributed.barrier()  # before any rank closes
        return counts


def test_a_step_between_ranks_waits_at_its_end_alone(simulate):
    """It waited for each of the losses, their sum, and their weights."""
    gpu = simulate(devices=2)
    with simulated_nccl():
        (waits, polls), _ = in_threads(2, counted, remove_tail(SCHEDULE), gpu)
    assert [kind for kind, _ in waits] == ["event"], waits
    assert sum(waits.values()) == 2  # one of each rank
    assert not polls
