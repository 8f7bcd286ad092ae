"""Every bug once: what was wrong, and what is right. Most gave wrong numbers without an error."""

from __future__ import annotations

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import optree
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import ppfunc as pp
from ppfunc.runtime.lowering.comparison import checksum
from ppfunc.schedule import Instruction, Op, append_tail, remove_tail
from ppfunc.stage import Signature, device as stage_device
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.tree import tree_leaves
from tests import models
from tests.models import all_gather, dense, new_trainer, normal, reference, same_bits, squared
from tests.network.simulated import Simulated

D = 3
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def same(params, x):
    return x


problem = partial(models.problem, b=2, d=D)


# -- what only some microbatches have
# --------------------------------------------------------------------------


def losing_or_measuring(params, x):
    """An auxiliary loss of 1 for microbatches of two rows, a metric of 1000 for those of one."""
    if len(x) == 2:
        return pp.Output(x, loss=x.sum() * 0 + 1)
    return pp.Output(x, metrics=torch.tensor(1000.0))


@every_engine
def test_an_auxiliary_loss_of_some_microbatches_is_not_their_metric(engine):
    """The first leaf that a stage kept was taken for its loss in every microbatch: 502.5 in the place of
    2.5.
    """
    step = pp.value_and_grad(
        [losing_or_measuring, same],
        lambda y, t: (y - t).sum() + 2,
        pp.gpipe(2, 2),
        engine=engine,
        has_aux=True,
    )
    batch = pp.Microbatches([torch.ones(2, D), torch.ones(1, D)])
    result = step({0: {}, 1: {}}, batch, batch)
    loss, aux = result.loss, result.aux
    assert loss == 2.5
    assert [tree if tree is None else tree.item() for tree in aux.metrics[0]] == [None, 1000]


@every_engine
def test_metrics_that_the_first_microbatch_lacks_are_there_for_the_others(engine):
    """The first microbatch said which metrics there are: those of the others vanished."""

    def measuring(params, x):
        return pp.Output(x, metrics={"sum": x.sum()} if len(x) == 2 else None)

    step = pp.evaluate([measuring, same], squared, pp.gpipe(2, 3), engine=engine, has_aux=True)
    batch = pp.Microbatches([torch.ones(1, D), torch.ones(2, D), torch.ones(1, D)])
    aux = step({0: {}, 1: {}}, batch, batch).aux
    assert [tree if tree is None else tree["sum"].item() for tree in aux.metrics[0]] == [None, 6, None]


# -- instructions, outputs and options are honoured or refused
# ----------------------------------------------------


@pytest.mark.parametrize(
    "op", [Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP, Op.UNSHARD, Op.RESHARD], ids=lambda op: op.value
)
@pytest.mark.parametrize("make", [pp.value_and_grad, pp.hvp])
def test_instructions_that_nothing_honours_are_refused_by_name(op, make):
    """They were proved and then ignored: tied gradients were never summed, an optimizer never ran."""
    schedule = pp.gpipe(2, 2)
    schedule = replace(
        schedule,
        programs=tuple(
            (*program, (Instruction(op, rank),)) for rank, program in enumerate(schedule.programs)
        ),
    )
    with pytest.raises(
        ValueError, match=rf"'gpipe' has 0{op.value} \(rank 0, step \d+\), which nothing would honour"
    ):
        make([dense] * 2, squared, schedule)


def test_a_schedule_of_torchs_runtime_runs_by_its_compute():
    """Nothing gathers parameters here, or sums over data ranks: one pass takes both away."""
    schedule = pp.zbv(2, 4)
    theirs = pp.schedule.from_csv(pp.schedule.to_torch_csv(schedule))
    params, inputs, targets = models.problem(schedule)
    with pytest.raises(ValueError, match=r"UNSHARD .*take ppfunc\.schedule\.compute_only\(schedule\)"):
        pp.value_and_grad([models.dense] * 4, squared, theirs)
    step = pp.value_and_grad([models.dense] * 4, squared, pp.schedule.compute_only(theirs))
    wanted = pp.value_and_grad([models.dense] * 4, squared, schedule)(params, inputs, targets)
    assert same_bits(step(params, inputs, targets), wanted)


def test_a_sum_over_data_parallel_ranks_is_refused_under_replicas_too():
    """The sum over the replicas of a stage was taken for it."""
    schedule = append_tail(pp.dualpipe(2, 4), step=False)
    assert schedule.ops >= {Op.REDUCE_TIED, Op.REDUCE_GRAD}
    with pytest.raises(
        ValueError,
        match="REDUCE_GRAD .* no data parallel ranks to sum over; take ppfunc.schedule.remove_tail",
    ):
        pp.value_and_grad([dense] * 2, squared, schedule)
    arguments = problem()
    tied = append_tail(pp.dualpipe(2, 4), step=False, reduce_grad=False)
    results = [
        pp.value_and_grad([dense] * 2, squared, s)(*arguments)
        for s in (tied, remove_tail(schedule), pp.dualpipe(2, 4))
    ]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_argnums_name_each_argument_once():
    """``(0, 0)`` returned zeros, ``(1, 1)`` raised StopIteration."""
    for wrong in ((0, 0), (1, 1), (0, 1, 0), (), 2, -1, "0", [0]):
        with pytest.raises(
            ValueError,
            match="argnums: got .* expected 0 .parameters., 1 .inputs., or a tuple of both, each once",
        ):
            pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 2), argnums=wrong)


def test_targets_that_no_loss_function_reads_are_refused():
    """They were dropped."""
    params, inputs, targets = problem()
    with pytest.raises(ValueError, match="targets needs a loss function"):
        pp.evaluate([dense] * 2, None, pp.gpipe(2, 2), return_outputs=True)(params, inputs, targets)


def test_options_that_nothing_would_read_are_refused():
    """They were dropped."""
    stages, schedule = [dense] * 2, pp.gpipe(2, 2)
    params, inputs, _ = problem()
    outputs = pp.evaluate(stages, None, schedule, return_outputs=True)
    for told, make in {
        "per_microbatch=True keeps gradients of parameters apart": lambda: pp.value_and_grad(
            stages, squared, schedule, argnums=1, per_microbatch=True
        ),
        "loss_shape: got .2,., and no loss function": lambda: pp.evaluate(
            stages, None, schedule, return_outputs=True, loss_shape=(2,)
        ),
        "loss_weights needs a loss function, whose": lambda: pp.evaluate(
            stages, None, schedule, return_outputs=True, loss_weights=[1, 2]
        ),
        "overlapped: got a function, and the schedule 'gpipe' overlaps nothing": lambda: pp.value_and_grad(
            stages, squared, schedule, overlapped=pp.interleaved()
        ),
        "loss_weights needs a loss function, which": lambda: outputs(params, inputs, loss_weights=[1, 2]),
    }.items():
        with pytest.raises(ValueError, match=told):
            make()


