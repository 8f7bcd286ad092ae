"""Costs measured of stages."""

from __future__ import annotations

import time

import pytest
import torch

import ppfunc as pp
from ppfunc.measurement import measure
from tests.models import dense, normal, squared

D = 16


def slow(params, x):
    time.sleep(0.01)
    return dense(params, x)


def params_of(count):
    return {s: {"w": normal(D, D, seed=s)} for s in range(count)}


def test_seconds_are_those_of_the_stage_and_bytes_are_exact():
    costs = measure(
        [dense, dense, slow],
        params_of(3),
        normal(4, D),
        engine=pp.engines.functional,
        repeats=3,
        memory=False,
    )
    assert 0.01 <= costs.forward[2] < 0.1 and max(costs.forward[:2]) < 0.01
    costs = measure([dense] * 3, params_of(3), normal(4, D), squared, normal(4, D), repeats=3)
    nbytes = 4 * D * 8
    assert costs.bytes == (nbytes, nbytes, 0)
    assert costs.activation[0] == 2 * nbytes  # the input and the result of tanh
    assert all(
        value > 0
        for name in ("forward", "backward_input", "backward_weight")
        for value in getattr(costs, name)
    )
    timeline = pp.simulate(pp.one_f_one_b(3, 6), costs)
    assert timeline.peak_activations[0] == 3 * costs.activation[0]


def test_a_plan_under_a_cap_in_bytes_takes_the_costs_as_they_are():
    params, x = params_of(4), normal(4, D)
    costs = measure([dense] * 4, params, x, repeats=1)
    assert costs.parameters == (2 * D * D * 8,) * 4
    cap = 2 * D * D * 8 + 2 * max(costs.activation)
    plan = pp.plan(4, 8, costs, cap=cap, placement="loop", effort=0.1)
    assert max(plan.memory) <= cap
    loss, _ = pp.value_and_grad([dense] * 4, squared, plan.schedule)(params, normal(32, D), normal(32, D))
    whole, _ = pp.value_and_grad([dense] * 4, squared, pp.gpipe(4, 8))(params, normal(32, D), normal(32, D))
    assert torch.equal(loss, whole)


def test_one_stage_and_stages_that_draw_or_have_a_state():
    assert measure([dense], params_of(1), normal(4, D), repeats=1).bytes == (0,)
    dropped = measure(
        [lambda p, x: torch.dropout(dense(p, x), 0.5, True)] * 2, params_of(2), normal(4, D), repeats=1
    )
    assert len(dropped.forward) == 2
    counting = lambda p, x, n: pp.Output(dense(p, x), state=n + 1)  # noqa: E731
    assert (
        len(
            measure(
                [counting] * 2,
                params_of(2),
                normal(4, D),
                state={s: torch.zeros(()) for s in range(2)},
                repeats=1,
            ).forward
        )
        == 2
    )


def test_a_split_model_is_measured():
    model = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh(), torch.nn.Linear(D, D))
    parts = pp.split(model, torch.zeros(4, D), at=["2"])
    costs = measure(parts, parts.params, torch.zeros(4, D), repeats=1)
    assert len(costs.forward) == 2


def test_bytes_that_cannot_be_known_are_refused():
    with pytest.raises(TypeError, match="whose bytes cannot be known"):
        measure([dense] * 2, params_of(2), normal(4, D), engine=pp.engines.functional, repeats=1)


def test_arguments_of_a_wrong_type_are_refused_by_name():
    with pytest.raises(TypeError, match="stages: got None of type NoneType, expected one function per stage"):
        measure(None, params_of(1), normal(4, D))
    for repeats in (0, 1.5, None):
        with pytest.raises(ValueError, match=f"repeats = {repeats}, expected an integer of at least 1"):
            measure([dense], params_of(1), normal(4, D), repeats=repeats)
