"""Trainings drawn at random (odd leaves, tied, cut, clipped, scaled, weighted) have the losses and parameters
of a loop of plain torch.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ppfunc as pp
from tests.models import new_trainer, normal, squared
from tests.sharded_models import full

WIDTH, STEPS, NARROW = 4, 3, {torch.float32: 1e-4}
SCHEDULES = {
    "1f1b": (pp.one_f_one_b, 1), "gpipe": (pp.gpipe, 1), "zb_h1": (pp.zb_h1, 1), "zbv": (pp.zbv, 2), "dualpipev": (pp.dualpipev, 2),  # noqa: E501
    "interleaved": (lambda ranks, m: pp.interleaved_1f1b(ranks, m, 2), 2), "dualpipe": (pp.dualpipe, 1),
}  # fmt: skip
ODD = {
    "row": lambda: normal(1, WIDTH), "scalar": lambda: normal(1)[0].clone(), "empty": lambda: normal(0, 3), "five": lambda: normal(5, 3),  # noqa: E501
    "whole": lambda: torch.tensor([2, 3]), "complex": lambda: torch.complex(normal(3), normal(3, seed=1)).cfloat(), "idle": lambda: normal(2, 2),  # noqa: E501
    "truth": lambda: torch.tensor([True, False]), "even": lambda: normal(4, 2), "column": lambda: normal(6, 2).t(),  # noqa: E501
}  # fmt: skip
TIED = {name: make for name, make in ODD.items() if name not in ("idle", "whole", "truth")}


class Case(NamedTuple):
    """One training: what is drawn."""

    grid: tuple[int, int, int]
    schedule: str
    microbatches: int
    leaves: tuple[tuple[str, ...], ...]
    tied: tuple[str, tuple[int, ...]] | None
    clip: float | None
    norm_type: float
    scale: str
    overflow: bool
    weights: str
    shard: str
    reduce: torch.dtype | None
    optimizer: str
    donate: bool
    engine: str
    together: bool
    cut: bool


def drawn(seed: int, grid: tuple[int, int, int]) -> Case:
    """The case of a number."""
    choose = random.Random(seed)
    schedule = choose.choice([name for name in SCHEDULES if grid[0] % 2 == 0 or name != "dualpipe"])
    stages = grid[0] * SCHEDULES[schedule][1]
    leaves = tuple(tuple(sorted(choose.sample(sorted(ODD), choose.randint(0, 5)))) for _ in range(stages))
    places = (
        tuple(sorted(choose.sample(range(stages), choose.randint(2, min(3, stages))))) if stages > 1 else ()
    )
    scale = choose.choice(["none", "none", "static", "dynamic"])
    shard = choose.choice(["none", "optimizer", "params"])
    engine = (
        choose.choice(["graph", "functional", "eager"]) if shard != "params" else "graph"
    )  # those keep what cannot be freed
    return Case(
        grid, schedule, 2 * grid[0] if "dual" in schedule else choose.choice([2, 4]), leaves,
        (choose.choice(sorted(TIED)), places) if places and choose.random() < 0.6 else None,
        choose.choice([None, math.inf, 0.0, 0.05, 0.3]), choose.choice([2.0, 1.0, 3.0, math.inf]), scale,
        choose.random() < 0.4, choose.choice(["none", "tokens", "one rank", "some"]), shard,
        choose.choice([None, torch.float64, torch.float64, torch.float32]), choose.choice(["adamw", "sgd", "momentum", "nesterov"]),  # noqa: E501
        choose.random() < 0.3, engine, choose.random() < 0.3, choose.random() < 0.7,
    )  # fmt: skip


def contribution(name: str, p: torch.Tensor) -> torch.Tensor | float:
    """What a leaf adds to an activation."""
    if name == "row":
        return p
    if p.is_complex():
        return 0.1 * (p * p * (1 + 2j)).real.sum()
    return 0.1 * (p.float() if not p.is_floating_point() else p).double().pow(2).sum()


def stage_of(odd: tuple[str, ...], tied: str | None, gathered: Any) -> Any:
    """A stage with these leaves; ``gathered`` makes a leaf whole."""

    def stage(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ gathered(p, "w"))
        for name in odd:
            y = y if name == "idle" else y + contribution(name, gathered(p, name))
        return y if tied is None else y + contribution(tied, gathered(p, "tied"))

    return stage


def params_of(case: Case) -> dict[int, dict[str, torch.Tensor]]:
    made: dict[int, dict[str, torch.Tensor]] = {}
    for s, odd in enumerate(case.leaves):
        made[s] = {"w": normal(WIDTH, WIDTH, seed=s)} | {name: ODD[name]() for name in odd}
        if case.tied and s in case.tied[1]:
            made[s]["tied"] = TIED[case.tied[0]]()
    return made


def batches_of(case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Inputs, targets and weights of every step, of all data ranks."""
    ranks, m, made = case.grid[1], case.microbatches, []
    for step in range(STEPS):
        x, y = (normal(ranks, m * 2, WIDTH, seed=10 * step + n) for n in (100, 101))
        if case.overflow and step == 0:
            x[-1, -1, 0] = math.inf
        counts = torch.arange(1, 1 + ranks * m, dtype=torch.float64).view(ranks, m)
        if case.weights == "one rank":
            counts[: ranks - 1] = 0
        elif case.weights == "some":
            counts[:, ::2] = 0
        made.append((x, y, None if case.weights == "none" else counts))
    return made


