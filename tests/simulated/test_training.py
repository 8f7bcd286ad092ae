"""What trains over the simulated NCCL: stages of every kind, data ranks, failures, and how it ends."""

from __future__ import annotations

import optree
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.layout import local
from tests.models import affine, dense, new_trainer, normal, problem, same_bits, squared
from tests.simulated.cases import cases
from tests.simulated.groups import in_threads, simulated_nccl

D, M = 4, 4


@pytest.fixture
def ranks(simulate):
    """Run a function on each rank, a thread; on the CPU over gloo where ``device`` says so."""

    def run(function, *arguments, size=2, seed=0, device="cuda", omitted=(), **options):
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        run.gpu = None if device == "cpu" else simulate(devices=size, seed=seed)
        if omitted:
            run.gpu.omitted.update(omitted)
        with simulated_nccl(**options) as run.count:
            return in_threads(size, function, device, *arguments, backend=backend)

    return run


def moved(tree, device):
    """Move the tensors of a tree."""
    return optree.tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, tree)


def skipping():
    """A skip connection whose ends are on both ranks."""

    def first(p, x):
        y = dense(p, x)
        return pp.Output(y, skips={3: y[:1].sum(1)})

    def last(p, received):
        return dense(p, received.x + received.skips[1].sum())

    return [dense, first, dense, last], problem(4, M), {"schedule": pp.with_skips(pp.zbv(2, M), [(1, 3)])}, {}


def tied():
    """The table of the first stage is the head of the last."""
    table = normal(8, D)
    params = {0: {"table": table}, 1: {"w": normal(D, D, seed=1)}, 2: {"w": normal(D, D, seed=2)}}
    params[3] = {"head": table.clone()}
    stages = [lambda p, x: p["table"][x], dense, dense, lambda p, x: x @ p["head"].T]
    tokens = torch.randint(8, (3 * M,), generator=torch.Generator().manual_seed(0))
    options = {"schedule": pp.looped_bfs(2, M, 2), "tied": {"embedding": [(0, "table"), (3, "head")]}}
    return stages, (params, tokens, normal(3 * M, 8, seed=3)), options, {}


def with_state():
    """A running mean, which passes from microbatch to microbatch."""

    def normalised(params, x, state):
        y = x @ params["w"]
        new = {"mean": 0.9 * state["mean"] + 0.1 * y.mean(0).detach(), "count": state["count"] + 1}
        return pp.Output(torch.tanh(y - y.mean(0) + state["mean"]), state=new)

    state = {0: {"mean": torch.zeros(D, dtype=torch.float64), "count": torch.tensor(0)}}
    return (
        [normalised, dense],
        problem(2, M),
        {"schedule": pp.one_f_one_b(2, M), "has_aux": True},
        {"state": state},
    )


def seeded():
    """Dropout, whose mask is drawn on the CPU for both."""

    def noisy(params, x, extras):
        return dense(params, x) * extras["mask"]

    masks = {1: {"mask": (normal(3 * M, D, seed=9) > 0).double()}}
    return [dense, noisy], problem(2, M), {"schedule": pp.zb_h1(2, M)}, {"extras": masks}


KINDS = {"skips": skipping, "ties": tied, "state": with_state, "extras": seeded}


def parts(result):
    """Loss, gradients, and what else a step gives."""
    if len(result) == 2:
        return (*result, None)
    return result.loss, result.grads, result.aux.state


def run_kind(rank, size, device, kind, steps=2):
    stages, (params, inputs, targets), options, given = moved(KINDS[kind](), device)
    schedule = options["schedule"]
    own = {schedule.model_stages[s] for s in schedule.stages_of(rank)}
    own_given = {name: {s: tree for s, tree in of.items() if s in own} for name, of in given.items()}
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad(stages, squared, transport=transport, **options)
        results = []
        for _ in range(steps):
            results.append(parts(step({s: params[s] for s in own}, inputs, targets, **own_given)))
        return moved(results, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_every_kind_give_the_bits_of_the_cpu(ranks, kind):
    stages, arguments, options, given = KINDS[kind]()
    step = pp.value_and_grad(stages, squared, **options)
    wanted_loss, wanted_grads, wanted_state = parts(step(*arguments, **given))
    for results in ranks(run_kind, kind):
        for loss, grads, state in results:
            assert torch.equal(loss, wanted_loss)
            assert same_bits(grads, {s: wanted_grads[s] for s in grads})
            assert not state or same_bits(state, {s: wanted_state[s] for s in state})


def overlapped(rank, size, device, how):
    schedule = pp.dualpipev(2, 6)
    params, inputs, targets = moved(problem(schedule), device)
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * 4, squared, schedule, transport, overlapped=HOW[how]())
        return moved([step(own, inputs, targets) for _ in range(2)], "cpu")


