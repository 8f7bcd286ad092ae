"""Products with second derivatives, forward mode, ensembles and samples: as computed without a pipeline."""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch.func import grad, jvp, vmap

import ppfunc as pp

D, M, B = 3, 4, 2
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional}
SCHEDULES = {
    "1f1b": lambda: pp.one_f_one_b(3, M),
    "zb_h1": lambda: pp.zb_h1(2, M),
    "zbv": lambda: pp.zbv(2, M),
    "dualpipe": lambda: pp.dualpipe(2, M),
}
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
under_all = pytest.mark.parametrize(
    "name, engine", [*((name, pp.engines.graph) for name in SCHEDULES), ("zb_h1", pp.engines.functional)]
)


def hidden(h, ids):
    """What travels between the stages."""
    return {"h": h, "ids": ids, "nothing": None}


def stage(params, x):
    return hidden(torch.tanh(x["h"] @ params["w"] + params["b"]) + params["table"][x["ids"]], x["ids"])


def loss_fn(y, target):
    return (y["h"] - target).square().mean() + y["h"].pow(3).sum() * target.mean()


class Problem(NamedTuple):
    """A model, a direction, and a batch of M microbatches."""

    stages: list[Any]
    params: dict[int, Any]
    tangents: dict[int, Any]
    inputs: dict[str, Any]
    targets: torch.Tensor


def problem(schedule):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = len(schedule.flows[0].stages)
    params, tangents = (
        {s: {"w": random(D, D), "b": random(D), "table": random(2, D), "count": None} for s in range(count)}
        for _ in range(2)
    )
    for s in range(count):
        params[s]["count"] = torch.arange(2)
    inputs = hidden(random(M * B, D), torch.arange(M * B) % 2)
    return Problem([stage] * count, params, tangents, inputs, random(M * B, D))


def row(batch, m):
    """The microbatch m of a batch."""
    return optree.tree_map(lambda t: t.chunk(M)[m], batch)


def floating(tree):
    """The differentiable part of parameters."""
    return {s: {k: t for k, t in p.items() if k != "count"} for s, p in tree.items()}


def model(given, params, x):
    for s, fn in enumerate(given.stages):
        x = fn(params[s], x)
    return x


def total(given):
    """The loss of the whole batch as a function of the parameters of the model."""

    def loss(params):
        rows = [(row(given.inputs, m), row(given.targets, m)) for m in range(M)]
        return sum(loss_fn(model(given, params, x), target) for x, target in rows) / M

    return loss


def assert_near(got, want):
    """Equal to 1e-10, for trees; the first may have more leaves in its dictionaries."""
    if isinstance(want, dict):
        for key in want:
            assert_near(got[key], want[key])
        return
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-10 * want.abs().max(), (got, want)


@under_all
def test_forward_mode(name, engine):
    schedule = SCHEDULES[name]()
    given = problem(schedule)
    params, tangents = floating(given.params), floating(given.tangents)
    want = jvp(total(given), (params,), (tangents,))
    step = pp.jvp(given.stages, loss_fn, schedule, engine=engine)
    got = step(given.params, given.tangents, given.inputs, given.targets)
    assert_near(torch.stack(got), torch.stack(want))


@every
def test_forward_mode_of_outputs_with_respect_to_inputs(engine):
    schedule = pp.one_f_one_b(3, M)
    given = problem(schedule)
    moved = hidden(torch.ones_like(given.inputs["h"]), None)
    step = pp.jvp(given.stages, None, schedule, engine=engine)
    y, ty = step(given.params, dict.fromkeys(range(3)), given.inputs, input_tangents=moved)

    def outputs(h):
        return model(given, given.params, hidden(h, given.inputs["ids"]))["h"]

    want, slope = jvp(outputs, (given.inputs["h"],), (moved["h"],))
    assert_near(y["h"], want)
    assert_near(ty["h"], slope)
    assert ty["ids"] is None
    apart = pp.microbatch(given.inputs, M)
    for rows in (pp.microbatch(moved, M), [row(moved, m) for m in range(M)]):
        again, slopes = step(given.params, dict.fromkeys(range(3)), apart, input_tangents=rows)
        assert isinstance(again, pp.Microbatches)
        assert torch.equal(again.join()["h"], y["h"])
        assert torch.equal(slopes.join()["h"], ty["h"])


@every
def test_forward_mode_along_nothing_is_zero(engine):
    schedule = pp.gpipe(3, M)
    given = problem(schedule)
    held = dict.fromkeys(range(3))
    loss, slope = pp.jvp(given.stages, loss_fn, schedule, engine=engine)(
        given.params, held, given.inputs, given.targets
    )
    assert loss == pp.evaluate(given.stages, loss_fn, schedule, engine=engine)(
        given.params, given.inputs, given.targets
    )
    assert slope == 0


