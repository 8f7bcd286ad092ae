"""Flat programs are functions of tensors: they can be differentiated, and mapped over, from outside."""

from __future__ import annotations

import pytest
import torch

from ppfunc.stage import functional, graph

nests = pytest.mark.parametrize("engine", [graph, functional], ids=lambda e: e.__name__)


def stage(w, x):
    return (x @ w).sin() @ w


@pytest.fixture
def args():
    torch.manual_seed(0)
    return torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


def gradient(program, w, x):
    """Of ``stage(w, x).sum()`` with respect to ``w``, by the stage program."""
    _, residuals = program.flat.forward((w,), (x,), ())
    gw, _ = program.flat.backward(residuals, (torch.ones(2, 3, dtype=torch.float64),))
    return gw[0]


def direct(w, x):
    return torch.func.grad(lambda w: stage(w, x).sum())(w)


@nests
def test_grad_of_the_gradient(engine, args):
    w, x = args
    program = engine(stage, args)
    got = torch.func.grad(lambda w: gradient(program, w, x).square().sum())(w)
    want = torch.func.grad(lambda w: direct(w, x).square().sum())(w)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@nests
def test_vmap_over_an_ensemble(engine, args):
    w, x = args
    program = engine(stage, args)
    many = torch.stack([w, 2 * w, w.T])
    got = torch.func.vmap(lambda w: gradient(program, w, x))(many)
    want = torch.stack([direct(w, x) for w in many])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@nests
def test_hessian_vector_product_by_jvp(engine, args):
    w, x = args
    program, v = engine(stage, args), torch.randn(3, 3, dtype=torch.float64)
    _, got = torch.func.jvp(lambda w: gradient(program, w, x), (w,), (v,))
    _, want = torch.func.jvp(lambda w: direct(w, x), (w,), (v,))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
