"""A step lowered: its text, its bytes and its operations, and the cache of what was compiled."""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.runtime import StepSpec, lower
from ppfunc.runtime.lowering.stage_programs import CACHE_SIZE, StagePrograms
from ppfunc.runtime.paper.ledger import Bytes
from ppfunc.runtime.running.compile import compile_step
from ppfunc.runtime.running.execute import execute, fill
from ppfunc.runtime.values.arguments import RawArguments, read_arguments
from ppfunc.schedule import Op
from ppfunc.stage import Signature
from tests import models
from tests.models import dense, normal, same_bits, squared

D, M, B = 4, 3, 2
BYTES = 8  # of a float64


problem = partial(models.problem, m=M, b=B)


def on_meta(tree):
    return optree.tree_map(lambda t: t.to("meta"), tree)


def signatures(params, inputs, targets):
    return {s: Signature.of(p) for s, p in params.items()}, Signature.of(inputs), Signature.of(targets)


def test_lower_compile_and_execute_are_functions_on_values():
    """What a step function does, done by hand: two compiled steps of one lowered step give the same bits."""
    params, inputs, targets = problem()
    step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, M))
    schedule = step.schedule
    arguments = read_arguments(RawArguments(params, inputs, targets), schedule, [0, 1], {1})
    spec, programs = StepSpec("mine", ("loss", "grads")), StagePrograms(pp.engines.graph)
    pipeline = step.pipeline._replace(spec=spec, programs=programs)
    lowered = lower(pipeline, arguments.form, arguments.example)
    assert [str(lowered.stages[0, m].sinks[0].signature) for m in range(M)] == ["float64[2,4]"] * M
    assert [str(lowered.stages[1, m].sources[0].signature) for m in range(M)] == ["float64[2,4]"] * M
    assert str(lowered.stages[1, 0].loss) == "float64[]"
    loss, _ = step(params, inputs, targets)
    for _ in range(2):
        buffers = execute(compile_step(lowered, programs, pp.InProcess()), fill(lowered, arguments))
        assert torch.equal(torch.stack([buffers.kept[1, m][0] for m in range(M)]).mul(1 / M).sum(), loss)


@pytest.mark.parametrize(
    "engine",
    [pp.engines.graph, pp.engines.functional, pp.engines.eager],
    ids=["graph", "functional", "eager"],
)
def test_values_meta_tensors_and_signatures_lower_to_the_same(engine):
    given = problem()
    step = pp.value_and_grad([dense] * 2, squared, pp.zb_h1(2, M), engine=engine)
    of_values, of_meta, of_signatures = (
        step.lower(*given),
        step.lower(*on_meta(given)),
        step.lower(*signatures(*given)),
    )
    assert of_values.as_text() == of_meta.as_text() == of_signatures.as_text()
    assert of_values.memory_analysis() == of_meta.memory_analysis() == of_signatures.memory_analysis()
    assert of_values.cost_analysis() == of_meta.cost_analysis() == of_signatures.cost_analysis()
    assert step.cache_info() == (0, 0, CACHE_SIZE, 0)


def test_only_the_call_needs_values():
    given = problem()
    step = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M))
    with pytest.raises(
        ValueError,
        match=r"params\[0\]\['w'\]: got a tensor on the device meta, which has no values; .* lower the call",
    ):
        step(*on_meta(given))
    with pytest.raises(TypeError, match=r"params\[0\]: got .*Signature.*, expected a tensor"):
        step(*signatures(*given))


@pytest.mark.parametrize("builder", [pp.one_f_one_b, pp.zb_h1, pp.dualpipe])
def test_the_text_has_every_program_every_stage_and_the_bytes_of_every_message(builder):
    m = 4
    step = pp.value_and_grad([dense] * 2, squared, builder(2, m))
    lines = step.lower(*problem(m=m)).as_text().splitlines()
    schedule = step.schedule
    ranks = [n for n, line in enumerate(lines) if line.startswith("rank ")]
    assert [lines[n] for n in ranks] == ["rank 0", "rank 1"]
    for rank, (start, stop) in enumerate(zip(ranks, [*ranks[1:], None], strict=True)):
        own = lines[start:stop]
        for stage in schedule.stages_of(rank):
            assert any(
                re.match(rf"  stage {stage}\b.* on cpu: params {{'w': float64\[4,4\]}}", line) for line in own
            )
        program = own[own.index("  program") + 1 :]
        assert len(program) == len(schedule.programs[rank])
        for line, instructions in zip(program, schedule.programs[rank], strict=True):
            assert all(str(i) in line for i in instructions)
        sent = sum(i.op in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B) for i in schedule.instructions(rank))
        assert sum(line.count(f"({B * D * BYTES} B)") for line in program) == sent > 0


