"""Losses of microbatches: how they are weighed and added up, and those that train nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
import ppfunc.runtime.step as step_module
from ppfunc.runtime.running import calls
from tests.models import new_trainer, normal, squared

ENGINES = [pp.engines.graph, pp.engines.functional, pp.engines.eager]


def scaled(p, x):
    return x * p["w"]


def half(y, target):
    return (y * target).mean().bfloat16()


def in_halves(rank, size):
    """The mean of 64 losses of bfloat16, of a step and of a trainer: in bfloat16 it was off by as much as a
    percent.
    """
    m, params = 64, {s: {"w": torch.ones(4)} for s in range(2)}
    x, y = 1 + normal(m, 4).float().abs(), torch.ones(m, 4)
    want = (
        torch.stack([half(a, b) for a, b in zip(x.split(1), y.split(1), strict=True)]).double().mean().item()
    )
    mine = params if size == 1 else {rank: params[rank]}
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        loss, _ = pp.value_and_grad([scaled] * 2, half, pp.gpipe(2, m), transport)(mine, x, y)
        trainer = new_trainer([scaled] * 2, half, pp.gpipe(2, m), pp.optim.sgd(0.0), transport=transport)
        _, metrics = trainer.step(trainer.init(mine), x, y)
    assert (loss.dtype, metrics.loss.dtype) == (torch.float32, torch.float64)
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert metrics.loss.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.smooth_l1_loss])
def test_losses_hold_no_memory_of_their_elements(engine, loss_fn, monkeypatch):
    held = []

    def losses_of(lowered, buffers):
        held.extend(t.untyped_storage().nbytes() for kept in buffers.kept.values() for t in kept)
        return calls.losses_of(lowered, buffers)

    monkeypatch.setattr(step_module, "losses_of", losses_of)
    params = {s: {"w": normal(4)} for s in range(2)}
    step = pp.value_and_grad([scaled] * 2, loss_fn, pp.gpipe(2, 4), engine=engine)
    step(params, normal(32, 4), normal(32, 4))
    assert held == [8] * 4


def test_halves_are_added_up_in_float32():
    in_halves(0, 1)


def test_halves_of_two_ranks_are_added_up_in_float32(two):
    two(in_halves)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_microbatch_of_no_tokens_counts_nothing(engine):
    """Its mean is no number, and no number times 0 is none either."""
    params, x, ids = {0: {"w": normal(4)}}, normal(8, 4), torch.arange(8) % 4
    ids[4:] = -100
    counts = [4, 0]
    trainer = pp.Trainer([scaled], F.cross_entropy, pp.gpipe(1, 2), pp.optim.sgd(0.1), engine=engine)
    state, metrics = trainer.step(trainer.init(params), x, ids, loss_weights=counts)
    w = params[0]["w"].clone().requires_grad_()
    loss = F.cross_entropy(x * w, ids)
    loss.backward()
    assert metrics.loss.item() == pytest.approx(loss.item(), rel=1e-12) and metrics.skipped == 0
    torch.testing.assert_close(state.params[0]["w"], (w - 0.1 * w.grad).detach(), rtol=1e-12, atol=0)
    _, metrics = trainer.step(trainer.init(params), x, ids)
    assert metrics.skipped == 1 and metrics.loss.isnan()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind, place", [("loss", "stage 1: its loss"), ("stage", "stage 0: its output")])
def test_what_passes_no_gradient_on_is_told_once(engine, kind, place):
    stages = [lambda p, x: scaled(p, x).detach() if kind == "stage" else scaled(p, x), scaled]
    loss_fn = lambda y, t: squared(y, t).detach() if kind == "loss" else squared(y, t)  # noqa: E731
    trainer = pp.Trainer(stages, loss_fn, pp.gpipe(2, 2), pp.optim.sgd(0.1), engine=engine)
    state = trainer.init({s: {"w": normal(4)} for s in range(2)})
    with pytest.warns(UserWarning, match=f"{place} passes no gradient on") as caught:
        for _ in range(3):
            state, _ = trainer.step(state, normal(4, 4), normal(4, 4))
    assert len(caught) == 1


def test_what_is_meant_to_train_nothing_is_not_told():
    frozen = torch.nn.Linear(4, 4).double().requires_grad_(False)
    first, own, _ = pp.stage_from_module(frozen)
    stages, params = [first, scaled], {0: own, 1: {"w": normal(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pp.value_and_grad(stages, squared, pp.gpipe(2, 2))(params, normal(4, 4), normal(4, 4))
        losing = [lambda p, x: pp.Output(scaled(p, x), loss=x.square().mean()), scaled]
        pp.value_and_grad(losing, squared, pp.gpipe(2, 2))(
            {s: {"w": normal(4)} for s in range(2)}, normal(4, 4), normal(4, 4)
        )
        pp.evaluate(stages, lambda y, t: squared(y, t).detach(), pp.gpipe(2, 2))(
            params, normal(4, 4), normal(4, 4)
        )


def masked(y, target):
    """A mean over the rows that count: over none, it is 0 / 0, and so is its gradient."""
    value, counts = target
    return ((y - value).square() * counts).sum() / (counts.sum() * y.shape[-1])


def balanced(p, x):
    """A stage with a loss of its own, a mean over the rows that are not 0: over none, a NaN."""
    return pp.Output(torch.tanh(x * p["w"]), loss=(x * p["w"]).square().sum() / (x != 0).sum())


def empty_batch(m=8, empty=(0, 3, 7)):
    """Inputs, targets and weights, of which some microbatches count nothing: their inputs are 0, or no
    numbers at all.
    """
    x, value, counts = normal(2 * m, 4), normal(2 * m, 4, seed=1), torch.ones(2 * m, 1, dtype=torch.float64)
    for n in empty:
        counts[2 * n : 2 * n + 2], x[2 * n : 2 * n + 2] = 0, torch.nan if n == 3 else 0.0
    return x, (value, counts), [0.0 if n in empty else 1.0 + n for n in range(m)]


def by_autograd(params, x, target, weights):
    """Loss, gradients and those of the inputs, of the microbatches that count alone."""
    own = {s: {"w": p["w"].clone().requires_grad_()} for s, p in params.items()}
    x, total, m = x.clone().requires_grad_(), torch.zeros((), dtype=torch.float64), len(weights)
    for n, (part, value, counts) in enumerate(zip(x.chunk(m), *(t.chunk(m) for t in target), strict=True)):
        if weights[n]:
            for p in own.values():
                out = balanced(p, part)
                part, total = out.y, total + weights[n] * out.loss
            total = total + weights[n] * masked(part, (value, counts))
    given = torch.autograd.grad(total, [*(p["w"] for p in own.values()), x])
    return total.detach(), dict(zip(own, given, strict=False)), given[-1]


EMPTY = {
    "1f1b": (pp.one_f_one_b, 1), "zb_h1": (pp.zb_h1, 1), "zbv": (pp.zbv, 2), "dualpipe": (pp.dualpipe, 1), "dualpipev": (pp.dualpipev, 2),  # noqa: E501
}  # fmt: skip


def left_out(rank, size, name, engine, shard="none"):
    """A step, and steps of a trainer in two passes, with microbatches that count nothing: those of autograd
    without them.
    """
    build, stages = EMPTY[name][0](2, 8), 2 * EMPTY[name][1]
    params, (x, target, weights) = {s: {"w": normal(4, seed=s)} for s in range(stages)}, empty_batch()
    mine = {s: params[s] for s in (build.model_stages_of(rank) if size > 1 else params)}
    loss, grads, of_x = by_autograd(params, x, target, weights)
    engine = getattr(pp.engines, engine)
    merged = pp.interleaved() if engine is pp.engines.graph and name == "dualpipev" else None
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad(
            [balanced] * stages, masked, build, transport, engine=engine, argnums=(0, 1), overlapped=merged, on_nonfinite="raise"  # noqa: E501
        )  # fmt: skip
        result = step(mine, x, target, loss_weights=weights)
        got, found, inputs = result.loss, result.grads, result.input_grads
        assert got.item() == pytest.approx(loss.item(), rel=1e-12)
        for s in mine:
            torch.testing.assert_close(found[s]["w"], grads[s], rtol=1e-12, atol=1e-12)
        if inputs is not None:
            firsts = [c for c in build.flows if size == 1 or build.placement[c.stages[0]] == rank]
            rows = torch.cat([of_x[2 * m : 2 * m + 2] for c in firsts for m in c.microbatches])
            torch.testing.assert_close(inputs, rows, rtol=1e-12, atol=1e-12)
        trainer = new_trainer(
            [balanced] * stages, masked, build, pp.optim.sgd(0.1), transport=transport, engine=engine, shard=shard,  # noqa: E501
            clip=1e6, on_nonfinite="raise",
        )  # fmt: skip
        state, total = trainer.init(mine), sum(weights)
        for _ in range(2):
            state, metrics = trainer.step(state, x, target, loss_weights=weights)
            loss, grads, _ = by_autograd(params, x, target, weights)
            params = {s: {"w": p["w"] - 0.1 * grads[s] / total} for s, p in params.items()}
            assert metrics.loss.item() == pytest.approx(loss.item() / total, rel=1e-12)
        for s in mine:
            torch.testing.assert_close(state.params[s]["w"], params[s]["w"], rtol=1e-12, atol=1e-12)
        assert trainer.evaluate(state, x, target, loss_weights=weights).isfinite()


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("engine", ["graph", "functional", "eager"])
def test_a_microbatch_of_weight_0_contributes_nothing(name, engine):
    left_out(0, 1, name, engine)


def test_a_microbatch_of_weight_0_contributes_nothing_where_parameters_are_freed():
    left_out(0, 1, "zb_h1", "graph", "params")


@pytest.mark.parametrize(
    "name, engine", [("1f1b", "eager"), ("zb_h1", "functional"), ("zbv", "graph"), ("dualpipe", "graph")]
)
def test_a_microbatch_of_weight_0_contributes_nothing_over_processes(two, name, engine):
    two(left_out, name, engine)


def nothing_on_one_data_rank(rank, size, shard):
    """Of two data ranks one has nothing that counts, and no finite number."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    params, (x, target, weights) = {s: {"w": normal(4, seed=s)} for s in range(2)}, empty_batch()
    given = (
        (x, target, weights)
        if data == 0
        else (x * torch.nan, tuple(t * 0 for t in target), [0.0] * len(weights))
    )
    with new_trainer(
        [balanced] * 2, masked, pp.zb_h1(2, 8), pp.optim.sgd(0.1), mesh, axes=pp.Axes("pp", "dp"), shard=shard
    ) as trainer:
        state, metrics = trainer.step(trainer.init({pipe: params[pipe]}), *given[:2], loss_weights=given[2])
    loss, grads, _ = by_autograd(params, x, target, weights)
    assert metrics.skipped == 0 and metrics.loss.item() == pytest.approx(
        loss.item() / sum(weights), rel=1e-12
    )
    w = state.params[pipe]["w"]
    w = w.full_tensor() if shard == "params" else w
    torch.testing.assert_close(
        w, params[pipe]["w"] - 0.1 * grads[pipe] / sum(weights), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shard", ["none", "optimizer", "params"])
def test_a_data_rank_without_anything_that_counts_contributes_nothing(four, shard):
    four(nothing_on_one_data_rank, shard)


def test_what_is_not_finite_and_counts_is_named_beside_what_does_not_count():
    params, (x, target, weights) = {s: {"w": normal(4)} for s in range(2)}, empty_batch()
    x[9] = torch.inf  # of microbatch 4; microbatch 0 has none that is finite, either, and weight 0
    step = pp.value_and_grad(
        [balanced] * 2, masked, pp.gpipe(2, 8), on_nonfinite="raise", loss_weights=weights
    )
    with pytest.raises(pp.PipelineError, match="stage 0, microbatch 4"):
        step(params, x, target)


def test_a_weight_of_0_that_a_transform_hides_leaves_out_a_loss_that_is_no_number():
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=torch.float64)
    step = pp.evaluate([lambda w, x: w * x], masked, pp.gpipe(1, 2), engine=pp.engines.functional)
    counts = torch.ones(2, 1, dtype=torch.float64)
    given = {0: torch.tensor(2.0)}, torch.tensor([[1.0], [torch.nan]]), (torch.zeros(2, 1), counts)
    losses = torch.func.vmap(lambda w: step(*given, loss_weights=w))(weights)
    assert losses.isfinite().all() and losses[0] == 2 * losses[1] > 0


