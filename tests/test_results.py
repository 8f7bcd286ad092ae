"""Results beside loss and gradients: losses, outputs and aux of every microbatch are those of the model in
one piece, and loss and gradients stay as they are.
"""

from __future__ import annotations

import inspect
from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import ppfunc as pp
from ppfunc.schedule import chimera, remove_tail, zero_bubble
from tests.builders import BUILDERS
from tests.models import affine, problem, same_bits, squared

MORE = {"has_aux": True, "return_losses": True, "return_outputs": True}
TRAINING = {
    n: f
    for n, f in (BUILDERS | {"zero_bubble": zero_bubble, "chimera": chimera}).items()
    if "inference" not in n
}
ENGINES = {
    "graph": pp.engines.graph,
    "functional": pp.engines.functional,
    "eager": pp.engines.eager,
    "remat": pp.engines.graph(remat="full"),
}
near = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


def with_aux(y: Tensor, target: Tensor) -> tuple[Tensor, dict]:
    error = (y - target).abs()
    return squared(y, target), {"right": (error < 0.5).sum(), "worst": error.amax(0), "none": None}


def alone(y: Tensor, target: Tensor) -> Tensor:
    return with_aux(y, target)[0]


def burdened(params, x):
    """A stage with a loss and metrics of its own."""
    y = affine(params, x)
    return pp.Output(y, loss=0.1 * params["w"].square().sum() + y.square().mean(), metrics={"mean": y.mean()})


def whole(stages, params, inputs, targets, m):
    """The losses, outputs, metrics of the last stage that has some, and ``aux`` of every microbatch."""
    rows = []
    for x, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        extra, metrics = 0.0, None
        for stage, fn in enumerate(stages):
            x = fn(params[stage], x)
            if isinstance(x, pp.Output):
                extra, metrics, x = extra + x.loss, x.metrics["mean"], x.y
        loss, aux = with_aux(x, target)
        rows.append((loss + extra, x, aux, metrics))
    return rows


def schedule_of(name, p, m, chunks=2):
    takes_chunks = "chunks" in inspect.signature(TRAINING[name]).parameters
    return remove_tail(TRAINING[name](p, m, **({"chunks": chunks} if takes_chunks else {})))


def require_results(result, rows, here=None):
    """Compare with the rows of the model in one piece.

    Args:
        here: the microbatches whose last stage ran in this process; by default all.
    """
    losses, outputs, aux, _ = zip(*rows, strict=True)
    near(result.losses, torch.stack(losses).detach())
    here = range(len(rows)) if here is None else here
    if not here:
        assert result.outputs is None and result.aux.loss is None
        return
    near(result.outputs, torch.cat([outputs[m] for m in here]).detach())
    near(result.aux.loss["worst"], torch.stack([aux[m]["worst"] for m in here]).detach())
    assert torch.equal(result.aux.loss["right"], torch.stack([aux[m]["right"] for m in here]))
    assert result.aux.loss["none"] is None
    assert not any(t.requires_grad for t in (result.losses, result.outputs, result.aux.loss["worst"]))


def require_forms(shapes, result):
    """What is told of a step in advance is on no device, and of the shapes and dtypes of what comes back."""
    leaves, others = optree.tree_leaves(shapes), optree.tree_leaves(result)
    assert optree.tree_structure(shapes) == optree.tree_structure(result)
    assert [(t.shape, t.dtype) for t in leaves] == [(t.shape, t.dtype) for t in others]
    assert all(t.is_meta for t in leaves)