def test_targets_of_other_rows_do_not_broadcast():
    """Four rows of inputs and two of targets in two microbatches: each target was taken for two inputs."""
    params, inputs, targets = problem(m=2)
    with pytest.raises(ValueError, match="targets: got 2 rows in axis 0, the inputs have 4"):
        pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 2))(params, inputs, targets[:2])


def test_outputs_without_a_batch_axis_are_refused_or_told_apart():
    """There is nothing along which the outputs of a whole batch could be joined."""
    params, inputs, _ = problem()
    step = pp.evaluate([dense, lambda p, x: dense(p, x).mean(0)], None, pp.gpipe(2, 4), return_outputs=True)
    with pytest.raises(ValueError, match=r"the output of stage 1 is float64\[3\].*no axis of 2 rows"):
        step(params, inputs)
    outputs = step(params, pp.microbatch(inputs, 4))
    assert isinstance(outputs, pp.Microbatches)
    assert [row.shape for row in outputs] == [(D,)] * 4


@pytest.mark.parametrize("builder", [pp.gpipe, pp.zbv, pp.dualpipe, pp.schedule.chimera])
def test_outputs_and_input_gradients_come_in_the_order_of_the_batch(builder):
    """Also where two chains run from both ends of the ranks."""
    schedule = builder(2, 4)
    params = dict.fromkeys(set(schedule.model_stages), ())
    x, t = normal(8, D), normal(8, D, seed=1)
    outputs = pp.evaluate([same] * len(params), None, schedule, return_outputs=True)
    assert torch.equal(outputs(params, x), x)
    assert torch.equal(outputs(params, pp.microbatch(x, 4)).join(), x)
    _, gx = pp.value_and_grad([same] * len(params), lambda y, t: (y * t).sum(), schedule, argnums=1)(
        params, x, t
    )
    assert torch.equal(gx, t / 4)
    step = pp.evaluate(
        [lambda p, x: pp.Output(x, metrics=x)] * len(params),
        lambda y, t: y[0, 0],
        schedule,
        has_aux=True,
        loss_weights=range(4),
    )
    result = step(params, x, t)
    torch.testing.assert_close(result.loss, sum(m * x[2 * m, 0] for m in range(4)))
    assert all(torch.equal(rows.flatten(0, 1), x) for rows in result.aux.metrics.values())


def test_a_state_is_not_split_between_replicas():
    """Each replica kept its own: running statistics of half the batch."""

    def counting(params, x, state):
        return pp.Output(dense(params, x), state=state + len(x))

    step = pp.value_and_grad([counting, dense], squared, pp.dualpipe(2, 4), has_aux=True)
    with pytest.raises(
        ValueError, match="stage 0 returns a state, and this schedule runs replicas of it .*dualpipev"
    ):
        step(*problem(), state={0: torch.tensor(0)})


def test_what_a_stage_returns_and_nobody_asked_for_is_refused():
    params, inputs, targets = problem()
    for output, options, told in [
        ({"metrics": torch.ones(1)}, {}, "returns metrics; pass has_aux=True"),
        ({"state": torch.ones(1)}, {"has_aux": True}, r"returns the state float32\[1\].*it was given none"),
        (
            {"skips": {1: torch.ones(1)}},
            {},
            r"skip connections to the stages \[1\], the schedule has them to \[\]",
        ),
        ({"loss": torch.ones(2)}, {}, r"the loss of stage 0 must be a floating scalar, got float32\[2\]"),
        ({"loss": torch.tensor(1)}, {}, r"the loss of stage 0 must be a floating scalar, got int64\[\]"),
    ]:
        first = [lambda p, x: pp.Output(dense(p, x), **output), dense]  # noqa: B023
        with pytest.raises((ValueError, pp.StageError), match=told):
            pp.value_and_grad(first, squared, pp.gpipe(2, 2), **options)(params, inputs, targets)
    losing = [lambda p, x: pp.Output(dense(p, x), loss=x.sum()), dense]
    with pytest.raises(
        ValueError,
        match="stage 0 returns an auxiliary loss, and evaluate without a loss function returns none",
    ):
        pp.evaluate(losing, None, pp.gpipe(2, 2), return_outputs=True)(params, inputs)


@every_engine
def test_losses_of_another_dtype_are_those_of_a_plain_loop(engine):
    """A loss of bfloat16 beside an auxiliary one of float64; the weights are exact in both."""
    params, inputs, targets = problem()
    stages = [lambda p, x: pp.Output(dense(p, x), loss=x.square().sum()), dense]
    step = pp.value_and_grad(
        stages, lambda y, t: squared(y, t).bfloat16(), pp.gpipe(2, 2), engine=engine, loss_weights=[0.5, 0.25]
    )
    loss, _ = step(params, inputs, targets)
    parts = zip(inputs.chunk(2), targets.chunk(2), [0.5, 0.25], strict=True)
    want = sum(
        w * (squared(dense(params[1], dense(params[0], x)), t).bfloat16() + x.square().sum())
        for x, t, w in parts
    )
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=0)
    assert loss.dtype == torch.float64


# -- one step function, used twice at a time
# ----------------------------------------------------------------------


@every_engine
def test_one_step_function_in_two_threads(engine):
    """Both wrote into the memory of one bound program: 49 losses of 400 were wrong."""
    step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, 4), engine=engine)
    alone = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, 4), engine=engine)
    params, inputs, targets = problem()
    want = {k: alone(params, inputs * k, targets) for k in range(5)}
    wrong: deque[object] = deque()

    def work(first):
        for n in range(200 if engine is pp.engines.graph else 60):
            k = (first + n) % 5
            try:
                if not same_bits(step(params, inputs * k, targets), want[k]):
                    wrong.append(k)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert step.cache_info().misses == 1