def test_other_derivatives_leave_out_what_counts_nothing():
    plain = lambda p, x: torch.tanh(x * p["w"])  # noqa: E731
    params, (x, target, weights) = {s: {"w": normal(4, seed=s)} for s in range(2)}, empty_batch()
    moved = {s: {"w": normal(4, seed=5 + s)} for s in range(2)}
    stages, build, m = [plain] * 2, pp.gpipe(2, 8), len(weights)

    def whole(params):
        parts = zip(x.chunk(m), *(t.chunk(m) for t in target), weights, strict=True)
        return sum(
            w * masked(plain(params[1], plain(params[0], part)), (value, counts))
            for part, value, counts, w in parts
            if w
        )

    def near(one, other):
        return torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    want = torch.func.grad(whole)(params)
    near(
        pp.jvp(stages, masked, build, loss_weights=weights)(params, moved, x, target),
        torch.func.jvp(whole, (params,), (moved,)),
    )
    near(pp.hvp(stages, masked, build, loss_weights=weights)(params, moved, x, target).products,
         torch.func.jvp(torch.func.grad(whole), (params,), (moved,))[1])  # fmt: skip
    rows = pp.value_and_grad(stages, masked, build, loss_weights=weights, per_microbatch=True)(
        params, x, target
    )[1]
    assert not any(rows[s]["w"][n].any() for s in rows for n in (0, 3, 7))
    near({s: {"w": rows[s]["w"].sum(0)} for s in rows}, want)
    step = pp.value_and_grad(stages, masked, build, loss_weights=weights, engine=pp.engines.functional)
    near(torch.func.grad(lambda p: step(p, x, target)[0])(params), want)
    near(torch.func.jvp(lambda p: step(p, x, target)[1], (params,), (moved,))[1],
         torch.func.jvp(torch.func.grad(whole), (params,), (moved,))[1])  # fmt: skip
    slope = torch.func.grad(
        lambda w: step(params, normal(16, 4), (target[0], torch.ones(16, 1)), loss_weights=w)[0]
    )
    assert slope(torch.ones(8, dtype=torch.float64)).all()


