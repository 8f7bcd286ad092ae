"""Training steps in one process: as torch trains, to the bit where that is promised."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppfunc as pp
from ppfunc.schedule import Op
from ppfunc.stage.engines.tracing.joint import Record
from ppfunc.stage.tree import tree_leaves, tree_map
from tests import models
from tests.models import affine, dense, mlp, mlp_params, new_trainer, normal, same_bits, squared
from tests.training.trainer.problems import (
    ROWS,
    STEPS,
    TIED,
    TOLERANCE,
    WIDTH,
    copy_of,
    embed,
    head,
    problem,
    tied_problem,
    train,
)
from tests.unseen import Unseen


@pytest.mark.parametrize(
    "clip, norm_type", [(None, 2.0), (0.1, 2.0), (0.1, 3.0), (0.01, math.inf), (math.inf, 2.0), (0.0, 2.0)]
)
def test_it_trains_as_torch_does(clip, norm_type):
    stages, params, x, y = problem()
    with new_trainer(
        stages, squared, pp.zb_h1(4, 8), pp.optim.adamw(1e-2), clip=clip, norm_type=norm_type
    ) as trainer:
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


@pytest.mark.parametrize(
    "options", [{"clip": 0.1}, {"on_nonfinite": "ignore"}, {"scale": pp.dynamic_scale(interval=2)}], ids=str
)
@pytest.mark.parametrize("builder", [pp.one_f_one_b, pp.zb_h2])
def test_several_steps_at_once_are_those_steps(options, builder):
    stages, params, x, y = problem()
    with new_trainer(stages, squared, builder(4, 4), pp.optim.adamw(1e-2), **options) as trainer:
        wanted, found = train(trainer, params, x, y)
        got, metrics = trainer.steps(trainer.init(params), [(x, y)] * STEPS, seed=(0, 0))
        state, scales = trainer.init(params), []
        for _ in range(STEPS):
            state, own = trainer.step(state, x, y)
            scales.append(own.scale)
    assert same_bits(got, wanted)
    assert same_bits([m.scale for m in metrics], scales)
    assert [(m.loss.item(), m.grad_norm.item()) for m in metrics] == found


@pytest.mark.parametrize("optimizer", [pp.optim.sgd(0.1), pp.optim.sgd(0.1)._replace(on_leaves=None)])
@pytest.mark.parametrize("wide", [normal(6, 12), normal(1, 6).expand(6, 6)])
def test_the_steps_of_a_call_find_parameters_with_the_strides_that_programs_were_traced_for(wide, optimizer):
    """As torch's optimizers keep them: a view of the transposed weight is one in every step."""

    def flat(params, x):
        assert not params["w"].is_contiguous()
        return torch.tanh(x * params["w"].T.view(-1)[:WIDTH] + params["b"].mean())

    params, x, y = {0: {"w": normal(WIDTH, WIDTH).T, "b": wide[:, :6]}}, normal(4, WIDTH), normal(4, WIDTH)
    with new_trainer([flat], squared, pp.gpipe(1, 2), optimizer) as trainer:
        first = trainer.init(params)
        state, metrics = trainer.steps(first, [(x, y)] * 3)
        own, again = first, []
        for _ in range(3):
            own, one = trainer.step(own, x, y)
            again.append(one.loss)
    for name, leaf in state.params[0].items():
        assert leaf.stride() == first.params[0][name].stride()
    assert same_bits(state.params, own.params) and [m.loss for m in metrics] == again
    assert again[0] > again[1] > again[2]


def test_a_step_that_is_recorded_is_that_step():
    stages, params, x, y = problem()
    with new_trainer(stages, squared, pp.zb_h1(4, 4), pp.optim.adamw(1e-2)) as trainer:
        wanted, metrics = trainer.step(trainer.init(params), x, y)
        (state, own), timeline = trainer.record(trainer.init(params), x, y)
    assert same_bits(state, wanted) and own.loss == metrics.loss
    ops = [[i.op for i in timeline.schedule.instructions(rank)] for rank in range(4)]
    assert all(found[-1] is Op.STEP for found in ops) and timeline.schedule.microbatches == 4
    for found, ends in zip(ops, timeline.ends, strict=True):
        assert ends[-1] > max(end for op, end in zip(found, ends, strict=True) if op is Op.W)


