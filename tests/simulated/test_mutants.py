"""Waits, events and ``record_stream`` of the package, left out one at a time: each is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.schedule.passes.insert import insert_offloads
from tests.models import dense, problem, squared
from tests.simulated.groups import in_threads, simulated_nccl
from tests.simulated.test_pipelines import steps
from tests.simulated.test_training import overlapped, run_kind, train

# Calls whose absence changes no order, by kind and the file that makes them, and why.
COVERED = {
    ("host wait", "opening.py"): "it looks for errors of the first messages",
    ("host wait", "record.py"): "simulated events tell their time without it; those of CUDA would raise",
    ("record_stream", "overlap.py"): "residuals live until both streams have met, unless the forward fails",
}


def in_process(devices: tuple[int, ...], schedule: pp.Schedule, record: bool, **options: Any) -> Any:
    """Two steps in one process, ranks on devices in turn; the second is recorded, or not."""
    params, inputs, targets = problem(schedule)
    where = {s: torch.device("cuda", devices[schedule.placement[s] % len(devices)]) for s in params}
    held = {s: {k: v.to(where[s]) for k, v in tree.items()} for s, tree in params.items()}
    step = pp.value_and_grad([dense] * len(params), squared, schedule, **options)
    step(held, inputs, targets)
    result = step.record(held, inputs, targets)[0] if record else step(held, inputs, targets)
    return optree.tree_map(torch.Tensor.cpu, result)


def threads(function: Callable[..., Any], *arguments: Any, size: int = 2) -> Callable[[], Any]:
    def run() -> Any:
        with simulated_nccl():
            return in_threads(size, function, *arguments, backend="cpu:gloo,cuda:nccl")

    return run


SCENARIOS: dict[str, Callable[[], Any]] = {
    "two streams": lambda: in_process((0,), pp.dualpipev(2, 4), False, overlapped=pp.two_streams()),
    "offload": lambda: in_process((0,), insert_offloads(pp.one_f_one_b(2, 4)), False),
    "offload on two": lambda: in_process((0, 1), insert_offloads(pp.zb_h1(2, 4), lookahead=0), False),
    "recorded": lambda: in_process((0, 1), pp.one_f_one_b(2, 4), True),
    "1f1b": threads(steps, pp.one_f_one_b(2, 4), {}),
    "dualpipe": threads(steps, pp.dualpipe(2, 4), {}),
    "dualpipev, two streams": threads(overlapped, "cuda", "two_streams"),
    "ties": threads(run_kind, "cuda", "ties"),
    "optimizer cut": threads(train, "cuda", (1, 2), "optimizer", pp.one_f_one_b),
    "params cut": threads(train, "cuda", (1, 2), "params", pp.one_f_one_b),
}


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.fixture
def run(simulate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(scenario: str, *left_out: Any) -> tuple[Any, Any]:
        gpu = simulate(devices=2, hang=20.0)
        gpu.omitted.update(left_out)
        try:
            found = SCENARIOS[scenario]()
        except Exception as error:  # a hang, or what is refused
            found = error
        races, gpu.races[:] = list(gpu.races), []
        return gpu, (found, races)

    return run


@pytest.mark.large
def test_a_call_that_is_left_out_is_reported(run):
    reported: dict[tuple[str, str], bool] = {}
    for scenario in SCENARIOS:
        gpu, (wanted, races) = run(scenario)
        assert not isinstance(wanted, Exception) and not races, (scenario, wanted, races[:1])
        for call in sorted(call for call in gpu.orders if call[1]):
            if not reported.get(call):
                _, (found, races) = run(scenario, call)
                differs = isinstance(found, Exception) or not same(found, wanted)
                reported[call] = bool(races) or differs
    silent = [call for call, seen in reported.items() if not seen]
    assert len(reported) > 15
    assert {(kind, place.rsplit("/", 1)[-1].split(":")[0]) for kind, place in silent} == set(COVERED), silent
