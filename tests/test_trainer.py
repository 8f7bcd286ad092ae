"""Training steps: as torch trains one process, to the bit where that is promised, over every axis of a mesh."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves
from tests.models import normal, squared

WIDTH, STAGES, ROWS, STEPS = 6, 4, 32, 6
TOLERANCE = 1e-12
SCHEDULES = {
    "1f1b": lambda ranks, m: pp.one_f_one_b(STAGES, m) if ranks == STAGES else pp.one_f_one_b(ranks, m),
    "interleaved": lambda ranks, m: pp.interleaved_one_f_one_b(ranks, m, STAGES // ranks),
    "zb_h1": lambda ranks, m: pp.zb_h1(ranks, m),
    "zbv": lambda ranks, m: pp.zbv(STAGES // 2, m),
    "dualpipev": lambda ranks, m: pp.dualpipev(STAGES // 2, m),
}


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
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


# -- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip, norm_type", [(None, 2.0), (0.1, 2.0), (0.1, 3.0), (0.01, math.inf), (math.inf, 2.0), (0.0, 2.0)])
def test_it_trains_as_torch_does(clip, norm_type):
    stages, params, x, y = problem()
    with pp.train_step(stages, squared, pp.zb_h1(4, 8), pp.adamw(1e-2), clip=clip, norm_type=norm_type) as trainer:
        state, found = train(trainer, params, x, y)
    own = [params[s]["w"].clone().requires_grad_() for s in range(4)]
    optimizer = torch.optim.AdamW(own, 1e-2)
    for loss, norm in found:
        optimizer.zero_grad()
        out = x
        for w in own:
            out = torch.tanh(out @ w)
        whole = squared(out, y)
        whole.backward()
        measured = nn.utils.clip_grad_norm_(own, math.inf if clip is None else clip, norm_type)
        assert (loss, norm) == pytest.approx((whole.item(), measured.item()), rel=TOLERANCE)
        optimizer.step()
    assert all(torch.allclose(state.params[s]["w"], own[s], rtol=TOLERANCE, atol=TOLERANCE) for s in range(4))
    assert state.step == STEPS


@pytest.mark.parametrize("builder", [pp.gpipe, pp.one_f_one_b, pp.zb_h1])
def test_passes_add_up_as_one_schedule_of_all_their_microbatches(builder):
    stages, params, x, y = problem()
    options = {"clip": 0.1, "scale": pp.static_scale(8.0)}
    several = train(pp.train_step(stages, squared, builder(4, 4), pp.adamw(1e-2), accumulate=2, **options), params, x, y)
    once = train(pp.train_step(stages, squared, builder(4, 8), pp.adamw(1e-2), **options), params, x, y)
    assert several[1] == once[1]
    assert same_bits(several[0], once[0])


def noisy(params, x):
    return F.dropout(torch.tanh(x @ params["w"]), 0.5)


def test_passes_draw_what_one_schedule_draws():
    _, params, x, y = problem()
    several = train(pp.train_step([noisy] * 4, squared, pp.gpipe(4, 2), pp.sgd(1e-2), accumulate=4), params, x, y)
    once = train(pp.train_step([noisy] * 4, squared, pp.gpipe(4, 8), pp.sgd(1e-2)), params, x, y)
    assert same_bits(several[0], once[0])


@pytest.mark.parametrize("options", [{"clip": 0.1}, {"on_nonfinite": "ignore"}, {"scale": pp.dynamic_scale(interval=2)}], ids=str)
@pytest.mark.parametrize("builder", [pp.one_f_one_b, pp.zb_h2])
def test_several_steps_at_once_are_those_steps(options, builder):
    stages, params, x, y = problem()
    with pp.train_step(stages, squared, builder(4, 4), pp.adamw(1e-2), accumulate=2, **options) as trainer:
        wanted, found = train(trainer, params, x, y)
        got, metrics = trainer.steps(trainer.init(params), [(x, y)] * STEPS, seed=(0, 0))
        state, scales = trainer.init(params), []
        for _ in range(STEPS):
            state, own = trainer.step(state, x, y)
            scales.append(own.scale)
    assert same_bits(got, wanted)
    assert same_bits([m.scale for m in metrics], scales)
    assert [(m.loss.item(), m.grad_norm.item()) for m in metrics] == found


def test_a_stage_is_updated_where_the_schedule_has_it_or_after_all():
    stages, params, x, y = problem(2)
    seen = []

    def noting(rate):
        inner = pp.sgd(rate)

        def update(grads, state, params):
            seen.append(float(params["w"].sum()))
            return inner.update(grads, state, params)

        return inner._replace(update=update)

    with pp.train_step(stages, squared, pp.one_f_one_b(2, 2), noting(1e-2), on_nonfinite="ignore") as trainer:
        trainer.steps(trainer.init(params), [(x, y)] * 2)
    assert len(seen) == 4
    assert len(set(seen)) == 4  # every update was of new parameters


def test_an_overflow_is_skipped_and_the_scale_falls():
    stages, params, x, y = problem()
    bad = x.clone()
    bad[0] = math.inf
    with pp.train_step(stages, squared, pp.zb_h1(4, 4), pp.adamw(1e-2), scale=pp.dynamic_scale(init=4.0)) as trainer:
        first = trainer.init(params)
        state, metrics = trainer.step(first, bad, y)
        assert (metrics.skipped, metrics.scale, state.scale["scale"], state.step) == (1, 4, 2, 0)
        assert same_bits((state.params, state.optimizer), (first.params, first.optimizer))
        state, metrics = trainer.step(state, x, y)
        assert (metrics.skipped, metrics.scale, state.step) == (0, 2, 1)
        assert metrics.grad_norm.isfinite()


def test_what_is_not_finite_raises_or_is_ignored_where_asked():
    stages, params, x, y = problem()
    bad = x / 0
    with (
        pp.train_step(stages, squared, pp.zb_h1(4, 4), pp.sgd(1e-2), on_nonfinite="raise") as trainer,
        pytest.raises(pp.PipelineError, match=r"FloatingPointError: the loss is nan, the norm of the gradients nan"),
    ):
        trainer.step(trainer.init(params), bad, y)
    with pp.train_step(stages, squared, pp.zb_h1(4, 4), pp.sgd(1e-2), on_nonfinite="ignore") as trainer:
        state, metrics = trainer.step(trainer.init(params), bad, y)
    assert metrics.skipped == 0
    assert state.params[0]["w"].isnan().any()


def test_losses_weigh_as_their_weights_whatever_their_sum():
    stages, params, x, y = problem()
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0])
    with pp.train_step(stages, squared, pp.one_f_one_b(4, 4), pp.sgd(1e-2)) as trainer:
        state, metrics = trainer.step(trainer.init(params), x, y, loss_weights=weights)
        twice, _ = trainer.step(trainer.init(params), x, y, loss_weights=2 * weights)
        assert trainer.evaluate(trainer.init(params), x, y, loss_weights=weights) == pytest.approx(metrics.loss.item(), rel=TOLERANCE)
    loss, grads = pp.value_and_grad(stages, squared, pp.one_f_one_b(4, 4), loss_weights=weights / 8)(params, x, y)
    assert metrics.loss.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    for s in range(4):
        assert torch.allclose(state.params[s]["w"], params[s]["w"] - 1e-2 * grads[s]["w"], rtol=TOLERANCE)
        assert torch.allclose(state.params[s]["w"], twice.params[s]["w"], rtol=TOLERANCE)


def test_masters_are_wide_and_stages_compute_narrow():
    _, params, x, y = problem()
    seen = set()

    def stage(p, x):
        seen.add((p["w"].dtype, x.dtype))
        return torch.tanh(x @ p["w"])

    precision = pp.Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float32)
    loss = lambda out, target: squared(out.float(), target.float())  # noqa: E731
    with pp.train_step([stage] * 4, loss, pp.one_f_one_b(4, 4), pp.adamw(1e-2), precision=precision) as trainer:
        state, found = train(trainer, params, x, y)
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert {t.dtype for t in tree_leaves(state.params)} == {torch.float32}
    assert found[-1][0] < found[0][0]


def test_leaves_without_gradients_and_of_odd_shapes_stay_or_train():
    def stage(p, x):
        return (x @ p["w"]) * p["s"] + p["row"] + p["z"].real.sum() + p["empty"].sum() + p["n"]

    odd = {
        "w": normal(WIDTH, WIDTH), "s": torch.tensor(1.5, dtype=torch.float64), "row": normal(1, WIDTH),
        "z": torch.complex(normal(3), normal(3)), "empty": torch.zeros(0, 3, dtype=torch.float64), "n": torch.tensor(2),
    }  # fmt: skip
    x, y = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    for clip in (None, 0.1):
        with pp.train_step([stage] * 2, squared, pp.one_f_one_b(2, 4), pp.adamw(1e-2), clip=clip) as trainer:
            state, _ = train(trainer, {s: copy_of(odd) for s in (0, 1)}, x, y)
        assert state.params[0]["n"] == 2
        assert not torch.equal(state.params[0]["z"], odd["z"])
        assert not torch.equal(state.params[0]["s"], odd["s"])


def copy_of(tree):
    return {name: t.clone() for name, t in tree.items()}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"accumulate": 0}, "accumulate: got 0, expected a number of passes, at least 1"),
        ({"clip": -1.0}, "clip: got -1.0, expected a norm, at least 0"),
        ({"on_nonfinite": "stop"}, "on_nonfinite: got 'stop', expected 'skip' or 'raise' or 'ignore'"),
        ({"shard": "all"}, "shard: got 'all', expected 'none' or 'optimizer' or 'params'"),
        ({"norm_type": 0.0}, "norm_type is 0.0"),
    ],
)
def test_wrong_arguments_are_named(options, text):
    stages, *_ = problem()
    with pytest.raises(ValueError, match=text):
        pp.train_step(stages, squared, pp.one_f_one_b(4, 4), pp.adamw(1e-2), **options)


def test_two_clippings_and_a_strange_state_are_refused():
    stages, params, x, y = problem()
    clipping = pp.chain(pp.clip_by_global_norm(0.1), pp.adamw(1e-2))
    with pytest.raises(ValueError, match="the optimizer clips, too"):
        pp.train_step(stages, squared, pp.one_f_one_b(4, 4), clipping, clip=1.0)
    with pp.train_step(stages, squared, pp.one_f_one_b(4, 4), clipping) as trainer:
        state, found = train(trainer, params, x, y)
        with pytest.raises(TypeError, match="state: got .*, expected what init or step of this trainer has returned"):
            trainer.step(params, x, y)
    wanted = train(pp.train_step(stages, squared, pp.one_f_one_b(4, 4), pp.adamw(1e-2), clip=0.1), params, x, y)
    assert found == wanted[1]
    assert same_bits(state.params, wanted[0].params)


@pytest.mark.parametrize("build", [lambda: pp.one_f_one_b(4, 8), lambda: pp.dualpipe(4, 8), lambda: pp.dualpipev(2, 8)])
def test_a_parameter_of_several_places_counts_once_in_the_norm(build):
    _, params, x, y = tied_problem()
    stages = [embed, dense, dense, head]
    with pp.train_step(stages, F.cross_entropy, build(), pp.adamw(1e-2), tied=TIED, clip=0.1) as trainer:
        _, found = train(trainer, params, x, y)
    table, *layers = (params[s][name].clone().requires_grad_() for s, name in ((0, "e"), (1, "w"), (2, "w")))
    optimizer = torch.optim.AdamW([table, *layers], 1e-2)
    for loss, norm in found:
        optimizer.zero_grad()
        out = table[x]
        for w in layers:
            out = torch.tanh(out @ w)
        whole = F.cross_entropy(out @ table.T, y)
        whole.backward()
        measured = nn.utils.clip_grad_norm_([table, *layers], 0.1)
        assert (loss, norm) == pytest.approx((whole.item(), measured.item()), rel=TOLERANCE)
        optimizer.step()


def test_axes_without_a_mesh_are_refused():
    stages, *_ = problem(2)
    with pytest.raises(ValueError, match="axes: got .*, and no mesh that has them"):
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), axes=pp.Axes("pp", "dp"))


def test_an_optimizer_makes_parameters_of_the_same_form():
    stages, params, x, y = problem(2)
    with pytest.raises(TypeError, match="optimizer: got a transform of gradients, expected an optimizer"):
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.clip_by_global_norm(1.0))
    shrinking = pp.sgd(1e-2)._replace(update=lambda grads, state, params: ({name: p.sum(0) for name, p in params.items()}, state))
    with (
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), shrinking, on_nonfinite="ignore") as trainer,
        pytest.raises(pp.PipelineError, match=r"has made torch.float64\[6\] of the parameter torch.float64\[6, 6\] of stage"),
    ):
        trainer.step(trainer.init(params), x, y)


def test_small_gradients_survive_a_scale_in_half_precision():
    def stage(p, x):
        return x * p["w"]

    params, x = {0: {"w": torch.ones(4)}}, torch.full((4, 4), 1.0)
    loss = lambda y, t: (y.float() * t).sum()  # noqa: E731
    options = {"precision": pp.Precision(compute=torch.float16, master=torch.float32), "scale": pp.static_scale(2.0**14)}
    with pp.train_step([stage], loss, pp.gpipe(1, 2), pp.sgd(1.0), **options) as trainer:
        state, metrics = trainer.step(trainer.init(params), x, torch.full((4, 4), 1e-6))
    assert metrics.grad_norm > 0
    assert torch.allclose(1 - state.params[0]["w"], torch.full((4,), 2e-6), rtol=0.1)


def test_stages_that_share_memory_are_updated_once_each():
    stages, params, x, y = problem(2)
    shared, apart = {0: params[0], 1: params[0]}, {0: copy_of(params[0]), 1: copy_of(params[0])}
    tied = {"w": [(0, "w"), (1, "w")]}
    found = [
        train(pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(0.1, donate=True), tied=tied), own, x, y, steps=2)
        for own in (shared, apart)
    ]
    assert found[0][1] == found[1][1]
    assert same_bits(found[0][0].params, found[1][0].params)


# -- a mesh ------------------------------------------------------------------------------------


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


OPTIONS = {
    "plain": {"clip": 0.3},
    "accumulate": {"clip": 0.3, "accumulate": 2},
    "sharded": {"clip": 0.3, "shard": "optimizer"},
    "params": {"clip": 0.3, "shard": "params"},
    "ignore": {"on_nonfinite": "ignore"},
}


def whole(params):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in params.items()}


def grid(rank, size, pipes, schedule, option):
    """Training over pipelines side by side, beside training of the whole batch in this process."""
    mesh = init_device_mesh("cpu", (pipes, size // pipes), mesh_dim_names=("pp", "dp"))
    data, place, options = size // pipes, mesh.get_local_rank("dp"), OPTIONS[option]
    stages, params, x, y = tied_problem()
    weights = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) if option == "plain" else None
    build, rest = SCHEDULES[schedule], {name: value for name, value in options.items() if name not in ("accumulate", "shard")}
    with pp.train_step(stages, F.cross_entropy, build(pipes, 8), pp.adamw(1e-2), tied=TIED, **rest) as trainer:
        wanted, found = train(trainer, params, x, y, loss_weights=weights)
        evaluated = trainer.evaluate(wanted, x, y, seed=(0, 0))
    rows, own = ROWS // data, 8 // data
    part = slice(place * rows, (place + 1) * rows)
    here = None if weights is None else weights[place * own : (place + 1) * own]
    build = build(pipes, own // options.get("accumulate", 1))
    with pp.train_step(stages, F.cross_entropy, build, pp.adamw(1e-2), mesh, axes=pp.Axes("pp", "dp"), tied=TIED, **options) as trainer:
        mine = {s: params[s] for s in build.model_stages_of(mesh.get_local_rank("pp"))}
        state, losses = train(trainer, mine, x[part], y[part], loss_weights=here)
        assert trainer.evaluate(state, x[part], y[part], seed=(0, 0)).item() == pytest.approx(evaluated.item(), rel=TOLERANCE)
        if option != "plain":
            again, metrics = trainer.steps(trainer.init(mine), [(x[part], y[part])] * STEPS, seed=(0, 0))
            assert same_bits(tree_leaves(again.params), tree_leaves(state.params))
            assert [m.loss.item() for m in metrics] == [loss for loss, _ in losses]
    for got, expected in zip(losses, found, strict=True):
        assert got == pytest.approx(expected, rel=TOLERANCE)
    for s in mine:
        for name, leaf in whole(state.params[s]).items():
            assert torch.allclose(leaf, wanted.params[s][name], rtol=TOLERANCE, atol=TOLERANCE)
    if option in ("sharded", "params"):
        with pp.train_step(stages, F.cross_entropy, build, pp.adamw(1e-2), mesh, axes=pp.Axes("pp", "dp"), tied=TIED, clip=0.3) as trainer:
            plain, _ = train(trainer, mine, x[part], y[part])
        assert all(torch.equal(leaf, plain.params[s][name]) for s in mine for name, leaf in whole(state.params[s]).items())
    sharded = [t for t in tree_leaves(state.optimizer) if isinstance(t, DTensor)]
    assert bool(sharded) == (option in ("sharded", "params"))
    kept = sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in tree_leaves(state.params))
    assert kept * (data if option == "params" else 1) == sum(t.numel() for t in tree_leaves(mine))
    assert all(t.to_local().numel() * data == t.numel() for t in sharded)
    return losses


@pytest.mark.parametrize(
    "schedule, option",
    [
        ("dualpipev", "plain"),
        ("interleaved", "accumulate"),
        ("zbv", "sharded"),
        ("zbv", "params"),
        ("dualpipev", "params"),
        ("zbv", "ignore"),
    ],
)
def test_two_pipelines_of_two_ranks_train_as_one_process(four, schedule, option):
    answers = four(grid, 2, schedule, option)
    assert all(answer == answers[0] for answer in answers)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks():
    torch.manual_seed(1)
    return [Block().double() for _ in range(STAGES)]


def tensor_parallel(rank, size, shape, schedule, option):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    data, place, options = shape[1], mesh.get_local_rank("dp"), OPTIONS[option]
    x, y = normal(ROWS, WIDTH, seed=90), normal(ROWS, WIDTH, seed=91)
    whole = [pp.stage_from_module(block) for block in blocks()]
    rest = {name: value for name, value in options.items() if name != "shard"}
    params = {s: {name: t.detach().clone() for name, t in stage.params.items()} for s, stage in enumerate(whole)}
    with pp.train_step([stage.fn for stage in whole], squared, SCHEDULES[schedule](2, 8), pp.adamw(1e-2), **rest) as trainer:
        wanted, found = train(trainer, params, x, y)
    cut = [pp.parallelize(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}) for block in blocks()]
    build, rows = SCHEDULES[schedule](2, 8 // data), ROWS // data
    part, axes = slice(place * rows, (place + 1) * rows), pp.Axes("pp", "dp", "tp")
    with pp.train_step([stage.fn for stage in cut], squared, build, pp.adamw(1e-2), mesh, axes=axes, **options) as trainer:
        mine = {s: cut[s].params for s in build.model_stages_of(mesh.get_local_rank("pp"))}
        state, losses = train(trainer, mine, x[part], y[part])
    for got, expected in zip(losses, found, strict=True):
        assert got == pytest.approx(expected, rel=TOLERANCE)
    for s in mine:
        for name, leaf in state.params[s].items():
            assert isinstance(leaf, DTensor)
            assert torch.allclose(leaf.full_tensor(), wanted.params[s][name], rtol=TOLERANCE, atol=TOLERANCE)
    assert all(isinstance(t, DTensor) for s in mine for t in tree_leaves(state.optimizer[s]) if t.ndim)


def test_tensor_parallel_pipelines_train_as_one_process(four):
    four(tensor_parallel, (2, 1, 2), "zbv", "plain")


@pytest.mark.parametrize("option", ["sharded", "params"])
def test_all_three_axes_train_as_one_process(fresh, option):
    fresh(8)(tensor_parallel, (2, 2, 2), "dualpipev", option, timeout=120)


def failing(rank, size):
    """One rank of the second pipeline fails in a stage, once; then it overflows, alone; then all is well again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    calls = []

    def stage(params, x):
        calls.append(None)
        if rank == 3 and len(calls) == 3:
            raise ValueError("on purpose")
        return torch.tanh(x @ params["w"])

    _, params, x, y = problem(2)
    schedule, pipe = pp.one_f_one_b(2, 4), mesh.get_local_rank("pp")
    options = {"axes": pp.Axes("pp", "dp"), "engine": pp.functional, "scale": pp.dynamic_scale()}
    with pp.train_step([stage] * 2, squared, schedule, pp.sgd(1e-2), mesh, **options) as trainer:
        state = trainer.init({pipe: params[pipe]})
        began = time.monotonic()
        with pytest.raises(pp.PipelineError, match=r"rank 3 failed at .* on purpose") as caught:
            for _ in range(3):
                trainer.step(state, x, y)
        seconds = time.monotonic() - began
        bad = x * math.inf if mesh.get_local_rank("dp") == 1 else x
        same, metrics = trainer.step(state, bad, y)
        assert (metrics.skipped, same.step, same.scale["scale"]) == (1, 0, 2.0**15)
        assert same_bits(same.params, state.params)
        after, _ = trainer.step(state, x, y)
    return caught.value.rank, seconds, after.params[pipe]["w"]


