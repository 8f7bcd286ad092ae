"""Stages that take and return more than an activation, and gradients of more than the parameters."""

from __future__ import annotations

from functools import partial

import optree
import pytest
import torch

import ppfunc as pp
from tests import models
from tests.models import dense, same_bits, squared

D, M, B = 4, 6, 3
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional}
SCHEDULES = {
    "1f1b": lambda: pp.one_f_one_b(4, M),
    "zbv": lambda: pp.zbv(2, M),
    "interleaved": lambda: pp.interleaved_1f1b(2, M, 2),
}


problem = partial(models.problem, 4, M, b=B)


def pairs(inputs, targets):
    """The microbatches of inputs and targets."""
    return zip(inputs.chunk(M), targets.chunk(M), strict=True)


def near(a, b):
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-15)


both = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
every = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
ways = pytest.mark.parametrize(
    ("engine", "schedule"),
    [
        (ENGINES[engine], SCHEDULES[schedule])
        for engine, schedule in (("graph", "1f1b"), ("graph", "zbv"), ("functional", "interleaved"))
    ],
)


@ways
def test_auxiliary_losses_and_metrics_from_any_stage(engine, schedule):
    def auxiliary(params, x):
        y = dense(params, x)
        return pp.Output(y, loss=y.square().sum() / 10, metrics={"norm": y.norm(), "sign": (y > 0).sum()})

    params, inputs, targets = problem()
    stages = [dense, auxiliary, dense, auxiliary]
    step = pp.value_and_grad(stages, squared, schedule(), engine=engine, has_aux=True)
    result = step(params, inputs, targets)
    loss, aux, grads = result.loss, result.aux, result.grads

    def whole(params):
        total, norms = 0, {1: [], 3: []}
        for x, target in pairs(inputs, targets):
            for s in range(4):
                x = dense(params[s], x)
                if s in (1, 3):
                    total = total + x.square().sum() / 10 / M
                    norms[s].append(x.norm())
            total = total + squared(x, target) / M
        return total, norms

    want, (value, norms) = torch.func.grad_and_value(whole, has_aux=True)(params)
    near(loss, value)
    near(grads, want)
    assert set(aux.metrics) == {1, 3}
    near(aux.metrics[1]["norm"], torch.stack(norms[1]))
    assert aux.metrics[3]["sign"].dtype == torch.int64
    with pytest.raises(ValueError, match="stage 1 returns metrics; pass has_aux=True"):
        pp.value_and_grad(stages, squared, schedule(), engine=engine)(params, inputs, targets)
    judged = pp.evaluate(stages, squared, schedule(), engine=engine, has_aux=True)(params, inputs, targets)
    assert torch.equal(judged.loss, loss)
    near(judged.aux.metrics, aux.metrics)


@ways
def test_state_passes_from_microbatch_to_microbatch(engine, schedule):
    def normalised(params, x, state):
        y = x @ params["w"]
        mean = y.mean(0)
        new = {"mean": 0.9 * state["mean"] + 0.1 * mean.detach(), "count": state["count"] + 1}
        return pp.Output(torch.tanh(y - mean + state["mean"]), state=new)

    params, inputs, targets = problem()
    state = {s: {"mean": torch.zeros(D, dtype=torch.float64), "count": torch.tensor(0)} for s in (0, 2)}
    stages = [normalised, dense, normalised, dense]
    step = pp.value_and_grad(stages, squared, schedule(), engine=engine, has_aux=True)
    result = step(params, inputs, targets, state=state)
    loss, aux, grads = result.loss, result.aux, result.grads

    def whole(params):
        total, now = 0, dict(state)
        for x, target in pairs(inputs, targets):
            for s in range(4):
                if s in state:
                    out = normalised(params[s], x, now[s])
                    x, now[s] = out.y, out.state
                else:
                    x = dense(params[s], x)
            total = total + squared(x, target) / M
        return total, now

    want, (value, now) = torch.func.grad_and_value(whole, has_aux=True)(params)
    near(loss, value)
    near(grads, want)
    near(aux.state, now)
    assert aux.state[2]["count"] == M
    assert state[2]["count"] == 0
    with pytest.raises(ValueError, match="stage 0 returns the state .* given none"):
        stages = [lambda p, x: pp.Output(x, state=x), dense, dense, dense]
        pp.value_and_grad(stages, squared, schedule(), has_aux=True)(params, inputs, targets)


