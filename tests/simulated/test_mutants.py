"""Waits, events and ``record_stream`` of the package, left out one at a time: each is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

from tests.simulated.programs import FAILING, PROGRAMS

EVERY = PROGRAMS | FAILING


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.fixture
def run(simulate: Callable[..., Any]) -> Callable[..., Any]:
    """Run a program; return the device, the result or the error, and the races."""

    def run(program: str, *left_out: Any, **options: Any) -> tuple[Any, Any, list[str]]:
        gpu = simulate(devices=2, hang=20.0, **options)
        gpu.omitted.update(left_out)
        try:
            found = EVERY[program]()
        except Exception as error:  # a hang, or what is refused
            found = error
        races, gpu.races[:] = list(gpu.races), []
        return gpu, found, races

    return run


@pytest.mark.large
def test_a_call_that_is_left_out_is_reported(run):
    reported: dict[tuple[str, str], bool] = {}
    for program in EVERY:
        gpu, wanted, races = run(program)
        assert not isinstance(wanted, Exception) and not races, (program, wanted, races[:1])
        for call in sorted(call for call in gpu.orders if call[1]):
            if not reported.get(call):
                _, found, races = run(program, call)
                differs = isinstance(found, Exception) or not same(found, wanted)
                reported[call] = bool(races) or differs
    silent = [call for call, seen in reported.items() if not seen]
    print(len(reported), "calls")
    assert len(reported) > 15
    assert not silent


@pytest.mark.large
@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_reported_under_any_seed(run, seed):
    for program in PROGRAMS:
        _, found, races = run(program, seed=seed)
        assert not isinstance(found, Exception) and not races, (program, found, races[:1])