@pytest.mark.parametrize("name", TRAINING)
@settings(max_examples=2)
@given(data=st.data())
def test_results_are_those_of_the_model_in_one_piece(name, data):
    p = data.draw(st.sampled_from([2, 4] if name in ("dualpipe", "chimera") else [1, 2, 3]))
    m = (
        2 * p + data.draw(st.sampled_from([0, 2]))
        if name.startswith("dualpipe")
        else data.draw(st.sampled_from([2, 4, 8]))
    )
    schedule = schedule_of(name, p, m, data.draw(st.integers(1, 3)))
    engine = ENGINES[data.draw(st.sampled_from([*ENGINES]))]
    weights = data.draw(st.sampled_from([None, "own", "with zero"]))
    params, inputs, targets = problem(schedule, leaves="wb", b=2)
    m, count = schedule.microbatches, len(params)
    burden = data.draw(st.integers(-1, count - 1))
    stages = [burdened if s == burden else affine for s in range(count)]
    rows = whole(stages, params, inputs, targets, m)
    each = (
        [1 / m] * m
        if weights is None
        else [0.0 if weights != "own" and n == 1 else 0.3 + n for n in range(m)]
    )
    options = {"engine": engine, "loss_weights": None if weights is None else each}
    overlapped = pp.interleaved() if name.startswith("dualpipe") and engine is pp.engines.graph else None
    metrics = {"has_aux": any(fn is burdened for fn in stages)}
    plain = pp.value_and_grad(stages, alone, schedule, overlapped=overlapped, **options, **metrics)
    asked = pp.value_and_grad(stages, with_aux, schedule, overlapped=overlapped, **options, **MORE)
    bare, result = plain(params, inputs, targets), asked(params, inputs, targets)
    loss, grads = (bare.loss, bare.grads) if metrics["has_aux"] else bare
    assert torch.equal(result.loss, loss) and same_bits(result.grads, grads)
    require_results(result, rows)
    require_forms(pp.eval_shape(asked, params, inputs, targets), result)
    near(result.loss, sum(w * row[0].detach() for w, row in zip(each, rows, strict=True)))
    judged = pp.evaluate(stages, with_aux, schedule, **options, **MORE)(params, inputs, targets)
    require_results(judged, rows)
    for s, fn in enumerate(stages):
        if fn is burdened:
            near(result.aux.metrics[s]["mean"], torch.stack([row[3] for row in rows]).detach())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_microbatches_of_other_shapes_give_theirs(name):
    """Outputs and aux that differ in shape come as Microbatches, losses as a tensor."""
    schedule = schedule_of(name, 2, 4)
    params, _, _ = problem(schedule, leaves="wb")
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 1, 3, 2)]

    def loss(y, target):
        return squared(y, target), y.sum(1)

    step = pp.value_and_grad([affine] * len(params), loss, schedule, **MORE)
    result = step(params, pp.Microbatches(batches), pp.Microbatches(batches))
    assert [len(aux) for aux in result.aux.loss] == [len(y) for y in result.outputs] == [3, 1, 3, 2]
    for n, x in enumerate(batches):
        y = x
        for s in range(len(params)):
            y = affine(params[s], y)
        near(result.outputs[n], y)
        near(result.losses[n], squared(y, x))
        near(result.aux.loss[n], y.sum(1))


def test_a_loss_that_is_no_number_is_returned_where_its_weight_is_zero():
    schedule = pp.one_f_one_b(2, 2)
    params, inputs, targets = problem(schedule)
    targets[-1] = torch.nan
    step = pp.value_and_grad([lambda p, x: x @ p["w"]] * 2, squared, schedule, return_losses=True)
    result = step(params, inputs, targets, loss_weights=[1.0, 0.0])
    assert (
        result.loss == result.losses[0] and result.losses[1].isnan() and result.grads[0]["w"].isfinite().all()
    )


def test_a_scalar_that_a_stage_holds_is_not_handed_out():
    held = torch.ones(())
    stage = lambda w, x, state: pp.Output(x * w, state={"s": held})  # noqa: E731
    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 1), has_aux=True)
    for _ in range(2):
        found = step({0: torch.ones(())}, torch.ones(2), torch.zeros(2), state={0: {"s": torch.zeros(())}})
        assert found.aux.state[0]["s"] == 1
        found.aux.state[0]["s"].zero_()


def test_losses_of_an_ensemble_keep_their_shape():
    schedule = pp.one_f_one_b(2, 4)
    params, inputs, targets = problem(schedule, leaves="wb")
    members = {s: {n: torch.stack([t, 2 * t, -t]) for n, t in tree.items()} for s, tree in params.items()}
    stages, loss = pp.ensemble([affine] * 2, with_aux)
    result = pp.value_and_grad(stages, loss, schedule, loss_shape=(3,), **MORE)(members, inputs, targets)
    assert result.losses.shape == (4, 3) and result.aux.loss["worst"].shape == (4, 3, 4)
    near(result.losses.mean(0), result.loss)
    rows = whole([affine] * 2, params, inputs, targets, 4)
    near(result.losses[:, 0], torch.stack([row[0] for row in rows]))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("builder", "ranks"), [("gpipe", 1), pytest.param("zb_h1", 2, marks=pytest.mark.large)]
)
def test_compiled_programs_return_them(builder, ranks):
    schedule, stages = getattr(pp, builder)(ranks, 2 * ranks), [affine] * ranks
    params, inputs, targets = problem(schedule, leaves="wb")
    step = pp.value_and_grad(stages, with_aux, schedule, engine=pp.engines.graph(compile=True), **MORE)
    for _ in range(2):
        require_results(step(params, inputs, targets), whole(stages, params, inputs, targets, 2 * ranks))


