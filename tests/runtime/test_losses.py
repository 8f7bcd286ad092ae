"""Losses of microbatches: how they are weighed and added up, and those that train nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import ppfunc as pp
from tests.models import normal, squared

ENGINES = [pp.graph, pp.functional, pp.eager]


def scaled(p, x):
    return x * p["w"]


def half(y, target):
    return (y * target).mean().bfloat16()


def in_halves(rank, size):
    """The mean of 64 losses of bfloat16, of a step and of a trainer: in bfloat16 it was off by as much as a percent."""
    m, params = 64, {s: {"w": torch.ones(4)} for s in range(2)}
    x, y = 1 + normal(m, 4).float().abs(), torch.ones(m, 4)
    want = torch.stack([half(a, b) for a, b in zip(x.split(1), y.split(1), strict=True)]).double().mean().item()
    mine = params if size == 1 else {rank: params[rank]}
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        loss, _ = pp.value_and_grad([scaled] * 2, half, pp.gpipe(2, m), transport)(mine, x, y)
        trainer = pp.train_step([scaled] * 2, half, pp.gpipe(2, m // 2), pp.sgd(0.0), transport=transport, accumulate=2)
        _, metrics = trainer.step(trainer.init(mine), x, y)
    assert (loss.dtype, metrics.loss.dtype) == (torch.float32, torch.float64)
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert metrics.loss.item() == pytest.approx(want, rel=1e-6)


def test_halves_are_added_up_in_float32():
    in_halves(0, 1)


def test_halves_of_two_ranks_are_added_up_in_float32(two):
    two(in_halves)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_microbatch_of_no_tokens_counts_nothing(engine):
    """Its mean is no number, and no number times 0 is none either."""
    params, x, ids = {0: {"w": normal(4)}}, normal(8, 4), torch.arange(8) % 4
    ids[4:] = -100
    counts = [4, 0]
    trainer = pp.train_step([scaled], F.cross_entropy, pp.gpipe(1, 2), pp.sgd(0.1), engine=engine)
    state, metrics = trainer.step(trainer.init(params), x, ids, loss_weights=counts)
    w = params[0]["w"].clone().requires_grad_()
    loss = F.cross_entropy(x * w, ids)
    loss.backward()
    assert metrics.loss.item() == pytest.approx(loss.item(), rel=1e-12) and metrics.skipped == 0
    torch.testing.assert_close(state.params[0]["w"], (w - 0.1 * w.grad).detach(), rtol=1e-12, atol=0)
    _, metrics = trainer.step(trainer.init(params), x, ids)
    assert metrics.skipped == 1 and metrics.loss.isnan()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind, place", [("loss", "stage 1: its loss"), ("stage", "stage 0: its output")])
def test_what_passes_no_gradient_on_is_told_once(engine, kind, place):
    stages = [lambda p, x: scaled(p, x).detach() if kind == "stage" else scaled(p, x), scaled]
    loss_fn = lambda y, t: squared(y, t).detach() if kind == "loss" else squared(y, t)  # noqa: E731
    trainer = pp.train_step(stages, loss_fn, pp.gpipe(2, 2), pp.sgd(0.1), engine=engine)
    state = trainer.init({s: {"w": normal(4)} for s in range(2)})
    with pytest.warns(UserWarning, match=f"{place} passes no gradient on") as caught:
        for _ in range(3):
            state, _ = trainer.step(state, normal(4, 4), normal(4, 4))
    assert len(caught) == 1


def test_what_is_meant_to_train_nothing_is_not_told():
    frozen = torch.nn.Linear(4, 4).double().requires_grad_(False)
    first, own, _ = pp.stage_from_module(frozen)
    stages, params = [first, scaled], {0: own, 1: {"w": normal(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pp.value_and_grad(stages, squared, pp.gpipe(2, 2))(params, normal(4, 4), normal(4, 4))
        losing = [lambda p, x: pp.Output(scaled(p, x), loss=x.square().mean()), scaled]
        pp.value_and_grad(losing, squared, pp.gpipe(2, 2))({s: {"w": normal(4)} for s in range(2)}, normal(4, 4), normal(4, 4))
        pp.evaluate(stages, lambda y, t: squared(y, t).detach(), pp.gpipe(2, 2))(params, normal(4, 4), normal(4, 4))