def test_a_failure_in_one_pipeline_fails_all_and_an_overflow_skips_all(four, soon):
    answers = four(failing)
    assert all(rank == 3 and seconds < soon for rank, seconds, _ in answers)
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(answers[one][2], answers[other][2])


def disagreeing(rank, size):
    """Ranks that compute parts of the same stage are given other batches: nothing is trained on them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages, params, x, y = problem(2)
    pipe = mesh.get_local_rank("pp")
    rows = x if mesh.get_local_rank("tp") else x[:16]
    with (
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), mesh, axes=pp.Axes("pp", model="tp")) as trainer,
        pytest.raises(pp.AgreementError, match="4 microbatches of"),
    ):
        trainer.step(trainer.init({pipe: params[pipe]}), rows, y if mesh.get_local_rank("tp") else y[:16])


def test_parts_of_a_stage_run_the_same_batch(four):
    four(disagreeing)


def misnamed(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages, *_ = problem(2)
    with pytest.raises(ValueError, match="the mesh has the axes pp, dp; name each of them once"):
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), mesh)


def test_every_axis_is_named(four):
    four(misnamed)


def laid_differently(rank, size):
    """Two ranks that compute parts of the same stage cut its parameter along other axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages, params, x, y = problem(2)
    pipe, axis = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    own = DTensor.from_local(params[pipe]["w"].chunk(2, axis)[axis].contiguous(), mesh["tp"], [Shard(axis)])
    with (
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), mesh, axes=pp.Axes("pp", model="tp")) as trainer,
        pytest.raises(pp.AgreementError, match=r"params\[.\]\['w'\]: torch.float64 of \[6,6\] S\(.\) over tp=2; rank"),
    ):
        trainer.step(trainer.init({pipe: {"w": own}}), x, y)