ROWS = {  # of the microbatches, their weights, and whether a warning tells that rows count unlike
    "unlike": ([4, 3, 1], None, True),
    "unlike, on purpose": ([4, 3, 1], [1 / 3] * 3, False),
    "unlike, by rows": ([4, 3, 1], [4 / 8, 3 / 8, 1 / 8], False),
    "alike": ([2, 2, 2], None, False),
}


@pytest.mark.parametrize("form", ["plain", "trainer"])
@pytest.mark.parametrize("case", ROWS)
def test_rows_that_count_unlike_are_told_once(case, form):
    rows, weights, tells = ROWS[case]
    x = pp.Microbatches(normal(sum(rows), 4).split(rows))
    params, schedule = {0: {"w": torch.ones(4, dtype=torch.float64)}}, pp.gpipe(1, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if form == "plain":
            step = pp.value_and_grad([scaled], squared, schedule)
            losses = [step(params, x, x, loss_weights=weights)[0].item() for _ in range(2)]
            longer = pp.Microbatches(normal(sum(rows) + 3, 4).split([n + 1 for n in rows]))
            step(params, longer, longer, loss_weights=weights)
        else:
            trainer = new_trainer([scaled], squared, schedule, pp.optim.sgd(0.0))
            state = trainer.init(params)
            losses = [trainer.step(state, x, x, loss_weights=weights)[1].loss.item() for _ in range(2)]
    each = [squared(part, part).item() for part in x]
    of_weights = weights or [1 / 3] * 3
    assert losses == pytest.approx([sum(w * n for w, n in zip(of_weights, each, strict=True))] * 2)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == tells
    assert not tells or "loss_weights=[n / 8 for n in [4, 3, 1]]" in texts[0]
