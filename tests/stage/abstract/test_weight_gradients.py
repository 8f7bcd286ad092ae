"""Functions whose backward leaves the gradient of a weight to a pass of the user's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.stage import eager, functional, graph
from tests.models import squared


class Deferred(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gy):
        _, w = ctx.saved_tensors
        return gy @ w, None


class Partly(Deferred):
    """The weight gets a gradient on another way."""


class Whole(Deferred):
    @staticmethod
    def backward(ctx, gy):
        x, w = ctx.saved_tensors
        return gy @ w, gy.T @ x


class Routed(torch.autograd.Function):
    """Given two values of one weight, it returns the gradient of one: all of it."""

    @staticmethod
    def forward(x, scores, gates):
        return x * gates

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gy):
        x, scores, gates = ctx.saved_tensors
        return gy * gates, 2 * gy * x * scores, None


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3).double())

    def forward(self, x):
        return Routed.apply(x, self.w, self.w.square())


class Layer(nn.Module):
    def __init__(self, function, cast=False):
        super().__init__()
        self.w, self.function, self.cast = nn.Parameter(torch.randn(3, 3).double()), function, cast

    def forward(self, x):
        y = self.function.apply(x, self.w.t().contiguous().t() if self.cast else self.w)
        return y + (self.w.sum() if self.function is Partly else 0)


def steps(model, x, engine):
    fn, params, _ = pp.stage_from_module(model)
    parts = pp.split(model, x[:2], at=["1"])
    yield pp.value_and_grad([fn], squared, pp.gpipe(1, 2), engine=engine), {0: params}
    yield pp.value_and_grad(parts, squared, pp.gpipe(2, 2), engine=engine), parts.params


@pytest.mark.parametrize("engine", [graph, functional, eager])
@pytest.mark.parametrize("kind", [Deferred, Partly, "cast"])
def test_a_deferred_gradient_is_left_out_as_by_autograd(engine, kind):
    cast = kind == "cast"
    x = torch.randn(4, 3).double()
    model = nn.Sequential(Layer(Whole), Layer(Deferred if cast else kind, cast))
    for step, params in steps(model, x, engine):
        grads = {name: g for tree in step(params, x, x)[1].values() for name, g in tree.items()}
        model.zero_grad()
        squared(model(x), x).backward()
        want = model[1].w.grad
        torch.testing.assert_close(grads["1.w"], torch.zeros(3, 3).double() if want is None else want)


@pytest.mark.parametrize("engine", [graph, functional, eager])
def test_one_that_returns_the_gradient_or_whose_weight_is_frozen_runs(engine):
    x = torch.randn(4, 3).double()
    model = nn.Sequential(Layer(Whole), Layer(Deferred))
    model[1].w.requires_grad_(False)
    for step, params in steps(model, x, engine):
        loss, grads = step(params, x, x)
        model.zero_grad()
        want = (squared(model(x[:2]), x[:2]) + squared(model(x[2:]), x[2:])) / 2
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(grads[0]["0.w"], model[0].w.grad)


@pytest.mark.parametrize("engine", [graph, functional, eager])
def test_one_that_returns_the_gradient_by_another_value_of_the_weight_runs(engine):
    x, model = torch.randn(4, 3).double(), nn.Sequential(Layer(Whole), Router())
    for step, params in steps(model, x, engine):
        loss, grads = step(params, x, x)
        model.zero_grad()
        squared(model(x), x).backward()
        torch.testing.assert_close(loss, squared(model(x), x).detach())
        got = {name: g for tree in grads.values() for name, g in tree.items()}
        torch.testing.assert_close(got["1.w"], model[1].w.grad)
