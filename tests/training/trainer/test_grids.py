"""Grids of pipe x data x tensor ranks train as torch trains the model whole, in one process; sharded as
whole, to rounding; several steps as one by one, to the bit.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ppfunc as pp
from tests.covering import pairwise
from tests.models import new_trainer, same_bits

VOCABULARY, WIDTH, HIDDEN, LAYERS, ROWS, MICROBATCHES, STEPS = 10, 6, 8, 4, 32, 4, 5
TOLERANCE = 1e-12
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
SCHEDULES = {
    "1f1b": pp.one_f_one_b,
    "interleaved": lambda ranks, m: pp.interleaved_1f1b(ranks, m, 2),
    "zb_h1": pp.zb_h1,
    "zbv": pp.zbv,
    "dualpipev": pp.dualpipev,
}
OPTIONS = [
    "clip",
    "tied clip",
    "overflow",
    "optimizer overflow",
    "params overflow",
    "tied clip overflow",
    "tied clip overflow optimizer",
    "tied clip overflow params",
    "muon tied overflow",
    "muon optimizer",
    "muon tied clip overflow params",
]
MUON = pp.optim.muon(0.02, rest=pp.optim.adamw(1e-2))
PAIRS = list(itertools.product(GRIDS, SCHEDULES))


class Block(nn.Module):
    """Leaves of many rows, of one that no axis cuts, and of none; stacks cut along matrices, or between."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.gain, self.row = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1, 1))
        self.three, self.two = (nn.Parameter(torch.randn(n, WIDTH, WIDTH) / 4) for n in (3, 2))

    def forward(self, x):
        for stack in (self.three, self.two):
            x = x + torch.tanh(torch.einsum("bi,eij->bj", x, stack))
        return x * self.row + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


def layers(tied):
    torch.manual_seed(3)
    made = [nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY, bias=False)]
    made[-1].weight.data = made[0].weight.data.clone() if tied else made[-1].weight.data
    return [layer.double() for layer in made]


