"""Transforms of single stages: traced, cut and run as any stage is."""

from __future__ import annotations

import logging

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from ppfunc.stage import StageError, functional, graph
from ppfunc.stage.transforms import (
    dual,
    dual_loss,
    ensemble,
    for_samples,
    per_sample,
)
from tests.models import BatchNormed, attention_block, attention_params, normal

ENGINES = {"graph": graph, "functional": functional}
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@pytest.fixture
def params():
    own = attention_params(4)
    return own | {"qkv": own["qkv"].T.contiguous().T}  # as of a linear layer, with strides of its own


def run(program, params, x, gy):
    """Forward and backward, apart and whole: the same bits."""
    y, residuals = program.forward(params, x)
    gx, rest = program.backward_input(residuals, gy(y))
    apart = program.backward_weight(rest), gx
    whole = program.backward(program.forward(params, x)[1], gy(y))
    assert optree.tree_all(optree.tree_map(torch.equal, apart, whole))
    return y, *apart


def assert_near(got, want):
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), got, want)


@every
def test_a_dual_block_and_its_second_derivatives(engine, params):
    x, tx = normal(2, 3, 4), normal(2, 3, 4, seed=5)
    tangents = optree.tree_map(torch.sin, params)
    primal, tangent = (params, x), (tangents, tx)
    example = (params, tangents), (x, tx)
    program = engine(dual(attention_block), example)
    y, gparams, gx = run(
        program, *example, lambda y: y._replace(value=torch.zeros_like(y[0]), tangent=y[1].cos())
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = jvp(attention_block, primal, tangent)
        cotangent = want[1].cos()
        first = grad(lambda p, a: (attention_block(p, a) * cotangent).sum(), (0, 1))
        gradient, product = jvp(first, primal, tangent)
    assert_near(tuple(y), want)
    assert_near((gparams[0], gx[0]), product)
    assert_near((gparams[1], gx[1]), gradient)


@every
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_samples_and_models_side_by_side(engine, params):
    x = normal(3, 5, 4)
    samples = for_samples(params, 3)
    assert samples["qkv"].untyped_storage().data_ptr() == params["qkv"].untyped_storage().data_ptr()
    y, gparams, _ = run(engine(per_sample(attention_block), (samples, x)), samples, x, torch.cos)
    assert_near(y, attention_block(params, x))
    assert_near(
        gparams, vmap(grad(lambda p, a: attention_block(p, a[None]).sin().sum()), (None, 0))(params, x)
    )
    first, second = ensemble([attention_block, attention_block], torch.sub)[0]
    models = optree.tree_map(lambda t: torch.stack([t, t / 2]), params)
    y, gparams, _ = run(engine(first, (models, x)), models, x, torch.cos)
    assert_near(gparams, vmap(grad(lambda p, a: attention_block(p, a).sin().sum()), (0, None))(models, x))
    assert_near(run(engine(second, (models, y)), models, y, torch.cos)[0], vmap(attention_block)(models, y))


@every
def test_models_draw_their_own_random_numbers_if_they_are_to(engine):
    params, x = torch.ones(2, 50), torch.ones(50)

    def dropped(p, a):
        return F.dropout(p * a, 0.5)

    def first(randomness):
        return engine(ensemble([dropped], torch.sub, randomness=randomness)[0][0], (params, x))

    with pytest.raises(StageError, match="randomness"):
        first("error")
    one, two = first("different").forward(params, x)[0]
    assert not torch.equal(one, two)
    one, two = first("same").forward(params, x)[0]
    assert torch.equal(one, two)


def test_a_side_input_does_not_move():
    y, ty = dual(lambda p, x, mask: p * x * mask)(
        (torch.tensor(2.0), None), (torch.tensor(3.0), torch.tensor(1.0)), torch.tensor(5.0)
    )
    assert (y, ty) == (30.0, 10.0)


def test_losses_of_complex_and_integer_outputs():
    y = {"z": torch.complex(normal(3), normal(3, seed=2)), "n": torch.arange(3)}
    ty = {"z": torch.complex(normal(3, seed=4), normal(3, seed=6)), "n": None}

    def loss_fn(y, target):
        return (y["z"].abs() ** 3 * target * y["n"]).sum()

    def real(a, b):
        return loss_fn({"z": torch.complex(a, b), "n": y["n"]}, 2)

    at, along = ((t["z"].real, t["z"].imag) for t in (y, ty))
    value, slope = jvp(real, at, along)
    gradient, product = jvp(grad(real, (0, 1)), at, along)
    assert_near(dual_loss(loss_fn)((y, ty), 2), torch.stack([value, slope]))

    def gradients(loss):
        return grad(lambda z, tz: loss(({**y, "z": z}, {**ty, "z": tz}), 2).sum(), (0, 1))(y["z"], ty["z"])

    assert_near(
        gradients(dual_loss(loss_fn, slope_alone=True)), (torch.complex(*product), torch.complex(*gradient))
    )


def test_a_stage_without_a_batch_axis_has_no_samples():
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="leading batch axis"):
        per_sample(lambda p, x: (p * x).sum())(for_samples(torch.ones(()), 3), x)


