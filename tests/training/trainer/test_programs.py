"""Ranks that hold one stage run one program; what may differ between them is let through."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.abstract.outline import SeenCalls
from tests.models import new_trainer, normal, squared
from tests.training.trainer.problems import WIDTH, problem


class Scaled(torch.autograd.Function):
    """Multiplies the gradient by a number that its forward keeps."""

    @staticmethod
    def forward(x, scale):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


def stages_and_loss(kind, odd):
    """Stages and a loss that compute something else on an odd rank."""
    factor, table = (1.5 if odd else 1.0), normal(WIDTH, seed=int(odd))

    def stage(p, x):
        y = torch.tanh(x @ p["w"])
        if kind == "number":
            y = y * factor
        if kind == "constant":
            y = y + table
        if kind == "backward":
            y = Scaled.apply(y, factor)
        if kind == "gradient" and odd:
            with torch.no_grad():
                y = y + x.sin()
        elif kind == "gradient":
            y = y + x.sin()
        return (y, y.cos())[odd] if kind == "output" else y

    def loss(y, target):
        return squared(y, target) * factor if kind == "loss" else squared(y, target)

    return [stage, stage], loss


def apart(rank, size, kind, engine, lowered):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    _, params, x, y = problem(2)
    pipe, odd = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    stages, loss = stages_and_loss(kind, odd)
    options = {"axes": pp.Axes("pp", "dp"), "engine": getattr(pp.engines, engine)}
    with new_trainer(stages, loss, pp.one_f_one_b(2, 4), pp.optim.sgd(1e-2), mesh, **options) as trainer:
        state, began = trainer.init({pipe: params[pipe]}), time.monotonic()
        with pytest.raises(pp.AgreementError) as caught:
            if lowered:
                trainer.lower({pipe: params[pipe]}, x, y)
            trainer.step(state, x, y)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("kind", ["number", "constant", "loss", "backward", "gradient", "output"])
@pytest.mark.parametrize("engine", ["graph", "functional", "eager"])
def test_data_ranks_that_run_other_programs_are_told_so(four, soon, kind, engine):
    lowered = kind == "number"
    for text, seconds in four(apart, kind, engine, lowered):
        assert f"stage {int(kind == 'loss')} runs other programs on ranks" in text
        assert (
            "on ranks 2 and 3" if kind == "loss" else "on ranks 0 and 1"
        ) in text or "ranks 2 and 3" in text
        assert seconds < soon


def places_apart(rank, size, role):
    """Code that reads its own place along an axis of stages; or batches of other shapes on data ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "b"))
    _, params, x, y = problem(2)
    pipe, place = mesh.get_local_rank("pp"), mesh.get_local_rank("b")

    def stage(p, x):
        return torch.tanh(x @ p["w"]) + (0 if role == "shapes" else place * 0.1)

    axes = {
        "model": pp.Axes("pp", model="b"),
        "experts": pp.Axes("pp", data="b", experts="b"),
        "context": pp.Axes("pp", data="b", context="b"),
        "shapes": pp.Axes("pp", data="b"),
    }[role]
    rows = slice(None, 16 if role == "shapes" and place else None)
    with new_trainer(
        [stage] * 2, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(1e-2), mesh, axes=axes
    ) as trainer:
        state = trainer.init({pipe: params[pipe]})
        for _ in range(2):
            state, metrics = trainer.step(state, x[rows], y[rows])
    return metrics.loss.item()


@pytest.mark.parametrize("role", ["model", "experts", "context", "shapes"])
def test_ranks_whose_programs_may_differ_train(four, role):
    assert all(loss > 0 for loss in four(places_apart, role))


def copies_apart(rank, size, same):
    """Both ranks hold both stages, one for each direction of the pipeline."""
    _, params, x, y = problem(2)
    factor = 1.0 if same else 1.0 + rank

    def stage(p, x):
        return torch.tanh(x @ p["w"]) * factor

    with pp.P2P() as transport:
        step = pp.value_and_grad([stage] * 2, squared, pp.dualpipe(2, 4), transport)
        if same:
            return step(params, x, y)[0].item()
        with pytest.raises(pp.AgreementError, match="stage 0 runs other programs on ranks 0 and 1"):
            step(params, x, y)


def noted(rank, size, copies):
    """How often a rank notes the program of a stage in a step. It holds one stage, or copies of both."""
    stages, params, x, y = problem(2)
    begin, begun = SeenCalls.__init__, []
    with pytest.MonkeyPatch.context() as patch, pp.P2P() as transport:
        patch.setattr(SeenCalls, "__init__", lambda *given: begun.append(given) or begin(*given))
        schedule = (pp.dualpipe if copies else pp.one_f_one_b)(2, 4)
        step = pp.value_and_grad(stages, squared, schedule, transport)
        step(params if copies else {rank: params[rank]}, x, y)
    return len(begun)


def test_nobody_notes_the_program_of_a_stage_that_one_rank_holds(two):
    assert two(noted, False) == [0, 0]
    assert all(two(noted, True))


def test_copies_of_a_stage_on_other_ranks_run_its_program(two):
    assert len(set(two(copies_apart, True))) == 1
    two(copies_apart, False)
