"""Bindings of operators: each is looked for once per kind of call, in all traces together."""

from __future__ import annotations

import torch

from ppfunc.stage import graph
from ppfunc.stage.engines.tracing import emit
from tests.stage.conftest import by_autograd, through


def test_like_calls_share_what_was_found(monkeypatch):
    found = []
    find = emit._find
    monkeypatch.setattr(emit, "_FOUND", {})
    monkeypatch.setattr(emit, "_find", lambda node: found.append(node) or find(node))

    def fn(w, x):
        for _ in range(20):
            x = (x @ w).sin() * x
        return x * x  # of one tensor twice, which is another kind of call

    w, x = torch.randn(3, 3), torch.randn(2, 3)
    program = graph(fn, (w, x))
    assert len(found) < 20
    once = len(found)
    graph(fn, (torch.randn(4, 4), torch.randn(3, 4)))  # another trace, of other sizes
    assert len(found) == once
    torch.testing.assert_close(through(program, w, x), by_autograd(fn, w, x))