def batch(step, overflows):
    """Of the whole grid; in one step the loss of the last row is none."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(VOCABULARY, (ROWS,), generator=generator) for _ in range(2))
    gains = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    gains[-1] = torch.inf if overflows and step == 2 else 1
    return ids, (targets, gains)


def loss_fn(scores, targets):
    ids, gains = targets
    return (F.cross_entropy(scores, ids, reduction="none") * gains).mean()


class Muon:
    """The parameters of a module, updated whole."""

    def __init__(self, model):
        self.params = dict(model.named_parameters())
        self.state = MUON.init(self.params)

    def zero_grad(self):
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def step(self):
        grads = {name: p.grad for name, p in self.params.items()}
        new, self.state = MUON.update(grads, self.state, self.params)
        for name, p in self.params.items():
            p.copy_(new[name])


@cache
def alone(options):
    """Losses, norms, scales and whether the update was skipped, of every step of torch alone; then the
    parameters by layer.
    """
    words = options.split()
    model = nn.Sequential(*layers("tied" in words))
    if "tied" in words:
        model[-1].weight = model[0].weight
    optimizer = Muon(model) if "muon" in words else torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    scaler, scale, good = "overflow" in words, 8.0 if "overflow" in words else 1.0, 0
    for step in range(STEPS):
        x, y = batch(step, scaler)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3 if "clip" in words else torch.inf)
        skipped = not (norm.isfinite() and loss.isfinite())
        found.append((loss.item(), norm.item(), scale, float(skipped)))
        if not skipped:
            optimizer.step()
        good = 0 if skipped else good + 1
        if scaler and (skipped or good == 2):
            scale, good = scale * (0.5 if skipped else 2.0), 0
    return found, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@cache
def cut(stages, tied, mesh):
    """The layers as stages, over the ranks of an axis where there are any, and the places of the tied leaf.

    Made once in a process: trainers that share stages share what is traced of them.
    """
    count, made = LAYERS // stages, layers(tied)
    plans = [
        {"": RowwiseParallel(input_layouts=Replicate())},
        *[{".up": ColwiseParallel(), ".down": RowwiseParallel()}] * 2,
        {"": ColwiseParallel(output_layouts=Replicate())},
    ]
    found = []
    for stage in range(stages):
        own = range(stage * count, (stage + 1) * count)
        module = nn.Sequential(*(made[n] for n in own))
        plan = {f"{k}{path}": style for k, n in enumerate(own) for path, style in plans[n].items()}
        found.append(pp.stage_from_module(module) if mesh is None else pp.parallelize(module, mesh, plan))
    return found, {"embedding": [(0, "0.weight"), (stages - 1, f"{count - 1}.weight")]} if tied else {}


def metrics_of(found):
    return [(m.loss.item(), m.grad_norm.item(), m.scale.item(), m.skipped.item()) for m in found]


def whole(tree):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tree.items()}


@cache
def mesh_of(shape):
    """The axes that have several ranks, and that of the pipeline; two of data where they are a pair."""
    pipe, data, model = shape
    pairs = [("dp_replicate", data[0]), ("dp_shard", data[1])] if isinstance(data, tuple) else [("dp", data)]
    axes = [(name, size) for name, size in (("pp", pipe), *pairs, ("tp", model)) if size > 1 or name == "pp"]
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def trained(mesh, shape, schedule, options):
    """The metrics and the parameters, whole, after all steps; those that run together have the same bits."""
    words, names = options.split(), () if mesh is None else mesh.mesh_dim_names
    build = SCHEDULES[schedule](shape[0], MICROBATCHES)
    stages, tied = cut(len(set(build.model_stages)), "tied" in words, mesh["tp"] if "tp" in names else None)
    data = tuple(name for name in names if name.startswith("dp"))
    model = "tp" if "tp" in names else None
    axes = None if mesh is None else pp.Axes("pp", data if len(data) > 1 else next(iter(data), None), model)
    place, pieces = 0, 1
    for name in data:
        place, pieces = place * mesh[name].size() + mesh.get_local_rank(name), pieces * mesh[name].size()
    part = slice(place * ROWS // pieces, (place + 1) * ROWS // pieces)
    batches = [batch(step, "overflow" in words) for step in range(STEPS)]
    batches = [(ids[part], tuple(t[part] for t in targets)) for ids, targets in batches]
    pipe = range(shape[0]) if mesh is None else [mesh.get_local_rank("pp")]
    mine = {s: stages[s].params for rank in pipe for s in build.model_stages_of(rank)}
    with new_trainer(
        [stage.fn for stage in stages], loss_fn, build,
        MUON if "muon" in words else pp.optim.adamw(1e-2), mesh, axes=axes, tied=tied,
        clip=0.3 if "clip" in words else None, scale=pp.dynamic_scale(init=8.0, interval=2) if "overflow" in words else None,  # noqa: E501
        shard=next((w for w in words if w in ("optimizer", "params")), "none"),
    ) as trainer:  # fmt: skip
        state, found = trainer.init(mine), []
        for x, y in batches:
            state, metrics = trainer.step(state, x, y)
            found.append(metrics)
        params = {s: whole(tree) for s, tree in state.params.items()}
        again, others = trainer.steps(trainer.init(mine), batches)
        assert str(metrics_of(others)) == str(metrics_of(found))  # bit by bit, with NaN
        assert same_bits(again, state)
    layer = LAYERS // len(stages)
    return metrics_of(found), {
        f"{s * layer + int(n)}.{rest}": t for s in params for n, _, rest, t in parted(params[s])
    }


def parted(tree):
    return ((*name.partition("."), t) for name, t in tree.items())


def grid(rank, size, shape, schedule, expected):
    """Train on the first ranks of all, under each of the options, as torch alone does."""
    mesh = None if size == 1 else mesh_of(shape)
    for options, (wanted, params) in expected.items():
        found, got = trained(mesh, shape, schedule, options)
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=TOLERANCE, nan_ok=True), options
        for name, leaf in got.items():
            assert torch.allclose(leaf, params[name], rtol=TOLERANCE, atol=TOLERANCE), (options, name)


def run(request, shape, schedule, options):
    data = math.prod(shape[1]) if isinstance(shape[1], tuple) else shape[1]
    expected, size = {option: alone(option) for option in options}, shape[0] * data * shape[2]
    if size == 1:
        return grid(0, 1, shape, schedule, expected)
    processes = request.getfixturevalue({2: "two", 4: "four", 8: "eight"}[size])
    return processes(grid, shape, schedule, expected, timeout=2000)


@pytest.mark.parametrize(
    "pipe, data, model, schedule, options",
    [
        (*axes, " ".join(filter(None, words)))
        for *axes, tied, overflow, shard in pairwise(
            (1, 2),
            (1, 2),
            (1, 2),
            [name for name in SCHEDULES if name != "zb_h1"],  # zbv has all that it has
            ("clip", "tied clip", ""),
            ("", "overflow"),
            ("", "optimizer", "params"),
        )
        for words in [(tied, overflow, shard)]
    ],
)
def test_grids_train_as_one_process(request, pipe, data, model, schedule, options):
    run(request, (pipe, data, model), schedule, [options])


@pytest.mark.parametrize(
    "shape, schedule, options",
    [
        ((2, 2, 2), "1f1b", "muon tied clip overflow params"),
        ((1, 2, 2), "interleaved", "muon overflow optimizer"),
        ((1, 1, 2), "1f1b", "muon clip"),
        ((2, 2, 1), "zbv", "muon params"),
        ((1, 2, 1), "dualpipev", "muon tied optimizer"),
        ((1, (2, 2), 1), "1f1b", "muon tied overflow params"),
    ],
    ids=str,
)
def test_matrices_cut_over_ranks_are_updated_whole(request, shape, schedule, options):
    run(request, shape, schedule, [options])


@pytest.mark.parametrize(
    "shape, schedule",
    [
        ((1, (2, 2), 1), "1f1b"),
        pytest.param((2, (2, 2), 1), "zbv", marks=pytest.mark.large),
        pytest.param((1, (2, 2), 2), "dualpipev", marks=pytest.mark.large),
    ],
    ids=str,
)
def test_parameters_are_cut_over_the_last_of_several_data_axes(request, shape, schedule):
    run(request, shape, schedule, OPTIONS[5:8] if request.config.getoption("--large") else OPTIONS[7:8])


@pytest.mark.large
@pytest.mark.parametrize("shape, schedule", PAIRS, ids=str)
def test_every_grid_trains_under_all_options(request, shape, schedule):
    run(request, shape, schedule, OPTIONS)