@every_engine
def test_a_stage_that_calls_its_own_step_function_is_told_so(engine):
    """A bare KeyError. Another step function may run within a stage."""
    params, inputs, targets = problem()
    other = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 2))
    for own in (True, False):

        def calling(p, x):
            return dense(p, x) * (step if own else other)(params, inputs, targets)[0]  # noqa: B023

        step = pp.value_and_grad([calling, dense], squared, pp.gpipe(2, 2), engine=engine)
        if own:
            with pytest.raises(
                pp.StageError,
                match=(r"stage 0: .*a stage calls the step function that it is part of \(value_and_grad"),
            ):
                step(params, inputs, targets)
            continue
        batches = list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
        scaled = partial(lambda scale, p, x: dense(p, x) * scale, other(params, inputs, targets)[0])
        want, _ = reference([scaled, dense], squared, params, batches)
        torch.testing.assert_close(step(params, inputs, targets)[0], want)


# -- memory
# ----------------------------------------------------------------------------------------------------


def storages(tree):
    return [t.untyped_storage().data_ptr() for t in tree_leaves(tree)]


@every_engine
@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("m", [1, 2])
def test_results_share_no_memory(engine, apart, m):
    """Gradients of listed inputs were views of the targets, outputs were the inputs, an unchanged state was
    the caller's.
    """

    def passing(params, x, state):
        return pp.Output(x + params["a"] + params["b"], metrics={"x": x, "again": x}, state=state)

    x, t = torch.ones(2 * m, D), torch.ones(2 * m, D)
    inputs, targets = (pp.microbatch(x, m), pp.microbatch(t, m)) if apart else (x, t)
    params = {0: {"a": torch.zeros(2, D), "b": torch.zeros(2, D)}, 1: {}}
    state = {0: {"mean": torch.zeros(D), "count": torch.tensor(0)}}
    train = pp.value_and_grad(
        [passing, same],
        lambda y, t: (y * t).sum(),
        pp.gpipe(2, m),
        engine=engine,
        argnums=(0, 1),
        has_aux=True,
    )
    judge = pp.evaluate(
        [passing, same],
        lambda y, t: (y * t).sum(),
        pp.gpipe(2, m),
        engine=engine,
        return_outputs=True,
        has_aux=True,
    )
    for step in (train, judge):
        results = step(params, inputs, targets, state=state)
        made = storages(results)
        assert len(set(made)) == len(made)
        assert not set(made) & set(storages((params, inputs, targets, state)))
        for leaf in tree_leaves(results):
            leaf.fill_(7)
        assert torch.equal(x, torch.ones(2 * m, D))
        assert torch.equal(t, torch.ones(2 * m, D))
        assert not any(leaf.any() for leaf in tree_leaves((params, state)))
        assert not any(
            (leaf == 7).any() for leaf in tree_leaves(step(params, inputs, targets, state=state)[0])
        )


def test_parameters_without_values_are_refused_by_stage_and_path():
    """Loss and gradients of uninitialised memory; between processes, one rank hung."""
    params, inputs, targets = problem()
    params[1] = {"layers": [{"w": params[1]["w"]}, {"w": torch.empty(D, D, device="meta")}]}
    step = pp.value_and_grad([dense, lambda p, x: dense(p["layers"][1], x)], squared, pp.gpipe(2, 2))
    with pytest.raises(
        ValueError,
        match=(
            r"params\[1\]\['layers'\]\[1\]\['w'\]: got a tensor on the device meta, which has no values;"
            r" load or materialise it"
        ),
    ):
        step(params, inputs, targets)


def test_replicas_with_the_same_sum_are_told_apart():
    """Replicas were compared by the sum of their bytes: a matrix and its transpose passed."""
    w = normal(D, D)
    assert torch.equal(checksum(w), checksum(w.clone()))
    others = [w.T, w.flip(0), w.clone().index_fill_(0, torch.tensor([0]), 0)]
    assert len({int(checksum(t)) for t in (w, *others)}) == 1 + len(others)
    z = torch.tensor([1 + 2j])
    assert torch.equal(checksum(z.conj()), checksum(z.conj().resolve_conj()))
    assert not torch.equal(checksum(z.conj()), checksum(z))


# -- keys and depth of trees
# --------------------------------------------------------------------------------------


def nested(tree, depth):
    for _ in range(depth):
        tree = [tree]
    return tree


def opened(tree):
    while isinstance(tree, list):
        (tree,) = tree
    return tree


@pytest.mark.parametrize("depth", [50, 990, 1100])
def test_deep_trees_pass_or_are_refused_by_name(depth):
    """A bare RecursionError, in the caller's process or in the one that read the signature."""
    params, inputs, targets = problem()
    stages = [lambda p, x: nested(dense(p, opened(x)), depth), lambda p, x: dense(p, opened(x))]
    step = pp.value_and_grad(stages, squared, pp.gpipe(2, 2))
    if depth < 1000:
        assert step(params, nested(inputs, depth), targets)[0] == step(params, inputs, targets)[0]
        signature = Signature.of(nested(inputs, depth))
        assert Signature.from_json(signature.to_json()) == signature
        return
    with pytest.raises(
        ValueError, match="inputs: got a tree nested deeper than 1000 levels, expected a flatter one"
    ):
        step(params, nested(inputs, depth), targets)
    with pytest.raises(
        (ValueError, pp.StageError), match="stage 0: .*returned y: got a tree nested deeper than 1000 levels"
    ):
        step(params, inputs, targets)


@pytest.mark.parametrize(
    "key",
    ["; run before: yes", "a\nb with 3 rows each", "as Microbatches", "\udc80", "", 0, 1.5, (1, "a"), True],
    ids=repr,
)
def test_keys_of_trees_are_whatever_a_dictionary_takes(key):
    """A key that looked like a part of the agreement between the ranks was read as one."""
    params, inputs, targets = problem()
    stages = [lambda p, x: {key: dense({"w": p[key]}, x[key])}, lambda p, x: dense(p, x[key])]
    step = pp.value_and_grad(stages, squared, pp.gpipe(2, 2))
    for _ in range(2):
        loss, grads = step({0: {key: params[0]["w"]}, 1: params[1]}, {key: inputs}, targets)
    want, wanted = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 2))(params, inputs, targets)
    assert torch.equal(loss, want)
    assert same_bits(grads, wanted)
    assert step.cache_info()[:2] == (1, 1)


# -- modes
# -------------------------------------------------------------------------------------------------------