def test_each_step_updates_the_parameters_of_the_step_before():
    stages, params, x, y = problem(2)
    seen = []

    def noting(rate):
        inner = pp.optim.sgd(rate)

        def update(grads, state, params):
            seen.append(float(params["w"].sum()))
            return inner.update(grads, state, params)

        return inner._replace(update=update)

    with pp.Trainer(stages, squared, pp.one_f_one_b(2, 2), noting(1e-2), on_nonfinite="ignore") as trainer:
        trainer.steps(trainer.init(params), [(x, y)] * 2)
    assert len(seen) == 4
    assert len(set(seen)) == 4  # every update was of new parameters


def test_a_donated_state_has_the_same_bits_also_where_a_step_is_skipped():
    stages, params, x, y = problem()
    found = []
    for donate in (False, True):
        optimizer = pp.optim.adamw(1e-2, donate=donate)
        with new_trainer(
            stages, squared, pp.zb_h1(4, 4), optimizer, clip=0.1, scale=pp.dynamic_scale(init=4.0)
        ) as trainer:
            state, metrics = trainer.init({s: copy_of(tree) for s, tree in params.items()}), []
            addresses = [t.data_ptr() for t in tree_leaves(state.params)]
            for n in range(STEPS):
                state, own = trainer.step(state, x * (math.inf if n == 2 else 1), y)
                metrics.append(own)
        assert (addresses == [t.data_ptr() for t in tree_leaves(state.params)]) == donate
        assert [m.skipped.item() for m in metrics] == [0, 0, 1, 0, 0, 0]
        found.append((state, str(metrics)))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.params[0].update(w=state.params[0]["w"] / 2),
        lambda state: state.optimizer[2]["mean"].update(w=torch.ones_like(state.params[2]["w"])),
        lambda state: state.optimizer[1].update(updates=torch.tensor(7)),
        lambda state: state.params[3]["w"].mul_(0.5),
        lambda state: setattr(state.optimizer[1]["square"]["w"], "data", normal(WIDTH, WIDTH).square().T),
    ],
)
def test_a_state_that_was_changed_in_its_place_is_read_anew(change):
    """A step goes on with the leaves that the last has made, and looks at each all the same."""
    stages, params, x, y = problem()
    optimizer = pp.optim.adamw(1e-2, donate=True)
    with new_trainer(stages, squared, pp.zb_h1(4, 4), optimizer, clip=0.1) as trainer:
        state, _ = train(trainer, {s: copy_of(tree) for s, tree in params.items()}, x, y, steps=2)
        change(state)
        copied = tree_map(torch.clone, state)
        wanted, _ = trainer.step(copied, x, y)
        after, _ = trainer.step(state, x, y)
    assert same_bits(after, wanted)


@pytest.mark.parametrize("donate", [False, True])
def test_keys_of_parameters_may_be_in_another_order_than_those_of_moments(donate):
    """Each parameter got the moments of another, of another size, which the kernel read and wrote past."""
    params, x, y = {0: mlp_params(WIDTH)}, normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
    optimizer = pp.optim.adamw(1e-2, donate=donate)
    with new_trainer([mlp], squared, pp.gpipe(1, 2), optimizer, clip=0.1) as trainer:
        state, _ = trainer.step(trainer.init(params), x, y)
        other = tree_map(torch.clone, state)
        other = other._replace(params={0: dict(reversed(other.params[0].items()))})
        for _ in range(2):
            state, _ = trainer.step(state, x, y)
            other, _ = trainer.step(other, x, y)
    own, moments = state.optimizer[0], other.optimizer[0]
    for name, p in state.params[0].items():
        assert same_bits(p, other.params[0][name]) and same_bits(own["mean"][name], moments["mean"][name])


@pytest.mark.parametrize("warm", [0, 2])
def test_stages_that_are_given_the_same_moments_are_told(warm):
    stages, params, x, y = problem(2)
    optimizer = pp.optim.adamw(1e-2, donate=True)
    with new_trainer(stages, squared, pp.gpipe(2, 4), optimizer) as trainer:
        state = trainer.init(params)
        for _ in range(warm):
            state, _ = trainer.step(state, x, y)
        shared = dict.fromkeys(state.optimizer, state.optimizer[0])
        told = r"state.optimizer\[.\]\['mean'\]\['\w+'\] shares its memory with another stage, whose update"
        with pytest.raises(pp.PipelineError, match=told):
            trainer.step(state._replace(optimizer=shared), x, y)


class Keeping:
    """An optimizer that keeps what its ``init`` was last given: the rate that its update takes."""

    def init(self, params):
        self.rates = {name: torch.full_like(p, 0.1) for name, p in params.items()}
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, grads, state, params):
        kept = {name: next(iter(rate.flatten())) for name, rate in self.rates.items()}
        return {name: params[name] - kept[name] * grads[name] for name in params}, state