def test_the_text_tells_microbatches_of_another_form_apart():
    params, inputs, targets = problem()
    inputs, targets = (pp.Microbatches([t[:2], t[2:5], t[4:]]) for t in (inputs, targets))
    stages = [lambda p, x: pp.Output(dense(p, x), metrics=x.sum() if len(x) == 3 else None), dense]
    text = (
        pp.value_and_grad(stages, squared, pp.gpipe(2, M), has_aux=True)
        .lower(params, inputs, targets)
        .as_text()
    )
    assert "microbatches 0, 2: x float64[2,4] no grad -> float64[2,4]" in text
    assert "microbatches 1: x float64[3,4] no grad -> float64[3,4]\n      metrics float64[] no grad" in text
    assert "0SEND_F1(96 B)" in text
    assert "0SEND_F2(64 B)" in text


def most(lowered):
    """The most bytes of each kind, by rank."""
    return [rank.most for rank in lowered.memory_analysis().values()]


def test_bytes_are_those_counted_by_hand():
    """A stage of [d, d] keeps its input, unless it is of the batch, and its output for the backward; the last
    one y - target, too. The gradients of the second microbatch are added to those of the first at once.
    """
    params, inputs, targets = problem()
    row, weight, given = B * D * BYTES, D * D * BYTES, {"params": D * D * BYTES, "batch": M * B * D * BYTES}
    step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, M))
    first, last = most(step.lower(params, inputs, targets))
    two = {"gradients": weight, "workspace": weight + row}
    # Two microbatches are in flight, both of whose outputs are on their way.
    assert first == Bytes(**given, **two, residuals=2 * row, messages=2 * row)
    weights = M * BYTES
    given["batch"] += weights
    assert last == Bytes(**given, **two, residuals=3 * row, messages=3 * row, outputs=M * BYTES)
    given["batch"] -= weights
    gpipe = most(pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M)).lower(params, inputs, targets))
    assert [rank.residuals for rank in gpipe] == [M * row, M * 3 * row]
    apart = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M), per_microbatch=True)
    assert [rank.gradients for rank in most(apart.lower(params, inputs, targets))] == [M * weight] * 2
    forward = pp.evaluate([dense] * 2, squared, pp.gpipe(2, M), return_outputs=True)
    begin, end = most(forward.lower(params, inputs, targets))
    assert begin == Bytes(**given, messages=3 * row, workspace=row)
    assert end.outputs == M * (BYTES + 2 * row)  # each, and all in one tensor
    assert end.residuals == end.gradients == 0


def test_bytes_of_extras_metrics_and_state():
    def stage(params, x, extras, state):
        return pp.Output(dense(params, x) * extras, metrics=x[0], state=state + 1)

    params, inputs, targets = problem()
    step = pp.value_and_grad([stage, dense], squared, pp.gpipe(2, M), has_aux=True)
    lowered = step.lower(
        params, inputs, targets, extras={0: normal(M * B, 1)}, state={0: torch.zeros(5, dtype=torch.int32)}
    )
    first = most(lowered)[0]
    assert first.batch == M * B * D * BYTES + M * B * BYTES
    assert first.params == D * D * BYTES + 5 * 4
    assert first.outputs == M * D * BYTES + 5 * 4


def test_operations_are_those_of_the_matrix_products():
    """2 b d d for each product: one in a forward, one for each gradient; none for the gradient of the inputs
    of a first stage.
    """
    product = 2 * B * D * D
    given = problem()
    for builder, rows in [
        (pp.one_f_one_b, [(1, 1, 0, 0), (1, 2, 0, 0)]),
        (pp.zb_h1, [(1, 0, 0, 1), (1, 0, 1, 1)]),
    ]:
        cost = pp.value_and_grad([dense] * 2, squared, builder(2, M)).lower(*given).cost_analysis()
        assert cost == {rank: tuple(M * product * n for n in row) for rank, row in enumerate(rows)}
        assert [rank.total for rank in cost.values()] == [2 * M * product, 3 * M * product]
    again = (
        pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M), engine=pp.engines.graph(remat="full"))
        .lower(*given)
        .cost_analysis()
    )
    assert [rank.backward for rank in again.values()] == [2 * M * product, 3 * M * product]
    compiled = (
        pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M), engine=pp.engines.graph(compile=True))
        .lower(*given)
        .cost_analysis()
    )
    assert compiled == pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M)).lower(*given).cost_analysis()
    forward = pp.evaluate([dense] * 2, squared, pp.gpipe(2, M)).lower(*given).cost_analysis()
    assert forward == dict.fromkeys(range(2), (M * product, 0, 0, 0))