def test_tracing_of_second_derivatives_logs_nothing(params, caplog):
    log, x = logging.getLogger("torch._subclasses.fake_tensor"), normal(2, 3, 4)
    log.addHandler(caplog.handler)
    graph(
        dual(lambda p, x: F.cross_entropy(attention_block(p, x)[0], torch.zeros(3).long())),
        ((params, params), (x, x)),
    )
    log.removeHandler(caplog.handler)
    assert not caplog.records


def by_hand(axes, channels):
    """Normalisation in plain arithmetic, with weight and bias along ``channels``."""

    def norm(x, scale):
        mean = x.mean(axes, keepdim=True)
        y = (x - mean) / ((x - mean).square().mean(axes, keepdim=True) + 1e-5).sqrt()
        shape = [-1 if n == channels else 1 for n in range(x.ndim)]
        return y * scale.view(shape) + scale.sin().view(shape)

    return norm


def statistics(x, scale):
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    return F.batch_norm(x, mean, var, scale, scale.sin(), training=True)


BY_HAND = {
    "layer": (lambda x, s: F.layer_norm(x, (4,), s, s.sin()), by_hand([2], 2)),
    "batch": (statistics, by_hand([0, 2], 1)),
    "batch without statistics": (
        lambda x, s: F.batch_norm(x, None, None, s, s.sin(), training=True),
        by_hand([0, 2], 1),
    ),
    "batch by torch": (
        lambda x, s: torch.batch_norm(x, s, s.sin(), None, None, True, 0.1, 1e-5, False),
        by_hand([0, 2], 1),
    ),
    "instance": (lambda x, s: F.instance_norm(x, weight=s, bias=s.sin()), by_hand([2], 1)),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_derivatives_of_normalisation_are_those_of_arithmetic(kind):
    """First and second derivatives in float64 by reverse over forward, to 1e-12."""
    x, tx, scale, tscale = normal(3, 4, 4), normal(3, 4, 4, seed=7), normal(4), normal(4, seed=9)

    def derivatives(norm):
        def slope(x, scale):
            y, ty = norm(((scale, tscale)), (x, tx))
            return (ty * y.detach().cos()).sum() + ty.sin().sum()

        y, ty = norm((scale, tscale), (x, tx))
        return y, ty, *grad(slope, (0, 1))(x, scale)

    own, reference = BY_HAND[kind]

    def plain(params, x):
        return jvp(lambda s, a: reference(a, s), (params[0], x[0]), (params[1], x[1]))

    got, want = derivatives(dual(lambda s, x: own(x, s))), derivatives(plain)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@every
def test_a_dual_batch_norm_keeps_the_statistics_of_torch(engine):
    from ppfunc.stage import stage_from_module

    module = BatchNormed(3)
    fn, params, state = stage_from_module(module)
    x = normal(5, 3)
    tangents = {k: t.sin() for k, t in params.items()}

    def pair(params, x, state):
        out = dual(fn)(params, x, state)
        return out.y, out.state

    program = engine(pair, ((params, tangents), (x, x.cos()), state), has_aux=True)
    ((y, _), after), _ = program.forward((params, tangents), (x, x.cos()), state)
    want = module(x)
    torch.testing.assert_close(y, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, dict(module.named_buffers()), rtol=1e-12, atol=1e-12)
