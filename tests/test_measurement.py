"""Costs measured of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ppfunc as pp
from ppfunc.measurement import measure
from tests.models import dense, normal, slow, squared

D = 16


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
    assert costs.seconds and costs.activation[0] == 2 * nbytes  # the input and the result of tanh
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


def test_bytes_are_known_whatever_the_engine_keeps():
    engines = pp.engines.graph, pp.engines.functional, pp.engines.eager
    costs = [measure([dense] * 2, params_of(2), normal(4, D), engine=e, repeats=1) for e in engines]
    kept = 2 * 4 * D * 8  # the input and the result of tanh
    assert [each.activation for each in costs] == [(kept, kept), (kept, kept + 8), (kept, kept + 8)]  # a loss


def test_bytes_that_depend_on_values_are_refused():
    def branching(p, x):
        return dense(p, x) if x.sum() > 0 else x

    options = {"engine": pp.engines.functional, "repeats": 1}
    with pytest.raises(pp.StageError, match="stage: its memory is not known: its control flow or its shapes"):
        measure([branching], params_of(1), normal(4, D), **options)
    assert measure([branching], params_of(1), normal(4, D), memory=False, **options).activation == 1


def test_the_bytes_of_stages_make_a_plan_without_a_run():
    params, x = params_of(4), normal(8 * 4, D)
    lowered = pp.value_and_grad([dense] * 4, squared, pp.one_f_one_b(4, 8)).lower(params, x, x)
    measured = measure([dense] * 4, params, x[:4], squared, x[:4], repeats=1)
    costs = lowered.costs()
    assert costs.forward == 1 and lowered.costs(measured) == replace(
        costs,
        **{n: getattr(measured, n) for n in ("forward", "backward_input", "backward_weight", "seconds")},
    )
    for name in ("activation", "weight_share", "parameters", "bytes"):
        assert tuple(getattr(costs, name).values()) == getattr(measured, name)
    assert max(pp.plan(4, 8, costs, cap=10_000, placement="loop", effort=0.1).memory) <= 10_000


def test_arguments_of_a_wrong_type_are_refused_by_name():
    with pytest.raises(TypeError, match="stages: got None of type NoneType, expected one function per stage"):
        measure(None, params_of(1), normal(4, D))
    for repeats in (0, 1.5, None):
        with pytest.raises(ValueError, match=f"repeats = {repeats}, expected an integer of at least 1"):
            measure([dense], params_of(1), normal(4, D), repeats=repeats)


def cached(params, x, carry):
    q, k, v = ((x @ w).unflatten(2, (2, -1)).transpose(1, 2) for w in params["w"].split(D, 1))
    y, carry = pp.carried_attention(q, k, v, carry)
    return pp.Output(x + y.transpose(1, 2).flatten(2), carry=carry)


def recurrent(params, x, carry):
    h = x.sum(1) if carry is None else carry + x.sum(1)
    return pp.Output((x @ params["w"][:, :D] + h[:, None]).tanh(), carry=(h * 2).tanh())


@pytest.mark.parametrize("stage", [cached, recurrent])
def test_every_slice_has_its_seconds_and_bytes(stage):
    params = {s: {"w": normal(D, 3 * D, seed=s)} for s in range(2)}
    batch = [pp.microbatch(normal(2, 12, D, seed=n), 1, slices=[5, 3, 4]) for n in range(2)]
    weights = [5 / 12, 3 / 12, 4 / 12]
    costs = measure([stage] * 2, params, batch[0], repeats=2)
    assert [of.bytes for of in costs.slices] == [(2 * n * D * 8, 0) for n in (5, 3, 4)]
    assert costs.bytes == (2 * 12 * D * 8, 0) and costs.parameters == (2 * 3 * D * D * 8,) * 2
    assert all(t > 0 for of in costs.slices for t in (*of.forward, *of.backward_input, *of.backward_weight))
    assert costs.forward[0] == sum(of.forward[0] for of in costs.slices)
    step = pp.value_and_grad([stage] * 2, lambda y, _: y.sum(), pp.seq1f1b(1, 1, 3, 2))
    lowered = step.lower(params, batch[0], pp.Microbatches([()] * 3), loss_weights=weights)
    for found in (costs, lowered.costs(costs)):
        [peak] = pp.simulate(lowered.schedule, found).peak_activations
        turns = [
            m.after for m in lowered.memory_analysis()[0].moments if m.instruction.op is pp.schedule.Op.F
        ]
        held = turns[-1].residuals + turns[-1].messages + 2 * 12 * D * 8  # the batch is the caller's
        # A result that the next stage keeps is one storage; a carry that nothing keeps is free soon.
        assert peak == held if stage is cached else peak > held
    assert {len(lowered.costs(c).slices) for c in (None, pp.Costs(forward=1, step=2), costs)} == {3}
    with pytest.raises(ValueError, match="slices has costs of 2 slices, expected 3"):
        lowered.costs(pp.Costs(slices=[pp.Costs()] * 2))


def test_one_slice_is_measured_with_its_carry():
    params = {s: {"w": normal(D, 3 * D, seed=s)} for s in range(2)}
    costs = measure([cached] * 2, params, pp.microbatch(normal(2, 12, D), 1, slices=1), repeats=1)
    assert len(costs.slices) == 1 and costs.bytes == costs.slices[0].bytes == (2 * 12 * D * 8, 0)


def test_what_a_run_says_of_a_slice_is_what_a_simulation_takes():
    def slower(params, x, carry):
        if carry is not None:
            slow({"w": params["w"][:, :D]}, x)
        return cached(params, x, carry)

    batch = [pp.microbatch(normal(4, 12, D, seed=n), 1, slices=3) for n in range(2)]
    params = {s: {"w": normal(D, 3 * D, seed=s)} for s in range(2)}
    step = pp.value_and_grad([slower] * 2, squared, pp.seq1f1b(2, 1, 3), engine=pp.engines.functional)
    timeline = step.record(params, *batch)[-1]
    paper = pp.simulate(timeline.schedule, timeline.costs())
    for rows in zip(timeline.rows(), paper.rows(), strict=True):
        for (instruction, start, end), (_, begin, stop) in zip(*rows, strict=True):
            if instruction.op in (pp.schedule.Op.F, pp.schedule.Op.B):
                assert stop - begin == pytest.approx(end - start)
