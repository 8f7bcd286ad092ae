"""What modules freeze, or set free, between two steps: in one process and over several, where others cannot know when the step begins."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ppfunc as pp
from tests.models import normal, squared

FROZEN = [(), (0,), (0, 1), (1,), (), (0, 1, 2), (0,)]  # the stages that are frozen, step after step


def layers(count=3, width=4):
    torch.manual_seed(0)
    return [nn.Linear(width, width).double() for _ in range(count)]


def by_torch(layers, batches):
    """Parameters after each step of torch, in which what is frozen has no gradient, and does not decay."""
    own, found = [p for layer in layers for p in layer.parameters()], []
    for frozen, (x, y) in zip(FROZEN, batches, strict=True):
        for n, layer in enumerate(layers):
            layer.requires_grad_(n not in frozen)
        made = x
        for layer in layers:
            made = torch.tanh(layer(made))
        loss = squared(made, y)
        free = [p for p in own if p.requires_grad]
        grads = torch.autograd.grad(loss, free) if free else ()
        with torch.no_grad():
            for p, g in zip(free, grads, strict=True):
                p -= 0.1 * (g + 0.5 * p)
        found.append([p.detach().clone() for p in own])
    return found


def stage_of(layer):
    fn, params, _ = pp.stage_from_module(layer)

    @functools.wraps(fn)
    def stage(p, x):
        return torch.tanh(fn(p, x))

    return stage, {name: p.clone() for name, p in params.items()}


def freezing(rank, size, schedule, engine, shape=None, shard="none"):
    """Train while stages are frozen and set free; a stage of every second rank is the last that others took gradients from."""
    model, batches = layers(), [(normal(8, 4, seed=n), normal(8, 4, seed=50 + n)) for n in range(len(FROZEN))]
    wanted, model = by_torch(model, batches), layers()
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    pipe, data = (rank, 0) if mesh is None else (mesh.get_local_rank("pp"), mesh.get_local_rank("dp"))
    ranks = 1 if size == 1 else size if mesh is None else shape[0]
    placement = [0] * 3 if ranks == 1 else [0, 1, 1]
    programs = [[*(pp.schedule.F(s, m) for m in range(4) for s in range(3) if placement[s] == r),
                 *(pp.schedule.B(s, m) for m in range(4) for s in (2, 1, 0) if placement[s] == r)] for r in range(ranks)]  # fmt: skip
    build = pp.schedule.single_chain("by hand", placement=placement, microbatches=4, programs=programs)
    build = pp.schedule.split_backward(build) if schedule == "split" else build
    mine = [s for s in range(3) if placement[s] == (pipe if ranks > 1 else 0)]
    made = {s: stage_of(layer) for s, layer in enumerate(model) if s in mine}
    options = {"engine": getattr(pp, engine), "shard": shard, "mesh": mesh, "axes": mesh and pp.Axes("pp", "dp")}
    options |= {"transport": pp.P2P(timeout=30)} if size > 1 and mesh is None else {}
    half = slice(None) if mesh is None else slice(4 * data, 4 * data + 4)
    with pp.train_step(
        [made[s][0] if s in made else None for s in range(3)], squared, build, pp.sgd(0.1, weight_decay=0.5), **options
    ) as trainer:  # fmt: skip
        state = trainer.init({s: made[s][1] for s in mine})
        for n, (frozen, (x, y)) in enumerate(zip(FROZEN, batches, strict=True)):
            for s in mine:
                model[s].requires_grad_(s not in frozen)
            (state, _), _ = trainer.record(state, x[half], y[half]) if n == 2 else (trainer.step(state, x[half], y[half]), None)
            for s in mine:
                for p, want in zip(state.params[s].values(), wanted[n][2 * s : 2 * s + 2], strict=True):
                    whole = p.full_tensor() if isinstance(p, DTensor) else p
                    torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-12, msg=str((n, s)))
        assert state.step == len(FROZEN)


@pytest.mark.parametrize("engine", ["graph", "functional", "eager"])
def test_stages_are_frozen_and_set_free(engine):
    freezing(0, 1, "whole", engine)


@pytest.mark.parametrize("schedule, engine", [("whole", "graph"), ("split", "graph"), ("whole", "functional"), ("whole", "eager")])
def test_stages_are_frozen_and_set_free_over_processes(two, schedule, engine):
    """A rank whose stage gives other gradients than before said so, and failed the step, once."""
    two(freezing, schedule, engine)


@pytest.mark.parametrize("shard", ["none", "optimizer", "params"])
def test_stages_are_frozen_and_set_free_over_a_mesh(four, shard):
    four(freezing, "whole", "graph", (2, 2), shard)


def on_one_rank(rank, size, kind):
    """Freeze one of two places, after steps in which none was frozen."""
    mesh = init_device_mesh("cpu", (2, 1) if kind == "tied" else (1, 2), mesh_dim_names=("pp", "dp"))
    module = nn.Linear(3, 3).double()
    module.weight.data, module.bias.data = normal(3, 3), normal(3)
    fn, own, _ = pp.stage_from_module(module)
    stages = [fn if stage == rank else None for stage in range(2)] if kind == "tied" else [fn]
    tied = {"w": [(0, "weight"), (1, "weight")]} if kind == "tied" else None
    x, y = normal(4, 3), normal(4, 3, seed=1)
    with pp.train_step(stages, squared, pp.gpipe(len(stages), 2), pp.sgd(0.1), mesh, axes=pp.Axes("pp", "dp"), tied=tied) as trainer:
        state = trainer.init({rank if kind == "tied" else 0: {name: t.clone() for name, t in own.items()}})
        for _ in range(2):
            state, _ = trainer.step(state, x, y)
        before = state.params
        module.weight.requires_grad_(bool(rank))
        with pytest.raises(pp.AgreementError, match="frozen"):
            trainer.step(state, x, y)
        module.weight.requires_grad_(False)
        state, _ = trainer.step(state, x, y)
    return all(torch.equal(before[s]["weight"], state.params[s]["weight"]) for s in before)


@pytest.mark.parametrize("kind", ["tied", "data"])
def test_one_parameter_that_one_rank_freezes_later_is_told(two, kind):
    assert two(on_one_rank, kind) == [True, True]


def together(rank, size, name):
    """Freeze a parameter at all of its places, after steps in which none was frozen: tied, or in two replicas of a stage."""
    modules = [nn.Linear(3, 3).double() for _ in range(2)]
    for module in modules:
        module.weight.data, module.bias.data = normal(3, 3), normal(3)
    made = [pp.stage_from_module(module) for module in modules]
    build, tied = (pp.gpipe(2, 4), {"w": [(0, "weight"), (1, "weight")]}) if name == "tied" else (pp.dualpipe(2, 4), None)
    mine = range(2) if size == 1 else build.model_stages_of(rank)
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        trainer = pp.train_step([fn for fn, _, _ in made], squared, build, pp.sgd(0.1), transport=transport, tied=tied)
        state = trainer.init({s: {name: t.clone() for name, t in made[s][1].items()} for s in mine})
        for frozen in (False, True, True, False):
            for module in modules:
                module.weight.requires_grad_(not frozen)
            before = state.params
            state, _ = trainer.step(state, normal(8, 3), normal(8, 3, seed=1))
            assert all(torch.equal(before[s]["weight"], state.params[s]["weight"]) == frozen for s in mine)
            assert not any(torch.equal(before[s]["bias"], state.params[s]["bias"]) for s in mine)
    return [state.params[s]["weight"] for s in range(2) if s in mine]


@pytest.mark.parametrize("name", ["tied", "replicas"])
def test_one_parameter_is_frozen_at_all_of_its_places(two, name):
    alone = together(0, 1, name)
    for rank, found in enumerate(two(together, name)):
        assert all(map(torch.equal, found, alone if name == "replicas" else [alone[rank]]))
