"""Transforms of torch.func around a whole pipeline, as around any function."""

from __future__ import annotations

import optree
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import ppfunc as pp
from tests import models
from tests.models import affine, squared

D, M = 3, 3
ENGINES = {"functional": pp.engines.functional, "graph": pp.engines.graph}
SCHEDULES = {
    "1f1b": pp.one_f_one_b(2, M),
    "zb_h1": pp.zb_h1(2, M),
    "interleaved": pp.interleaved_1f1b(1, M, 2),
}


@pytest.fixture
def problem():
    return models.problem(2, M, b=2, d=D, leaves="wb")


@pytest.fixture(params=[(s, e) for s in SCHEDULES for e in ENGINES], ids="-".join)
def step(request):
    schedule, engine = request.param
    return pp.value_and_grad([affine] * 2, squared, SCHEDULES[schedule], engine=ENGINES[engine])


def whole(params, inputs, targets):
    """The loss without a pipeline: microbatches are of one size, so it is that of the batch."""
    return squared(affine(params[1], affine(params[0], inputs)), targets)


def assert_near(got, want):
    assert optree.tree_structure(got) == optree.tree_structure(want)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), got, want)


def test_grad_of_the_loss(step, problem):
    got = grad(lambda *args: step(*args)[0], argnums=(0, 1, 2))(*problem)
    assert_near(got, grad(whole, argnums=(0, 1, 2))(*problem))
    assert_near(step(*problem)[1], got[0])


def test_vmap_of_losses_and_gradients_over_models_and_batches(step, problem):
    params, inputs, targets = problem
    models = optree.tree_map(lambda t: torch.stack([t, -t]), params)
    assert_near(
        vmap(step, (0, None, None))(models, inputs, targets)[1],
        vmap(grad(whole), (0, None, None))(models, inputs, targets),
    )
    batches = torch.stack([inputs, inputs.exp()])
    assert_near(
        vmap(step, (None, 0, None))(params, batches, targets)[1],
        vmap(grad(whole), (None, 0, None))(params, batches, targets),
    )


def test_derivatives_of_gradients(step, problem):
    params, inputs, targets = problem
    direction = optree.tree_map(torch.cos, params)

    def gradient(p):
        return step(p, inputs, targets)[1]

    def want(p):
        return grad(whole)(p, inputs, targets)

    assert_near(jvp(gradient, (params,), (direction,)), jvp(want, (params,), (direction,)))
    assert_near(vjp(gradient, params)[1](direction), vjp(want, params)[1](direction))


def test_hessians(step, problem):
    params, inputs, targets = problem

    def loss(w, call):
        return call({**params, 0: {**params[0], "w": w}}, inputs, targets)

    want = hessian(loss)(params[0]["w"], whole)
    assert_near(jacfwd(jacrev(loss))(params[0]["w"], lambda *args: step(*args)[0]), want)
    assert_near(jacrev(lambda w: loss(w, step)[1][0]["w"])(params[0]["w"]), want)


def test_a_plain_step_after_a_transform_gives_the_same_bits(step, problem):
    before = step(*problem)
    grad(lambda *args: step(*args)[0])(*problem)
    vmap(step, (None, 0, None))(problem[0], problem[1][None], problem[2])
    after = step(*problem)
    assert optree.tree_all(optree.tree_map(torch.equal, after, before))
    assert not any(t.requires_grad for t in optree.tree_leaves(after))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_jacobians_of_outputs(schedule, engine, problem):
    params, inputs, _ = problem
    outputs = pp.evaluate([affine] * 2, None, schedule, engine=engine, return_outputs=True)
    want = jacrev(lambda x: affine(params[1], affine(params[0], x)))(inputs)
    assert_near(jacrev(lambda x: outputs(params, x))(inputs), want)
    assert_near(jacfwd(lambda x: outputs(params, x))(inputs), want)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_input_gradients_and_gradients_per_microbatch(engine, problem):
    params, inputs, targets = problem
    step = pp.value_and_grad(
        [affine] * 2, squared, pp.zb_h1(2, M), engine=engine, argnums=(0, 1), per_microbatch=True
    )
    batches = torch.stack([inputs, inputs.exp()])

    def results(*arguments):
        result = step(*arguments)
        return result.loss, result.grads, result.input_grads

    got = vmap(results, (None, 0, None))(params, batches, targets)
    want = [results(params, batch, targets) for batch in batches]
    assert_near(got, optree.tree_map(lambda *rows: torch.stack(rows), *want))


def under_grad(rank, ranks):
    step = pp.value_and_grad(
        [affine] * 2, squared, SCHEDULES["1f1b"], pp.P2P(timeout=30), engine=pp.engines.functional
    )
    params = {rank: {"w": torch.ones(D, D), "b": torch.ones(D)}}
    arguments = params, torch.ones(M * 2, D), torch.ones(M * 2, D)
    with pytest.raises((ValueError, pp.PipelineError), match="several processes"):
        grad(lambda *args: step(*args)[0])(*arguments)
    step(*arguments)


def test_transforms_do_not_reach_over_processes_and_say_so(two):
    two(under_grad)
