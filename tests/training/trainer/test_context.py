"""Sequences that are cut over ranks train as torch trains them whole, in one process, also with padding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.tree import tree_map
from tests.models import new_trainer, normal
from tests.sharded_models import full, largest_difference

D, HEADS, TIME, ROWS, MICROBATCHES, STEPS, TOLERANCE = 8, 4, 8, 8, 4, 4, 1e-12
LENGTHS = (8, 3, 5, 8, 2, 7, 8, 1)  # tokens of every row; some ranks have none of a microbatch
SCHEDULES = {"1f1b": pp.one_f_one_b, "zbv": pp.zbv, "dualpipev": pp.dualpipev}


def block(axis):
    def stage(p, x):
        q, k, v = (x @ p["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if axis is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = pp.context_attention(q, k, v, axis)
        x = x + y.transpose(1, 2).flatten(2) @ p["o"]
        return x + torch.tanh(x @ p["up"]) @ p["down"]

    return stage


def params(stage):
    shapes = {"qkv": (D, 3 * D), "o": (D, D), "up": (D, D), "down": (D, D)}
    return {name: normal(*shape, seed=10 * stage + n) / 3 for n, (name, shape) in enumerate(shapes.items())}


def batch(step):
    seen = torch.arange(TIME) < torch.tensor(LENGTHS)[:, None]
    return normal(ROWS, TIME, D, seed=step), (normal(ROWS, TIME, D, seed=99 - step), seen)


def loss_fn(y, target):
    """The mean over tokens; 0 without any."""
    wanted, seen = target
    return (((y - wanted) ** 2).mean(-1) * seen).sum() / seen.sum().clamp(min=1)


@cache
def alone(stages):
    trees = [params(s) for s in range(stages)]
    leaves = [leaf.requires_grad_() for leaf in pp.stage.tree.tree_leaves(trees)]
    optimizer, found = torch.optim.AdamW(leaves, 1e-2), []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        for tree in trees:
            x = block(None)(tree, x)
        loss = loss_fn(x, target)
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(leaves, 0.3).item()))
        optimizer.step()
    return found, pp.stage.tree.tree_map(torch.Tensor.detach, trees)


def trained(rank, size, sizes, data, schedule, shard, expected, device="cpu"):
    names = ("pp", *data)
    mesh = init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=names)
    build = SCHEDULES[schedule](sizes[0], MICROBATCHES)
    found, wanted = expected
    with new_trainer(
        [block(mesh["cp"])] * build.stages, loss_fn, build, pp.optim.adamw(1e-2), mesh,
        axes=pp.Axes("pp", data, context="cp"), shard=shard, clip=0.3,
        overlapped=pp.interleaved() if schedule == "dualpipev" else None,
    ) as trainer:  # fmt: skip
        own = {s: params(s) for s in build.model_stages_of(mesh.get_local_rank("pp"))}
        state = trainer.init(tree_map(lambda leaf: leaf.to(device), own))
        deviation = 0.0
        for step in range(STEPS):
            x, (target, seen) = tree_map(lambda leaf: leaf.to(device), batch(step))
            for axis, dim in (("dp", 0), ("cp", 1)):
                if axis in names:
                    n = mesh[axis].size(), mesh.get_local_rank(axis)
                    x, target, seen = (t.chunk(n[0], dim)[n[1]] for t in (x, target, seen))
            tokens = seen.unflatten(0, (MICROBATCHES, -1)).flatten(1).sum(1)
            state, metrics = trainer.step(state, x, (target, seen), loss_weights=tokens)
            pairs = zip((metrics.loss.item(), metrics.grad_norm.item()), found[step], strict=True)
            deviation = max(deviation, *(abs(a - b) for a, b in pairs))
        whole = {s: tree_map(torch.Tensor.cpu, full(tree)) for s, tree in state.params.items()}
        return max(deviation, *(largest_difference(tree, wanted[s]) for s, tree in whole.items()))


@pytest.mark.parametrize(
    "sizes, data, schedule, shard",
    [
        ((2, 2), ("cp",), "zbv", "params"),
        ((2, 2), ("cp",), "dualpipev", "optimizer"),
        ((1, 2, 2), ("dp", "cp"), "1f1b", "params"),
    ],
    ids=str,
)
def test_sequences_over_ranks_train_as_in_one_process(four, sizes, data, schedule, shard):
    expected = alone(SCHEDULES[schedule](sizes[0], MICROBATCHES).stages)
    found = four(trained, sizes, data, schedule, shard, expected)
    assert max(found) < TOLERANCE, found
