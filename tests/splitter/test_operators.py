"""Operators that are not torch's own, or take functions: in the stages of a split, under every engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph

ROWS, D = 4, 3


@torch.library.custom_op("tests_ppfunc::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, by: float) -> Tensor:
    return x * w * by


@scaled.register_fake
def _(x: Tensor, w: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _saved(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.by = inputs[2]


def _of_scaled(ctx, g):
    """Three times the gradient in ``x``, which no trace through the operator would give."""
    x, w = ctx.saved_tensors
    return 3 * g * w * ctx.by, (g * x * ctx.by).sum(0), None


scaled.register_autograd(_of_scaled, setup_context=_saved)


@torch.library.triton_op("tests_ppfunc::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x * 2 + 1


shifted.register_autograd(lambda ctx, g: g * 5)


@torch.library.custom_op("tests_ppfunc::doubled_in_place", mutates_args=("x",))
def doubled_in_place(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("tests_ppfunc::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


LIBRARY = torch.library.Library("tests_ppfunc_low", "DEF")  # registered by hand, as kernel packages do
LIBRARY.define("tripled(Tensor x) -> Tensor")
LIBRARY.impl("tripled", lambda x: x * 3, "CPU")
torch.library.register_fake("tests_ppfunc_low::tripled", torch.empty_like, lib=LIBRARY)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tests_ppfunc_low.tripled(x)

    @staticmethod
    def backward(ctx, g):
        return 7 * g


LIBRARY.impl("tripled", Tripled.apply, "Autograd")


def written(x, w):
    y = x * w
    doubled_in_place(y)
    return y


OPERATORS = {
    "custom": lambda x, w: scaled(x, w, 2.0),
    "triton": lambda x, w: shifted(x * w),
    "by hand": lambda x, w: torch.ops.tests_ppfunc_low.tripled(x * w),
}


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.rand(D, dtype=torch.float64) + 1), call

    def forward(self, x):
        return self.call(x, self.weight)


def model_of(call):
    torch.manual_seed(0)
    linear = (nn.Linear(D, D, dtype=torch.float64) for _ in range(2))
    return nn.Sequential(next(linear), Calls(call), next(linear), Calls(call))


def batch():
    torch.manual_seed(1)
    return torch.rand(2 * ROWS, D, dtype=torch.float64), torch.rand(2 * ROWS, D, dtype=torch.float64)


def squared(y, target):
    return (y - target).square().mean()


def require_gradients_of_the_whole(model, engine, at=("2",)):
    x, target = batch()
    halves = [squared(model(a), b) / 2 for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    names, params = zip(*model.named_parameters(), strict=True)
    want = dict(zip(names, torch.autograd.grad(sum(halves), params), strict=True))
    parts = pp.split(model, x[:ROWS], at=at)
    loss, grads = pp.value_and_grad(parts, squared, pp.one_f_one_b(2, 2), engine=engine)(
        parts.params, x, target
    )
    assert torch.allclose(loss, sum(halves))
    for tree in grads.values():
        for name, grad in tree.items():
            assert torch.allclose(grad, want[name], atol=1e-14), name


@pytest.mark.parametrize("engine", [graph, eager])
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_of_a_library_keeps_its_own_backward(call, engine):
    require_gradients_of_the_whole(model_of(call), engine)


class Experts(nn.Module):
    """Rows sorted by their expert, and one product for all."""

    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(8, 3, bias=False), nn.Parameter(torch.rand(3, 8, 8) - 0.5)

    def forward(self, x):
        score, expert = self.router(x.float()).softmax(-1).max(-1)
        order = expert.argsort()
        ends = (expert[:, None] == torch.arange(3)).sum(0).cumsum(0).to(torch.int32)
        up = self.up.to(x.dtype)
        y = nn.functional.grouped_mm(x[order], up, offs=ends)
        return x + (y * score[order, None])[order.argsort()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_groups_are_traced_in_the_dtypes_of_their_kernel(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(Experts(), Experts()), torch.rand(8, 8, dtype=dtype)
    names, params = zip(*model.named_parameters(), strict=True)
    want = dict(zip(names, torch.autograd.grad(squared(model(x), x.float()), params), strict=True))
    parts = pp.split(model, x, at=["1"])
    _, grads = pp.value_and_grad(parts, squared, pp.one_f_one_b(2, 1))(parts.params, x, x.float())
    assert all(torch.equal(grad, want[name]) for tree in grads.values() for name, grad in tree.items())


def test_an_operator_that_writes_and_returns_nothing_is_called_before_the_result_leaves():
    require_gradients_of_the_whole(model_of(written), eager)
    summed = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    original = summed[1].forward

    def forward(x):
        y = original(x)
        torch._foreach_mul_([y], 3.0)
        return y

    summed[1].forward = forward
    x, target = (t.float() for t in batch())
    parts = pp.split(summed, x[:ROWS], at=["1"])
    loss = pp.evaluate(parts, squared, pp.one_f_one_b(2, 2))(parts.params, x, target)
    assert torch.allclose(loss, squared(summed(x), target))


def test_the_functional_engine_names_the_line_and_the_engines_that_serve_an_operator():
    parts, (x, target) = pp.split(model_of(OPERATORS["custom"]), batch()[0], at=["2"]), batch()
    step = pp.value_and_grad(parts, squared, pp.one_f_one_b(2, 2), engine=functional)
    with pytest.raises(StageError, match=r"register_autograd at .*test_operators.*use the eager engine"):
        step(parts.params, x, target)


def test_an_operator_without_a_fake_kernel_is_named_with_what_to_register():
    with pytest.raises(StageError, match=r"tests_ppfunc::unknown.*register_fake.*Instead: register one"):
        pp.split(model_of(lambda x, w: unknown(x * w)), batch()[0], at=["2"])