@under_all
def test_hessian_vector_products(name, engine):
    """One pass against forward over reverse of the whole model."""
    given = problem(SCHEDULES[name]())
    params, tangents = floating(given.params), floating(given.tangents)
    want, want_slope = jvp(total(given), (params,), (tangents,))
    gradient, product = jvp(grad(total(given)), (params,), (tangents,))
    step = pp.hvp(given.stages, loss_fn, SCHEDULES[name](), engine=engine)
    for _ in range(2):
        result = step(given.params, given.tangents, given.inputs, given.targets)
        assert_near(torch.stack([result.loss, result.slope]), torch.stack([want, want_slope]))
        assert optree.tree_structure(result.grads) == optree.tree_structure(given.params)
        assert optree.tree_structure(result.products) == optree.tree_structure(given.params)
        assert_near(result.grads, gradient)
        assert_near(result.products, product)


def held_by(schedule, rank):
    """The stages of the model that a rank holds."""
    return sorted({schedule.model_stages[s] for s in schedule.stages_of(rank)})


@every
def test_hessian_vector_products_along_part_of_the_parameters(engine):
    schedule = pp.zb_h1(2, M)
    given = problem(schedule)
    params = floating(given.params)
    tangents = {0: {**given.tangents[0], "w": None}, 1: None}
    zeros = optree.tree_map(torch.zeros_like, params)
    direction = {0: {**floating(given.tangents)[0], "w": zeros[0]["w"]}, 1: zeros[1]}
    gradient, product = jvp(grad(total(given)), (params,), (direction,))
    result = pp.hvp(given.stages, loss_fn, schedule, engine=engine)(
        given.params, tangents, given.inputs, given.targets
    )
    grads, products = result.grads, result.products
    assert_near(grads, gradient)
    assert_near(products, product)


def test_products_come_with_what_was_computed_beside_them():
    schedule = pp.zb_h1(3, M)
    given = problem(schedule)
    arguments = given.params, given.tangents, given.inputs, given.targets
    result = pp.hvp(given.stages, loss_fn, schedule)(*arguments)
    again = pp.hvp(given.stages, loss_fn, schedule, has_aux=True)(*arguments)
    assert optree.tree_structure(result.products) == optree.tree_structure(given.params)
    assert_near(result.loss, total(given)(floating(given.params)))
    assert isinstance(again.aux, pp.runtime.Aux) and result.aux is None
    pairs = zip(optree.tree_leaves(result), optree.tree_leaves(again._replace(aux=None)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def biased(params, x):
    """A stage with an auxiliary loss."""
    y = stage(params, x)
    return pp.Output(y, loss=y["h"].pow(4).sum() / 10, metrics=y["h"].mean())


def skipping(params, x):
    """A first stage that also gives to the last."""
    y = stage(params, x)
    return pp.Output(y, skips={2: {"h": y["h"] * params["b"], "ids": x["ids"]}})


def joining(params, received):
    y = stage(params, received.x)
    return {**y, "h": y["h"] * received.skips[0]["h"]}


@every
@pytest.mark.parametrize("builder", [pp.one_f_one_b, pp.zb_h1])
def test_auxiliary_losses_and_skip_connections(builder, engine):
    schedule = pp.with_skips(builder(3, M), [(0, 2)])
    given = problem(schedule)._replace(stages=[skipping, biased, joining])

    def loss(params):
        parts = []
        for m in range(M):
            first = stage(params[0], row(given.inputs, m))
            second = stage(params[1], first)
            y = stage(params[2], second)
            y = {**y, "h": y["h"] * first["h"] * params[0]["b"]}
            parts.append(loss_fn(y, row(given.targets, m)) + second["h"].pow(4).sum() / 10)
        return sum(parts) / M

    params, tangents = floating(given.params), floating(given.tangents)
    want = jvp(loss, (params,), (tangents,))
    gradient, product = jvp(grad(loss), (params,), (tangents,))
    given = given._replace(stages=[skipping, lambda p, x: biased(p, x)._replace(metrics=None), joining])
    arguments = given.params, given.tangents, given.inputs, given.targets
    assert_near(
        torch.stack(pp.jvp(given.stages, loss_fn, schedule, engine=engine)(*arguments)), torch.stack(want)
    )
    result = pp.hvp(given.stages, loss_fn, schedule, engine=engine)(*arguments)
    assert_near(torch.stack([result.loss, result.slope]), torch.stack(want))
    assert_near(result.grads, gradient)
    assert_near(result.products, product)


@under_all
def test_ensembles_train_as_separate_models(name, engine):
    schedule = SCHEDULES[name]()
    given = problem(schedule)
    models = [given.params, optree.tree_map(lambda t: t * 2, given.params), given.params]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *models)
    step = pp.value_and_grad(*pp.ensemble(given.stages, loss_fn), schedule, engine=engine, loss_shape=(3,))
    losses, grads = step(stacked, given.inputs, given.targets)
    alone = pp.value_and_grad(given.stages, loss_fn, schedule, engine=engine)
    for k, params in enumerate(models):
        loss, gradients = alone(params, given.inputs, given.targets)
        assert_near(losses[k], loss)
        assert_near(floating(optree.tree_map(lambda g: g[k], grads)), floating(gradients))  # noqa: B023


@under_all
def test_gradients_per_sample(name, engine):
    schedule = SCHEDULES[name]()
    given = problem(schedule)
    params = floating(given.params)

    def loss(p, x, target):
        one = optree.tree_map(lambda t: t[None], (x, target))
        return loss_fn(model(given, p, one[0]), one[1])

    def of_sample(p, h, ids, target):
        return loss(p, hidden(h, ids), target)

    batch = (given.inputs["h"], given.inputs["ids"], given.targets)
    want = vmap(grad(of_sample), (None, 0, 0, 0))(params, *batch)
    step = pp.per_sample_grad(given.stages, loss_fn, schedule, samples=B, engine=engine)
    value, grads = step(given.params, given.inputs, given.targets)
    got = floating(grads)
    assert_near(value, vmap(of_sample, (None, 0, 0, 0))(params, *batch).mean())
    assert_near(optree.tree_map(lambda g: g.flatten(0, 1), got), want)
    square = pp.transforms.square_norms(got)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in optree.tree_leaves(want)]).sum(0).sqrt()
    assert_near(square.sqrt().flatten(), norms)
    bound = norms.median().item()
    clipped = optree.tree_map(lambda g: torch.einsum("i...,i->...", g, (bound / norms).clamp(max=1)), want)
    assert_near(pp.transforms.clipped_sum(got, square, bound), clipped)
    assert grads[0]["count"].shape == (M, B, 2)


