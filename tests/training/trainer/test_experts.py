"""Experts over data ranks, in the shape of DeepSeek-V3, train as in one process, where torch trains them."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import ppfunc as pp
from tests.models import new_trainer, normal
from tests.sharded_models import full

D, HIDDEN, EXPERTS, TOP, ROWS, MICROBATCHES, STEPS = 4, 8, 4, 2, 16, 4, 4
SPEED = 0.05  # of the balancing bias
TOLERANCE = 1e-12
SCHEDULES = {"1f1b": pp.one_f_one_b, "zbv": pp.zbv, "dualpipev": pp.dualpipev}
OPTIONS = {"reduce_state": {"counts": "sum", "bias": "mean"}, "clip": 0.3}


def block(mesh, tp=None):
    """A shared expert, and for every token the best of some that lie over the ranks of an axis.

    A token is sent in a row of its own to each expert, so that none is dropped.
    """

    def exchanged(x, split, joined):
        return x if mesh is None else pp.collectives.all_to_all(x, mesh, split, joined)

    def wide(x):
        return x if tp is None else pp.collectives.pvary(x, tp)

    def summed(x):
        return x if tp is None else pp.collectives.psum(x, tp)

    def stage(p, x, state):
        h = F.layer_norm(x, (D,), p["norm"])
        scores = torch.sigmoid(h @ p["router"])
        chosen = (scores.detach() + state["bias"]).topk(TOP).indices
        hit = (chosen[..., None] == torch.arange(EXPERTS)).any(1).to(x.dtype)  # [rows, experts]
        gates = scores * hit / (scores * hit).sum(-1, keepdim=True)
        place = (hit.cumsum(0) - 1)[..., None] == torch.arange(len(x))
        into = hit[..., None] * place.to(x.dtype)  # [rows, experts, capacity]
        sent = exchanged(torch.einsum("rec,rd->ecd", into, h), 0, 1)
        y = torch.einsum("ecd,edh->ech", wide(sent), p["experts"]["up"])
        y = summed(torch.einsum("ech,ehd->ecd", F.silu(y), p["experts"]["down"]))
        y = torch.einsum("rec,re,ecd->rd", into, gates, exchanged(y, 1, 0))
        y = y + F.silu(h @ p["up"]) @ p["down"]
        return pp.Output(x + y, state={"bias": state["bias"], "counts": state["counts"] + hit.sum(0)})

    return stage


def balanced(stage, state):
    """Raise the bias of experts with few tokens, and begin to count anew."""
    few = state["counts"].mean() - state["counts"]
    return {"bias": state["bias"] + SPEED * few.sign(), "counts": torch.zeros_like(few)}


def params(stage):
    shapes = {"norm": (D,), "router": (D, EXPERTS), "up": (D, HIDDEN), "down": (HIDDEN, D)}
    made = {name: normal(*shape, seed=10 * stage + n) / 2 for n, (name, shape) in enumerate(shapes.items())}
    many = enumerate({"up": (EXPERTS, D, HIDDEN), "down": (EXPERTS, HIDDEN, D)}.items())
    experts = {name: normal(*shape, seed=10 * stage + 7 + n) / 2 for n, (name, shape) in many}
    return made | {"experts": experts}


def state():
    return {
        "bias": torch.zeros(EXPERTS, dtype=torch.float64),
        "counts": torch.zeros(EXPERTS, dtype=torch.float64),
    }


def batch(step):
    return normal(ROWS, D, seed=100 + step), normal(ROWS, D, seed=200 + step)


def loss_fn(y, target):
    return ((y - target) ** 2).mean()


@cache
def alone(stages, microbatches):
    """Losses and norms of every step, then parameters and biases, of torch in one process."""
    trees, states = [params(s) for s in range(stages)], [state() for _ in range(stages)]
    leaves = [leaf.requires_grad_() for leaf in pp.stage.tree.tree_leaves(trees)]
    optimizer, found = torch.optim.AdamW(leaves, 1e-2), []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        total = 0.0
        for rows, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            for s in range(stages):
                out = block(None)(trees[s], rows, states[s])
                rows, states[s] = out.y, out.state
            loss = loss_fn(rows, wanted) / microbatches
            loss.backward()
            total += loss.item()
        found.append((total, torch.nn.utils.clip_grad_norm_(leaves, OPTIONS["clip"]).item()))
        optimizer.step()
        states = [balanced(s, each) for s, each in enumerate(states)]
    detach = partial(pp.stage.tree.tree_map, torch.Tensor.detach)
    return found, detach(trees), states


def laid(tree, mesh, names):
    """Lay the parameters of experts over the axis ep, and their hidden width over tp."""

    def rule(name, leaf):
        if not name.startswith("experts"):
            return None
        hidden = 2 if name.endswith("up") else 1
        return [Shard(0), Shard(hidden)][: len(names)]

    return pp.stage.shard(tree, mesh[names], rule)


def largest(found, wanted):
    got, expected = (pp.stage.tree.tree_leaves(full(tree)) for tree in (found, wanted))
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@cache
def mesh_of(sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def trainer_over(sizes, names, axes, schedule, shard, **options):
    mesh = mesh_of(sizes, names)
    build = SCHEDULES[schedule](sizes[names.index("pp")], MICROBATCHES)
    tp = mesh["tp"] if "tp" in names else None
    trainer = new_trainer(
        [block(mesh["ep"], tp)] * build.stages, loss_fn, build, pp.optim.adamw(1e-2), mesh,
        axes=axes, shard=shard, update_state=balanced, **OPTIONS, **options,
    )  # fmt: skip
    mine = build.model_stages_of(mesh.get_local_rank("pp"))
    over = tuple(name for name in names if name in ("ep", "tp"))
    trees = {s: laid(params(s), mesh, over) for s in mine}
    return trainer, trainer.init(trees, {s: state() for s in mine})


def data_ranks(transport):
    """List the ranks that run other batches, in the order of the data axes."""
    return transport.grid.along(transport.axes.data_axes)


def part_of(trainer, tree, count):
    place = data_ranks(trainer.transport).index(trainer.transport.grid.rank)
    return tuple(t.chunk(count)[place] for t in tree)


def trained(rank, size, sizes, names, axes, schedule, shard, expected, folder):
    """Train some steps as torch has; save in the middle."""
    overlapped = pp.interleaved() if schedule == "dualpipev" else None
    trainer, current = trainer_over(sizes, names, axes, schedule, shard, overlapped=overlapped)
    found, wanted, biases = expected
    count, deviation = len(data_ranks(trainer.transport)), 0.0
    with trainer:
        for step in range(STEPS):
            current, metrics = trainer.step(current, *part_of(trainer, batch(step), count))
            got = metrics.loss.item(), metrics.grad_norm.item()
            deviation = max(deviation, *(abs(a - b) for a, b in zip(got, found[step], strict=True)))
            if folder and step == 1:
                pp.checkpoint.save(folder, current, step=2)
        for s, tree in current.params.items():
            deviation = max(deviation, largest(tree, wanted[s]))
            assert torch.equal(current.stage_state[s]["bias"], biases[s]["bias"])
    return deviation


def resumed(rank, size, sizes, names, axes, schedule, shard, expected, folder):
    """Go on from what was saved, with another number of expert ranks."""
    trainer, current = trainer_over(sizes, names, axes, schedule, shard)
    found, wanted, _ = expected
    count = len(data_ranks(trainer.transport))
    with trainer:
        current = pp.checkpoint.load(pp.checkpoint.latest(folder), like=current)
        for step in range(2, STEPS):
            current, metrics = trainer.step(current, *part_of(trainer, batch(step), count))
            assert metrics.grad_norm.item() == pytest.approx(found[step][1], rel=TOLERANCE)
        return max(largest(tree, wanted[s]) for s, tree in current.params.items())


EP = ("pp", "ep"), pp.Axes("pp", "ep", experts="ep")
INNER = ("pp", "dp", "ep"), pp.Axes("pp", ("dp", "ep"), experts="ep")
OUTER = ("pp", "ep", "dp"), pp.Axes("pp", ("ep", "dp"), experts="ep")


CASES = [
    ((2, 2), EP, "dualpipev", "none"),
    ((1, 2, 2), INNER, "1f1b", "optimizer"),
]


def compared(processes, count, sizes, form, schedule, shard, folder="", timeout=60):
    """The state of torch's training, from which that over a grid is not further away than rounding."""
    stages, data = SCHEDULES[schedule](sizes[0], MICROBATCHES).stages, count // sizes[0]
    expected = alone(stages, data // (2 if "tp" in form[0] else 1) * MICROBATCHES)
    assert any(each["bias"].any() for each in expected[2])
    found = processes(trained, sizes, *form, schedule, shard, expected, folder, timeout=timeout)
    assert max(found) < TOLERANCE, found
    return expected


@pytest.mark.parametrize("sizes, form, schedule, shard", CASES, ids=str)
def test_experts_train_as_in_one_process(four, sizes, form, schedule, shard):
    compared(four, 4, sizes, form, schedule, shard)


@pytest.mark.parametrize(
    "sizes, form, others, other_form, shard",
    [((2, 2), EP, (2, 2, 1), INNER, "optimizer"), ((1, 2, 2), OUTER, (1, 4), EP, "params")],
    ids=str,
)
def test_experts_are_loaded_by_another_number_of_ranks(
    four, sizes, form, others, other_form, shard, tmp_path
):
    expected = compared(four, 4, sizes, form, "1f1b", shard, str(tmp_path))
    found = four(resumed, others, *other_form, "1f1b", "none", expected, str(tmp_path))
    assert max(found) < TOLERANCE, found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_experts_over_tensor_ranks(request, schedule):
    if not request.config.getoption("--large"):
        pytest.skip("eight processes: run with --large")
    form = ("pp", "ep", "tp"), pp.Axes("pp", "ep", "tp", experts="ep")
    eight = request.getfixturevalue("eight")
    compared(eight, 8, (2, 2, 2), form, schedule, "optimizer", timeout=600)


def mistaken(rank, size):
    """Axes, layouts, batches and states that do not go together, each with what its error says."""
    names, axes = EP
    mesh = mesh_of((2, 2), names)
    for wrong in (pp.Axes("pp", "ep", experts="pp"), pp.Axes("pp", "ep", context="sp")):
        with pytest.raises(ValueError, match="expected one of the data axes, ep: its ranks run other"):
            pp.P2P(mesh=mesh, axes=wrong)
    with pytest.raises(ValueError, match="shard: got 'params' with experts='ep', the last data axis"):
        pp.P2P(mesh=mesh, axes=axes, shard="params")
    trees = {mesh.get_local_rank("pp"): laid(params(0), mesh, ("ep",))}
    with new_trainer(
        [block(None)] * 2, loss_fn, pp.gpipe(2, 2), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp", "ep")
    ) as trainer:
        with pytest.raises(ValueError, match=r"got parts over the axis 'ep', .* Axes\(experts=...\)"):
            trainer.init(trees)
        with pytest.raises(ValueError, match="say how they go together"):
            trainer.init({s: params(s) for s in trees}, {s: state() for s in trees})
    trainer, current = trainer_over((2, 2), names, axes, "1f1b", "none")
    rows = ROWS // (1 + mesh.get_local_rank("ep"))  # others meet no such tokens
    with trainer, pytest.raises(pp.AgreementError, match="batches of the same shapes"):
        trainer.step(current, *(t[:rows] for t in batch(0)))
    return True


def test_mistakes_are_named_on_every_rank(four):
    assert four(mistaken) == [True] * 4


def weighed(rank, size):
    """The gradient norm where a data rank gives no weight to a microbatch, of whose tokens others take part
    in the backward.
    """
    names, axes = EP
    trainer, current = trainer_over((1, 2), names, axes, "1f1b", "none")
    weights = [[1.0, 0.0, 2.0, 1.0], [3.0, 1.0, 0.0, 1.0]]
    with trainer:
        found = trainer.step(current, *part_of(trainer, batch(0), 2), loss_weights=weights[rank])[1]
    trees, total = params(0), 0.0
    leaves = [leaf.requires_grad_() for leaf in pp.stage.tree.tree_leaves(trees)]
    flat = [weight for row in weights for weight in row]
    for rows, wanted, weight in zip(*(t.chunk(8) for t in batch(0)), flat, strict=True):
        total = total + loss_fn(block(None)(trees, rows, state()).y, wanted) * weight / 9
    norm = torch.stack([g.norm() for g in torch.autograd.grad(total, leaves)]).norm()
    assert found.loss.item() == pytest.approx(total.item(), rel=TOLERANCE)
    return found.grad_norm.item(), norm.item()


def test_microbatches_without_weight_run_where_others_take_part(two):
    for got, expected in two(weighed):
        assert got == pytest.approx(expected, rel=TOLERANCE)


def named_norms(rank, size, form, shard):
    """Norms by stage and name of a step over 1 x 2 x 2, and of torch's gradients of the whole."""
    trainer, current = trainer_over((1, 2, 2), *form, "1f1b", shard)
    with trainer:
        found = trainer.step(current, *part_of(trainer, batch(0), 4), return_norms=True)[1]
        again = trainer.step(current, *part_of(trainer, batch(0), 4))[1]
    assert again.stage_norms is None and again.leaf_norms is None
    trees, total = params(0), 0.0
    leaves = [leaf.requires_grad_() for leaf in pp.stage.tree.tree_leaves(trees)]
    for rows, wanted in zip(*(t.chunk(16) for t in batch(0)), strict=True):
        total = total + loss_fn(block(None)(trees, rows, state()).y, wanted) / 16
    names = ["norm", "router", "up", "down", "experts.up", "experts.down"]
    norms = {name: g.norm().item() for name, g in zip(names, torch.autograd.grad(total, leaves), strict=True)}
    return found.stage_norms.tolist(), found.leaf_norms[0], found.grad_norm.item(), norms


@pytest.mark.parametrize("form, shard", [(OUTER, "params"), (INNER, "optimizer")], ids=str)
def test_norms_by_name_are_those_of_whole_gradients(four, form, shard):
    for stages, leaves, total, expected in four(named_norms, form, shard):
        assert stages == [pytest.approx(total, rel=TOLERANCE)]
        assert {name: norm.item() for name, norm in leaves.items()} == pytest.approx(expected, rel=TOLERANCE)