@ways
def test_extras_of_any_stage(engine, schedule):
    def masked(params, x, extras):
        return dense(params, x) * extras["mask"][:, None] + extras["position"].double()

    params, inputs, targets = problem()
    given = {"mask": torch.arange(M * B) % 2 == 0, "position": torch.arange(M * B * D).view(M * B, D)}
    step = pp.value_and_grad([dense, dense, masked, dense], squared, schedule(), engine=engine)
    loss, grads = step(params, inputs, targets, extras={2: given})

    def whole(params):
        total = 0
        for m, (x, target) in enumerate(pairs(inputs, targets)):
            for s in range(4):
                x = (
                    masked(params[s], x, {k: v.chunk(M)[m] for k, v in given.items()})
                    if s == 2
                    else dense(params[s], x)
                )
            total = total + squared(x, target) / M
        return total

    want, value = torch.func.grad_and_value(whole)(params)
    near(loss, value)
    near(grads, want)
    again = step(params, inputs, targets, extras={2: pp.microbatch(given, M)})
    assert same_bits(again, (loss, grads))
    with pytest.raises(ValueError, match=r"extras: got the stages \[4\], this process runs \[0, 1, 2, 3\]"):
        step(params, inputs, targets, extras={4: given})


@ways
def test_skip_connections(engine, schedule):
    def first(params, x):
        y = dense(params, x)
        return pp.Output(y, skips={2: (y.sin(), torch.arange(3)), 3: y})

    def third(params, received):
        skipped, ids = received.skips[0]
        return dense(params, received.x + skipped) * ids[:, None]

    def fourth(params, received):
        return dense(params, received.x * received.skips[0])

    params, inputs, targets = problem()
    schedule = pp.with_skips(schedule(), [(0, 3), (0, 2)])
    loss, grads = pp.value_and_grad([first, dense, third, fourth], squared, schedule, engine=engine)(
        params, inputs, targets
    )

    def whole(params):
        total = 0
        for x, target in pairs(inputs, targets):
            a = dense(params[0], x)
            b = dense(params[2], dense(params[1], a) + a.sin()) * torch.arange(3)[:, None]
            total = total + squared(dense(params[3], b * a), target) / M
        return total

    want, value = torch.func.grad_and_value(whole)(params)
    near(loss, value)
    near(grads, want)


def test_wrong_skip_connections_are_refused():
    params, inputs, targets = problem()
    for bad in ((1, 0), (0, 1), (0, 9), (2, 2)):
        with pytest.raises(
            ValueError, match=rf"skips: got \({bad[0]}, {bad[1]}\), expected \(source, destination\)"
        ):
            pp.with_skips(pp.gpipe(4, M), [bad])
    step = pp.value_and_grad([dense] * 4, squared, pp.with_skips(pp.gpipe(4, M), [(0, 2)]))
    with pytest.raises(
        pp.StageError, match=r"stage 0.*skip connections to the stages \[\], the schedule has them to \[2\]"
    ):
        step(params, inputs, targets)


def with_skip(rank, ranks):
    """A skip connection over the middle of three ranks, between processes."""
    params, inputs, targets = problem()
    schedule = pp.with_skips(pp.zb_h1(ranks, M), [(0, 3)])
    stages = [
        lambda p, x: pp.Output(dense(p, x), skips={3: x}),
        dense,
        dense,
        lambda p, r: dense(p, r.x + r.skips[0]),
    ]
    for engine in ENGINES.values():
        loss, grads = pp.value_and_grad(stages, squared, schedule, engine=engine)(params, inputs, targets)
        step = pp.value_and_grad(stages, squared, schedule, pp.P2P(timeout=30), engine=engine)
        for _ in range(2):
            mine, own = step(
                {rank: params[rank]}, inputs if rank == 0 else None, targets if rank == 3 else None
            )
        assert torch.equal(mine, loss)
        assert torch.equal(own[rank]["w"], grads[rank]["w"])


def test_a_skip_connection_between_processes(four):
    four(with_skip)


@ways
def test_gradients_of_the_inputs(engine, schedule):
    def first(params, x):
        return dense(params, x["value"]) * x["ids"][:, None]

    params, inputs, targets = problem()
    batch = {"value": inputs, "ids": torch.arange(M * B)}
    stages = [first, dense, dense, dense]
    step = pp.value_and_grad(stages, squared, schedule(), engine=engine, argnums=(0, 1))
    result = step(params, batch, targets)
    loss, grads, found = result.loss, result.grads, result.input_grads

    def whole(params, value):
        total = 0
        for x, ids, target in zip(value.chunk(M), batch["ids"].chunk(M), targets.chunk(M), strict=True):
            x = first(params[0], {"value": x, "ids": ids})
            for s in range(1, 4):
                x = dense(params[s], x)
            total = total + squared(x, target) / M
        return total

    (want, wanted), value = torch.func.grad_and_value(whole, argnums=(0, 1))(params, inputs)
    near(loss, value)
    near(grads, want)
    near(found["value"], wanted)
    assert found["ids"].shape == (M * B,)
    assert not found["ids"].any()
    alone = pp.value_and_grad(stages, squared, schedule(), engine=engine, argnums=1)(params, batch, targets)[
        1
    ]
    near(alone, found)
    result = pp.value_and_grad(stages, squared, schedule(), engine=engine, argnums=(1, 0))(
        params, batch, targets
    )
    near((result.grads, result.input_grads), (grads, found))
    with pytest.raises(ValueError, match="argnums: got 2"):
        pp.value_and_grad([dense] * 4, squared, schedule(), argnums=2)