def test_parts_of_a_stage_lie_the_same_way(four):
    four(laid_differently)


def clipped_differently(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages, params, x, y = problem(2)
    pipe, axes = mesh.get_local_rank("pp"), pp.Axes("pp", "dp")
    with (
        pp.train_step(stages, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), mesh, axes=axes, clip=1.0 + (rank == 3)) as trainer,
        pytest.raises(pp.AgreementError, match=r"train_step clip [12].0 of norm 2.0"),
    ):
        trainer.step(trainer.init({pipe: params[pipe]}), x, y)


def test_all_ranks_train_in_one_way(four):
    four(clipped_differently)


def calls_apart(rank, size, kind):
    """Data ranks that call for other steps; or gradients of which those of one stage alone are no numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    _, params, x, y = problem(2)
    pipe, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

    def stage(p, x):
        return torch.tanh(x @ p["w"]) + (0 * torch.sqrt(p["w"].sum() * 0) if kind == "nan" and pipe == 1 else 0)

    options = {"axes": pp.Axes("pp", "dp"), "norm_type": math.inf, "engine": pp.functional}
    with pp.train_step([stage] * 2, squared, pp.one_f_one_b(2, 4), pp.sgd(1e-2), mesh, **options) as trainer:
        own = {pipe: {"w": params[pipe]["w"].float() if kind == "dtype" and data else params[pipe]["w"]}}
        state = trainer.init(own)
        if kind == "nan":
            after, metrics = trainer.step(state, x, y)
            return metrics.skipped.item(), same_bits(after.params, state.params)
        with pytest.raises(pp.AgreementError, match="disagree"):
            if kind in ("weights", "evaluation"):
                call = trainer.step if kind == "weights" else trainer.evaluate
                call(state, x, y, loss_weights=[1, 2, 3, 4] if data else None)
            elif kind == "steps":
                trainer.steps(state, [(x, y)] * (2 + data))
            else:
                trainer.step(state, x.to(own[pipe]["w"].dtype), y.to(own[pipe]["w"].dtype))
    return None


@pytest.mark.parametrize("kind", ["weights", "evaluation", "steps", "dtype"])
def test_data_ranks_that_call_apart_are_told_so(four, kind):
    four(calls_apart, kind)


def test_a_gradient_of_one_stage_that_is_no_number_skips_the_update_under_every_norm(four):
    assert four(calls_apart, "nan") == [(1.0, True)] * 4


def evaluating(rank, size):
    """Pipelines of one rank each: one evaluates where the other trains."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stages, params, x, y = problem(1)
    with pp.train_step(stages, squared, pp.gpipe(1, 4), pp.sgd(1e-2), mesh, axes=pp.Axes("pp", "dp"), shard="params") as trainer:
        state = trainer.init(params)
        with pytest.raises(ValueError, match="got parts over the axis 'dp', expected whole parameters"):
            trainer.init(state.params)
        trainer.step(state, x, y)
        with pytest.raises(pp.AgreementError, match="train_step"):
            trainer.evaluate(state, x, y) if rank else trainer.step(state, x, y)


def test_pipelines_of_one_rank_agree_too(two):
    two(evaluating)