def test_operations_of_microbatches_of_different_sizes():
    params, inputs, targets = problem()
    ragged = [pp.Microbatches([t[:1], t[1:], t[:2]]) for t in (inputs, targets)]
    cost = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M)).lower(params, *ragged).cost_analysis()
    assert cost[0].forward == 2 * (1 + 5 + 2) * D * D


def test_what_is_lowered_is_compiled_and_runs_nothing():
    calls = []

    def engine(fn, example, **options):
        calls.append(options["name"])
        return pp.engines.graph(fn, example, **options)

    step = pp.value_and_grad([dense, lambda p, x: dense(p, x) * 2], squared, pp.gpipe(2, M), engine=engine)
    lowered = step.lower(*problem())
    assert not calls
    assert repr(lowered).startswith("<lowered value_and_grad, Schedule('gpipe'")
    compiled = lowered.compile()
    assert calls == ["stage 0", "stage 1"]
    assert len(compiled.step.calls) == 4 * M


def compiled_by_itself(rank, size):
    """The bits of a compiled step and of its step function, what other arguments raise, and what a failure
    makes of it.
    """
    params, inputs, targets = problem(2)
    with pp.InProcess() if size == 1 else pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, M), transport)
        own = params if size == 1 else {rank: params[rank]}
        given = own, inputs if rank == 0 else None, targets if rank == size - 1 else None
        compiled = step.lower(*(None if tree is None else on_meta(tree) for tree in given)).compile()
        assert step.cache_info().misses == 0
        assert same_bits(compiled(*given), step(*given))
        assert same_bits(compiled(*given), step(*given))
        longer = own, *(None if t is None else torch.cat([t, t]) for t in given[1:])
        with pytest.raises(
            (ValueError, pp.PipelineError),
            match=r"(inputs|targets) is now float64\[4,4\], it was float64\[2,4\], when the step was",
        ):
            compiled(*longer)
        if size > 1:
            with pytest.raises(RuntimeError, match="a step has failed since this one was lowered"):
                compiled(*given)
            compiled = step.lower(*given).compile()
        assert same_bits(compiled(*given), step(*given))


def test_what_is_compiled_is_called_as_the_step_function(two):
    compiled_by_itself(0, 1)
    two(compiled_by_itself)


class Silent(NamedTuple):
    """Parameters whose text shows nothing of them."""

    w: torch.Tensor

    def __repr__(self):
        return "Silent"


def test_a_compiled_step_refuses_parameters_that_differ_where_their_text_does_not():
    _, inputs, targets = problem(1)
    step = pp.value_and_grad([lambda p, x: x @ p.w.double()], squared, pp.gpipe(1, M))
    params = Silent(normal(D, D))
    compiled = step.lower({0: params}, inputs, targets).compile()
    with pytest.raises(ValueError, match=r"params\[0\] is now .*, it was .*, when the step was compiled"):
        compiled({0: Silent(params.w.float())}, inputs, targets)


def test_a_compiled_step_is_for_the_modes_in_which_it_was_lowered():
    fn, params, _ = pp.stage_from_module(
        module := torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    )
    given = {0: params}, torch.ones(M, D), torch.ones(M, D)
    lowered = pp.value_and_grad([fn], squared, pp.gpipe(1, M)).lower(*given)
    compiled = lowered.compile()
    compiled(*given)
    module.eval()
    for call in (lowered.compile, lambda: compiled(*given)):
        with pytest.raises(
            ValueError, match="stages read has changed since the step was lowered: .*training = False"
        ):
            call()
    module.train()
    with torch.autocast("cpu"), pytest.raises(ValueError, match="was lowered: another autocast"):
        compiled(*given)


# -- the cache
# -------------------------------------------------------------------------------------------------


class Counted:
    """An engine that counts the programs it builds."""

    def __init__(self):
        self.built = 0

    def __call__(self, fn, example, **options):
        self.built += 1
        return pp.engines.functional(fn, example, **options)


def counted(stages=None, **options):
    engine = Counted()
    return engine, pp.value_and_grad(stages or [dense], squared, pp.gpipe(1, M), engine=engine, **options)


def test_other_values_of_the_same_form_run_the_same_program():
    """Parameters, batch, weights and seed may all change; each call gives what a new step function gives."""
    engine, step = counted()
    for n in range(4):
        params, inputs, targets = (
            {0: {"w": normal(D, D, seed=n)}},
            normal(M * B, D, seed=n + 1),
            normal(M * B, D, seed=n + 2),
        )
        weights = [n, 1.0, -n]
        got = step(params, inputs, targets, loss_weights=weights, seed=(0, n))
        assert same_bits(got, counted()[1](params, inputs, targets, loss_weights=weights))
    assert engine.built == 1
    assert step.cache_info() == (3, 1, CACHE_SIZE, 1)


