"""Models in the precision that they are trained in: a trace follows the dtypes of the parameters."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph
from ppfunc.training import Precision

V, D, T, M = 11, 8, 6, 4
AT = ["blocks.1", "blocks.2", "norm"]


class Norm(nn.Module):
    """Computes in float32, and casts back to the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Attention with rotary tables and a mask of the least number, experts with a router in float32."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = Norm(), nn.Linear(D, 3, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.experts = nn.Parameter(torch.randn(3, D, D) / 4)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (t * cos + torch.cat([-t[..., D // 2 :], t[..., : D // 2]], -1) * sin for t in (q, k))
        mask = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        x = x + self.out((q @ k.mT / D**0.5 + mask).softmax(-1, torch.float32).to(x.dtype) @ v)
        weight = F.linear(x.float(), self.router.weight.float()).softmax(-1).to(x.dtype)
        return x + (torch.einsum("btd,edf->btef", x, self.experts) * weight[..., None]).sum(-2)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(V, D), Norm()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inverse", 1 / 100 ** (torch.arange(D // 2) * 2 / D), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1])[:, None].float() * self.inverse.float().repeat(2)
        for block in self.blocks:
            x = block(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self.head(self.norm(x))


def in_bfloat16():
    """The model as it is loaded in bfloat16: a buffer that no file has stays in float32."""
    model = Llama()
    inverse = model.inverse
    model.bfloat16()
    model.inverse = inverse
    return model


def loss_fn(y, target):
    return F.cross_entropy(y.flatten(0, 1).float(), target.flatten())


def batch():
    torch.manual_seed(1)
    ids = torch.randint(V, (2 * M, T + 1))
    return ids[:, :-1], ids[:, 1:]


def in_plain_torch(params, cast, autocast=False):
    """The loss, and the gradients of ``params``, cast and back once for every microbatch."""
    model, total = Llama(), 0.0
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    for ids, target in zip(*(t.chunk(M) for t in batch()), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = torch.func.functional_call(model, {n: p.to(cast) for n, p in params.items()}, (ids,))
            loss = loss_fn(y, target) / M
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in params.items()}


@pytest.mark.parametrize(
    "cast, engine",
    [(cast, graph) for cast in (torch.bfloat16, torch.float16, torch.float64)]
    + [(torch.bfloat16, functional), (torch.float16, eager)],
)
def test_a_step_computes_in_the_dtype_that_parameters_are_cast_to(cast, engine):
    model, (ids, target) = Llama(), batch()
    parts = pp.split(model, ids[:2], at=AT)
    step = pp.value_and_grad(parts, loss_fn, pp.one_f_one_b(4, M), engine=engine, sum_dtype=torch.float64)
    params = {s: {n: p.to(cast) for n, p in of.items()} for s, of in parts.params.items()}
    loss, grads = step(params, ids, target)
    want_loss, want = in_plain_torch(dict(model.named_parameters()), cast)
    assert float(loss) == pytest.approx(want_loss, abs=1e-6)
    summed_wider = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float64: 1e-6}[cast]
    for name, grad in (item for of in grads.values() for item in of.items()):
        near = summed_wider if name in parts.tied else 5e-7
        torch.testing.assert_close(grad.float(), want[name], rtol=0, atol=near)


WAYS = {
    "compute": (Llama, Precision(compute=torch.bfloat16, reduce=torch.float32), torch.bfloat16),
    "autocast": (Llama, Precision(), torch.float32),
    "masters": (
        in_bfloat16,
        Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float32),
        torch.bfloat16,
    ),
    "float16": (
        Llama,
        Precision(compute=torch.float16, reduce=torch.float32, scale=pp.dynamic_scale()),
        torch.float16,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_updates_float32_parameters_as_plain_torch_does_in_the_same_precision(way):
    make, precision, cast = WAYS[way]
    ids, target = batch()
    parts = pp.split(make(), ids[:2], at=AT)
    if way == "masters":
        parts = parts.load(Llama().state_dict(), dtype=torch.float32)
    context = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext()
    trainer = pp.Trainer(
        parts, loss_fn, pp.one_f_one_b(4, M), pp.optim.sgd(0.1), pp.InProcess(), precision=precision
    )
    state, params = trainer.init(parts.params), dict(Llama().named_parameters())
    for _ in range(3):
        with context:
            state, metrics = trainer.step(state, ids, target)
        want, grads = in_plain_torch(params, cast, way == "autocast")
        params = {name: p.detach() - 0.1 * grads[name] for name, p in params.items()}
        assert float(metrics.loss) == pytest.approx(want, abs=5e-4) and not metrics.skipped
    trained = parts.state_dict(state.params)
    for name, p in params.items():
        torch.testing.assert_close(trained[name], p, rtol=0, atol=1e-3)


@pytest.mark.parametrize("engine", [graph, eager])
def test_under_autocast_casts_are_those_of_plain_torch_and_the_backward_makes_none(engine):
    """Attention that drops has matrices in float32 of its own, among operators that draw in place."""

    def attends(w, x):
        q = F.linear(x, w)[None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5) @ w.float()

    w, x = (torch.randn(16, 16, generator=torch.Generator().manual_seed(n)) for n in range(2))
    leaves = [t.clone().requires_grad_() for t in (w, x)]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        want = attends(*leaves)
        program = engine(attends, (w, x))
        torch.manual_seed(3)
        y, residuals = program.forward(w, x)
        gradients = program.backward(residuals, torch.ones_like(y))
    assert torch.equal(y, want)
    want_gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
    assert all(map(torch.equal, gradients, want_gradients))


@pytest.mark.parametrize("engine", [graph, functional, eager])
def test_under_autocast_each_use_of_what_a_stage_gets_is_a_cast_whose_gradient_is_float32(engine):
    """Autocast keeps the cast of a leaf: a value that comes from another stage is none in the whole model."""

    def projects(w, x):
        return sum(F.linear(x, each).float() for each in w.unbind())

    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, 16, 16, generator=generator), torch.randn(8, 16, generator=generator)
    before = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = projects(w, before + 0)
        program = engine(projects, (w, x))
        out, residuals = program.forward(w, x)
        _, gx = program.backward(residuals, torch.ones_like(out))
    assert torch.equal(out, y)
    assert torch.equal(gx, torch.autograd.grad(y, before, torch.ones_like(y))[0])


def test_only_all_parameters_are_cast_or_none():
    ids, target = batch()
    parts = pp.split(Llama(), ids[:2], at=AT)
    step = pp.value_and_grad(parts, loss_fn, pp.one_f_one_b(4, M))
    half = {s: {n: p.bfloat16() for n, p in of.items()} for s, of in parts.params.items()}
    for params, words in (
        (half | {1: half[1] | {"blocks.1.norm.weight": torch.ones(D)}}, "blocks.1.norm.weight has the dtype"),
        (half | {2: parts.params[2]}, r"stage 2: its parameter .*float32, and others have been cast to .*16"),
        (half | {0: parts.params[0]}, r"stage 1: it gets values of the dtypes \[torch.float32"),
    ):
        with pytest.raises(StageError, match=words):
            step(params, ids, target)


def test_masters_without_compute_are_refused():
    with pytest.raises(ValueError, match="give both, such as compute=torch.bfloat16"):
        Precision(master=torch.float32)
    with pytest.raises(TypeError, match=r"dtype: got torch.int32, expected a floating dtype"):
        pp.split(Llama(), batch()[0], at=AT).load(Llama().state_dict(), dtype=torch.int32)