@every_engine
def test_a_lambda_around_a_module_follows_its_mode(engine):
    """Only the module's own function told whether it trains: a lambda around it kept the mode of the first
    call.
    """
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.5)).double()
    fn, params, _ = pp.stage_from_module(module)
    _, inputs, targets = problem()
    step = pp.value_and_grad([lambda p, x: fn(p, x) * 1], squared, pp.gpipe(1, 2), engine=engine)
    losses = []
    for training in (True, False, True, False):
        module.train(training)
        losses.append(step({0: params}, inputs, targets, seed=(0, 0))[0])
    with torch.no_grad():
        torch.testing.assert_close(losses[1], squared(module(inputs), targets))
    assert losses[0] == losses[2] != losses[1] == losses[3]


def test_programs_of_another_autocast_are_not_taken():
    """A shared program of the first dtype ran under every later one."""
    params, inputs, targets = optree.tree_map(torch.Tensor.float, problem())
    stages, losses = [lambda p, x: x @ p["w"]] * 2, {}
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss, _ = pp.value_and_grad(stages, squared, pp.gpipe(2, 2))(params, inputs, targets)
        assert losses.setdefault(dtype, loss) == loss
    assert len(set(map(float, losses.values()))) == 3


# -- engines
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [pp.engines.functional, pp.engines.eager], ids=["functional", "eager"])
def test_a_stage_that_begins_to_write_later_is_refused_then(engine):
    """Seen once, it was trusted for ever: versions are compared around each forward."""

    def stage(p, x):
        if x.sum() > 100:
            p["w"].detach().add_(1)
        return dense(p, x)

    params, inputs, targets = problem()
    step = pp.value_and_grad([stage, dense], squared, pp.gpipe(2, 2), engine=engine)
    step(params, inputs, targets)
    with pytest.raises(pp.PipelineError, match=r"writes into its argument params\['w'\]"):
        step(params, inputs.abs() * 1000, targets)


@every_engine
def test_a_complex_tensor_times_a_complex_number(engine):
    """AttributeError in the trace."""

    def stage(params, x):
        return ((x.to(torch.complex128) @ params["c"]) * (1 + 2j) / (2 - 1j) + 3j).abs()

    params = {0: {"c": torch.complex(normal(D, D), normal(D, D, seed=1))}}
    _, inputs, targets = problem()
    loss, grads = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=engine)(params, inputs, targets)
    want, wanted = reference(
        [stage], squared, params, list(zip(inputs.chunk(2), targets.chunk(2), strict=True))
    )
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grads, wanted)


@pytest.fixture
def alone():
    """A process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.eager], ids=["graph", "eager"])
def test_a_stage_may_end_in_a_functional_collective(alone, engine):
    """Its result was sent before it had come: memory that is not there."""

    def gathered(p, x):
        return all_gather(dense(p, x), 0, alone.group.WORLD)

    given = problem()
    got = pp.value_and_grad([gathered, dense], squared, pp.gpipe(2, 2), engine=engine)(*given)
    torch.testing.assert_close(got, pp.value_and_grad([dense, dense], squared, pp.gpipe(2, 2))(*given))


@pytest.mark.parametrize("kind", ["batch_norm", "instance_norm"])
def test_a_norm_over_one_value_per_channel_raises_as_in_torch(kind):
    """With forward derivatives it gave 0, and a division by zero in the derivative."""

    def normed(params, x):
        if kind == "batch_norm":
            return torch.nn.functional.batch_norm(x, None, None, params["w"], training=True)
        return torch.nn.functional.instance_norm(x[..., None], weight=params["w"]).squeeze(-1)

    params, inputs, targets = (
        {0: {"w": torch.ones(D, dtype=torch.float64)}},
        normal(2, D),
        normal(2, D, seed=1),
    )
    with pytest.raises(ValueError, match="Expected more than 1") as caught:
        normed(params[0], inputs[:1])
    for make, tangents in (
        (pp.value_and_grad, ()),
        (pp.jvp, (params,)),
        (pp.hvp, (params,)),
    ):
        with pytest.raises(pp.StageError, match=str(caught.value).split("(")[0]):
            make([normed], squared, pp.gpipe(1, 2))(params, *tangents, inputs, targets)


@torch.library.custom_op("ppfunc_bugs::transforms0", mutates_args=())
def transforms0(x: torch.Tensor) -> torch.Tensor:
    return x * 2


transforms0.register_fake(torch.empty_like)
torch.library.register_autograd("ppfunc_bugs::transforms0", lambda ctx, g: g * 2)


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.eager], ids=["graph", "eager"])
def test_an_operator_may_be_called_what_a_program_calls_its_own(engine):
    """A name of the written program was taken for the operator's."""
    given = problem()
    got = pp.value_and_grad(
        [lambda p, x: transforms0(dense(p, x)), dense], squared, pp.gpipe(2, 2), engine=engine
    )(*given)
    want = pp.value_and_grad([lambda p, x: dense(p, x) * 2, dense], squared, pp.gpipe(2, 2), engine=engine)(
        *given
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "engine",
    [pp.engines.graph, pp.engines.functional, pp.engines.eager],
    ids=["graph", "functional", "eager"],
)
def test_the_order_of_keys_is_part_of_the_form(engine):
    """Dictionaries in another order ran the program of the first one: the layers were applied in its
    order.
    """

    def in_turn(params, x):
        for w in params.values():
            x = torch.tanh(x @ w)
        return x

    a, b, x, t = normal(D, D), normal(D, D, seed=1), normal(4, D, seed=2), normal(4, D, seed=3)
    step = pp.value_and_grad([in_turn], squared, pp.gpipe(1, 1), engine=engine)
    for params in ({"a": a, "b": b}, {"b": b, "a": a}):
        loss, grads = step({0: params}, x, t)
        torch.testing.assert_close(loss, squared(in_turn(params, x), t))
        assert list(grads[0]) == list(params)


