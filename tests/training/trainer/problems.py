"""Pipelines to train, and how the tests of trainers train them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests import models
from tests.models import dense, normal

WIDTH, STAGES, ROWS, STEPS = 6, 4, 32, 6
TOLERANCE = 1e-12


def problem(stages=STAGES):
    return [dense] * stages, *models.problem(stages, b=ROWS // 4, d=WIDTH)


def train(trainer, params, x, y, steps=STEPS, **options):
    """The last state, and losses and norms of every step."""
    state, found = trainer.init(params), []
    for n in range(steps):
        state, metrics = trainer.step(state, x, y, seed=(0, n), **options)
        found.append((metrics.loss.item(), metrics.grad_norm.item()))
    return state, found


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
    params = {s: {"w": normal(WIDTH, WIDTH, seed=s)} for s in (1, 2)} | {
        0: {"e": normal(10, WIDTH)},
        3: {"w": normal(10, WIDTH)},
    }
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(10, (ROWS,), generator=generator) for _ in range(2))
    return [embed, noisy, dense, head], params, ids, targets