@pytest.mark.cuda
def test_on_a_device():
    schedule = pp.zbv(2, 4)
    problems = problem(schedule, leaves="wb")
    rows = whole([affine] * 4, *problems, 4)
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problems)
    step = pp.value_and_grad([affine] * 4, with_aux, schedule, **MORE)
    trainer = trainer_of(schedule)
    for _ in range(3):
        result = step(params, inputs, targets)
        require_results(
            result._replace(
                **optree.tree_map(
                    torch.Tensor.cpu,
                    {
                        "losses": result.losses,
                        "outputs": result.outputs,
                        "aux": result.aux,
                    },
                )
            ),
            rows,
        )
    _, metrics = trainer.step(trainer.init(params), inputs, targets, return_losses=True, return_outputs=True)
    assert metrics.losses.is_cuda and metrics.outputs.is_cuda and metrics.aux["worst"].shape == (4, 4)


def between_processes(rank, ranks, name):
    """Every rank has the losses; those of last stages have the outputs and aux of their microbatches."""
    schedule = schedule_of(name, ranks, 2 * ranks)
    params, inputs, targets = problem(schedule, leaves="wb", b=2)
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    stages = [burdened if s == 0 else affine for s in range(len(params))]
    here = [
        m
        for chain in schedule.flows
        for m in chain.microbatches
        if schedule.placement[chain.stages[-1]] == rank
    ]
    rows = whole(stages, params, inputs, targets, schedule.microbatches)
    with pp.P2P(timeout=30) as transport:
        plain = pp.value_and_grad(stages, alone, schedule, transport, has_aux=True)
        asked = pp.value_and_grad(stages, with_aux, schedule, transport, **MORE)
        judge = pp.evaluate(stages, with_aux, schedule, transport, **MORE)
        for _ in range(2):
            bare, result = plain(own, inputs, targets), asked(own, inputs, targets)
            assert torch.equal(bare.loss, result.loss) and same_bits(bare.grads, result.grads)
            require_results(result, rows, here)
            require_forms(asked.eval_shape(own, inputs, targets), result)
            require_results(judge(own, inputs, targets), rows, here)
    near(pp.value_and_grad(stages, with_aux, schedule, **MORE)(params, inputs, targets).losses, result.losses)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipe"])
def test_results_between_processes(two, name):
    two(between_processes, name)


# -- the trainer


def trainer_of(schedule, transport=None, loss=with_aux, **options):
    stages = [burdened if s == 0 else affine for s in range(len(set(schedule.model_stages)))]
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.adamw(1e-2))
    return pp.Trainer(stages, loss, schedule, optimizer, transport, **options)


