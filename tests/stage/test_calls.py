"""Bindings of operators: each is looked for once per trace and kind of call."""

from __future__ import annotations

import torch

from ppfunc.stage import graph
from ppfunc.stage.tracing import calls


def test_like_calls_share_what_was_found(monkeypatch):
    found = []
    find = calls._find
    monkeypatch.setattr(calls, "_find", lambda node: found.append(node) or find(node))

    def fn(w, x):
        for _ in range(20):
            x = (x @ w).sin() * x
        return x * x  # of one tensor twice, which is another kind of call

    w, x = torch.randn(3, 3), torch.randn(2, 3)
    program = graph(fn, (w, x))
    assert len(found) < 20
    y, residuals = program.forward(w, x)
    a, b = w.clone().requires_grad_(), x.clone().requires_grad_()
    want = torch.autograd.grad(fn(a, b).sum(), (a, b))
    torch.testing.assert_close(program.backward(residuals, torch.ones_like(y)), want)