def test_an_optimizer_that_keeps_what_it_was_given_trains():
    stages, params, x, y = problem()
    with (
        pp.Trainer(stages, squared, pp.gpipe(4, 2), Keeping()) as mine,
        pp.Trainer(stages, squared, pp.gpipe(4, 2), pp.optim.sgd(0.1)) as trainer,
    ):
        state, other = mine.init(tree_map(torch.clone, params)), trainer.init(params)
        for _ in range(2):
            (state, _), (other, _) = mine.step(state, x, y), trainer.step(other, x, y)
    torch.testing.assert_close(state.params, other.params, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("donate", [False, True])
def test_what_is_known_of_a_state_does_not_keep_it_alive(donate):
    stages, params, x, y = problem()
    kept, leaves = [], []
    with new_trainer(
        stages, squared, pp.zb_h1(4, 4), pp.optim.adamw(1e-2, donate=donate), clip=0.1
    ) as trainer:
        state = trainer.init({s: copy_of(tree) for s, tree in params.items()})
        for _ in range(3):
            state, metrics = trainer.step(state, x, y)
            kept.append((state.step, metrics))
            leaves += map(weakref.ref, tree_leaves((state.params, state.optimizer)))
        del state
        assert not any(leaf() is not None for leaf in leaves)


def test_a_warm_step_prepares_nothing_again():
    stages, params, x, y = problem()
    counted, optimizer = [], pp.optim.adamw(1e-2, donate=True)
    update, prepare = optimizer.on_leaves
    optimizer = optimizer._replace(on_leaves=(update, lambda *trees: counted.append("") or prepare(*trees)))
    with new_trainer(stages, squared, pp.zb_h1(4, 4), optimizer, clip=0.1) as trainer:
        state, _ = train(trainer, {s: copy_of(tree) for s, tree in params.items()}, x, y, steps=2)
        state, _ = trainer.steps(tree_map(torch.clone, state), [(x, y)] * 2)
        assert len(counted) == 4


def test_the_first_step_alone_traces(monkeypatch):
    """The scalars of a clip were traced in the second."""
    traces, init = [], Record.__init__
    monkeypatch.setattr(Record, "__init__", lambda self, stage: traces.append(stage) or init(self, stage))
    stages, params, x, y = problem()
    counts = []
    with pp.Trainer(
        stages,
        squared,
        pp.zb_h1(4, 8),
        pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.adamw(1e-2)),
        precision=pp.Precision(scale=pp.dynamic_scale()),
    ) as trainer:
        state = trainer.init(params)
        for _ in range(3):
            state, _ = trainer.step(state, x, y)
            counts.append(len(traces))
    assert counts[0] and counts == counts[:1] * 3


def test_an_error_says_in_which_step_it_arose():
    """Each step numbers its microbatches from 0."""
    stages, params, x, y = problem()
    bad = x.clone()
    bad[ROWS - 1] = math.nan
    with (
        pp.Trainer(stages, squared, pp.gpipe(4, 4), pp.optim.sgd(1e-2), on_nonfinite="raise") as trainer,
        pytest.raises(pp.PipelineError, match=r"failed at 0F3.*in step 1 of 2, counted from 0"),
    ):
        trainer.steps(trainer.init(params), [(x, y), (bad, y)])
    calls = Unseen()

    def failing(p, h):
        if next(calls) > 8:
            raise ArithmeticError("armed")
        return dense(p, h)

    engine = pp.engines.functional
    with (
        pp.Trainer(
            [*stages[:3], failing], squared, pp.gpipe(4, 4), pp.optim.sgd(1e-2), engine=engine
        ) as trainer,
        pytest.raises(pp.PipelineError, match=r"ArithmeticError: armed.*in step [12] of 3, counted from 0"),
    ):
        trainer.steps(trainer.init(params), [(x, y)] * 3)