def batches_of(schedule, steps):
    return [problem(schedule, leaves="wb", b=2, seed=n)[1:] for n in range(1, 1 + steps)]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_trainer_returns_them_too(name):
    schedule = schedule_of(name, 2, 4)
    params, (batch, second) = problem(schedule, leaves="wb", b=2)[0], batches_of(schedule, 2)
    trainer, plain = trainer_of(schedule), trainer_of(schedule, loss=alone)
    state, bare = trainer.init(params), plain.init(params)
    rows = whole([burdened, *[affine] * (len(params) - 1)], params, *batch, 4)
    judged = trainer.evaluate(state, *batch, **MORE)
    require_results(judged, rows)
    assert torch.equal(judged.loss, trainer.evaluate(state, *batch))
    asked = {"return_losses": True, "return_outputs": True}
    after, metrics = trainer.step(state, *batch, **asked)
    near(metrics.losses, torch.stack([row[0] for row in rows]).detach())
    near(metrics.outputs, torch.cat([row[1] for row in rows]).detach())
    near(metrics.aux["worst"], torch.stack([row[2]["worst"] for row in rows]).detach())
    without, unasked = plain.step(bare, *batch)
    assert unasked.losses is unasked.outputs is unasked.aux is None
    assert same_bits(after, without) and torch.equal(metrics.loss, unasked.loss)
    weights, extras = [[1.0, 2.0, 3.0, 4.0], [4.0, 0.0, 1.0, 1.0]], [{}, {}]
    several, reports = trainer.steps(state, [batch, second], loss_weights=weights, extras=extras, **asked)
    for n, (pair, report) in enumerate(zip([batch, second], reports, strict=True)):
        state, metrics = trainer.step(state, *pair, loss_weights=weights[n], **asked)
        assert same_bits(
            [report.loss, report.losses, report.outputs, report.aux, report.stages],
            [metrics.loss, metrics.losses, metrics.outputs, metrics.aux, metrics.stages],
        )
    assert same_bits(several, state)
    assert trainer.record(state, *batch, **asked)[0][1].losses.shape == (4,)


@pytest.mark.parametrize("clip", [False, True])
def test_the_metrics_have_the_learning_rate_of_each_update(clip):
    schedule, rate = pp.one_f_one_b(2, 4), pp.optim.warmup_cosine(1e-2, 2, 8)
    optimizer = pp.optim.adamw(rate)
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), optimizer) if clip else optimizer
    trainer = pp.Trainer(
        [affine] * 2, squared, schedule, optimizer, on_nonfinite="skip" if clip else "ignore"
    )
    state, batches = trainer.init(problem(schedule, leaves="wb")[0]), batches_of(schedule, 3)
    state, first = trainer.step(state, *batches[0])
    broken = (batches[0][0], batches[0][1] * torch.nan) if clip else batches[0]
    state, reports = trainer.steps(state._replace(step=state.step + 5), [broken, *batches[1:]])
    made = [0, *([1, 1, 2] if clip else [1, 2, 3])]
    assert [m.lr for m in (first, *reports)] == [rate(torch.tensor(n)) for n in made]
    assert state.optimizer[0]["updates"] == made[-1] + 1
    constant = pp.Trainer([affine] * 2, squared, schedule, pp.optim.sgd(0.5))
    assert constant.step(constant.init(problem(schedule, leaves="wb")[0]), *batches[0])[1].lr == 0.5


def test_the_metrics_have_the_learning_rate_of_each_group():
    schedule, rate = pp.one_f_one_b(2, 4), pp.optim.warmup_cosine(1e-2, 2, 8)
    weights = pp.optim.muon(rate, rest=pp.optim.Optimizer(lambda p: (), lambda g, s, p: (p, s)))
    optimizer = pp.optim.ema(pp.optim.by_name({"*b": pp.optim.sgd(0.5), "*": weights}))
    trainer = pp.Trainer([affine] * 2, squared, schedule, optimizer)
    state = trainer.init(problem(schedule, leaves="wb")[0])
    _, reports = trainer.steps(state, batches_of(schedule, 2))
    for n, report in enumerate(reports):
        assert report.lr == {"*b": 0.5, "*": {"matrices": rate(torch.tensor(n))}}


def train_in_processes(rank, ranks, kind):
    """Losses of the microbatches of all data ranks are on every rank, in the order of the data ranks."""
    data = kind == "data"
    schedule = schedule_of("1f1b" if data else kind, 1 if data else ranks, 4)
    params = problem(schedule, leaves="wb", b=2)[0]
    pairs = batches_of(schedule, 2)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (1, 2) if data else (2, 1), mesh_dim_names=("pp", "dp")
    )
    stages = [burdened, *[affine] * (len(params) - 1)]
    rows = [whole(stages, params, *pair, 4) for pair in pairs]
    batch = pairs[rank if data else 0]
    own = params if data else {s: params[s] for s in schedule.model_stages_of(rank)}
    asked = {"return_losses": True, "return_outputs": True}
    with trainer_of(schedule, pp.P2P(mesh=mesh, axes=pp.Axes(pipe="pp", data="dp"))) as trainer:
        state = trainer.init(own)
        judged, (_, metrics) = trainer.evaluate(state, *batch, **MORE), trainer.step(state, *batch, **asked)
    expected = torch.stack([row[0].detach() for each in (rows if data else rows[:1]) for row in each])
    near(judged.losses, expected)
    near(metrics.losses, expected)
    mine = [
        m for c in schedule.flows for m in c.microbatches if schedule.placement[c.stages[-1]] == rank or data
    ]
    if mine:
        outputs = torch.cat([rows[rank if data else 0][m][1].detach() for m in mine])
        near(metrics.outputs, outputs)
        near(judged.outputs, outputs)
        assert metrics.aux["worst"].shape == (len(mine), 4)
    else:
        assert metrics.outputs is metrics.aux is judged.aux.loss is None


