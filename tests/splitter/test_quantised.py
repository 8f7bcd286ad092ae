"""Quantised weights are constants of stages: adapters over them are trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppfunc as pp
from ppfunc.stage import eager, functional, graph
from tests.models import squared

D = 16


class Quantised(torch.Tensor):
    """A weight in int8 with a scale, as libraries for quantisation write it."""

    @staticmethod
    def __new__(cls, whole, scale):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, *bias = args
            return F.linear(x, w.whole.to(w.scale.dtype) * w.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].whole, args[0].scale)
        raise NotImplementedError(func)


def by_hand(linear):
    scale = linear.weight.detach().abs().max() / 127
    weight = Quantised((linear.weight.detach() / scale).round().to(torch.int8), scale)
    linear.weight = nn.Parameter(weight, requires_grad=False)


def by_torchao(linear):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    linear.weight.requires_grad_(False)


class Adapted(nn.Module):
    def __init__(self, quantise):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(D, D, bias=False), nn.Linear(D, 2), nn.Linear(2, D)
        quantise(self.base)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("quantise", [by_hand, by_torchao])
@pytest.mark.parametrize("engine", [graph, functional, eager])
def test_adapters_over_quantised_weights_are_trained(quantise, engine):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(quantise), nn.Tanh(), Adapted(quantise))
    x, t = torch.randn(4, D), torch.randn(4, D)
    loss = (squared(model(x[:2]), t[:2]) + squared(model(x[2:]), t[2:])) / 2
    loss.backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    fn, params, _ = pp.stage_from_module(model)
    parts = pp.split(model, x[:2], at=["2"])
    for stages, given, schedule in (
        ([fn], {0: params}, pp.gpipe(1, 2)),
        (parts, parts.params, pp.gpipe(2, 2)),
    ):
        got, grads = pp.value_and_grad(stages, squared, schedule, engine=engine)(given, x, t)
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close({n: g for tree in grads.values() for n, g in tree.items()}, want)
    assert parts.state_dict(parts.params)["0.base.weight"] is not None
    trainer = pp.Trainer(parts, squared, pp.gpipe(2, 2), pp.optim.adamw(1e-2), engine=engine)
    state, _ = trainer.step(trainer.init(parts.params), x, t)
    assert trainer.evaluate(state, x, t) < loss


def test_a_quantised_weight_that_is_trained_is_refused():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    by_hand(model[1])
    model[1].weight.requires_grad_(True)
    with pytest.raises(TypeError, match=r"1.weight: got a Quantised that is trained, .* freeze it"):
        pp.split(model, torch.zeros(2, D), at=["1"])