@every_engine
def test_microbatches_and_processes_keep_the_order_of_keys(engine):
    """Structures that differ in it alone were taken for one, and read in the order of their sorted keys on
    the other side.
    """

    def in_turn(params, x):
        y = torch.ones(2, D, dtype=torch.float64)
        for w in x.values():
            y = torch.tanh(y @ w)
        return y

    a, b, t = normal(D, D), normal(D, D, seed=1), normal(2, D, seed=2)
    inputs, targets = (
        pp.Microbatches([{"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "b": b}]),
        pp.Microbatches([t] * 3),
    )
    want = sum(squared(in_turn((), x), t) for x in inputs) / 3
    for stages in ([in_turn, same], [same, in_turn]):
        loss, _ = pp.value_and_grad(stages, squared, pp.gpipe(2, 3), engine=engine)(
            {0: {}, 1: {}}, inputs, targets
        )
        torch.testing.assert_close(loss, want)
    signatures = [Signature.of(x) for x in inputs]
    assert signatures[0] == signatures[2] != signatures[1]
    for signature in signatures:
        read = Signature.from_json(signature.to_json())
        assert read == signature
        assert list(read.unflatten([0, 1])) == list(signature.unflatten([0, 1]))


@every_engine
def test_a_state_may_come_back_with_its_keys_in_another_order(engine):
    def stage(params, x, state):
        return pp.Output(x, state={"b": state["b"] + 1, "a": state["a"]})

    step = pp.evaluate([stage], squared, pp.gpipe(1, 3), engine=engine, has_aux=True)
    state = {0: {"a": torch.zeros(1), "b": torch.zeros(1)}}
    aux = step({0: {}}, torch.ones(3, D), torch.ones(3, D), state=state).aux
    assert {key: value.item() for key, value in aux.state[0].items()} == {"a": 0, "b": 3}


def test_gradients_come_in_the_order_of_the_stages_that_were_given():
    """They came in the order of the schedule, so that the leaves of both trees, taken in turn, did not belong
    together.
    """
    params, inputs, targets = problem()
    grads = pp.value_and_grad([dense, dense], squared, pp.gpipe(2, 2))(
        {1: params[1], 0: params[0]}, inputs, targets
    )[1]
    assert list(grads) == [1, 0]


def test_the_mode_of_a_module_counts_also_where_its_forward_is_called_by_name():
    """Only modules that were called as such were noticed."""

    class Scaled(torch.nn.Module):
        def forward(self, w, x):
            return (1.0 if self.training else 3.0) * x @ w

    module = Scaled()
    step = pp.value_and_grad([lambda w, x: module.forward(w, x)], lambda y, t: y.sum(), pp.gpipe(1, 1))
    given = {0: normal(D, D)}, normal(2, D), normal(2, D)
    first = step(*given)[0]
    module.eval()
    torch.testing.assert_close(step(*given)[0], 3 * first)


@pytest.fixture
def restless():
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_may_share_a_module_under_an_engine_that_runs_it():
    """A call puts its tensors into the module: threads computed with those of each other, and left them
    there.
    """
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()).double()
    fn, params, _ = pp.stage_from_module(module)
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2), engine=pp.engines.functional)
    given = [
        ({0: {k: v + n for k, v in params.items()}}, normal(4, D), normal(4, D, seed=1)) for n in range(4)
    ]
    want = [step(*each)[0] for each in given]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda n: step(*given[n % 4])[0], range(200)))
    assert all(torch.equal(loss, want[n % 4]) for n, loss in enumerate(got))
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())


def test_a_loss_weight_that_the_dtype_of_the_loss_cannot_hold_is_refused():
    """It became 0, and so did the gradients."""
    params, inputs, targets = problem()
    step = pp.value_and_grad(
        [dense, dense], lambda y, t: squared(y, t).half(), pp.gpipe(2, 2), loss_weights=[2e-8, 1.0]
    )
    with pytest.raises(ValueError, match="loss_weights: .* become 0 or infinite in torch.float16"):
        step(params, inputs, targets)


def test_gradients_that_some_microbatches_do_not_have_are_memory_of_their_own():
    """A gradient that one microbatch alone gives, and that is a tensor of the caller, was returned as it
    is.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, x):
            ctx.save_for_backward(w)
            return w * x

        @staticmethod
        def backward(ctx, gy):
            return (*ctx.saved_tensors, None)

    def stage(w, x):
        return Product.apply(w, x) if x.sum() > 0 else x * 2

    w = torch.full((2, 3), 3.0)
    for x in (torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])):
        batch = x.view(2, 1, 1).expand(2, 2, 3).reshape(4, 3)
        _, grads = pp.value_and_grad([stage], lambda y, t: y.sum(), pp.gpipe(1, 2), engine=pp.engines.eager)(
            {0: w}, batch, torch.ones(4)
        )
        assert torch.equal(grads[0], w) and grads[0].data_ptr() != w.data_ptr()


def test_loss_weights_may_be_mapped_by_vmap():
    """Whether one becomes 0 in the dtype of the loss was asked of a tensor that vmap maps, which torch
    refuses.
    """
    params, inputs, targets = problem()
    step = pp.value_and_grad([dense, dense], squared, pp.gpipe(2, 2))
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 3.0]], dtype=torch.float64)
    losses = torch.func.vmap(lambda w: step(params, inputs, targets, loss_weights=w)[0])(weights)
    torch.testing.assert_close(
        losses, torch.stack([step(params, inputs, targets, loss_weights=w)[0] for w in weights])
    )
    narrow = pp.value_and_grad([dense, dense], lambda y, t: squared(y, t).half(), pp.gpipe(2, 2))
    with pytest.raises(ValueError, match="loss_weights: .* become 0 or infinite in torch.float16"):
        torch.func.vmap(lambda w: narrow(params, inputs, targets, loss_weights=w)[0])(1e-8 * weights)


@every_engine
def test_parameters_and_batches_may_be_inference_tensors(engine):
    """The eager engine raised torch's error, that an inference tensor cannot require a gradient."""
    params, inputs, targets = problem()
    step = pp.value_and_grad([dense, dense], squared, pp.gpipe(2, 2), engine=engine)
    want = step(params, inputs, targets)
    with torch.inference_mode():
        params, inputs, targets = problem()
    assert same_bits(step(params, inputs, targets), want)
    with torch.inference_mode():
        assert same_bits(step(params, inputs, targets), want)


@pytest.mark.parametrize("transform", [pp.hvp, pp.per_sample_grad])
def test_a_parameter_that_is_no_tensor_is_named_by_transforms(transform):
    """`per_sample_grad` raised AttributeError: 'float' object has no attribute 'detach'."""
    more, between = ({"samples": 4}, ()) if transform is pp.per_sample_grad else ({}, ({0: None, 1: None},))
    params, inputs, targets = problem()
    step = transform([dense, dense], squared, pp.gpipe(2, 2), **more)
    with pytest.raises(TypeError, match=r"params\[1\]\['w'\]: got 2.0 of type float, expected a tensor"):
        step({0: params[0], 1: {"w": 2.0}}, *between, inputs, targets)