@pytest.mark.parametrize("kind", ["data", "1f1b", "dualpipe"])
def test_a_trainer_between_processes(two, kind):
    two(train_in_processes, kind)


# -- shapes alone


def test_shapes_of_other_steps_and_of_stages():
    schedule = pp.one_f_one_b(2, 2)
    params, inputs, targets = problem(schedule, leaves="wb", dtype=torch.bfloat16)
    for step in (
        pp.value_and_grad([affine] * 2, squared, schedule, argnums=(1, 0), sum_dtype=torch.float32),
        pp.value_and_grad(
            [affine] * 2, squared, schedule, per_microbatch=True, trainable={0: False, 1: True}
        ),
        pp.evaluate([affine] * 2, None, schedule, return_outputs=True),
    ):
        wanted = () if "evaluate" in repr(step) else (targets,)
        require_forms(pp.eval_shape(step, params, inputs, *wanted), step(params, inputs, *wanted))
    products = pp.hvp([affine] * 2, squared, schedule)
    params, inputs, targets = problem(schedule, leaves="wb")
    require_forms(
        pp.eval_shape(products, params, params, inputs, targets), products(params, params, inputs, targets)
    )
    on_meta = optree.tree_map(lambda t: t.to("meta"), (params[0], inputs))
    assert pp.eval_shape(burdened, *on_meta).metrics["mean"].shape == ()
    drawing = pp.value_and_grad([lambda p, x: torch.dropout(affine(p, x), 0.5, True)] * 2, squared, schedule)
    assert pp.eval_shape(drawing, params, inputs, targets)[0].is_meta


def test_what_is_compiled_tells_what_is_lowered():
    schedule = pp.zb_h1(2, 4)
    lowered = pp.value_and_grad([affine] * 2, with_aux, schedule, **MORE).lower(
        *problem(schedule, leaves="wb")
    )
    compiled = lowered.compile()
    assert "aux {'right': int64[] no grad, 'worst': float64[4] no grad, 'none': None}" in compiled.as_text()
    assert compiled.as_text() == lowered.as_text()
    assert compiled.memory_analysis() == lowered.memory_analysis()
    assert compiled.cost_analysis() == lowered.cost_analysis()


# -- refusals


def test_what_comes_with_the_loss_is_asked_for():
    schedule = pp.gpipe(1, 2)
    params, inputs, targets = problem(schedule)
    with pytest.raises(ValueError, match=r"loss_fn: it returns a loss and .*right.*; pass has_aux=True"):
        pp.value_and_grad([lambda p, x: x @ p["w"]], with_aux, schedule)(params, inputs, targets)
    with pytest.raises(ValueError, match="return_losses: got True, and no loss function"):
        pp.evaluate([affine], None, schedule, return_outputs=True, return_losses=True)
    with pytest.raises(pp.StageError, match=r"aux\['n'\]: got .*int"):
        step = pp.value_and_grad([affine], lambda y, t: (squared(y, t), {"n": 3}), schedule, has_aux=True)
        step({0: problem(schedule, leaves="wb")[0][0]}, inputs, targets)
    trainer = trainer_of(schedule)
    state, batch = trainer.init(problem(schedule, leaves="wb")[0]), batches_of(schedule, 1)
    with pytest.raises(ValueError, match="loss_weights: got .*, expected a list of 1, one for every step"):
        trainer.steps(state, batch, loss_weights=[[1.0, 1.0]] * 2)
    with pytest.raises(ValueError, match="extras: got .*, expected a list of 1"):
        trainer.steps(state, batch, extras={0: torch.ones(2)})
