"""Outlines: what is learned of a stage before it runs."""

from __future__ import annotations

import functools
import sys
import threading

import pytest
import torch
from torch import nn

from ppfunc.stage import Signature, outline, stage_from_module
from tests.stage.conftest import every


def model():
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5), nn.ReLU()))


WRAPPED = {
    "as it is": lambda fn: fn,
    "lambda": lambda fn: lambda p, x: fn(p, x),
    "partial": functools.partial,
    "vmap": lambda fn: lambda p, x: torch.func.vmap(lambda row: fn(p, row), randomness="different")(x),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_modules_that_run_are_found_however_they_are_wrapped(kind):
    module = model()
    fn, params, _ = stage_from_module(module)
    seen = outline(WRAPPED[kind](fn), (params, torch.ones(2, 3)))
    assert seen.modules == tuple(module.modules()) and seen.random
    module.eval()
    assert outline(fn, (params, torch.ones(2, 3))).random is False
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_modules_that_another_thread_runs_are_not_among_them():
    other, own = nn.ReLU(), nn.Tanh()

    def fn(w, x):
        thread = threading.Thread(target=lambda: other(torch.ones(1)))
        thread.start()
        thread.join()
        return own(x * w)

    assert outline(fn, (torch.ones(2), torch.ones(2))).modules == (own,)


def test_modules_that_run_on_zeros_are_found_too():
    own = nn.Tanh()
    seen = outline(lambda w, x: own(x) if x.sum() < 1 else x, (torch.ones(2), torch.ones(2)))
    assert not seen.known and seen.random is None
    assert seen.modules == (own,)
    assert "values" in seen.untraced[0] and seen.untraced[1].startswith("use the functional engine")


@pytest.mark.parametrize("branch", [False, True])
def test_examples_without_values(branch):
    def fn(p, x, n):
        return (x @ p["w"]).T if not branch or x.sum() == 0 else x

    args = ({"w": torch.ones(3, 2)}, torch.ones(5, 3), torch.arange(2))
    want = outline(fn, args)
    assert want.known is not branch and str(want.y) == "float32[2,5]"
    for kind in (
        Signature.of,
        lambda tree: Signature.of(tree) if torch.is_tensor(tree) else {"w": tree["w"].to("meta")},
    ):
        assert outline(fn, tuple(map(kind, args))) == want
    assert outline(fn, (args[0], *(t.to("meta") for t in args[1:]))) == want


@every
def test_a_stage_with_an_outline_is_not_evaluated_again(engine, monkeypatch):
    args = torch.ones(2, 2), torch.ones(3, 2)
    seen = outline(lambda w, x: x @ w, args)
    monkeypatch.setattr(sys.modules["ppfunc.stage.abstract.outline"], "_observe", None)
    assert engine(lambda w, x: x @ w, args, outline=seen).y == seen.y


def test_scripted_functions_run_operator_by_operator():
    """On a GPU they are fused, once they have run, into kernels that read memory, of which there is none."""
    optimizing = torch._C._get_graph_executor_optimize
    seen = []

    def fn(w, x):
        seen.append(optimizing())
        return w * x

    outline(fn, (torch.ones(3), torch.ones(3)))
    assert optimizing() and set(seen) == {False}


@pytest.mark.cuda
def test_scripted_functions_on_cuda():
    @torch.jit.script
    def gated(x: torch.Tensor):
        return x * torch.sigmoid(x) + torch.tanh(x)

    for _ in range(4):
        outline(lambda w, x: gated(w * x), (torch.ones(64, device="cuda"), torch.ones(64, device="cuda")))
    torch.cuda.synchronize()
