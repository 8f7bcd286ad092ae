"""What a second step waits for on the host: nothing in one process, its end between processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import remove_tail
from tests.models import affine, dense, problem, same_bits, squared
from tests.simulated.cases import on_device, on_host
from tests.simulated.groups import in_threads, simulated_nccl

SCHEDULE = pp.one_f_one_b(2, 4)


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


def test_a_step_that_raises_for_numbers_that_are_not_finite_waits_at_its_end(gpu):
    """In one process it has to read one number before it returns."""
    params, *given = on_device(problem(SCHEDULE))
    step = pp.value_and_grad([dense] * 2, squared, SCHEDULE, on_nonfinite="raise")
    step(params, *given)
    gpu.waits.clear()
    step(params, *given)
    assert [kind for kind, _ in gpu.waits.elements()] == ["item"], gpu.waits
    with pytest.raises(pp.PipelineError, match="stage 0.*first not finite: its output"):
        step(params | {0: {"w": params[0]["w"] / 0}}, *given)


def finite(rank, size, gpu):
    """The waits of a second step that looks for numbers that are not finite, and the error of a third."""
    params, inputs, targets = on_device(problem(SCHEDULE))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * 2, squared, SCHEDULE, transport, on_nonfinite="raise")
        step({rank: params[rank]}, inputs, targets)
        torch.distributed.barrier()
        if rank == 0:
            gpu.waits.clear()
        torch.distributed.barrier()
        step({rank: params[rank]}, inputs, targets)
        torch.distributed.barrier()
        waits = dict(gpu.waits)
        torch.distributed.barrier()
        with pytest.raises(pp.PipelineError) as caught:
            step({rank: {"w": params[rank]["w"] / (0 if rank else 1)}}, inputs, targets)
        again, _ = step({rank: params[rank]}, inputs, targets)
        return waits, str(caught.value), again.item()


def test_ranks_that_raise_for_numbers_that_are_not_finite_wait_at_the_end_alone(simulate):
    gpu = simulate(devices=2)
    with simulated_nccl():
        (waits, *told), (_, *others) = in_threads(2, finite, gpu)
    assert [kind for kind, _ in waits] == ["event"], waits
    assert sum(waits.values()) == 2  # one of each rank
    for error, loss in told, others:
        assert "rank 1 failed at 1F0" in error and "first not finite: its loss" in error
        assert loss == told[1]


def counted(rank, size, schedule, gpu, **options):
    """The waits and polls of a second step; then one for whose shared parameters rank 1 has other values."""
    params, inputs, targets = on_device(problem(schedule))
    held = {
        s: params[0 if options else s] for s in {schedule.model_stages[s] for s in schedule.stages_of(rank)}
    }
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * len(params), squared, schedule, transport, **options)
        step(held, inputs, targets)
        torch.distributed.barrier()
        if rank == 0:
            gpu.waits.clear(), gpu.polls.clear()
        torch.distributed.barrier()
        step(held, inputs, targets)
        torch.distributed.barrier()
        counts = dict(gpu.waits), dict(gpu.polls)
        torch.distributed.barrier()  # before any rank closes
        if options or len(held) > 1:
            wrong = {s: {"w": tree["w"] + (1e-9 if rank else 0)} for s, tree in held.items()}
            with pytest.raises(pp.AgreementError, match="has other values on rank 0 .* than on rank 1"):
                step(wrong, inputs, targets)
        return counts


SHARED = {
    "nothing": (SCHEDULE, {}),
    "replicas": (pp.dualpipe(2, 4), {}),
    "a tie": (SCHEDULE, {"tied": {"w": [(0, "w"), (1, "w")]}}),
}


@pytest.mark.parametrize("shared", SHARED)
def test_a_step_between_ranks_waits_at_its_end_alone(simulate, shared, monkeypatch):
    """It waited for each of the losses, their sum, their weights, and for comparisons of what is shared.

    Who waits there sleeps: the thread kept a core busy as long as the device had work.
    """
    gpu, (schedule, options), sleeping = simulate(devices=2), SHARED[shared], []

    class Event(torch.cuda.Event):
        def __new__(cls, blocking=False):
            sleeping.append(blocking)
            return super().__new__(cls, blocking=blocking)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    with simulated_nccl():
        (waits, polls), _ = in_threads(2, partial(counted, **options), remove_tail(schedule), gpu)
    assert len(sleeping) >= 4 and all(sleeping)
    assert [kind for kind, _ in waits] == ["event"], waits
    assert sum(waits.values()) == 2  # one of each rank
    assert not polls


def test_a_tie_in_one_process_is_compared_at_the_end_of_the_step(gpu):
    schedule, tied = pp.gpipe(2, 4), {n: [(0, n), (1, n)] for n in "wb"}
    params, *given = on_device(problem(schedule, leaves="wb"))
    params[1] = {name: leaf.clone() for name, leaf in params[0].items()}
    step = pp.value_and_grad([affine] * 2, squared, schedule, tied=tied)
    step(params, *given)
    gpu.waits.clear()
    step(params, *given)
    assert [kind for kind, _ in gpu.waits.elements()] == ["item"], gpu.waits
    params[1]["b"] = params[1]["b"] + 1e-9
    with pytest.raises(pp.AgreementError, match=r"tied\['b'\] has other values in stage 0 than in stage 1"):
        step(params, *given)