def test_shared_memory_is_found_below_a_leaf_without_gradients_that_spans_it():
    """Only the longest of overlapping leaves was looked at, and bytes hid two weights that overlap."""
    memory = torch.zeros(8, dtype=torch.float64)
    params = {0: {"bytes": memory.view(torch.uint8), "w": memory[:4]}, 1: {"w": memory[2:6]}}
    step = pp.value_and_grad([lambda p, x: x * p["w"].sum()] * 2, squared, pp.gpipe(2, 1))
    with pytest.raises(ValueError, match=r"params\[0\] 'w' and params\[1\] 'w' share memory"):
        step(params, normal(2, 3), normal(2, 3))


def test_parameters_that_share_a_part_of_their_memory_are_refused():
    """Only leaves of two stages that begin at one address were seen: others got a part of the gradient of
    what they share.
    """

    def biased(params, x):
        return x @ params["w"] + params["b"]

    def step(first, second, b):
        params = {0: {"w": first, "b": b[0]}, 1: {"w": second, "b": b[1]}}
        return pp.value_and_grad([biased, biased], squared, pp.gpipe(2, 2))(params, inputs, targets)

    (w0, w1), b, (_, inputs, targets) = normal(2, D, D), normal(2, D, seed=1), problem()
    want, flat = step(w0.clone(), w1.clone(), b.clone()), torch.cat([w0.reshape(-1), w1.reshape(-1)])
    assert same_bits(step(*flat.view(2, D, D), b), want)  # views that lie beside each other share nothing
    with pytest.raises(
        ValueError, match=r"params\[0\] 'w' and params\[1\] 'w' share memory; give each a copy of its own"
    ):
        step(flat[: D * D].view(D, D), flat[D * D - 1 : -1].view(D, D), b)
    with pytest.raises(ValueError, match=r"params\[0\] 'b' and params\[1\] 'w' share memory; give"):
        step(w0, w1, [w1[:, 0], b[1]])


def test_a_place_that_is_one_tensor_with_a_tied_one_is_tied_as_well():
    """It got a part of the gradient, where the tied places got the sum of theirs."""

    def twice(params, x):
        return torch.tanh(x @ params["first"]) @ params["second"]

    def step(**tied):
        return pp.value_and_grad([twice, twice], squared, pp.gpipe(2, 2), **tied)(params, inputs, targets)[1]

    w, v, (_, inputs, targets) = normal(D, D), normal(D, D, seed=1), problem()
    params = {0: {"first": w, "second": w}, 1: {"first": w.clone(), "second": v}}
    places = [(0, "first"), (1, "first")]
    with pytest.raises(
        ValueError, match=r"params\[0\] 'first' and params\[0\] 'second' share memory; declare it"
    ):
        step(tied={"w": places})
    grads, parts = step(tied={"w": [*places, (0, "second")]}), step()
    torch.testing.assert_close(grads[0]["second"], parts[0]["first"] + parts[0]["second"] + parts[1]["first"])
    assert same_bits([grads[0]["first"], grads[1]["first"]], [grads[0]["second"]] * 2)


# -- kernels that are laid out otherwise than they say
# ----------------------------------------------------------


@every_engine
def test_a_batch_norm_of_a_transposed_tensor_may_be_viewed(engine):
    """Without values its result has the strides of its input, on the CPU others: `view size is not
    compatible` in the first step.
    """

    def stage(params, x):
        y = torch.nn.functional.batch_norm(x.transpose(1, 2), None, None, params["w"], training=True)
        return torch.nn.functional.linear(y.transpose(1, 2), params["m"])

    params, x, target = {"w": normal(D), "m": normal(D, D)}, normal(4, 5, D), normal(4, 5, D, seed=1)
    want = torch.func.grad(lambda p: squared(stage(p, x), target))(params)
    _, grads = pp.value_and_grad([stage], squared, pp.gpipe(1, 1), engine=engine)({0: params}, x, target)
    for name, gradient in want.items():
        torch.testing.assert_close(grads[0][name], gradient)


@pytest.mark.parametrize("options", [{"clip": 0.5}, {"scale": pp.dynamic_scale(8.0)}], ids=["clip", "scale"])
def test_a_parameter_without_axes_keeps_its_dtype_where_gradients_are_divided(options):
    """The product of two scalars has the wider dtype: the factor made the gradient float64, which no
    optimizer takes.
    """
    params = {0: {"s": torch.tensor(2.0)}, 1: {"s": torch.tensor(3.0)}}
    with new_trainer(
        [lambda p, x: x * p["s"]] * 2, squared, pp.gpipe(2, 2), pp.optim.sgd(0.1), **options
    ) as trainer:
        state, _ = trainer.step(trainer.init(params), torch.ones(4, 3), torch.zeros(4, 3))
    assert [state.params[s]["s"].dtype for s in (0, 1)] == [torch.float32] * 2
    assert state.params[0]["s"] < 2 and state.params[1]["s"] < 3


# -- what is drawn and not read
# ---------------------------------------------------------------------------------


@every_engine
def test_numbers_that_nobody_reads_are_drawn_also_where_a_stage_writes_in_place(engine):
    """The forward seemed to end at the first part of a `chunk`: the draw was left out, and the next one was
    another by `graph`.
    """

    def stage(params, x):
        a, b = (x @ params["w"]).chunk(2, 1)
        filled = torch.zeros_like(x)
        filled[:, :2] = a
        torch.dropout(b, 0.5, True)
        return torch.dropout(filled + x, 0.5, True)

    params, x, target = {0: {"w": normal(D, 4)}}, normal(8, D), normal(8, D, seed=1)
    _, expected = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=pp.engines.eager)(
        params, x, target, seed=(1, 2)
    )
    _, grads = pp.value_and_grad([stage], squared, pp.gpipe(1, 2), engine=engine)(
        params, x, target, seed=(1, 2)
    )
    torch.testing.assert_close(grads, expected)


def test_a_generator_that_cannot_be_read_keeps_no_later_step_from_restoring_it(monkeypatch):
    """The step was counted before its generators were read: the count stayed raised for ever."""

    def unreadable(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def draw():
        with preserve_rng([]):
            torch.rand(3)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="illegal memory access"):
        patched.setattr(stage_device, "generator_of", unreadable)
        draw()
    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)


