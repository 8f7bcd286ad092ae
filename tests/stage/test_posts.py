"""Operators stand between a collective and the wait for it, in the programs of one stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.engines.tracing.graph import is_post, is_wait
from tests.models import same_bits
from tests.sharded_models import D, expert_params, experts, products_beside, random


def stand_apart(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]
    flat = pp.engines.graph(experts(mesh), (expert_params(0), random((4, 3, D), rank))).flat
    bodies = [program.recipe.block.body for program in (flat.forward, flat.backward, flat.backward_input)]
    # of the shared expert, and gradients of parameters
    assert list(map(products_beside, bodies)) == [[0, 1], [2, 2], [1, 0]]
    for body in bodies:
        names = [node.name for node in body if is_post(node)]
        assert names == sorted(names)


def test_operators_of_a_stage_stand_beside_its_collectives(two):
    two(stand_apart)


def in_a_row(rank, size):
    """Collectives that do not need each other are all begun before the first wait."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]

    def stage(w, x):
        sums = [pp.collectives.psum(x * k, mesh) for k in range(1, 4)]
        return w * sums[0] * sums[1] * sums[2]

    body = pp.engines.graph(stage, (random((D,), 0), random((4, D), rank))).flat.forward.recipe.block.body
    kinds = ["post" if is_post(node) else "wait" for node in body if is_post(node) or is_wait(node)]
    assert kinds == ["post"] * 3 + ["wait"] * 3


def test_collectives_in_a_row_are_under_way_at_once(two):
    two(in_a_row)


def drawn(rank, size):
    """Draws that could pass each other: one that only the end needs, one that a collective needs."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]

    def stage(w, x):
        late, soon = F.dropout(x), F.dropout(x @ w)
        return pp.collectives.all_to_all(soon, mesh, 0, 1).sum() * late

    w, x = random((D, D), 0), random((4, 3, D), rank)
    results = []
    for engine in (pp.engines.graph, pp.engines.functional):
        program = engine(stage, (w, x))
        torch.manual_seed(0)
        y, residuals = program.forward(w, x)
        results.append((y, program.backward(residuals, y)))
    assert same_bits(*results)


def test_draws_keep_their_order(two):
    two(drawn)
