"""Operators that are not torch's own, or take functions: in the stages of a split, under every engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.strict_mode import strict_mode

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph
from tests.models import squared

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


def nested(x, w):
    """Branches within a branch, with values that they read from outside."""
    y = x * w

    def inside(y):
        return torch.cond(y.max() > 1.5, lambda y: y * w.sin(), lambda y: y + x.cos(), (y,))

    return torch.cond(y.sum() > 0, inside, lambda y: y * 0, (y,))


def without_gradient_in_part(x, w):
    def part(y):
        with torch.no_grad():
            total = y.sum()
        return y * total * w + torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    return torch.cond((x * w).sum() > 0, part, lambda y: y * 1.0, (x * w,))


def until_small(x, w):
    return while_loop(lambda y: y.abs().max() > 0.5, lambda y: (y * w * 0.4,), (x * w,))[0]


def three_times(x, w):
    count = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, (y * 1.5).sin()), (count, x * w))[1]


def scanned(x, w):
    start = torch.zeros(D, dtype=torch.float64)
    last, rows = scan(lambda c, row: (c * 0.5 + row, (c + row).sin()), start, x * w, dim=0)
    return rows + last


ON_VALUES, UNROLLED = (nested, without_gradient_in_part, until_small), (three_times, scanned)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize(
    ("call", "engine", "whole"),
    [(call, engine, False) for call in (*ON_VALUES, *UNROLLED) for engine in (functional, eager)]
    + [(three_times, eager, True), (scanned, functional, True)]
    + [(call, graph, True) for call in UNROLLED],  # a stage reads the counter of one
)
def test_branches_loops_and_scans_have_the_gradients_of_plain_torch(call, engine, whole):
    if call is scanned and torch.__version__ < "2.12":
        pytest.xfail("its scan has wrong gradients")
    if whole:
        require_gradients_of_the_whole(model_of(call), engine)
        return
    w, x = (torch.rand(*shape, dtype=torch.float64) + 1 for shape in ((D,), (ROWS, D)))
    program = engine(lambda w, x: call(x, w), (w, x))
    y, residuals = program.forward(w, x)
    leaves = [t.clone().requires_grad_() for t in (w, x)]
    want = call(leaves[1], leaves[0])
    assert torch.equal(y, want)
    gradients = program.backward(residuals, torch.ones_like(y))
    for got, wanted in zip(gradients, torch.autograd.grad(want, leaves, torch.ones_like(y)), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("call", ON_VALUES)
def test_a_model_with_branches_on_values_is_not_split(call):
    with pytest.raises(
        StageError,
        match=r"depend on the values of tensors \(operator .*test_operators.py.*; torch.where chooses without"
        r" values. Instead: make that part independent of values, or write this part as a stage by hand",
    ):
        pp.split(model_of(call), batch()[0], at=["2"])


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("engine", [graph, functional, eager])
def test_messages_about_branches_show_no_addresses(engine):
    first = lambda w, x: strict_mode(lambda x: x * 2, (x * w,))  # noqa: E731
    for stage in (lambda w, x: nested(x, w), first):
        try:
            engine(stage, (torch.rand(D), torch.rand(ROWS, D)), name="stage 1")
        except StageError as error:
            assert "0x" not in str(error) and "use the " in error.instead
            assert f"use the {engine.__name__} engine" not in error.instead


def test_the_functional_engine_names_the_line_and_the_engines_that_serve_an_operator():
    parts, (x, target) = pp.split(model_of(OPERATORS["custom"]), batch()[0], at=["2"]), batch()
    step = pp.value_and_grad(parts, squared, pp.one_f_one_b(2, 2), engine=functional)
    with pytest.raises(StageError, match=r"register_autograd at .*test_operators.*use the eager engine"):
        step(parts.params, x, target)


def test_an_operator_without_a_fake_kernel_is_named_with_what_to_register():
    with pytest.raises(StageError, match=r"tests_ppfunc::unknown.*register_fake.*Instead: register one"):
        pp.split(model_of(lambda x, w: unknown(x * w)), batch()[0], at=["2"])