# -- what the ranks agree on, and what each of them keeps
# -----------------------------------------------------------


def test_a_rank_that_has_kept_a_program_takes_part_where_the_others_agree_anew(monkeypatch):
    """Lowering for further shapes evicted the agreement, not the program: one rank went on with it while the
    other waited for shapes.
    """
    monkeypatch.setattr("ppfunc.runtime.lowering.stage_programs.CACHE_SIZE", 2)
    x, y = torch.ones(1, D), torch.zeros(1, D)

    def function(rank, transport):
        step = pp.value_and_grad(
            [lambda w, x: x @ w] * 2, squared, pp.gpipe(2, 1), transport, engine=pp.engines.functional
        )
        first, _ = step({rank: torch.eye(D)}, x, y)
        for rows in (2, 3):
            step.lower({rank: torch.eye(D)}, torch.ones(rows, D), torch.zeros(rows, D))
        other = (
            torch.eye(D) if rank == 0 else torch.eye(D).t()
        )  # in memory of another layout: this rank has no program for it
        return first, step({rank: other}, x, y)[0]

    for outcome in Simulated(2, 0).run(function):
        assert outcome.error is None, outcome.error
        assert torch.equal(*outcome.value)


@pytest.mark.parametrize("who", [0, 1])
def test_arguments_that_a_rank_cannot_lower_fail_the_call_on_all_ranks(who):
    """They were read before the call began: the other ranks waited for their whole limit."""
    params, x, y = problem(2)

    def function(rank, transport):
        trainer = new_trainer([dense] * 2, squared, pp.gpipe(2, 2), pp.optim.sgd(1e-2), transport=transport)
        mine = {rank: params[rank]}
        with pytest.raises((pp.PipelineError, TypeError), match="params") as caught:
            trainer.lower({rank: {"w": "no tensor"}} if rank == who else mine, x, y)
        trainer.lower(mine, x, y)
        return caught.value

    for rank, outcome in enumerate(Simulated(2, 0).run(function)):
        assert outcome.error is None, outcome.error
        assert type(outcome.value) is (TypeError if rank == who else pp.PipelineError)
        assert rank == who or (outcome.value.rank == who and "TypeError: params" in str(outcome.value))


@pytest.mark.parametrize("which", ["made", "parameter", "constant"])
def test_an_assignment_to_data_is_no_operator(which):
    """Programs were traced as if the tensor had kept its values: wrong losses and gradients, without an
    error.
    """

    def stage(p, x):
        y, factor = x @ p["w"], torch.zeros(3, dtype=x.dtype)
        if which == "made":
            y.data = y.data.clamp(-0.5, 0.5)
        elif which == "constant":
            factor.data = torch.ones(3, dtype=x.dtype)
        else:
            x.data = x.data * 2
        return y * p["w"][0] + factor

    given = {0: {"w": normal(3, 3)}}, normal(4, 3, seed=1), normal(4, 3, seed=2)
    with pytest.raises(
        pp.StageError, match="stage 0: it assigns to the data of a tensor, which is not traced"
    ):
        pp.value_and_grad([stage], squared, pp.gpipe(1, 2))(*given)

    class Assigning(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.data = torch.ones_like(y)
            return y

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Assigning(3, 3)).double()
    with pytest.raises(pp.StageError, match="it assigns to the data of a tensor"):
        pp.split(model, given[1], at=["1"])


def test_a_stage_that_raised_once_is_tried_again():
    """What was found of a stage that raised once, and not on zeros, was kept, so that every retry was
    refused.
    """
    calls = []

    def stage(p, x):
        calls.append(None)
        if len(calls) == 1:
            raise OSError("no such file yet")
        return x * p

    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 2))
    given = {0: normal(3)}, normal(4, 3, seed=1), normal(4, 3, seed=2)
    with pytest.raises(pp.StageError, match="no such file yet"):
        step(*given)
    assert step(*given)[0] > 0


def two_stages(kind, model, inputs):
    """A model of three layers, cut before the last, by names or by hand; its stages and parameters."""
    if kind == "split":
        split = pp.split(model, inputs, at=["2"])
        return split, split.params
    made = [pp.stage_from_module(model[:2]), pp.stage_from_module(model[2:])]
    return [fn for fn, _, _ in made], {s: p for s, (_, p, _) in enumerate(made)}


@pytest.mark.parametrize("kind", ["split", "modules"])
def test_a_frozen_parameter_is_not_moved_by_weight_decay(kind):
    """Its gradient is zero, and AdamW made it smaller in every step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3)).double()
    model[0].requires_grad_(False)
    inputs, targets = normal(4, 3, seed=1), normal(4, 3, seed=2)
    stages, params = two_stages(kind, model, inputs)
    before = model[0].weight.detach().clone()
    warmed = pp.optim.warmup_cosine(1e-2, 2, 10)
    for optimizer in (
        pp.optim.adamw(1e-2),
        pp.optim.adamw(warmed),
        pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.adamw(1e-2)),
        pp.optim.adamw(1e-2, donate=True),
    ):
        own = params
        for frozen in (True, False, True):
            model[0].requires_grad_(not frozen)
            trainer = pp.Trainer(stages, squared, pp.gpipe(2, 2), optimizer)
            state = trainer.init(
                {s: {name: t.clone() for name, t in tree.items()} for s, tree in own.items()}
            )
            for _ in range(2):
                known = [leaf.clone() for leaf in tree_leaves(state.params)]
                state, _ = trainer.step(state, inputs, targets, loss_weights=[1.0, 2.0])
                same = [torch.equal(a, b) for a, b in zip(known, tree_leaves(state.params), strict=True)]
                assert same == [frozen, frozen, False, False]
            own = state.params
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", ["modules", "split"])
@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_step_function_follows_what_its_modules_had_frozen(engine, kind):
    """One whose stages had run kept the gradients of what was frozen later, and zeros for what was frozen
    before.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    stages, params = two_stages(kind, model, inputs)
    step = pp.value_and_grad(stages, squared, pp.one_f_one_b(2, 2), engine=engine)
    _, whole = step(params, inputs, targets)
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        step = pp.value_and_grad(stages, squared, pp.one_f_one_b(2, 2), engine=engine)
        _, grads = step(params, inputs, targets)
        for n, g in enumerate(tree_leaves(grads[0])):
            assert torch.equal(g, torch.zeros_like(g) if frozen else tree_leaves(whole[0])[n])
        assert same_bits(grads[1], whole[1])
    assert step.cache_info().currsize == 1