def alone(case: Case) -> tuple[list[tuple[float, ...]], dict[int, dict[str, torch.Tensor]]]:
    """Losses, norms, scales and what was skipped, and the parameters, of a loop of torch."""
    params = params_of(case)
    if case.tied:
        for s in case.tied[1][1:]:
            params[s]["tied"] = params[case.tied[1][0]]["tied"]
    unique = {
        id(t): t.requires_grad_()
        for tree in params.values()
        for t in tree.values()
        if t.is_floating_point() or t.is_complex()
    }
    own = list(unique.values())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(own, 1e-2, weight_decay=0.1) if case.optimizer == "adamw" else torch.optim.SGD(  # noqa: E501
        own, 1e-2, momentum=0.0 if case.optimizer == "sgd" else 0.9, weight_decay=0.1, nesterov=case.optimizer == "nesterov"  # noqa: E501
    )  # fmt: skip
    stages = [
        stage_of(odd, case.tied[0] if case.tied and s in case.tied[1] else None, dict.__getitem__)
        for s, odd in enumerate(case.leaves)
    ]
    scale, found = {"none": 1.0, "static": 4.0, "dynamic": 8.0}[case.scale], []
    for x, y, weights in batches_of(case):
        ranks, m = case.grid[1], case.microbatches
        shares = (
            torch.full((ranks, m), 1 / (ranks * m), dtype=torch.float64)
            if weights is None
            else weights / weights.sum()
        )
        loss: Any = 0.0
        for r in range(ranks):
            for n, (a, b) in enumerate(zip(x[r].chunk(m), y[r].chunk(m), strict=True)):
                for s, stage in enumerate(stages):
                    a = stage(params[s], a)
                loss = loss + shares[r, n] * squared(a, b)
        optimizer.zero_grad()
        loss.backward()
        for p in own:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        each = [p.grad.abs().reshape(-1) for p in own if p.grad is not None]
        norm = torch.cat(each).norm(case.norm_type).item()
        skipped = not (math.isfinite(norm) and math.isfinite(loss.item()))
        found.append((loss.item(), norm, scale, float(skipped)))
        if not skipped:
            if case.clip is not None and case.clip < math.inf:
                for p in own:
                    p.grad *= min(1.0, case.clip / (norm + 1e-6))
            optimizer.step()
        elif case.scale == "dynamic":
            scale /= 2
    return found, {s: {name: t.detach() for name, t in tree.items()} for s, tree in params.items()}


