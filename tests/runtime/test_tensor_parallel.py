"""Pipelines whose stages are cut over the ranks of a second axis: as one process computes them, step after
step.
"""

from __future__ import annotations

import copy
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import ppfunc as pp
from ppfunc.stage import StageError
from tests.models import all_gather, squared
from tests.sharded_models import MODELS, B, D, T, W, full, largest_difference, random
from tests.storages import kept_bytes

M = 4
TOLERANCE = 1e-12
SCHEDULES = {
    "gpipe": lambda: pp.gpipe(2, M),
    "1f1b": lambda: pp.one_f_one_b(2, M),
    "interleaved": lambda: pp.interleaved_1f1b(2, M, 2),
    "zb-h1": lambda: pp.zb_h1(2, M),
    "zbv": lambda: pp.zbv(2, M),
}


class Pipelines:
    """A pipeline of so many stages cut over tensor ranks: in this process, or over processes, one pipeline
    per tensor rank.
    """

    def __init__(self, size, pipe, schedule, kind):
        self.mesh = init_device_mesh("cpu", (pipe, size // pipe), mesh_dim_names=("pp", "tp"))
        self.tp, self.schedule = self.mesh["tp"], schedule
        stages = sorted(set(schedule.model_stages))
        self.model = MODELS[kind]
        self.transport = (
            pp.InProcess()
            if pipe == 1
            else pp.P2P(timeout=60, mesh=self.mesh, axes=pp.Axes("pp", model="tp"))
        )
        self.held = stages if pipe == 1 else sorted(schedule.model_stages_of(self.mesh.get_local_rank("pp")))
        self.params = self.shard({s: self.model.params(s) for s in self.held})
        cut = self.model.cut(self.tp)
        self.cut_x = None if self.model.x is None else Shard(self.model.x)
        stage = (
            cut
            if self.cut_x is None
            else pp.with_layouts(cut, self.tp, inputs=self.cut_x, outputs=self.cut_x)
        )
        self.stages = [stage] * len(stages)

    def shard(self, params):
        placements = self.model.placements
        return pp.stage.shard(params, self.tp, lambda name, leaf: placements[name.partition(".")[2]])

    def lay(self, batch):
        """A batch, cut as the activations are."""
        return batch if self.cut_x is None else distribute_tensor(batch, self.tp, [self.cut_x])

    def loss(self, y, target):
        """The mean over what all ranks have."""
        if self.cut_x is None:
            return squared(y, target)
        return pp.collectives.psum((y - target).square().sum(), self.tp) / (y.numel() * self.tp.size())

    def own(self, tree):
        return {s: tree[s] for s in self.held}


def batch():
    return random((M * B, T, D), 7), random((M * B, T, D), 8)


@cache
def whole_gradients(kind, stages):
    """What ``gradients`` compares with: of as many stages, whole, in one process."""
    model, schedule = MODELS[kind], pp.gpipe(stages, M)
    parts, params, (x, target) = [model.whole] * stages, {s: model.params(s) for s in range(stages)}, batch()
    outputs = pp.evaluate(parts, None, schedule, return_outputs=True)(params, x)
    step = pp.value_and_grad(parts, squared, schedule, argnums=(0, 1))(params, x, target)
    apart = pp.value_and_grad(parts, squared, schedule, per_microbatch=True)(params, x, target)
    return outputs, step.loss, step.grads, step.input_grads, apart[1]


def gradients(rank, size, pipe, name, kind, want_y, want, grads, gx, apart):
    """Losses, gradients and input gradients of two steps, as DTensors of the placements given."""
    p = Pipelines(size, pipe, SCHEDULES[name](), kind)
    x, target = batch()
    with p.transport:
        step = pp.value_and_grad(p.stages, p.loss, p.schedule, p.transport, argnums=(0, 1))
        for _ in range(2):
            result = step(p.params, p.lay(x), p.lay(target))
            loss, got, got_x = result.loss, result.grads, result.input_grads
            assert abs(loss - want) < TOLERANCE
            assert all(got[s][n].placements == t.placements for s in p.held for n, t in p.params[s].items())
            assert largest_difference(full(got), p.own(grads)) < TOLERANCE
            if got_x is not None:
                assert got_x.shape == x.shape and isinstance(got_x, DTensor) == (p.cut_x is not None)
                assert largest_difference(full(got_x), gx) < TOLERANCE
        assert step.cache_info().misses == 1
        step = pp.value_and_grad(p.stages, p.loss, p.schedule, p.transport, per_microbatch=True)
        got = step(p.params, p.lay(x), p.lay(target))[1]
        assert largest_difference(full(got), p.own(apart)) < TOLERANCE
        outputs = pp.evaluate(p.stages, None, p.schedule, p.transport, return_outputs=True)(
            p.params, p.lay(x)
        )
        if outputs is not None:
            assert isinstance(outputs, DTensor) == (p.cut_x is not None)
            assert largest_difference(full(outputs), want_y) < TOLERANCE


@pytest.mark.parametrize(
    "pool, pipelines, name, kind",
    [
        *(("two", 1, "zb-h1", kind) for kind in ("rows and columns", "sequence", "heads")),
        ("two", 1, "1f1b", "heads"),
        *(("four", 2, name, "rows and columns") for name in ("gpipe", "interleaved", "zbv")),
        # Below, 1f1b and zb-h1 have two pipelines of their own.
        pytest.param("four", 2, "1f1b", "rows and columns", marks=pytest.mark.large),
        pytest.param("four", 2, "zb-h1", "rows and columns", marks=pytest.mark.large),
        *(("four", 2, "1f1b", kind) for kind in ("sequence", "heads")),
    ],
)
def test_pipelines_over_two_tensor_ranks(request, pool, pipelines, name, kind):
    wanted = whole_gradients(kind, max(SCHEDULES[name]().model_stages) + 1)
    request.getfixturevalue(pool)(gradients, pipelines, name, kind, *wanted, timeout=120)


ALONG = {"hvp": pp.hvp, "jvp": pp.jvp}


def derivatives(rank, size, pipe, kind, along, wanted):
    """Products with second derivatives, slopes, and gradients of samples."""
    p = Pipelines(size, pipe, SCHEDULES["1f1b"](), kind)
    x, target = batch()
    tangents = p.shard(p.own(along))
    with p.transport:
        for which, transform in ALONG.items():
            want = wanted[which]
            got = transform(p.stages, p.loss, p.schedule, p.transport)(
                p.params, tangents, p.lay(x), p.lay(target)
            )
            if which == "jvp":
                assert largest_difference(got, want) < TOLERANCE
                continue
            for name in ("loss", "slope"):
                assert largest_difference(getattr(got, name), getattr(want, name)) < TOLERANCE, which
            for name in ("grads", "products"):
                one, other = getattr(got, name), getattr(want, name)
                assert all(isinstance(t, DTensor) for s in one for t in one[s].values())
                assert largest_difference(full(one), p.own(other)) < TOLERANCE, which
        with pytest.raises(
            (ValueError, pp.PipelineError),
            match=r"tangent of .*: got torch.float64\[4, 16\], expected .* S\(1\) over",
        ):
            pp.jvp(p.stages, p.loss, p.schedule, p.transport)(p.params, p.own(along), p.lay(x), p.lay(target))


@pytest.mark.parametrize("kind", ["rows and columns", "sequence"])
def test_hessian_vector_products_through_two_pipelines(four, kind):
    model, schedule = MODELS[kind], SCHEDULES["1f1b"]()
    params, along = ({s: model.params(s + first) for s in range(2)} for first in (0, 10))
    wanted = {
        which: transform([model.whole] * 2, squared, schedule)(params, along, *batch())
        for which, transform in ALONG.items()
    }
    four(derivatives, 2, kind, along, wanted, timeout=120)


def samples(rank, size):
    """Gradients of every sample, their norms over all ranks, and the sum of clipped ones."""
    p = Pipelines(size, 1, SCHEDULES["1f1b"](), "rows and columns")
    x, target = batch()
    whole = {s: p.model.params(s) for s in p.held}
    want, grads = pp.per_sample_grad([p.model.whole] * 2, squared, p.schedule, samples=B)(whole, x, target)
    loss, got = pp.per_sample_grad(p.stages, p.loss, p.schedule, samples=B)(p.params, x, target)
    assert abs(loss - want) < TOLERANCE and largest_difference(full(got), grads) < TOLERANCE
    assert got[0]["a"].placements == (Shard(3),) and got[0]["c"].placements == (Replicate(),)
    norms = pp.transforms.square_norms(got)
    assert (
        type(norms) is torch.Tensor
        and largest_difference(norms, pp.transforms.square_norms(grads)) < TOLERANCE
    )
    clipped, wanted = pp.transforms.clipped_sum(got, norms, 0.1), pp.transforms.clipped_sum(grads, norms, 0.1)
    assert clipped[0]["a"].placements == (Shard(1),) and largest_difference(full(clipped), wanted) < TOLERANCE


def test_gradients_of_samples(two):
    two(samples)


# -- modules, by torch's plans
# -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


PLANS = {
    "columns and rows": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, None),
    "sequence": (
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
        Shard(1),
    ),
}


def two_blocks():
    torch.manual_seed(0)
    return [Block().double() for _ in range(2)]


@cache
def whole_blocks():
    plain = [pp.stage_from_module(m) for m in two_blocks()]
    params = {s: p.params for s, p in enumerate(plain)}
    return pp.value_and_grad([p.fn for p in plain], squared, pp.gpipe(2, M))(params, *batch())


def blocks(rank, size, pipe, name, which, wanted, grads):
    """Modules under torch's plan, through pipelines: DTensors outside, and traced through."""
    plan, cut = PLANS[which]
    schedule = SCHEDULES[name]()
    mesh = init_device_mesh("cpu", (pipe, size // pipe), mesh_dim_names=("pp", "tp"))
    tp = mesh["tp"]
    made = [pp.parallelize(m, tp, plan, inputs=cut, outputs=cut) for m in two_blocks()]
    transport = pp.InProcess() if pipe == 1 else pp.P2P(mesh["pp"].get_group(), timeout=60)
    held = range(len(made)) if pipe == 1 else schedule.model_stages_of(mesh.get_local_rank("pp"))
    params = {s: made[s].params for s in held}
    x, target = batch()
    lay = lambda t: t if cut is None else distribute_tensor(t, tp, [cut])  # noqa: E731
    loss_fn = (
        squared
        if cut is None
        else lambda y, t: pp.collectives.psum((y - t).square().sum(), tp) / (y.numel() * tp.size())
    )
    with transport:
        for engine in (pp.engines.graph, pp.engines.eager):
            step = pp.value_and_grad([m.fn for m in made], loss_fn, schedule, transport, engine=engine)
            for _ in range(2):
                loss, got = step(params, lay(x), lay(target))
                assert abs(loss - wanted) < TOLERANCE
                assert all(t.placements == params[s][n].placements for s in held for n, t in got[s].items())
                assert largest_difference(full(got), {s: grads[s] for s in held}) < TOLERANCE
        if pipe == 1:
            with pytest.raises(StageError, match="uses DTensors, .* use the graph engine"):
                pp.value_and_grad([m.fn for m in made], loss_fn, schedule, engine=pp.engines.functional)(
                    params, lay(x), lay(target)
                )
            with pytest.raises(
                StageError,
                match="uses DTensors, whose own functions torch.func cannot transform.* over ppfunc.collectives.psum",  # noqa: E501
            ):
                pp.hvp([m.fn for m in made], loss_fn, schedule)(params, params, lay(x), lay(target))


@pytest.mark.parametrize("pool, pipelines, name", [("two", 1, "1f1b"), ("four", 2, "zb-h1")])
@pytest.mark.parametrize("which", PLANS)
def test_modules_under_a_plan(request, pool, pipelines, name, which):
    request.getfixturevalue(pool)(blocks, pipelines, name, which, *whole_blocks(), timeout=120)


class Prepared(nn.Module):
    """Two blocks and a head, laid out by torch before anything else."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(D, D)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def lay_out(self, tp, which):
        plan, cut = PLANS[which]
        for block in self.blocks:
            parallelize_module(block, tp, plan)
        if cut is not None:
            whole_to_cut = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=cut, use_local_output=True
            )
            head = ColwiseParallel(input_layouts=cut, output_layouts=Replicate())
            parallelize_module(self, tp, {"blocks.0": whole_to_cut, "head": head})
        return self


def prepared(rank, size, which):
    """Modules that torch has laid out are stages, and split, as they are."""
    torch.manual_seed(0)
    model, (x, target) = Prepared(), batch()
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    fn, params, _ = pp.stage_from_module(model)
    loss, grads = pp.value_and_grad([fn], squared, pp.gpipe(1, M))({0: params}, x, target)
    laid = copy.deepcopy(model).lay_out(tp, which)
    one = pp.stage_from_module(laid)
    parts = pp.split(laid, x[: len(x) // M], at=["blocks.1"])
    for stages, given, schedule in (
        ([one.fn], {0: one.params}, pp.gpipe(1, M)),
        (parts, parts.params, pp.one_f_one_b(2, M)),
    ):
        for engine in (pp.engines.graph, pp.engines.eager):
            got, gradients = pp.value_and_grad(stages, squared, schedule, engine=engine)(given, x, target)
            assert abs(got - loss) < TOLERANCE
            every = {name: g for tree in full(gradients).values() for name, g in tree.items()}
            assert largest_difference({0: every}, grads) < TOLERANCE
        trainer = pp.Trainer(stages, squared, schedule, pp.optim.sgd(0.1))
        state, _ = trainer.step(trainer.init(given), x, target)
        assert abs(trainer.evaluate(state, x, target)) < loss
    parts.put_back(parts.params)
    with pytest.raises(StageError, match="stage 1: it takes the value .*, a DTensor, from stage 0"):
        halves = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
        two_layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double()
        pp.split(parallelize_module(two_layers, tp, halves), x, at=["1"])
    for n in (2, 3):  # counted as the whole
        assert pp.split(laid, x[: len(x) // M], at=n).at == pp.split(model, x[: len(x) // M], at=n).at
    with pytest.raises(TypeError, match="weight: the model has a DTensor, .* before it is laid out"):
        parts.load(model.state_dict())
    wrapped = fully_shard(copy.deepcopy(model), mesh=tp)
    for take in (pp.stage_from_module, lambda m: pp.split(m, x[:1], at=["blocks.1"])):
        with pytest.raises(TypeError, match="FSDPModule has wrapped, .* shard='params'"):
            take(wrapped)


@pytest.mark.parametrize("which", PLANS)
def test_modules_that_torch_has_laid_out_are_taken_as_they_are(two, which):
    two(prepared, which)


def tokens(rank, size):
    """An embedding and a head cut over the vocabulary, and the loss of torch that goes with them."""
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    torch.manual_seed(0)
    embed, head = nn.Embedding(10, D).double(), nn.Linear(D, 10).double()
    plain = [pp.stage_from_module(copy.deepcopy(m)) for m in (embed, head)]
    rows = pp.parallelize(embed, tp, RowwiseParallel(input_layouts=Replicate()))
    columns = pp.parallelize(head, tp, ColwiseParallel(use_local_output=False))
    ids, target = torch.randint(10, (M * B, T)), torch.randint(10, (M * B, T))
    loss_fn = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    schedule = pp.one_f_one_b(2, M)
    want, grads = pp.value_and_grad([p.fn for p in plain], loss_fn, schedule)(
        {s: p.params for s, p in enumerate(plain)}, ids, target
    )
    with loss_parallel():
        step = pp.value_and_grad([rows.fn, columns.fn], loss_fn, schedule)
        loss, got = step({0: rows.params, 1: columns.params}, ids, target)
    assert abs(loss - want) < TOLERANCE and largest_difference(full(got), grads) < TOLERANCE
    outputs = pp.evaluate([rows.fn, columns.fn], None, schedule, return_outputs=True)(
        {0: rows.params, 1: columns.params}, ids
    )
    assert outputs.placements == (Shard(2),) and outputs.shape == (M * B, T, 10)


def test_a_vocabulary_that_is_cut(two):
    two(tokens)


# -- what goes wrong
# -----------------------------------------------------------------------------------------------


def refused(rank, size):
    """Every way to differentiate wrongly is refused, by name of the stage, with the line."""
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    schedule, x = pp.one_f_one_b(1, 2), torch.ones(4, D)
    params = {0: torch.eye(D)}

    def in_place(w, x):
        y = x @ w
        dist.all_reduce(y)
        return y

    stages = {
        "all_reduce": lambda w, x: collectives.all_reduce(x @ w, "sum", tp),
        "broadcast": lambda w, x: collectives.broadcast(x @ w, 0, tp),
        "allreduce_": in_place,
    }
    for engine in (pp.engines.graph, pp.engines.functional, pp.engines.eager):
        for op, stage in stages.items():
            step = pp.value_and_grad([stage], squared, schedule, engine=engine)
            with pytest.raises(
                StageError,
                match=rf"^stage 0: .*{op}.*test_tensor_parallel.py:\d+.* Instead: use ppfunc.collectives.psum",  # noqa: E501
            ):
                step(params, x, x)


def test_wrong_collectives_are_refused_by_every_engine(two):
    two(refused)


def otherwise(rank, size):
    """Another placement on one rank, before anything hangs in a collective; the next step is right."""
    p = Pipelines(size, 1, SCHEDULES["1f1b"](), "rows and columns")
    x, target = batch()
    step = pp.value_and_grad(p.stages, p.loss, p.schedule)
    other = {
        s: {n: t.redistribute(placements=[Shard(0)]) if rank and n == "c" else t for n, t in tree.items()}
        for s, tree in p.params.items()
    }
    with pytest.raises(
        pp.AgreementError,
        match=r"params\[0\]\['c'\] lies over the axis 'tp' in several ways: rank 0 has .* R over",
    ):
        step(other, x, target)
    plain = {
        s: {n: t.to_local() if rank and n == "a" else t for n, t in tree.items()}
        for s, tree in p.params.items()
    }
    with pytest.raises(
        pp.AgreementError,
        match=r"rank 0 has torch.float64 of \[4,16\] S\(1\) over tp=2; rank 1 has no DTensor",
    ):
        step(plain, x, target)
    assert torch.isfinite(step(p.params, x, target)[0])


def test_ranks_that_lay_a_leaf_out_in_two_ways_are_told(two):
    two(otherwise)


def otherwise_later(rank, size, soon):
    """As above, after a step that was right, so that one rank alone has something to compile; over control
    messages, in time.
    """
    p = Pipelines(size, 1, pp.one_f_one_b(1, M), "rows and columns")
    (x, target), found = batch(), []
    turned = DTensor.from_local(p.params[0]["a"].to_local(), p.tp, [Replicate()])
    other = {0: p.params[0] | ({"a": turned} if rank else {})}
    plain = {0: p.params[0] | ({"a": p.params[0]["a"].to_local()} if rank else {})}
    with pp.P2P(timeout=60, mesh=p.mesh, axes=pp.Axes("pp", model="tp")) as transport:
        step = pp.value_and_grad(p.stages, p.loss, p.schedule, transport)
        for wrong, words in (
            (other, r"rank 0 has .* S\(1\) over.*; rank 1 has .* R over"),
            (plain, "rank 0 has .*; rank 1 has no DTensor"),
        ):
            found.append(step(p.params, x, target)[0])
            start = time.perf_counter()
            with pytest.raises(
                pp.AgreementError,
                match=r"params\[0\]\['.'\] lies over the ranks of one stage in several ways: " + words,
            ):
                step(wrong, x, target)
            assert time.perf_counter() - start < soon
        found.append(step(p.params, x, target)[0])
    assert found[0] == found[1] == found[2]


def test_a_rank_that_begins_to_lay_a_leaf_out_otherwise_is_told_in_time(two, soon):
    two(otherwise_later, soon)


def failing_alone(rank, size, soon):
    """A stage that one rank cannot evaluate is not tried on zeros there, where its collective would wait for
    the others.
    """
    p = Pipelines(size, 1, pp.one_f_one_b(1, M), "rows and columns")
    (x, target), found = batch(), []
    wrong = {0: p.params[0] | ({"c": p.params[0]["c"].redistribute(placements=[Shard(0)])} if rank else {})}
    with pp.P2P(timeout=60, mesh=p.mesh, axes=pp.Axes("pp", model="tp")) as transport:
        step = pp.value_and_grad(p.stages, p.loss, p.schedule, transport)
        found.append(step(p.params, x, target)[0])
        start = time.perf_counter()
        with pytest.raises(
            StageError if rank else pp.PipelineError, match="stage 0: it raised RuntimeError .* broadcast"
        ):
            step(wrong, x, target)
        assert time.perf_counter() - start < soon
        found.append(step(p.params, x, target)[0])
    assert found[0] == found[1]


def test_a_stage_that_fails_on_one_rank_waits_for_nobody(two, soon):
    two(failing_alone, soon)


def boundaries(rank, size):
    """A part is given to a stage that takes it for the whole, in this process and over a message."""
    schedule = pp.one_f_one_b(2, 2)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "tp"))
    tp = mesh["tp"]
    giving = pp.with_layouts(lambda w, x: x * w, tp, outputs=Shard(1))
    taking = pp.with_layouts(lambda w, x: x * w, tp, inputs=Shard(0))
    stage, x = mesh.get_local_rank("pp"), torch.ones(4, D)
    with pp.P2P(mesh["pp"].get_group(), timeout=60) as transport:
        for last, words in (
            (lambda w, x: x * w, "declares none that is cut"),
            (taking, r"stage 1 declares of \[4,4\] S\(0\) over tp=2"),
        ):
            step = pp.value_and_grad([giving, last], squared, schedule, transport)
            with pytest.raises(
                (ValueError, pp.PipelineError),
                match=r"stage 0 gives float32\[2,4\] of \[2,8\] S\(1\) over tp=2.*" + words,
            ):
                step({stage: torch.ones(D)}, x, x)


def test_a_part_that_the_next_stage_takes_for_the_whole_is_refused(four):
    four(boundaries)


def asynchronous(rank, size):
    """The result of a collective of torch, which has no memory of its own until it is read, over a message
    and back.
    """
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "tp"))
    tp, stage = mesh["tp"], mesh.get_local_rank("pp")

    def gathered(w, x):
        return all_gather(x * w, 0, tp)

    x, target, w = random((4, D), 1), random((8, D), 2), random((D,), 3)
    with pp.P2P(mesh["pp"].get_group(), timeout=60) as transport:
        for engine in (pp.engines.graph, pp.engines.eager):
            step = pp.value_and_grad(
                [gathered, lambda w, x: x * w], squared, pp.one_f_one_b(2, 2), transport, engine=engine
            )
            inputs, targets = pp.microbatch(x, 2), pp.microbatch(target, 2)
            _, grads = step({stage: w}, inputs, targets)
            assert type(grads[stage]) is torch.Tensor and grads[stage].isfinite().all()


def test_results_of_collectives_are_waited_for_before_they_leave(four):
    four(asynchronous)


def whole_weights(rank, size):
    """No weight is gathered, so that none is kept whole, once for every microbatch."""
    p = Pipelines(size, 1, SCHEDULES["1f1b"](), "sequence")
    x, target = batch()
    lowered = pp.value_and_grad(p.stages, p.loss, p.schedule).lower(p.params, p.lay(x), p.lay(target))
    args = {n: t.to_local() for n, t in p.params[0].items()}, p.lay(x).to_local()[:B]
    program = pp.engines.graph(p.model.cut(p.tp), args)
    activations = B * T * D * 8
    assert kept_bytes(program, *args) <= 6 * activations and "tp=2" in str(lowered.step.form.params[0])


def test_residuals_have_no_weights(two):
    two(whole_weights)


def states(rank, size):
    """A state that is cut comes back cut, and metrics that are DTensors as such."""
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]

    def stage(w, x, state):
        y = x * w
        return pp.Output(
            y,
            state={"mean": state["mean"] + pp.collectives.psum(y.mean(0), tp).detach()},
            metrics=DTensor.from_local(y.detach().sum(0), tp, [Shard(0)]),
        )

    state = {0: {"mean": distribute_tensor(torch.zeros(2 * D), tp, [Shard(0)])}}
    step = pp.value_and_grad(
        [stage], lambda y, t: y.sum(), pp.one_f_one_b(1, 2), has_aux=True, engine=pp.engines.eager
    )
    result = step({0: torch.ones(D)}, torch.ones(4, D), torch.ones(4, D), state=state)
    aux = result.aux
    assert aux.state[0]["mean"].placements == (Shard(0),) and torch.equal(
        aux.state[0]["mean"].full_tensor(), torch.full((2 * D,), 4.0)
    )
    assert aux.metrics[0].placements == (Shard(1),) and aux.metrics[0].shape == (2, 2 * D)


def test_states_and_metrics_that_are_cut(two):
    two(states)


def placements_change(rank, size):
    """A program is made for a placement, and another one compiled where it changes, also where the parts have
    one shape.
    """
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    step = pp.value_and_grad([lambda w, x: x * w.sum()], lambda y, t: y.sum(), pp.one_f_one_b(1, 1))
    x, found = torch.ones(2, 2, dtype=W), []
    for placement, shape in (
        (Shard(0), (4, 2)),
        (Shard(1), (2, 4)),
        (Replicate(), (2, 2)),
        (Shard(0), (4, 2)),
    ):
        w = distribute_tensor(torch.ones(shape, dtype=W), tp, [placement])
        found.append(step({0: w}, x, x)[1][0])
        assert found[-1].placements == (placement,) and found[-1].shape == shape
    assert step.cache_info().misses == 3


def test_programs_are_kept_by_placement(two):
    two(placements_change)


class UpAndDown(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


UNEQUAL_PLANS = {  # by rank
    "a style": ({"up": ColwiseParallel()}, {"up": RowwiseParallel()}),
    "its options": ({"up": RowwiseParallel()}, {"up": RowwiseParallel(input_layouts=Replicate())}),
    "a submodule": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, {"up": ColwiseParallel()}),
    "a wrong name": ({"up": ColwiseParallel()}, {"upp": ColwiseParallel()}),
}


def has_another_plan(rank, size):
    """What each plan raises here, and a parameter laid out by a plan that is the same on all ranks."""
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    errors = []
    for plans in UNEQUAL_PLANS.values():
        with pytest.raises(ValueError) as raised:
            pp.parallelize(UpAndDown(), tp, plans[rank])
        errors.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        pp.parallelize(UpAndDown(8 + 2 * rank), tp, UNEQUAL_PLANS["a style"][0])
    with pytest.MonkeyPatch.context() as patch:  # what would run code of a peer
        patch.setattr(torch.distributed, "all_gather_object", None)
        made = pp.parallelize(UpAndDown(), tp, UNEQUAL_PLANS["a submodule"][0])
    return [*errors, str(raised.value)], list(made.params["up.weight"].to_local().shape)


def test_plans_that_differ_are_refused_on_all_ranks_before_torch_communicates(two):
    """Torch's collectives of one rank met others of its peer: gloo said "Connection closed by peer"."""
    (errors, shape), (others, _) = two(has_another_plan)
    style, options, submodule, name, width = errors
    assert "rank 0 of the axis has 'up' as ColwiseParallel" in style
    assert "rank 1 has 'up' as RowwiseParallel" in style
    assert "Shard(dim=-1)" in options and "Replicate()" in options
    assert "rank 0 of the axis has 'down' as RowwiseParallel" in submodule
    assert "rank 0 of the axis has 'up' as" in name and "rank 1 has 'upp' as" in name
    assert "up.weight of shape [8, 4]" in width and "up.weight of shape [10, 4]" in width
    assert others == errors
    assert shape == [4, 4]