def test_an_error_of_a_users_class_runs_a_step_once():
    """A step that had failed with an error of a class named `Refrozen`, as one of ours was, ran twice."""

    class Refrozen(ValueError):
        pass

    runs = []

    def stage(params, x):
        if not isinstance(x, FakeTensor):
            runs.append(1)
            raise Refrozen("of the user")
        return params * x

    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 1), engine=pp.engines.functional)
    with pytest.raises(pp.PipelineError, match="of the user"):
        step({0: normal(3)}, normal(4, 3), normal(4, 3))
    assert len(runs) == 1


def test_a_frozen_teacher_does_not_freeze_the_stage_that_asks_it():
    """The names of its parameters are those of the student."""
    (teacher, known, _), (student, params, _) = (
        pp.stage_from_module(torch.nn.Linear(3, 3).double()) for _ in range(2)
    )
    frozen, own, _ = pp.stage_from_module(torch.nn.Linear(3, 3).double().requires_grad_(False))

    class Config:
        frozen = True

    config, x, y = Config(), normal(4, 3), normal(4, 3, seed=1)

    def stage(params, x):
        made = student(params, x)
        return pp.Output(
            made, loss=squared(made, frozen(own, x)) if config.frozen else squared(made, teacher(known, x))
        )

    trainer = pp.Trainer([stage], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1))
    state, _ = trainer.step(trainer.init({0: params}), x, y)
    assert not torch.equal(state.params[0]["weight"], params["weight"])


def test_tied_columns_are_compared():
    """Bits of a vector with a stride could not be viewed as bytes: a step raised for tied columns."""

    def scaled(params, x):
        return x * params["b"]

    whole = torch.arange(8.0, dtype=torch.float64)
    params = {0: {"b": whole[::2]}, 1: {"b": whole[::2].clone()}}
    tied = {"b": [(0, "b"), (1, "b")]}
    x = torch.ones(4, 4, dtype=torch.float64)
    loss, grads = pp.value_and_grad([scaled] * 2, squared, pp.gpipe(2, 2), tied=tied)(params, x, x)
    leaf = whole[::2].clone().requires_grad_()
    expected = squared(x * leaf * leaf, x)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grads[0]["b"], torch.autograd.grad(expected, leaf)[0])
    params[1]["b"] = params[1]["b"] + 1
    with pytest.raises(pp.AgreementError, match="other values in stage 0 than in stage 1"):
        pp.value_and_grad([scaled] * 2, squared, pp.gpipe(2, 2), tied=tied)(params, x, x)


class Whitened(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.linalg.cholesky(self.first(x)))


@every_engine
@pytest.mark.parametrize("split", [False, True])
def test_a_factorization_that_fails_is_an_error(engine, split):
    """The operator that raises for it has no result: graph dropped it, and ran on with any numbers."""
    model = Whitened().double()
    torch.nn.init.eye_(model.first.weight)
    torch.nn.init.zeros_(model.first.bias)
    good, bad = (c * torch.eye(3, dtype=torch.float64).expand(2, 3, 3).clone() for c in (4.0, -4.0))
    if split:
        stages = pp.split(model, good[:1], at=["second"])
        params, ranks = stages.params, 2
    else:
        module, tree, _ = pp.stage_from_module(model)
        stages, params, ranks = [module], {0: tree}, 1
    step = pp.value_and_grad(stages, squared, pp.gpipe(ranks, 2), engine=engine)
    loss, _ = step(params, good, good)
    torch.testing.assert_close(loss, squared(model(good), good).detach())
    with pytest.raises(pp.PipelineError, match="not positive-definite"):
        step(params, bad, bad)


def test_views_of_a_copy_are_not_those_of_its_source():
    """The graph engine left copies out, and took views of other offsets or strides for equal."""
    table = torch.arange(4.0, dtype=torch.float64).view(2, 2).t()

    def stage(w, x):
        first, second = x[0:2].view(1, 2), x[2:4].clone().view(1, 2)
        row, column = table.contiguous()[0], table[:, 0]
        return first * w, second * w, row * w, column * w

    w, x = normal(2), normal(4)
    program = pp.stage.graph(stage, (w, x))
    y, residuals = program.forward(w, x)
    assert all(map(torch.equal, y, stage(w, x)))
    leaves = w.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = torch.autograd.grad([t.sum() for t in stage(*leaves)], leaves)
    assert all(map(torch.equal, program.backward(residuals, tuple(map(torch.ones_like, y))), wanted))


class Asserting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        h = self.first(x)
        torch._assert_async(h.abs().max() < 1e6, "too large")
        return self.second(h)


class Checked(torch.autograd.Function):
    """Looks at the gradient in its backward."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        torch._assert_async((gradient < 1e6).all(), "too steep")
        return gradient


@every_engine
@pytest.mark.parametrize("schedule", [pp.gpipe(2, 2), pp.zb_h1(2, 2)], ids=["B", "I and W"])
@pytest.mark.parametrize("place", ["activation", "weight"])
def test_what_a_backward_asserts_is_asserted_by_its_program(engine, schedule, place):
    """No gradient depends on it, so that it was left out of the trace."""

    def stage(w, x):
        return Checked.apply(x * w) if place == "activation" else x * Checked.apply(w)

    step = pp.value_and_grad([stage] * 2, squared, schedule, engine=engine)
    step({0: torch.ones(3), 1: torch.ones(3)}, torch.ones(4, 3), torch.zeros(4, 3))
    with pytest.raises(pp.PipelineError, match="too steep"):
        step({0: torch.ones(3), 1: torch.ones(3)}, torch.full((4, 3), 1e9), torch.zeros(4, 3))


@every_engine
def test_what_a_model_asserts_is_asserted_by_its_stages(engine):
    """No value depends on it, so that a split left it out."""
    split = pp.split(Asserting(), torch.ones(2, 3), at=["second"])
    step = pp.value_and_grad(split, squared, pp.gpipe(2, 2), engine=engine)
    step(split.params, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(pp.PipelineError, match="too large"):
        step(split.params, torch.full((4, 3), 1e9), torch.ones(4, 3))