def laid(case: Case, tree: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    """The leaves over the ranks of the axis of the model, some cut, some whole, some plain."""
    if mesh is None or not case.cut:
        return {name: t.clone() for name, t in tree.items()}
    made = {}
    for n, (name, t) in enumerate(sorted(tree.items())):
        dim = next((d for d, size in enumerate(t.shape) if size and size % 2 == 0), None)
        kind = Replicate() if dim is None else Shard(dim)
        odd = not (t.is_floating_point() or t.is_complex())
        made[name] = (
            t.clone()
            if odd or (dim is None and n % 2 and name != "tied")
            else distribute_tensor(t.clone(), mesh, [kind], src_data_rank=None)
        )
    return made


def gathering(mesh: Any, layouts: dict[str, Any]) -> Any:
    """What makes a leaf whole in a stage."""

    def gathered(p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        dim = layouts.get(name)
        return p[name] if dim is None else pp.collectives.all_gather(p[name], mesh, dim, replicated=True)

    return gathered


def trained(rank: int, size: int, case: Case) -> tuple[list[tuple[float, ...]], float]:
    """Train as the case says; the metrics, and the largest relative difference from the loop."""
    mesh, names = None, ("pp", "dp", "tp")
    if size > 1:
        kept = [(name, n) for name, n in zip(names, case.grid, strict=True) if n > 1 or name == "pp"]
        mesh = init_device_mesh(
            "cpu", tuple(n for _, n in kept), mesh_dim_names=tuple(name for name, _ in kept)
        )
    has = {name: mesh is not None and name in (mesh.mesh_dim_names or ()) for name in names}
    tensors = mesh["tp"] if has["tp"] else None
    schedule = SCHEDULES[case.schedule][0](case.grid[0], case.microbatches)
    pipes = range(case.grid[0]) if mesh is None else [mesh.get_local_rank("pp")]
    data = mesh.get_local_rank("dp") if has["dp"] else 0
    mine = {
        s: laid(case, tree, tensors)
        for s, tree in params_of(case).items()
        if any(s in schedule.model_stages_of(r) for r in pipes)
    }
    stages: list[Any] = []
    for s, odd in enumerate(case.leaves):
        cuts = {
            n: next((q.dim for q in t.placements if q.is_shard()), None)
            for n, t in mine.get(s, {}).items()
            if isinstance(t, DTensor)
        }
        stages.append(
            stage_of(odd, case.tied[0] if case.tied and s in case.tied[1] else None, gathering(tensors, cuts))
        )
    tied = {"t": [(s, "tied") for s in case.tied[1]]} if case.tied else None
    rate, given = 1e-2, {"weight_decay": 0.1, "donate": case.donate}
    optimizer = pp.optim.adamw(rate, **given) if case.optimizer == "adamw" else pp.optim.sgd(
        rate, 0.0 if case.optimizer == "sgd" else 0.9, nesterov=case.optimizer == "nesterov", **given
    )  # fmt: skip
    scale = {"none": None, "static": pp.static_scale(4.0), "dynamic": pp.dynamic_scale(8.0)}[case.scale]
    axes = (
        None if mesh is None else pp.Axes("pp", *("dp" if has["dp"] else None, "tp" if has["tp"] else None))
    )
    with warnings.catch_warnings(), new_trainer(
        stages, squared, schedule, optimizer, mesh, axes=axes, engine=getattr(pp.engines, case.engine), tied=tied, clip=case.clip,  # noqa: E501
        norm_type=case.norm_type, scale=scale, shard=case.shard, precision=pp.Precision(reduce=case.reduce),
    ) as trainer:  # fmt: skip
        warnings.simplefilter("ignore")
        state, found = trainer.init(mine), []
        if case.together and case.weights == "none":
            state, found = trainer.steps(state, [(x[data], y[data]) for x, y, _ in batches_of(case)])
        else:
            for x, y, weights in batches_of(case):
                state, metrics = trainer.step(
                    state, x[data], y[data], loss_weights=None if weights is None else weights[data]
                )
                found.append(metrics)
    wanted, params = alone(case)
    got = [(m.loss.item(), m.grad_norm.item(), m.scale.item(), m.skipped.item()) for m in found]
    narrow = any("complex" in odd for odd in case.leaves) or (
        case.tied is not None and case.tied[0] == "complex"
    )
    tolerance = 1e-4 if narrow else NARROW.get(case.reduce, 1e-12)
    for one, other in zip(got, wanted, strict=True):
        if not other[3]:
            assert one == pytest.approx(other, rel=tolerance), (case, one, other)
        else:
            assert one[2:] == other[2:], (case, one, other)
    for s, tree in state.params.items():
        for name, leaf in full(tree).items():
            same = (
                torch.allclose(leaf, params[s][name], rtol=tolerance, atol=tolerance)
                and leaf.shape == params[s][name].shape
            )
            assert same, (case, s, name, leaf, params[s][name])
    return got


GRIDS = {
    1: [(1, 1, 1), (2, 1, 1), (4, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (4, 1, 1)],
}


def run(request: Any, size: int, few: int) -> None:
    for n in range(200 if request.config.getoption("--large") else few):
        grid = GRIDS[size][n % len(GRIDS[size])]
        case = drawn(1000 * size + n, grid)
        if size == 1:
            trained(0, 1, case)
        else:
            answers = request.getfixturevalue({2: "two", 4: "four"}[size])(trained, case)
            assert len(set(map(str, answers))) == 1, case


@pytest.mark.parametrize("size, few", [(1, 9), (2, 12), (4, 3)])
def test_random_trainings_are_those_of_a_loop(request, size, few):
    run(request, size, few)