def test_losses_weigh_as_their_weights_whatever_their_sum():
    stages, params, x, y = problem()
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0])
    with pp.Trainer(stages, squared, pp.one_f_one_b(4, 4), pp.optim.sgd(1e-2)) as trainer:
        state, metrics = trainer.step(trainer.init(params), x, y, loss_weights=weights)
        twice, _ = trainer.step(trainer.init(params), x, y, loss_weights=2 * weights)
        assert trainer.evaluate(trainer.init(params), x, y, loss_weights=weights) == pytest.approx(
            metrics.loss.item(), rel=TOLERANCE
        )
    loss, grads = pp.value_and_grad(stages, squared, pp.one_f_one_b(4, 4), loss_weights=weights / 8)(
        params, x, y
    )
    assert metrics.loss.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    for s in range(4):
        assert torch.allclose(state.params[s]["w"], params[s]["w"] - 1e-2 * grads[s]["w"], rtol=TOLERANCE)
        assert torch.allclose(state.params[s]["w"], twice.params[s]["w"], rtol=TOLERANCE)


def test_parameters_are_cast_once_for_every_update(monkeypatch):
    """And those of earlier updates are let go: a pass computes with the first copies or with those of the
    last update.
    """
    stages, params, x, y = problem()
    made, alive = [], []

    def casting(precision, tree):
        cast = to_compute(precision, tree)
        if isinstance(tree, dict | list):  # of parameters
            made.extend(weakref.ref(leaf) for leaf in tree_leaves(cast)[-1:])
        return cast

    def loss_fn(out, target):
        return squared(out.float(), target.float())

    def update(grads, state, params, **given):
        alive.append(sum(ref() is not None for ref in made))
        return plain.update(grads, state, params, **given)

    to_compute, plain, batches = pp.Precision.to_compute, pp.optim.sgd(0.1), 10
    options = {"precision": pp.Precision(compute=torch.float32), "engine": pp.engines.functional}
    with new_trainer(
        stages, loss_fn, pp.one_f_one_b(4, 4), plain._replace(update=update), **options
    ) as trainer:
        state = trainer.init(params)
        monkeypatch.setattr(pp.Precision, "to_compute", casting)
        trainer.steps(state, [(x, y)] * batches)
    assert len(made) == 4 * batches  # once before the first, and after each but the last
    assert max(alive) <= 3 * 4


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
def test_dtypes_that_no_checkpoint_holds_are_refused(dtype):
    """They were trained, and refused at the first save."""
    trainer = pp.Trainer([dense], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1))
    params = {0: {"w": normal(WIDTH, WIDTH), "own": torch.zeros(2).to(dtype)}}
    with pytest.raises(TypeError, match=r"params\[0\]\['own'\] has the dtype .*, which no checkpoint holds"):
        trainer.init(params)


@pytest.mark.parametrize(
    "build", [lambda: pp.one_f_one_b(4, 8), lambda: pp.dualpipe(4, 8), lambda: pp.dualpipev(2, 8)]
)
def test_a_parameter_of_several_places_counts_once_in_the_norm(build):
    _, params, x, y = tied_problem()
    stages = [embed, dense, dense, head]
    with new_trainer(stages, F.cross_entropy, build(), pp.optim.adamw(1e-2), tied=TIED, clip=0.1) as trainer:
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


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("scale", [None, pp.static_scale(1024.0)], ids=["plain", "scaled"])
def test_norms_by_stage_and_by_name(norm_type, scale):
    params, x, y = models.problem(2, leaves="wb")
    stages, schedule, options = [affine] * 2, pp.one_f_one_b(2, 4), {"norm_type": norm_type, "scale": scale}
    frozen = {1: lambda p: {"w": True, "b": False}}
    grads = pp.value_and_grad(stages, squared, schedule)(params, x, y)[1]
    grads[1].pop("b")
    trainer = new_trainer(stages, squared, schedule, pp.optim.sgd(0.1), trainable=frozen, **options)
    metrics = trainer.steps(trainer.init(params), [(x, y)] * 2, return_norms=True)[1][0]
    by_stage = [torch.cat([g.flatten() for g in grads[s].values()]).norm(norm_type).item() for s in (0, 1)]
    assert metrics.stage_norms.tolist() == pytest.approx(by_stage, rel=TOLERANCE)
    for s, tree in grads.items():
        found = {name: norm.item() for name, norm in metrics.leaf_norms[s].items()}
        assert found == pytest.approx(
            {name: g.norm(norm_type).item() for name, g in tree.items()}, rel=TOLERANCE
        )


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_is_no_number_reaches_all_parameters_where_it_is_clipped(norm_type):
    """As under ``clip_grad_norm_``. A largest norm of infinity would stop all other parameters in silence."""

    def last(p, x):
        return x @ p["w"] + 0 * torch.sqrt(0 * p["w"].sum())

    _, params, x, y = problem(2)
    options = {"clip": 0.1, "norm_type": norm_type, "on_nonfinite": "ignore"}
    trainer = new_trainer([dense, last], squared, pp.one_f_one_b(2, 4), pp.optim.sgd(0.1), **options)
    state, metrics = trainer.step(trainer.init(params), x, y)
    assert metrics.grad_norm.isnan() and metrics.loss.isfinite()
    assert all(state.params[s]["w"].isnan().all() for s in range(2))


