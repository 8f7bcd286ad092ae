"""Residuals that move to the host and back: beside what the device computes, and only what was on it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import Op, insert_offloads, seq_zb
from tests.models import dense, normal, problem, same_bits, squared
from tests.simulated.cases import cases, on_device, on_host
from tests.test_slices import CELLS, INPUTS, PARAMS, SEQUENCES, TARGETS, loss_fn

PLAIN = pp.gpipe(2, 4)
MOVING = insert_offloads(PLAIN)
SCHEDULES = {"gpipe": MOVING, "zb": insert_offloads(pp.zb_h1(2, 4), lookahead=0)}


@pytest.mark.parametrize(("name", "seed"), cases(product(SCHEDULES, range(5)), [("gpipe", 0), ("zb", 1)]))
def test_offloaded_residuals_give_the_same_bits_and_hold_up_nothing(simulate, name, seed):
    gpu, schedule = simulate(seed=seed), SCHEDULES[name]
    params, inputs, targets = problem(schedule)
    step = pp.value_and_grad([dense] * 2, squared, schedule)
    held, x, y = on_device((params, inputs, targets))
    step(held, x, y)
    gpu.waits.clear()
    result = step(held, x, y)
    assert not gpu.waits, dict(gpu.waits)
    assert same_bits(on_host(result), step(params, inputs, targets))


@pytest.mark.parametrize(("cell", "seed"), cases(product(CELLS, range(3)), [("cache", 0), ("linear", 1)]))
def test_offloaded_slices_give_the_same_bits_and_carries(simulate, cell, seed):
    """Keys of a slice go to the next slice while they move."""
    gpu, schedule = simulate(seed=seed), insert_offloads(seq_zb(2, SEQUENCES, 4), lookahead=0)
    assert Op.OFFLOAD in schedule.ops
    params = {s: PARAMS[s] for s in range(2)}
    step = pp.value_and_grad([CELLS[cell]] * 2, loss_fn, schedule, return_carry=True)

    def run(params, *batch):
        given = [pp.microbatch(part, SEQUENCES, slices=4) for part in batch]
        carry = step(params, *given).carry if cell == "linear" else None
        gpu.waits.clear()
        found = step(params, *given, carry=carry)
        return found.loss, found.grads, {s: each.trees for s, each in found.carry.items()}

    found = run(*on_device((params, INPUTS, TARGETS)))
    assert not gpu.waits, dict(gpu.waits)
    assert same_bits(on_host(found), run(params, INPUTS, TARGETS))


def test_parts_of_tensors_move_without_holding_up_the_host(gpu):
    """As queries, keys and values do, which lie beside each other in one tensor, with heads before rows."""

    def heads(params, x):
        q, k, v = (x @ params["w"]).unflatten(1, (2, 3, 2)).permute(2, 1, 0, 3)
        return x + torch.tanh(q * k * v).transpose(0, 1).flatten(1).repeat(1, 2)

    params = {s: {"w": normal(8, 12, seed=s)} for s in range(2)}
    held, x, y = on_device((params, normal(12, 8, seed=2), normal(12, 8, seed=3)))
    moving, plain = (pp.value_and_grad([heads] * 2, squared, s) for s in (MOVING, PLAIN))
    moving(held, x, y)
    gpu.waits.clear()
    result = moving(held, x, y)
    assert not gpu.waits, dict(gpu.waits)
    assert same_bits(on_host(result), on_host(plain(held, x, y)))


def test_memory_is_counted_on_the_device_alone(gpu):
    kept = []
    for schedule in (pp.gpipe(1, 4), insert_offloads(pp.gpipe(1, 4), lookahead=0)):
        given = problem(schedule)
        step = pp.value_and_grad([dense], squared, schedule)
        memory, host = (step.lower(*each).memory_analysis()[0] for each in (on_device(given), given))
        kept.append((memory.most.residuals, host.most.residuals))
        assert memory.most.gradients == host.most.gradients  # nothing else is made
    (whole, on_host_too), (moved, not_moved) = kept
    row = given[1][:3].nbytes
    assert whole == on_host_too == not_moved == 4 * 2 * row
    assert moved == 3 * row  # of one microbatch at a time; its input, part of the batch, comes back as a copy


def test_moves_are_issued_on_streams_of_their_own(gpu):
    """On the stream that computes they would hide nothing."""
    issued = []
    issue = gpu.issue

    def noted(stream, what, *args, **kwargs):
        issued.append((what, stream))
        return issue(stream, what, *args, **kwargs)

    held, x, y = on_device(problem(MOVING))
    gpu.issue = noted
    pp.value_and_grad([dense] * 2, squared, MOVING)(held, x, y)
    computes = {stream for what, stream in issued if what.startswith(("tanh", "mm"))}
    moves = [stream for what, stream in issued if "copy" in what and "host" in what]
    assert computes
    assert len(moves) >= 4
    assert not computes & set(moves)


@torch.library.custom_op("simulated::attend", mutates_args=())
def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As memory-efficient attention with dropout, which keeps its seed on the host."""
    return x * 2, torch.zeros((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("simulated::attend_backward", mutates_args=())
def attend_backward(gy: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    assert seed.device.type == "cpu", "the seed is read on the host"
    return gy * 2


attend.register_fake(lambda x: (torch.empty_like(x), torch.empty((), dtype=torch.int64, device="cpu")))
attend_backward.register_fake(lambda gy, seed: torch.empty_like(gy))


def keep(ctx, inputs, output):
    ctx.seed = output[1]
    ctx.mark_non_differentiable(output[1])


attend.register_autograd(lambda ctx, gy, _: attend_backward(gy, ctx.seed), setup_context=keep)


def attending(params, x):
    return attend(dense(params, x))[0]


def test_what_was_on_the_host_stays_there(gpu):
    """A FETCH brought the seed of attention to the device, whose backward reads it on the host."""
    held, x, y = on_device(problem(MOVING))
    results = [pp.value_and_grad([attending] * 2, squared, s)(held, x, y) for s in (PLAIN, MOVING)]
    assert same_bits(*map(on_host, results))