def stacked_three(tree):
    return optree.tree_map(lambda t: torch.stack([t, t * 2, t]), tree)


# Each over a transport, with the parameters and the tangents of the stages that a process holds.
OVER = {
    "jvp": lambda given, schedule, transport, params, tangents: pp.jvp(
        given.stages, loss_fn, schedule, transport
    )(params, tangents, given.inputs, given.targets),
    "hvp": lambda given, schedule, transport, params, tangents: pp.hvp(
        given.stages, loss_fn, schedule, transport
    )(params, tangents, given.inputs, given.targets),
    "per_sample_grad": lambda given, schedule, transport, params, _: pp.per_sample_grad(
        given.stages, loss_fn, schedule, transport, samples=B
    )(params, given.inputs, given.targets),
    "ensemble": lambda given, schedule, transport, params, _: pp.value_and_grad(
        *pp.ensemble(given.stages, loss_fn), schedule, transport, loss_shape=(3,)
    )(stacked_three(params), given.inputs, given.targets),
    "saliency": lambda given, schedule, transport, params, _: pp.value_and_grad(
        given.stages, loss_fn, schedule, transport, argnums=(0, 1)
    )(params, given.inputs, given.targets),
}


def same_as_in_process(rank, ranks, transform, name, want):
    schedule = SCHEDULES[name]()
    given, held = problem(schedule), held_by(schedule, rank)
    params, tangents = ({s: tree[s] for s in held} for tree in (given.params, given.tangents))
    got = OVER[transform](given, schedule, pp.P2P(timeout=30), params, tangents)
    if transform == "saliency" and got.input_grads is not None:
        chains = [chain for chain in schedule.flows if schedule.placement[chain.stages[0]] == rank]
        cut = pp.microbatch(want.input_grads, schedule.microbatches)
        own = pp.Microbatches(cut[m] for chain in chains for m in chain.microbatches)
        want = want._replace(input_grads=own.join())
    return len(list(equal_parts(got, want, held)))


def equal_parts(got, want, held):
    """Every tensor of ``got``, which has the stages of one rank, and nothing of the inputs where that is not
    the first.
    """
    if got is None or isinstance(got, torch.Tensor):
        if got is not None:
            assert torch.equal(got, want)
            yield got
    elif isinstance(got, dict):
        if all(isinstance(key, int) for key in got):
            assert set(got) == set(held)
        for key in got:
            yield from equal_parts(got[key], want[key], held)
    else:
        for mine, other in zip(got, want, strict=True):
            yield from equal_parts(mine, other, held)


