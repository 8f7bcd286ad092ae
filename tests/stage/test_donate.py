"""Results are written over arguments that nothing reads afterwards, and over nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ppfunc.stage import functional, graph


def source(program, name):
    return getattr(program.flat, name).__doc__


def test_gelu_and_the_sum_of_a_residual_branch_take_memory_that_nothing_reads():
    def stage(params, x):
        return x + F.gelu(F.layer_norm(x, (8,)) @ params) @ params

    program = graph(stage, (torch.randn(8, 8), torch.randn(4, 8)))
    assert "grad_input=" in source(program, "backward")
    assert ".add_(" in source(program, "backward")
    assert ".add_(" in source(program, "forward")


@pytest.mark.parametrize(
    "stage",
    [
        lambda p, x: (x @ p) + x,  # the sum is the output, the product is gone
        lambda p, x: ((x @ p) + x, (x @ p).T),  # the product is returned, through a view
        lambda p, x: x + p[0],  # an argument is not ours
        lambda p, x: (x @ p) * (x @ p),  # the same tensor twice, after common parts are one
        lambda p, x: (x @ p).sum() + (x @ p).T,
        lambda p, x: F.gelu(x @ p) * F.gelu(x @ p).detach(),
        lambda p, x: (x @ p)[:2] + (x @ p)[2:],  # two views of one memory
    ],
)
def test_no_argument_and_no_result_is_written_over(stage):
    params = torch.randn(4, 4, dtype=torch.float64)
    x = torch.randn(4, 4, dtype=torch.float64)
    before = params.clone(), x.clone()
    programs = [engine(stage, (params, x)) for engine in (graph, functional)]
    results = []
    for program in programs:
        y, residuals = program.forward(params, x)
        kept = [t.clone() for t in torch.utils._pytree.tree_leaves(y)]
        gy = torch.utils._pytree.tree_map(torch.ones_like, y)
        gradients = program.backward(residuals, gy)
        assert all(torch.equal(a, b) for a, b in zip(kept, torch.utils._pytree.tree_leaves(y), strict=True))
        assert all((g == 1).all() for g in torch.utils._pytree.tree_leaves(gy))
        results.append((kept, gradients))
    (a, ga), (b, gb) = results
    assert all(map(torch.equal, a, b))
    assert all(map(torch.equal, ga, gb))
    assert torch.equal(params, before[0])
    assert torch.equal(x, before[1])
