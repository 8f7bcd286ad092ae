"""Compiled programs: the same results within rounding, the same random numbers, no guards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

from ppfunc.stage import graph, stage_from_module
from ppfunc.stage._torch import vector_options
from ppfunc.stage.engines.tracing import emit

pytestmark = pytest.mark.compiler


def stage(p, x, scale):
    return F.dropout(F.gelu(x @ p["w"]) * scale, 0.5) * p["g"], x, p["g"]


def test_compiled_programs_agree_with_plain_ones():
    torch.manual_seed(0)
    args = ({"w": torch.randn(4, 8), "g": torch.randn(8)}, torch.randn(3, 4), torch.randn(8))
    results = []
    for engine in (graph(remat="full"), graph(remat="full", compile=True)):
        program = engine(stage, args)
        torch.manual_seed(1)
        y, residuals = program.forward(*args)
        gy = (torch.ones(3, 8), torch.ones(3, 4), torch.ones(8))
        whole = program.backward(residuals, gy)
        gx, rest = program.backward_input(residuals, gy)
        results.append((y, whole, (program.backward_weight(rest), gx)))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*results[1][1:])


@pytest.mark.parametrize(
    ("both", "shape"), [(False, (2, 1, 4)), pytest.param(True, (3, 2, 4), marks=pytest.mark.large)]
)
def test_a_recurrent_layer(both, shape):
    torch.manual_seed(0)
    module = nn.LSTM(4, 3, bidirectional=both)
    fn, params, _ = stage_from_module(module)
    x = torch.randn(shape, requires_grad=True)
    program = graph(lambda p, x: fn(p, x)[0], (params, x), compile=True)
    y, residuals = program.forward(params, x)
    gparams, gx = program.backward(residuals, torch.ones_like(y))
    want = module(x)[0]
    torch.testing.assert_close(y, want.detach())
    wanted = torch.autograd.grad(want.sum(), [*module.parameters(), x])
    torch.testing.assert_close([*gparams.values(), gx], list(wanted))


DRAWS = {
    "bernoulli of a tensor": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.empty_like(x).bernoulli_(0.7),
    "integers": lambda x: torch.randint_like(x, 30) + torch.randint(9, (6, 8)),
    "normal and uniform": lambda x: torch.randn_like(x) + torch.empty_like(x).uniform_(),
    "permutation": lambda x: torch.randperm(8) * x,
}


@pytest.mark.xfail(torch.__version__ < "2.12", reason="its C++ header has no place for a generator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_programs_draw_the_same_numbers(dtype):
    torch.manual_seed(0)
    args = torch.ones(8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    drawn = []
    for engine in (graph, graph(compile=True)):
        program = engine(lambda w, x: [draw(w * x) + w * x for draw in DRAWS.values()], args)
        torch.manual_seed(1)
        drawn.append(program.forward(*args)[0])
    torch.testing.assert_close(*drawn)


def test_only_programs_that_run_are_compiled(monkeypatch):
    """Seen without a compiler, which may fail for reasons of its own."""
    made, (_, *others) = [], emit.inductor()
    monkeypatch.setattr(
        emit, "inductor", lambda: (lambda module, *_, **__: made.append(module) or module, *others)
    )
    program = graph(lambda w, x: (x @ w).sin(), (torch.randn(3, 3), torch.randn(2, 3)), compile=True)
    assert not made
    for _ in range(2):
        y, residuals = program.forward(torch.randn(3, 3), torch.randn(2, 3))
        program.backward(residuals, torch.ones_like(y))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("capability", "decided", "options"),
    [("AVX512", None, {"cpp.vec_isa_ok": True}), ("AVX512", False, {}), ("AVX2", None, {})],
)
def test_inductor_does_not_try_vectors_that_torch_uses(monkeypatch, capability, decided, options):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    with config.patch({"cpp.vec_isa_ok": decided}):
        assert vector_options() == options


def test_equal_programs_are_found_on_disk():
    args = torch.randn(3, 3), torch.randn(2, 3)
    for constant in (torch.ones(3), torch.ones(3), torch.tensor([5.0, 7.0, 9.0])):
        counters.clear()
        program = graph(lambda w, x, c=constant: (x @ w).sin() * c, args, compile=True)
        torch.testing.assert_close(program.forward(*args)[0], (args[1] @ args[0]).sin() * constant)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, counters["inductor"]


def test_what_inductor_keeps_of_its_own_random_operators_is_left_alone():
    x = torch.ones(4, 4)
    program = graph(lambda w, x: torch.bernoulli((w * x).sigmoid()), (x, x), compile=True)
    counters.clear()
    torch.manual_seed(0)
    drawn = program.forward(x, x)[0]
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.bernoulli(x.sigmoid()))
    found = counters["inductor"].keys() | counters["aot_autograd"].keys()
    assert "autograd_cache_bypass" in found
    assert not {"fxgraph_cache_hit", "fxgraph_cache_miss", "autograd_cache_hit"} & found
