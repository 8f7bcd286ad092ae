"""Pipelines to train, and how the tests of trainers train them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves
from tests.models import normal

WIDTH, STAGES, ROWS, STEPS = 6, 4, 32, 6
TOLERANCE = 1e-12


def dense(params, x):
    return torch.tanh(x @ params["w"])


def problem(stages=STAGES):
    params = {s: {"w": normal(WIDTH, WIDTH, seed=s)} for s in range(stages)}
    return [dense] * stages, params, normal(ROWS, WIDTH, seed=90), normal(ROWS, WIDTH, seed=91)


def train(trainer, params, x, y, steps=STEPS, **options):
    """The last state, and losses and norms of every step."""
    state, found = trainer.init(params), []
    for n in range(steps):
        state, metrics = trainer.step(state, x, y, seed=(0, n), **options)
        found.append((metrics.loss.item(), metrics.grad_norm.item()))
    return state, found


def same_bits(one, other):
    """Whether the parts of two trees that this process has are the same."""
    return all(torch.equal(local(a), local(b)) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


def noisy(params, x):
    return F.dropout(torch.tanh(x @ params["w"]), 0.5)


def copy_of(tree):
    return {name: t.clone() for name, t in tree.items()}


def embed(params, ids):
    return params["e"][ids]


def head(params, x):
    return x @ params["w"].T


TIED = {"embedding": [(0, "e"), (3, "w")]}


def tied_problem():
    params = {s: {"w": normal(WIDTH, WIDTH, seed=s)} for s in (1, 2)} | {0: {"e": normal(10, WIDTH)}, 3: {"w": normal(10, WIDTH)}}
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(10, (ROWS,), generator=generator) for _ in range(2))
    return [embed, noisy, dense, head], params, ids, targets