def test_small_gradients_survive_a_scale_in_half_precision():
    def stage(p, x):
        return x * p["w"]

    params, x = {0: {"w": torch.ones(4)}}, torch.full((4, 4), 1.0)
    loss = lambda y, t: (y.float() * t).sum()  # noqa: E731
    options = {
        "precision": pp.Precision(compute=torch.float16, master=torch.float32),
        "scale": pp.static_scale(2.0**14),
    }
    with new_trainer([stage], loss, pp.gpipe(1, 2), pp.optim.sgd(1.0), **options) as trainer:
        state, metrics = trainer.step(trainer.init(params), x, torch.full((4, 4), 1e-6))
    assert metrics.grad_norm > 0
    assert torch.allclose(1 - state.params[0]["w"], torch.full((4,), 2e-6), rtol=0.1)


def test_stages_that_share_memory_are_updated_once_each():
    stages, params, x, y = problem(2)
    shared, apart = {0: params[0], 1: params[0]}, {0: copy_of(params[0]), 1: copy_of(params[0])}
    tied = {"w": [(0, "w"), (1, "w")]}
    found = [
        train(
            pp.Trainer(stages, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(0.1, donate=True), tied=tied),
            own,
            x,
            y,
            steps=2,
        )
        for own in (shared, apart)
    ]
    assert found[0][1] == found[1][1]
    assert same_bits(found[0][0].params, found[1][0].params)


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
@pytest.mark.parametrize("optimizer", [pp.optim.adamw(0.1), pp.optim.sgd(0.1, 0.9)])
def test_tensors_are_made_elsewhere_by_default(engine, optimizer):
    """``torch.set_default_device`` is for tensors of the user: a step makes its own beside those that it is
    given.
    """

    def run():
        trainer = new_trainer([mlp] * 2, squared, pp.zb_h1(2, 4), optimizer, clip=1.0, engine=engine)
        state = trainer.init(params)
        for _ in range(2):
            state, metrics = trainer.step(state, inputs, targets, loss_weights=[1, 2, 3, 4])
        return tree_leaves((state.params, metrics.loss, metrics.grad_norm))

    params, inputs, targets = (
        {s: mlp_params(4, s) for s in range(2)},
        normal(8, 4, seed=7),
        normal(8, 4, seed=8),
    )
    wanted = run()
    with torch.device("meta"):
        found = run()
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_a_trainer_keeps_no_parameters_of_its_calls(compute):
    """Nor what they were cast to, or every run holds one copy more of the model."""

    def alive():
        return {id(t) for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.bfloat16}

    stages, params, x, y = problem()
    precision, before = pp.Precision(compute=compute), alive()
    with new_trainer(stages, squared, pp.gpipe(4, 8), pp.optim.sgd(1e-2), precision=precision) as trainer:
        state = trainer.init(params)
        seen = [weakref.ref(t) for t in tree_leaves(state.params)]
        del params
        state, _ = trainer.step(state, x, y)
        gc.collect()
        assert not [ref for ref in seen if ref() is not None] and alive() <= before


@pytest.mark.parametrize("weights", [None, [1.0 + n for n in range(256)]])
def test_losses_in_float32_are_summed_in_float64(weights):
    """Products with weights, and their sum, were rounded to float32."""
    rows = torch.rand(256, 1, generator=torch.Generator().manual_seed(0))
    stage, loss = lambda p, x: x * p["w"], lambda y, target: y.sum()
    with new_trainer([stage], loss, pp.gpipe(1, 256), pp.optim.sgd(0.0)) as trainer:
        state = trainer.init({0: {"w": torch.ones(())}})
        _, metrics = trainer.step(state, rows, rows, loss_weights=weights)
        evaluated = trainer.evaluate(state, rows, rows, loss_weights=weights)
    each = torch.ones(256) if weights is None else torch.tensor(weights)
    expected = (rows.double().flatten() * each.double()).sum().item() / each.sum().item()
    assert metrics.loss.item() == pytest.approx(expected, rel=1e-14)
    assert evaluated.item() == pytest.approx(expected, rel=1e-14)
