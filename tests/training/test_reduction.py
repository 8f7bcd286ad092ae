"""The sums of gradients within a training step: memory that steps share, what overlaps, and what the host
reads.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.schedule import Op
from ppfunc.stage.engines.tracing import cut
from ppfunc.stage.tree import tree_leaves, tree_map
from tests import models
from tests.models import affine, new_trainer, same_bits, squared
from tests.sharded_models import full
from tests.training.world import Reads

WIDTH, ROWS, MICROBATCHES = 6, 16, 4
AXES = pp.Axes("pp", "dp")


def double(params, x):
    return 2 * x


problem = partial(models.problem, m=MICROBATCHES, b=ROWS // MICROBATCHES, d=WIDTH, leaves="wb")


def remembering(seen):
    """Gradient descent whose state is the last gradient, in the memory in which it came; notes where that
    is.
    """

    def update(grads, state, params, *, found_inf=None):
        seen.append([g.data_ptr() for g in tree_leaves(grads)])
        return tree_map(lambda p, g: p - 0.1 * g, params, grads), grads

    return pp.optim.Optimizer(lambda params: tree_map(torch.zeros_like, params), update, elementwise=True)


def forgetting(seen):
    return remembering(seen)._replace(
        init=lambda params: (),
        update=lambda *args, **options: (remembering(seen).update(*args, **options)[0], ()),
    )


def kept(rank, size, shard):
    """Memory of the gradients of several steps, of an optimizer that keeps them, and of one that does not."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    params, x, y = problem(1)
    found = []
    for optimizer in (remembering, forgetting):
        seen = []
        with new_trainer(
            [affine], squared, pp.gpipe(1, MICROBATCHES), optimizer(seen), mesh, axes=AXES, shard=shard
        ) as trainer:
            state, states, copies = trainer.init(params), [], []
            for _ in range(4):
                state, _ = trainer.step(state, x, y)
                del seen[: -len(states) - 1]  # ranks compare what optimizers do before the first step
                states.append(state.optimizer)
                copies.append([t.clone() for t in tree_leaves(state.optimizer)])
            assert same_bits(states, copies)
        found.append(len({tuple(places) for places in seen}))
    return found


def test_the_memory_of_gradients_serves_the_next_step_unless_the_optimizer_keeps_them(two):
    assert two(kept, "none") == [[4, 1]] * 2


def test_parts_of_gradients_too(two):
    assert two(kept, "optimizer") == [[4, 1]] * 2


def accumulated(rank, size, together):
    """States after some steps, sums of gradients whole and in parts, with so many bytes of gradients added up
    at once.
    """
    mesh, made = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), []
    params, x, y = problem(1)
    before, cut._TOGETHER = cut._TOGETHER, together
    stages = [lambda p, x: affine(p, torch.tanh(x @ p["w"]))]
    options = {"axes": AXES, "precision": pp.Precision(reduce=torch.float32)}
    for shard, build in (
        ("none", pp.gpipe),
        ("optimizer", pp.zb_h1),
        ("params", pp.gpipe),
        ("none", pp.zb_h1),
    ):
        with new_trainer(
            stages, squared, build(1, MICROBATCHES), pp.optim.adamw(0.1), mesh, shard=shard, **options
        ) as trainer:
            state = trainer.init(params)
            for _ in range(3):
                state, _ = trainer.step(state, x, y)
            made += tree_leaves(full(state))
    cut._TOGETHER = before
    return made


def test_gradients_that_are_added_up_one_by_one_have_the_same_bits(two):
    whole, parts = two(accumulated, 2**20)[0], two(accumulated, 1)[0]
    assert len(whole) == len(parts) > 6 and all(map(torch.equal, whole, parts))


def emptied(rank, size):
    """A step with a stage that has no parameters, beside that of one process."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    params, x, y = problem(2)
    stages, schedule = [affine, double], pp.interleaved_1f1b(1, MICROBATCHES, 2)
    with new_trainer(stages, squared, schedule, pp.optim.sgd(0.1), mesh, axes=AXES) as trainer:
        state, metrics = trainer.step(trainer.init({0: params[0], 1: {}}), x, y)
    with pp.Trainer(stages, squared, schedule, pp.optim.sgd(0.1)) as trainer:
        wanted, whole = trainer.step(trainer.init({0: params[0], 1: {}}), x, y)
    torch.testing.assert_close((state.params, metrics), (wanted.params, whole), rtol=1e-12, atol=1e-12)


def test_a_stage_without_parameters_has_nothing_to_sum(two):
    two(emptied)


def unread(rank, size, shard):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    params, x, y = problem(1)
    options = {
        "clip": 0.1,
        "scale": pp.dynamic_scale(),
        "shard": shard,
        "precision": pp.Precision(reduce=torch.float32),
    }
    optimizer = pp.optim.adamw(pp.optim.warmup_cosine(0.1, 2, 10))
    with new_trainer(
        [affine], squared, pp.gpipe(1, MICROBATCHES), optimizer, mesh, axes=AXES, **options
    ) as trainer:
        state, _ = trainer.step(trainer.init(params), x, y)
        with Reads(str(Path(pp.__file__).parent / "training")) as reads:
            trainer.step(state, x, y)
    return reads.found, reads.seen > 50


def test_the_host_reads_no_value_in_an_update(two):
    for shard in ("none", "optimizer", "params"):
        assert two(unread, shard) == [([], True)] * 2


def overlapping(rank, size, late):
    """Seconds of each sum on a rank whose peer is late with it, and whether a stage computes between its
    begin and its end.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    params, x, y = problem(2)
    passed = []

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, gradient):
            passed.append(None)
            if rank == 1 and len(passed) % MICROBATCHES == 0:  # the last of a step
                time.sleep(late)
            return gradient

    def slow(params, x):
        return affine(params, Late.apply(x))

    schedule = pp.interleaved_1f1b(1, MICROBATCHES, 2)
    with new_trainer(
        [affine, slow], squared, schedule, pp.optim.sgd(0.1), mesh, axes=AXES, engine=pp.engines.eager
    ) as trainer:
        state, _ = trainer.step(trainer.init(params), x, y)
        _, timeline = trainer.record(state, x, y)
    events = list(zip(timeline.schedule.instructions(0), timeline.starts[0], timeline.ends[0], strict=True))
    sums = {i.stage: (start, end) for i, start, end in events if i.op is Op.REDUCE_GRAD}
    between = [i for i, start, _ in events if i.op is Op.B and start >= sums[1][1]]
    updated = max(end for i, _, end in events if i.op is Op.STEP)
    return max(end - start for start, end in sums.values()), len(between), updated - sums[1][0]


def test_sums_over_data_ranks_run_beside_what_is_computed(two):
    late = 0.5
    longest, between, until_used = two(overlapping, late)[0]
    assert longest < late / 2  # it does not wait for the other rank, which is late
    assert between > 0  # the backwards of the stage before
    assert until_used > 0.8 * late  # and the update does