def changes():
    params, inputs, targets = problem(1)
    w = params[0]["w"]
    return {
        "stride": ({0: {"w": w.T.contiguous().T}}, inputs, targets),
        "stride of the inputs": (params, inputs.T.contiguous().T, targets),
        "dtype": ({0: {"w": w.float()}}, inputs.float(), targets.float()),
        "dtype of the targets": (params, inputs, targets.float()),
        "type": ({0: {"w": torch.nn.Parameter(w)}}, inputs, targets),
        "kind of dictionary": ({0: OrderedDict(w=w)}, inputs, targets),
        "structure": ({0: {"w": w, "unused": w}}, inputs, targets),
        "rows": (params, inputs[:M], targets[:M]),
        "Microbatches": (params, pp.microbatch(inputs, M), targets),
    }


@pytest.mark.parametrize("what", changes())
def test_another_form_is_compiled_anew_and_the_first_stays(what):
    given, other = problem(1), changes()[what]
    _, step = counted()
    first = step(*given)
    assert same_bits(step(*other), counted()[1](*other))
    assert step.cache_info().misses == 2
    assert same_bits(step(*given), first)
    assert same_bits(step(*other), counted()[1](*other))
    assert step.cache_info() == (2, 2, CACHE_SIZE, 2)


@pytest.mark.cuda
def test_another_device_is_compiled_anew():
    given = problem(1)
    _, step = counted()
    here, there = step(*given), step(*optree.tree_map(torch.Tensor.cuda, given))
    assert there[0].device.type == "cuda"
    torch.testing.assert_close(there[0].cpu(), here[0])
    assert step.cache_info().misses == 2
    assert same_bits(step(*given), here)


def test_the_mode_of_a_module_is_part_of_the_form():
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.5)).double()
    fn, params, _ = pp.stage_from_module(module)
    _, step = counted([fn])
    _, inputs, targets = problem(1)
    seen = []
    for training in (True, False, True, False):
        module.train(training)
        seen.append(step({0: params}, inputs, targets, seed=(0, 0))[0])
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    assert step.cache_info().misses == 2


def test_cleared_it_compiles_anew():
    engine, step = counted()
    want = step(*problem(1))
    step.cache_clear()
    assert step.cache_info() == (0, 0, CACHE_SIZE, 0)
    assert same_bits(step(*problem(1)), want)
    assert engine.built == 2
    assert step.cache_info() == (0, 1, CACHE_SIZE, 1)


@pytest.mark.filterwarnings("ignore:value_and_grad has been traced")
def test_the_least_recently_used_form_goes_first():
    engine, step = counted()
    params = problem(1)[0]

    def call(rows):
        return step(params, normal(M * rows, D), normal(M * rows, D, seed=1))

    first = call(1)
    for rows in range(2, CACHE_SIZE + 1):
        call(rows)
    call(1)  # used again: not the oldest any more
    assert engine.built == CACHE_SIZE
    call(CACHE_SIZE + 1)
    assert step.cache_info().currsize == CACHE_SIZE
    assert same_bits(call(1), first)
    assert engine.built == CACHE_SIZE + 1
    call(2)  # the one that went
    assert engine.built == CACHE_SIZE + 2


def test_one_warning_names_what_changes_again_and_again():
    _, step = counted()
    params = problem(1)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 13):
            step(params, normal(M * rows, D), normal(M * rows, D, seed=1))
    (warning,) = caught
    assert re.search(
        r"value_and_grad has been traced 8 times, each for another form of its arguments, or for"
        " other values that its stages read: "
        r"inputs is now float64\[8,4\], it was float64\[7,4\]; let sizes vary, .*dynamic=True.*, pad batches",
        str(warning.message),
    )
    assert warning.filename == __file__


def test_what_is_traced_anew_after_failures_is_of_no_other_form():
    class Failing(pp.InProcess):
        generation = 0

    transport, (params, inputs, targets) = Failing(), problem()
    step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, M), transport)
    for _ in range(12):  # a warning would be an error
        step(params, inputs, targets)
        transport.generation += 1  # as after a failure
    assert step.cache_info().misses == 12


def test_the_warning_tells_a_layout_from_a_shape():
    _, step = counted()
    _, inputs, targets = problem(1)
    with pytest.warns(UserWarning, match=r"params\[0\] is now .*, it was .*, in memory of another layout"):
        for pad in range(8):
            step({0: {"w": torch.zeros(D, D + pad, dtype=torch.float64)[:, :D]}}, inputs, targets)


def test_a_step_shows_itself_in_a_line():
    _, step = counted()
    assert re.fullmatch(r"<step function value_and_grad, Schedule\('gpipe', .*\), stages 0 here>", repr(step))
    assert math.prod(map(len, repr(step).splitlines())) < 200
