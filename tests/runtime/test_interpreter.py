"""The interpreter: what a bound program holds, and for how long."""

from __future__ import annotations

import sys

import pytest
import torch

import ppfunc as pp
from ppfunc.stage import FlatProgram

D, M = 4, 6


def stage(params, x):
    return torch.tanh(x @ params["w"])


def squared(y, target):
    return (y - target).square().mean()


def problem(stages):
    generator = torch.Generator().manual_seed(0)
    params = {s: {"w": torch.randn(D, D, generator=generator)} for s in range(stages)}
    return params, torch.randn(M, 3, D, generator=generator), torch.randn(M, 3, D, generator=generator)


@pytest.mark.parametrize("schedule", [pp.one_f_one_b(2, M), pp.zb_h1(2, M)], ids=["1f1b", "zb_h1"])
def test_residuals_are_used_once_by_their_only_owner_and_dropped(schedule):
    alive, most, owners = set(), [0], []

    def watched(fn, example, **options):
        program = pp.graph(fn, example, **options)
        flat = program.flat

        def forward(params, x, consts):
            outputs, residuals = flat.forward(params, x, consts)
            alive.add(id(residuals))
            most[0] = max(most[0], len(alive))
            return outputs, residuals

        def use(function):
            def run(residuals, gy):
                owners.append(sys.getrefcount(residuals) - 1)
                alive.discard(id(residuals))
                return function(residuals, gy)

            return run

        return program._replace(flat=FlatProgram(forward, use(flat.backward), use(flat.backward_input), flat.backward_weight))

    params, inputs, targets = problem(2)
    pp.value_and_grad([stage] * 2, squared, schedule, engine=watched)(params, inputs, targets)
    assert owners == [1] * 2 * M
    assert not alive
    assert most[0] <= 3  # rank 0 holds two microbatches, rank 1 one


def test_a_step_leaves_nothing_in_its_memory():
    from ppfunc.pipeline import value_and_grad

    params, inputs, targets = problem(2)
    step = value_and_grad([stage] * 2, squared, pp.gpipe(2, M))
    step(params, inputs, targets)
    (session,) = [c.cell_contents for c in step.__closure__ if type(c.cell_contents).__name__ == "Session"]
    ((bound, _),) = session.bound.values()
    memory = bound.memory
    assert not (memory.params or memory.values or memory.residuals or memory.kept or memory.constants or memory.weights)


def test_thunks_know_where_they_come_from():
    params, inputs, targets = problem(2)
    step = pp.value_and_grad([stage] * 2, squared, pp.gpipe(2, M))
    step(params, inputs, targets)
    (session,) = [c.cell_contents for c in step.__closure__ if type(c.cell_contents).__name__ == "Session"]
    ((bound, _),) = session.bound.values()
    assert len(bound.thunks) == len(bound.places) == 4 * M  # in one process messages need no thunk
    assert {str(p.instruction) for p in bound.places} == {f"{s}{op}{m}" for s in range(2) for op in "FB" for m in range(M)}