@every
def test_gradients_of_the_inputs_have_the_form_of_the_inputs(schedule):
    params, inputs, targets = problem()
    step = pp.value_and_grad([dense] * 4, squared, schedule(), argnums=1)
    _, whole = step(params, inputs, targets)
    _, apart = step(params, pp.microbatch(inputs, M), targets)
    assert isinstance(apart, pp.Microbatches)
    assert torch.equal(apart.join(), whole)


def test_a_list_is_a_tree_like_any_other():
    """A list of m tensors is not a list of microbatches: each of its leaves is cut."""
    params, inputs, targets = problem()
    step = pp.value_and_grad(
        [lambda p, x: dense(p, x[0]) + x[1], dense, dense, dense], squared, pp.gpipe(4, M), argnums=1
    )
    _, found = step(params, [inputs, inputs.sin()], targets)
    assert isinstance(found, list)
    assert [tuple(t.shape) for t in found] == [(M * B, D)] * 2


@every
def test_gradients_of_each_microbatch(schedule):
    params, inputs, targets = problem()
    _, rows = pp.value_and_grad([dense] * 4, squared, schedule(), per_microbatch=True)(
        params, inputs, targets
    )
    _, total = pp.value_and_grad([dense] * 4, squared, schedule())(params, inputs, targets)
    for s in range(4):
        assert rows[s]["w"].shape == (M, D, D)
        torch.testing.assert_close(rows[s]["w"].sum(0), total[s]["w"], rtol=1e-12, atol=1e-15)


def test_gradients_of_each_microbatch_with_replicas():
    params, _, _ = problem()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(8 * B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    made, want = (
        pp.value_and_grad([dense] * 4, squared, schedule, per_microbatch=True, argnums=(0, 1))(
            params, inputs, targets
        )
        for schedule in (pp.dualpipe(4, 8), pp.gpipe(4, 8))
    )
    near(made, want)


def test_skip_connections_of_replicas_have_the_numbers_of_the_stages_of_the_model():
    def skipping(p, x):
        y = dense(p, x)
        return pp.Output(y, skips={2: y.sin(), 3: x})

    stages = [
        skipping,
        dense,
        lambda p, r: dense(p, r.x + r.skips[0]),
        lambda p, r: dense(p, r.x + r.skips[0]),
    ]
    generator = torch.Generator().manual_seed(3)
    params = {s: {"w": torch.randn(D, D, generator=generator, dtype=torch.float64)} for s in range(4)}
    inputs, targets = (torch.randn(8 * B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    replicated = pp.with_skips(pp.dualpipe(4, 8), [(0, 2), (0, 3)])
    assert set(replicated.skips) == {(0, 2), (0, 3), (4, 6), (4, 7)}
    made, want = (
        pp.value_and_grad(stages, squared, schedule)(params, inputs, targets)
        for schedule in (replicated, pp.with_skips(pp.gpipe(4, 8), [(0, 2), (0, 3)]))
    )
    near(made, want)


@both
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_overlapped_function_of_the_callers(engine, ranks):
    calls = []

    def overlapped(forward, arguments, backward, others):
        calls.append(len(others))
        gradients = backward(*others)  # the other way round
        return forward(*arguments), gradients

    generator = torch.Generator().manual_seed(2)
    params = {s: {"w": torch.randn(D, D, generator=generator, dtype=torch.float64)} for s in range(2 * ranks)}
    inputs, targets = (
        torch.randn((2 * ranks + 2) * B, D, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    schedule = pp.dualpipev(ranks, 2 * ranks + 2)
    pairs = sum(i.op is pp.schedule.Op.OVERLAP_F_B for r in range(ranks) for i in schedule.instructions(r))
    stages = [dense] * (2 * ranks)
    loss, grads = pp.value_and_grad(stages, squared, schedule, engine=engine, overlapped=overlapped)(
        params, inputs, targets
    )
    want, wanted = pp.value_and_grad(stages, squared, schedule, engine=engine)(params, inputs, targets)
    assert len(calls) == pairs > 0
    assert torch.equal(loss, want)
    assert same_bits(grads, wanted)