HOW = {"interleaved": pp.interleaved, "two_streams": pp.two_streams}


@pytest.mark.parametrize("how", HOW)
def test_overlapped_pairs_give_the_bits_of_the_cpu(ranks, how):
    schedule = pp.dualpipev(2, 6)
    loss, grads = pp.value_and_grad([dense] * 4, squared, schedule)(*problem(schedule))
    for results in ranks(overlapped, how):
        for mine, own in results:
            assert torch.equal(mine, loss)
            assert same_bits(own, {s: grads[s] for s in own})


@pytest.mark.large
def test_what_orders_streams_is_needed(ranks):
    """Each wait and each ``record_stream`` is left out, wherever it is called from."""
    ranks(overlapped, "two_streams")
    calls, silent = sorted(ranks.gpu.orders), []
    assert len(calls) >= 8
    for call in calls:
        ranks(overlapped, "two_streams", omitted=[call])
        silent += [] if ranks.gpu.races else [call]
        ranks.gpu.races.clear()
    # Residuals live until both streams have met; host waits are for errors of the device.
    assert [kind for kind, _ in silent if kind != "host wait"] == ["record_stream"], silent


def test_a_negative_weight_on_the_device_makes_no_number(gpu):
    """There it is not read: the loss is NaN, and the update is left out."""
    stages, batch = [dense] * 2, moved(problem(2, M), "cuda")
    with pp.Trainer(stages, squared, pp.gpipe(2, M), pp.optim.sgd(1e-2), pp.InProcess()) as trainer:
        weights = torch.tensor([2.0, 1.0, -1.0, 1.0], dtype=torch.float64, device="cuda")
        before = trainer.init(batch[0])
        after, metrics = trainer.step(before, *batch[1:], loss_weights=weights)
        assert metrics.loss.isnan() and metrics.skipped == 1
        assert same_bits(moved(before.params, "cpu"), moved(after.params, "cpu"))
        _, metrics = trainer.step(after, *batch[1:], loss_weights=weights.abs())
        assert metrics.loss.isfinite()


def test_a_step_is_lowered_for_the_device_of_its_parameters(gpu):
    params, inputs, targets = moved(problem(2, M), "cuda")
    with pp.Trainer([dense] * 2, squared, pp.gpipe(2, M), pp.optim.sgd(1e-2)) as trainer:
        assert "stage 1 on cuda:0" in trainer.lower(params, inputs, targets).as_text()


def train(rank, size, device, shape, shard, build):
    """Losses, norms and whole parameters, after some steps one by one and two together."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp"))
    pipe, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    schedule = build(shape[0], M)
    params, inputs, targets = moved(problem(schedule, b=6, leaves="wb"), device)

    own = {s: params[s] for s in schedule.model_stages_of(pipe)}
    rows = len(inputs) // shape[1]
    half = slice(data * rows, (data + 1) * rows)
    with new_trainer(
        [affine] * len(params), squared, schedule, pp.optim.adamw(1e-2), mesh, axes=pp.Axes("pp", "dp"),
        clip=0.3, shard=shard, scale=pp.dynamic_scale(init=8.0, interval=2),
    ) as trainer:  # fmt: skip
        state, found = trainer.init(own), []
        for _ in range(2):
            state, metrics = trainer.step(state, inputs[half], targets[half])
            found.append(metrics)
        state, more = trainer.steps(state, [(inputs[half], targets[half])] * 2)
        found += more
        params = optree.tree_map(lambda leaf: local(leaf).cpu(), dict(state.params))
        return [(m.loss.item(), m.grad_norm.item(), m.scale.item()) for m in found], params


@pytest.mark.parametrize(
    ("pipe", "data", "shard"),
    cases(
        [(pipe, 2, shard) for pipe in (1, 2) for shard in ("none", "optimizer", "params")],
        [(1, 2, "params"), (2, 2, "none"), (1, 2, "optimizer")],
    ),
)
def test_a_trainer_with_data_ranks_gives_the_bits_of_gloo(ranks, pipe, data, shard):
    shape, size = (pipe, data), pipe * data
    wanted = ranks(train, shape, shard, pp.one_f_one_b, size=size, device="cpu")
    found = ranks(train, shape, shard, pp.one_f_one_b, size=size)
    for (metrics, params), (wanted_metrics, wanted_params) in zip(found, wanted, strict=True):
        assert metrics == wanted_metrics
        assert same_bits(params, wanted_params)
    assert not ranks.count.alive()
