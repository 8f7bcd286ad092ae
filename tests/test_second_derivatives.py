"""Second derivatives of operators: ``hvp`` is forward over reverse, whatever torch does in other orders."""

from __future__ import annotations

import copy
import sys
import unittest
from contextlib import suppress
from types import SimpleNamespace

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import ppfunc as pp
from ppfunc.stage import StageError
from ppfunc.stage.transforms import dual

ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)

# Among them all whose derivatives torch gets wrong in reverse over forward, by one sample or another.
SAMPLE = """
    nn.functional.layer_norm nn.functional.batch_norm nn.functional.instance_norm nn.functional.group_norm
    linalg.solve linalg.solve_ex linalg.tensorsolve linalg.householder_product linalg.eigh linalg.eigvalsh
    linalg.cholesky linalg.pinv det logdet linalg.lu_solve nn.functional.conv2d index_put
    nn.functional.cross_entropy nn.functional.gelu nn.functional.scaled_dot_product_attention matmul cumprod
    masked_select quantile nn.functional.embedding nn.functional.max_pool2d var_mean fft.rfft cdist""".split()
PARTS = 16


def operators():
    """Operators of torch with samples of arguments, those with derivatives in float64."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # of torch's own tests
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op for op in op_db if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")
    ]


def total(y):
    """A scalar of some curvature made of all results."""
    value = torch.zeros((), dtype=torch.float64)
    for t in optree.tree_leaves(y):
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
            t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
            t = t.double().flatten()
            value = value + (t * torch.linspace(0.5, 1.5, max(len(t), 1)).double()[: len(t)]).sum()
            value = value + (t * t * torch.linspace(1.0, 2.0, max(len(t), 1)).double()[: len(t)]).sum()
    return value


def stage_of(op, sample):
    """Make a stage of an operator, and parameters of the arguments that it is differentiated by."""
    leaves, treedef = optree.tree_flatten(((sample.input, *sample.args), sample.kwargs), none_is_leaf=True)
    leaves = [
        t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in leaves
    ]
    at = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
    held = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]

    def stage(params, x):
        inside = [t.clone() if isinstance(t, torch.Tensor) else t for t in held]
        for i, value in zip(at, params, strict=True):
            inside[i] = value
        args, options = optree.tree_unflatten(treedef, inside)
        return total(sample.output_process_fn_grad(op(*args, **options))) * x.sum()

    return stage, [held[i].clone() for i in at]


def forward_over_reverse(loss, params, tangents):
    with sdpa_kernel(SDPBackend.MATH):
        return jvp(grad(loss), (params,), (tangents,))


def products(stage, params, tangents, engine):
    x = torch.ones(1, dtype=torch.float64)
    step = pp.hvp([stage], lambda y, target: y, pp.gpipe(1, 1), engine=engine)
    result = step({0: params}, {0: tangents}, x, x)
    return result.grads[0], result.products[0]


def require_right(op, sample, engine):
    """Compare; ask for what graph refuses because it depends on values, as its error advises."""
    stage, params = stage_of(op, sample)
    tangents = [torch.randn_like(t) for t in params]
    if not params:
        return
    try:
        want = forward_over_reverse(lambda p: stage(p, torch.ones(1).double()), params, tangents)
    except (NotImplementedError, RuntimeError):
        with pytest.raises((StageError, TypeError, NotImplementedError)):
            products(stage, params, tangents, engine)
        return
    try:
        got = products(stage, params, tangents, engine)
    except StageError as error:
        assert "use the functional engine" in str(error) or "use the eager engine" in str(error)
        got = products(stage, params, tangents, pp.engines.functional)
    for one, other in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(
            one,
            other,
            rtol=1e-7,
            atol=1e-9 * float(other.abs().max()) if other.numel() else 0,
            equal_nan=True,
        )


# Two calls have other draws; what is compared is drawn once in the tests below.
RANDOM = {
    "normal",
    "bernoulli",
    "multinomial",
    "nn.functional.rrelu",
    "nn.functional.multi_head_attention_forward",
}


def is_random(name):
    return name in RANDOM or "dropout" in name or "fractional" in name


def samples_of(op, count):
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
    return samples[:: max(1, len(samples) // count)][:count]


@pytest.mark.parametrize("name", SAMPLE)
def test_hvp_of_an_operator_is_forward_over_reverse(name):
    for op in operators():
        if op.name == name and not op.variant_test_name:
            for sample in samples_of(op, 1):
                require_right(op, sample, pp.engines.graph)


@every
@pytest.mark.parametrize("name", ["linalg.solve", "nn.functional.layer_norm"])
def test_every_engine_gives_it(name, engine):
    op = next(op for op in operators() if op.name == name)
    require_right(op, samples_of(op, 1)[0], engine)


@pytest.mark.large
@pytest.mark.parametrize("part", range(PARTS))
def test_hvp_of_all_operators(part):
    wrong = []
    for op in operators()[part::PARTS]:
        for sample in () if is_random(op.name) else samples_of(op, 3):
            try:
                require_right(op, sample, pp.engines.graph)
            except StageError:  # without values, torch itself fails
                pass
            except AssertionError as error:
                wrong.append((op.name, op.variant_test_name, str(error)[:200]))
    assert not wrong


MODELS = {
    "layer": (lambda: [nn.Linear(3, 3), nn.LayerNorm(3)], (4, 3)),
    "batch": (lambda: [nn.Linear(3, 3), nn.BatchNorm1d(3)], (4, 3)),
    "instance": (lambda: [nn.Conv1d(3, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True)], (4, 3, 7)),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_norms_of_a_split(name, training):
    """The loss solves a system: it too is differentiated rightly."""
    torch.manual_seed(0)
    parts, shape = MODELS[name]
    model = nn.Sequential(*parts(), *parts()).double().train(training)
    x = torch.randn(shape, dtype=torch.float64)

    def loss_fn(y, target):
        y = y.flatten(1)[:, :3]
        return torch.linalg.solve(torch.eye(3).double() * 4 + y.T @ y, target).pow(3).sum()

    target, buffers = torch.randn(3, 2).double(), dict(model.named_buffers())
    whole = copy.deepcopy(model)
    split = pp.split(model, (x,), at=["2"])
    params = {name: t for tree in split.params.values() for name, t in tree.items()}
    tangents = optree.tree_map(torch.randn_like, params)
    own = {s: {name: tangents[name] for name in tree} for s, tree in split.params.items()}

    def loss(params):
        kept = {name: t.clone() for name, t in buffers.items()}
        return loss_fn(functional_call(whole, (params, kept), (x,)), target)

    state = {"state": split.state} if split.state else {}
    schedule = pp.gpipe(2, 1)
    arguments = split.params, own, pp.Microbatches([x]), pp.Microbatches([target])
    want, slope = forward_over_reverse(loss, params, tangents), jvp(loss, (params,), (tangents,))[1]
    got = pp.hvp(split, loss_fn, schedule, has_aux=True)(*arguments, **state)
    for ours, theirs in zip((got.grads, got.products), want, strict=True):
        flat = {name: t for tree in ours.values() for name, t in tree.items()}
        torch.testing.assert_close(flat, theirs, rtol=1e-10, atol=1e-12)
    forward = pp.jvp(split, loss_fn, schedule, has_aux=True)(*arguments, **state)
    torch.testing.assert_close(forward.slope, slope, rtol=1e-10, atol=1e-12)


def normed(p, x):
    return F.layer_norm(x @ p, (3,)).tanh()


def solved(y, target):
    return torch.linalg.solve(torch.eye(3).double() * 4 + y.T @ y, target.T).pow(3).sum()


def arguments_of_two():
    generator = torch.Generator().manual_seed(1)
    w, t = (torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    x, y = (torch.randn(8, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return dict(enumerate(w)), dict(enumerate(t)), x, y


def of_a_rank(rank, ranks):
    params, tangents, x, target = arguments_of_two()
    held = [{rank: tree[rank]} for tree in (params, tangents)]
    return pp.hvp([normed] * 2, solved, pp.one_f_one_b(2, 2), pp.P2P(timeout=30))(*held, x, target).products


def test_two_processes_give_the_products_of_one(two):
    step = pp.hvp([normed] * 2, solved, pp.one_f_one_b(2, 2))
    params, tangents, x, target = arguments_of_two()
    want = step(params, tangents, x, target).products

    def loss(params):
        rows = zip(x.chunk(2), target.chunk(2), strict=True)
        return sum(solved(normed(params[1], normed(params[0], a)), b) for a, b in rows) / 2

    torch.testing.assert_close(want, forward_over_reverse(loss, params, tangents)[1], rtol=1e-10, atol=1e-12)
    for rank, got in enumerate(two(of_a_rank)):
        assert torch.equal(got[rank], want[rank])


@every
def test_a_backward_takes_the_draws_of_its_forward(engine):
    """The gradient is that of a step with the same seed, and the product its slope."""

    def dropped(p, x):
        noise = torch.empty_like(x).uniform_()
        return F.dropout((x @ p).tanh(), 0.5) * noise + torch.rand_like(x) * p.sum()

    params, tangents, x, target = arguments_of_two()
    seed, schedule = (3, 4), pp.one_f_one_b(2, 2)
    plain = pp.value_and_grad([dropped] * 2, solved, schedule, engine=engine)
    got = pp.hvp([dropped] * 2, solved, schedule, engine=engine)(params, tangents, x, target, seed=seed)
    loss, grads = plain(params, x, target, seed=seed)
    torch.testing.assert_close((got.loss, got.grads), (loss, grads), rtol=1e-12, atol=1e-14)
    ahead, behind = (
        plain({s: p + e * tangents[s] for s, p in params.items()}, x, target, seed=seed)[1]
        for e in (1e-5, -1e-5)
    )
    slopes = {s: (ahead[s] - behind[s]) / 2e-5 for s in params}
    torch.testing.assert_close(got.products, slopes, rtol=1e-6, atol=1e-8)


def test_a_traced_backward_computes_nothing_of_its_forward_again():
    w, x = torch.randn(3, 3).double(), torch.randn(4, 3).double()
    program = pp.engines.graph(
        dual(lambda p, x: (x @ p).exp().sin()),
        ((w, w), (x, x)),
    )
    assert "exp(" in program.flat.forward.__doc__
    assert "exp(" not in program.flat.backward.__doc__


@pytest.mark.parametrize(
    "logarithm", [torch.logdet, lambda p: torch.linalg.slogdet(p)[1]], ids=["logdet", "slogdet"]
)
@every
def test_logarithms_of_determinants(logarithm, engine):
    w = 2 * torch.eye(3).double() + torch.randn(3, 3).double() / 4
    tangent = torch.randn(3, 3).double()
    want = forward_over_reverse(logarithm, w, tangent)
    got = products(lambda p, x: logarithm(p) * x.sum(), w, tangent, engine)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_dual_function_may_be_differentiated_twice_in_reverse():
    w, t = torch.randn(3, 3).double(), torch.randn(3, 3).double()

    def fn(p):
        return (p @ p.T @ p).sin().sum()

    def third(call):
        return grad(lambda p: grad(lambda p: call(p)[1].square())(p).square().sum())(w)

    ours = third(lambda p: dual(lambda p, x: fn(p))((p, t), (w, None)))
    torch.testing.assert_close(ours, third(lambda p: jvp(fn, (p,), (t,))), rtol=1e-9, atol=1e-9)


def test_a_refusal_leaves_autograd_on():
    """Of an operator that torch fails to call without values, within forward mode."""
    w = torch.rand(5).double()

    def stage(p, x):
        return torch.quantile(p, torch.full((3,), 0.4).double()).sum() * x.sum()

    with suppress(StageError):
        products(stage, w, w, pp.engines.graph)
    assert (w.clone().requires_grad_() * 2).requires_grad
    torch.testing.assert_close(jvp(torch.sin, (w,), (w,))[1], w.cos() * w)


@pytest.mark.parametrize("make", [pp.jvp, pp.hvp])
def test_a_step_of_derivatives_is_not_differentiated_from_outside(make):
    params, tangents, x, target = arguments_of_two()
    step = make([normed] * 2, solved, pp.gpipe(2, 1))

    def loss(params):
        result = step(params, tangents, x, target)
        return result[0] if make is pp.jvp else result.loss

    with pytest.raises(ValueError, match=f"ppfunc.{make.__name__} under a torch.func transform"):
        grad(loss)(params)
    many = optree.tree_map(lambda t: torch.stack([t, t]), params)
    assert torch.vmap(loss)(many).shape == (2,)


def test_operators_of_constants_alone_may_write():
    held = torch.ones(3)

    def stage(p, x):
        return p * x * held.sqrt().add_(1).mul_(2)

    x = torch.ones(2, 3)
    y, _ = pp.engines.graph(stage, (torch.ones(3), x)).forward(torch.ones(3), x)
    assert torch.equal(y, torch.full((2, 3), 4.0)) and torch.equal(held, torch.ones(3))
