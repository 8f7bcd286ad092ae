"""Operators with hidden effects, replaced in a trace by honest ones, and operators that stay what they
are.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import ppfunc as pp
from tests.stage.conftest import by_autograd, through

aten = torch.ops.aten


@pytest.mark.parametrize(("training", "running"), [(True, True), (True, False), (False, True)])
def test_batch_norm_of_cudnn_is_served_without_cudnn(training: bool, running: bool) -> None:
    """A trace for CUDA meets cuDNN's operator; its program is that of torch's own, running statistics
    included.
    """

    def stage(norm: Any) -> Any:
        def fn(params: Any, x: torch.Tensor, state: Any) -> Any:
            mean, var = (t.clone() for t in state) if running else (None, None)
            y = norm(x, *params, mean, var, training, 0.1, 1e-5)[0]
            return y, (mean, var) if running else state

        return fn

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(0)
    given = (r(3), r(3)), r(5, 3, 4), (r(3), r(3).abs())
    cotangent = r(5, 3, 4)
    programs = [
        pp.engines.graph(stage(norm), given, has_aux=True)
        for norm in (aten.cudnn_batch_norm, aten.native_batch_norm)
    ]
    results = []
    for program in programs:
        (y, state), residuals = program.forward(*given)
        results.append((y, *state, *optree.tree_leaves(program.backward(residuals, cotangent))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    if training and running:
        assert not torch.equal(results[0][1], given[2][0])


@pytest.mark.parametrize("fn", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_what_has_a_kernel_is_not_decomposed(fn: Any) -> None:
    """The derivatives of SiLU and Mish could be, into operators that round in another way."""
    x, gy = torch.randn(2, 500, 4, 4, generator=torch.Generator().manual_seed(0)).split([1, 1])
    program = pp.engines.graph(lambda w, x: fn(w * x), (torch.ones(()), x))
    y, _, gx = through(program, torch.ones(()), x, gy=gy)
    assert all(map(torch.equal, (y, gx), by_autograd(fn, x, gy=gy)))
