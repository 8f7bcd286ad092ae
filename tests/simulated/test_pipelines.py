"""Pipelines over the simulated NCCL: the bits of the CPU, no race, nothing left; and every wait is needed."""

from __future__ import annotations

import sys
import threading
import warnings
from itertools import product

import pytest
import torch
from torch.distributed import Backend

import ppfunc as pp
from ppfunc.schedule import remove_tail
from tests.builders import BUILDERS
from tests.models import dense, problem, same_bits, squared
from tests.simulated.cases import cases, on_device, on_host, take
from tests.simulated.kernels import Work
from tests.simulated.nccl import Options, ProcessGroupNCCL

FEW = [*((name, 2) for name in BUILDERS), ("interleaved_1f1b", 3), ("chimera", 4)]
BUILD = {"1f1b": pp.one_f_one_b, "dualpipe": pp.dualpipe, "dualpipev": pp.dualpipev}


def built(name, ranks):
    """A schedule of a builder, with a number of microbatches that it takes."""
    for microbatches in (2 * ranks, ranks, ranks + 1):
        try:
            return remove_tail(BUILDERS[name](ranks, microbatches))
        except ValueError as error:
            refused = error
    pytest.skip(f"{name} takes no {ranks} ranks: {refused}")


def held(schedule, rank, params):
    return {s: params[s] for s in schedule.model_stages_of(rank)}


def steps(rank, size, schedule, options, count=2):
    """What each of some steps gives, on the host; the ranks are given the whole batch."""
    params, inputs, targets = on_device(problem(schedule))
    stages, mine = [dense] * len(params), held(schedule, rank, params)
    with pp.P2P(timeout=30) as transport:
        if schedule.forward_only:
            judge = pp.evaluate(stages, squared, schedule, transport)
            return [judge(mine, inputs, targets).cpu() for _ in range(count)]
        step = pp.value_and_grad(stages, squared, schedule, transport, **options)
        return [on_host(step(mine, inputs, targets)) for _ in range(count)]


def alone(schedule, **options):
    params, inputs, targets = problem(schedule)
    stages = [dense] * len(params)
    if schedule.forward_only:
        return pp.evaluate(stages, squared, schedule)(params, inputs, targets)
    return pp.value_and_grad(stages, squared, schedule, **options)(params, inputs, targets)


def require_same(schedule, found, wanted):
    for rank, results in enumerate(found):
        for result in results:
            if schedule.forward_only:
                assert torch.equal(result, wanted)
            else:
                assert torch.equal(result[0], wanted[0])
                assert same_bits(result[1], held(schedule, rank, wanted[1]))


@pytest.mark.parametrize(("builder", "size"), cases(product(BUILDERS, (2, 3, 4)), FEW))
def test_every_builder_gives_the_bits_of_the_cpu(ranks, builder, size):
    schedule = built(builder, size)
    found = ranks(steps, schedule, {}, size=size)
    require_same(schedule, found, alone(schedule))
    assert not ranks.count.alive()
    if size == 2 and not schedule.forward_only:
        # Of each way its own, since a send would wait for the receive beside it; one more for replicas.
        assert ranks.count.made == 2 * (1 + 2 * bool(schedule.crossing_edges) + bool(schedule.replicas))


@pytest.mark.parametrize(
    ("name", "seed"), cases(product(["1f1b", "dualpipev"], range(50)), [("1f1b", 0), ("dualpipev", 1)])
)
def test_no_interleaving_changes_a_bit(ranks, name, seed):
    schedule = BUILD[name](2, 4)
    require_same(schedule, ranks(steps, schedule, {}, seed=seed), alone(schedule))


def test_no_wait_at_all_is_reported(ranks, monkeypatch):
    monkeypatch.setattr(Work, "wait", lambda self, timeout=None: True)
    ranks(steps, pp.one_f_one_b(2, 4), {})
    assert take(ranks.gpu.races)


class _Forgetful:
    """Counts the waits for receives of a run, and leaves one of them out."""

    def __init__(self, left_out):
        self.left_out, self.count = left_out, 0
        self._wait, self._lock = Work.wait, threading.Lock()

    def __call__(self, work):
        with self._lock:
            self.count += sys._getframe(2).f_locals.get("outgoing") is False  # in the wait of a transfer
            if self.count == self.left_out:
                self.left_out = None
                return True
        return self._wait(work)


def forgetful(monkeypatch, left_out=None):
    waits = _Forgetful(left_out)
    monkeypatch.setattr(Work, "wait", lambda self, timeout=None: waits(self))
    return waits


@pytest.mark.parametrize("name", cases(["1f1b", "dualpipe"], ["1f1b"]))
def test_each_wait_for_a_message_is_needed(ranks, name, pytestconfig, monkeypatch):
    """Left out one by one; those for sends are covered by later operations."""
    schedule, large = BUILD[name](2, 4), pytestconfig.getoption("--large")
    with monkeypatch.context() as here:
        waits = forgetful(here)
        ranks(steps, schedule, {})
    assert waits.count > 8
    silent = []
    for number in range(1, waits.count + 1, 1 if large else waits.count // 4):
        with monkeypatch.context() as here:
            forgetful(here, number)
            ranks(steps, schedule, {}, seed=number)
        if not take(ranks.gpu.races):
            silent.append(number)
    assert not silent


class Uncounted(ProcessGroupNCCL):
    """Another engine of NCCL, or of a vendor, as torch describes them: it counts no operations."""

    def _get_sequence_number_for_group(self):
        raise RuntimeError("Backend does not yet support sequence numbers")


def uncounted(given, options):
    options = Options()
    options._timeout = given.timeout
    return Uncounted(given.store, given.group_rank, given.group_size, options)


@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy", "nccl-legacy", "vendor"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_over_a_group_of_another_engine_or_of_a_vendor(ranks, name, backend, monkeypatch):
    """P2P opens communicators of NCCL for all of its engines, and of the vendor's for others."""
    monkeypatch.setattr(Backend, "_plugins", dict(Backend._plugins))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is registered again
        Backend.register_backend(backend, uncounted, extended_api=True, devices=["cuda"])
    schedule = remove_tail(BUILD[name](2, 4))
    found = ranks(steps, schedule, {}, backend=f"cpu:gloo,cuda:{backend}")
    require_same(schedule, found, alone(schedule))
    assert not ranks.count.alive()