@pytest.mark.parametrize(
    "transform, name", list(zip(OVER, cycle(["zb_h1", "zbv", "dualpipe"]), strict=False))
)
def test_two_processes_give_the_bits_of_one(two, transform, name):
    given = problem(schedule := SCHEDULES[name]())
    want = OVER[transform](given, schedule, pp.InProcess(), given.params, given.tangents)
    assert min(two(same_as_in_process, transform, name, want)) >= 2


def test_norms_and_clipping_take_any_leaves():
    grads = {
        "w": torch.zeros(2, 3, 5, dtype=torch.bfloat16),
        "z": 2j * torch.ones(2, 3),
        "n": torch.zeros(2, 3, 4).int(),
    }
    square = pp.transforms.square_norms(grads)
    assert torch.equal(square, torch.full((2, 3), 4.0))
    clipped = pp.transforms.clipped_sum(grads, square, 1.0)
    assert {k: (t.dtype, t.shape) for k, t in clipped.items()} == {
        k: (t.dtype, t.shape[2:]) for k, t in grads.items()
    }
    assert clipped["z"] == 6j
    with pytest.raises(ValueError, match="positive"):
        pp.transforms.clipped_sum(grads, square, 0.0)


def test_a_loss_of_another_shape_than_was_said_is_refused():
    schedule = pp.gpipe(1, 1)
    for shape, told in [((), "floating scalar"), ((3,), r"shape \[3\], the loss_shape")]:
        step = pp.value_and_grad([lambda w, x: w * x], torch.sub, schedule, loss_shape=shape)
        with pytest.raises(ValueError, match=told):
            step({0: torch.ones(())}, torch.ones(1, 2), torch.ones(1, 2))


def test_tangents_that_do_not_fit_are_refused():
    schedule = pp.gpipe(1, 1)
    params = {0: {"w": torch.ones(2), "n": torch.ones(2).int()}}
    step = pp.jvp([lambda p, x: p["w"] * x], lambda y, t: y.sum(), schedule)
    good = {"w": torch.ones(2), "n": None}
    step(params, {0: good}, torch.ones(1, 2), torch.ones(1, 2))
    for wrong, told in [
        (
            {**good, "w": torch.ones(3)},
            r"tangent of params\[0\]\['w'\]: got torch.float32\[3\], expected torch.float32\[2\]",
        ),
        ({**good, "w": torch.ones(2).double()}, r"got torch.float64\[2\], expected torch.float32\[2\]"),
        ({**good, "n": torch.ones(2).int()}, "expected None: torch.int32 has no tangents"),
        ({"w": torch.ones(2)}, "got the structure"),
    ]:
        with pytest.raises(ValueError, match=told):
            step(params, {0: wrong}, torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"tangents: got the stages \[\]"):
        step(params, {}, torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize(
    "make", [pp.jvp, pp.hvp, pp.value_and_grad, lambda *given: pp.per_sample_grad(*given, samples=2)]
)
def test_something_else_in_the_place_of_an_argument_is_refused_by_name(make):
    fns, loss, schedule = [torch.mul] * 2, lambda y, t: y.sum(), pp.gpipe(2, 2)
    for given, name in (
        ((None, loss, schedule), "stages"),
        ((fns, 5, schedule), "loss_fn"),
        ((fns, loss, "gpipe"), "schedule"),
    ):
        with pytest.raises((TypeError, pp.ScheduleError), match=f"{name}: got "):
            make(*given)


def test_an_ensemble_without_the_shape_of_its_loss_is_told_so():
    stages, loss_fn = pp.ensemble([lambda p, x: p * x], lambda y, t: (y - t).square().mean())
    x = torch.ones(4, 3)
    with pytest.raises(
        ValueError,
        match=r"must be a floating scalar, got float32\[5\]; .* an ensemble, pass loss_shape=",
    ):
        pp.value_and_grad(stages, loss_fn, pp.gpipe(1, 2))({0: torch.ones(5, 3)}, x, x)


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_gradients_of_every_sample_through_shared_memory_are_refused(engine):
    """Their sum over the elements that overlap was another one, without an error."""
    step = pp.per_sample_grad(
        [lambda p, x: x * p.as_strided((4,), (5,))],
        lambda y, target: (y - target).square().sum(),
        pp.gpipe(1, 2),
        samples=2,
        engine=engine,
    )
    with pytest.raises(Exception, match=r"calls as_strided, .* index, or use unfold"):
        step({0: torch.randn(4, 4)}, torch.randn(4, 4), torch.zeros(4, 4))
