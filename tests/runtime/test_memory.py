"""The memory that is predicted: that of processes that run, at its peak, and what it consists of."""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.paper.analysis import MessagesOnPaper, _arguments, _of_rank
from ppfunc.runtime.running.compile import bind
from ppfunc.runtime.running.execute import fill
from ppfunc.schedule import insert_recomputes, split_backward
from ppfunc.stage.tree import tree_leaves
from tests import models
from tests.builders import BUILDERS
from tests.models import attention_block, attention_params, dense, normal, squared
from tests.storages import LiveStorages

M, TOKENS, WIDTH, BLOCKS = 4, 16, 16, 4
SCHEDULES = "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"
REMATS = "none", "full", "cheap"


def blocks(params, x):
    for p in params:
        x = attention_block(p, x)
    return x


def problem(schedule, width=WIDTH):
    """Stages of blocks in float32, their parameters, and a batch."""
    each = BLOCKS // schedule.stages
    params = {
        s: [attention_params(width, seed=s * each + n, dtype=torch.float32) for n in range(each)]
        for s in range(schedule.stages)
    }
    inputs, targets = (normal(2 * M, TOKENS, width, seed=n, dtype=torch.float32) for n in range(2))
    return [blocks] * schedule.stages, params, inputs, targets


def measured(rank, schedule, engine, transport):
    """The memory that is predicted for this rank, and what it holds in a step: the bytes, and where most."""
    stages, params, inputs, targets = problem(schedule)
    own = {s: params[s] for s in schedule.stages_of(rank)}
    first, last = (schedule.placement[schedule.flows[0].stages[n]] == rank for n in (0, -1))
    batch = inputs if first else None, targets if last else None
    step = pp.value_and_grad(stages, squared, schedule, transport, engine=engine)
    memory = step.lower(own, *batch).memory_analysis()[rank]
    step(own, *batch)
    given = [t for t in tree_leaves((own, batch)) if t is not None]
    with LiveStorages(given) as counted:
        step(own, *batch)
    return memory, sum(t.nbytes for t in given) + counted.peak, counted.at


def measured_by(rank, size, graphs):
    """Predicted and measured bytes of this rank by schedule and rematerialisation, and by engine."""
    cases = [(name, pp.engines.graph(remat=remat)) for name, remat in graphs]
    cases += [("zbv", engine) for engine in (pp.engines.functional, pp.engines.eager)]
    with pp.P2P(mapped=False) as transport:  # whose messages lie in storages, which are counted
        return [(name, *measured(rank, BUILDERS[name](2, M), e, transport)) for name, e in cases]


def test_the_peak_is_that_of_processes_that_run(two, request):
    """Some pairs, since those of the test below are all."""
    every, some = product(SCHEDULES, REMATS), zip(SCHEDULES, REMATS * 2, strict=True)
    graphs = list(every if request.config.getoption("--large") else some)
    for rank, answers in enumerate(two(measured_by, graphs)):
        off = [(name, rank, memory.peak, most) for name, memory, most, _ in answers]
        assert all(predicted == pytest.approx(most, rel=0.01) for _, _, predicted, most in off), off


def several(params, x):
    """Small leaves that travel together, of which the next stage keeps the first until its backward."""
    h = torch.tanh(x @ params)
    return {"kept": h, "a": h + 1, "b": h * 2, "c": h - 3}


def joined(params, x):
    return (x["a"] + x["b"] + x["c"]) * 0.5 + x["kept"] @ params


def measured_messages(rank, size, name):
    schedule, w = BUILDERS[name](2, M), normal(WIDTH, WIDTH, dtype=torch.float32)
    inputs, targets = (normal(M * TOKENS, WIDTH, seed=n, dtype=torch.float32) for n in range(2))
    batch = (inputs, None) if rank == 0 else (None, targets)
    with pp.P2P(mapped=False) as transport:
        step = pp.value_and_grad([several, joined], squared, schedule, transport)
        memory = step.lower({rank: w}, *batch).memory_analysis()[rank]
        step({rank: w}, *batch)
        with LiveStorages([w, batch[rank]]) as counted:
            step({rank: w}, *batch)
    return memory.peak, w.nbytes + batch[rank].nbytes + counted.peak


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_small_leaves_of_a_message_share_a_buffer(name, two):
    """It lives as long as one of them."""
    for predicted, most in two(measured_messages, name):
        assert predicted == pytest.approx(most, abs=16 * M)


def run_alone(lowered, programs, rank):
    """Run the calls of a rank on tensors with values, and return its most bytes and their instruction."""
    step = _of_rank(lowered, rank)
    compiled = bind(step, programs, MessagesOnPaper())
    arguments = _arguments(step, rank)
    given = tree_leaves([arguments.params, arguments.inputs, arguments.targets])
    peaks = []
    with torch.no_grad(), LiveStorages(given) as counted:
        buffers = fill(step, arguments)
        for call, place in zip(compiled.calls, compiled.places, strict=True):
            call(buffers)
            peaks.append((counted.peak, place.instruction))
    most = peaks[-1][0]
    return most, next(instruction for peak, instruction in peaks if peak == most)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_in_the_instruction_in_which_it_is(name, remat):
    stages, params, inputs, targets = problem(schedule := BUILDERS[name](2, M))
    step = pp.value_and_grad(stages, squared, schedule, engine=pp.engines.graph(remat=remat))
    lowered = step.lower(params, inputs, targets)
    compiled = lowered.compile().step
    for rank, memory in lowered.memory_analysis().items():
        most, instruction = run_alone(lowered.step, compiled.programs, rank)
        made = memory.peak - memory.most.params - memory.most.batch
        assert (made, memory.at) == (pytest.approx(most, abs=8 * M), instruction)
        assert memory.peak == sum(memory.held) == max(moment.most for moment in memory.moments)
        assert [moment.instruction for moment in memory.moments] == list(schedule_of(lowered, rank))


@pytest.mark.parametrize("remat", ["cheap", "full"])
def test_what_wide_stages_compute_again_is_known(remat):
    stages, params, inputs, targets = problem(pp.zb_h1(2, M), 256)
    step = pp.value_and_grad(stages, squared, pp.zb_h1(2, M), engine=pp.engines.graph(remat=remat))
    lowered = step.lower(params, inputs, targets)
    memory = lowered.memory_analysis()[0]
    most, _ = run_alone(lowered.step, lowered.compile().step.programs, 0)
    assert memory.peak - memory.most.params - memory.most.batch == pytest.approx(most, abs=8 * M)
    assert memory.most.again > 0


def schedule_of(lowered, rank):
    return lowered.step.schedule.instructions(rank)


def wide(params, x):
    h = torch.tanh(x @ params["up"])
    return h @ params["down"]


LINE = f"{__file__}:{inspect.getsourcelines(wide)[1] + 1}"


def test_the_largest_tensors_have_stage_kind_and_line():
    params = {s: {"up": torch.ones(4, 64), "down": torch.ones(64, 4)} for s in range(2)}
    inputs, targets = torch.ones(M * 32, 4), torch.ones(M * 32, 4)
    step = pp.value_and_grad([wide] * 2, squared, pp.gpipe(2, M))
    memory = step.lower(params, inputs, targets).memory_analysis()[1]
    assert str(memory.at) == "1B0" and len(memory.largest) == 10
    kept = [held for held in memory.largest if held.kind == "residuals"][:M]
    assert [held.size for held in kept] == [4 * 32 * 64] * M
    assert {str(held.instruction) for held in kept} == {f"1F{m}" for m in range(M)}
    assert {(held.stage, held.name, held.line) for held in kept} == {(1, "aten.tanh.default", LINE)}
    lines = {held.line for held in memory.largest if held.kind == "workspace"}
    assert LINE in lines and "" not in lines, "a gradient has the line of its operator"
    assert memory.held.residuals >= M * 4 * 32 * 64 and memory.held.workspace >= 2 * 4 * 32 * 64
    assert str(memory).startswith(f"{memory.peak} bytes at most, in 1B0\n") and LINE in str(memory)


def test_a_message_that_comes_has_a_name():
    params, inputs, targets = models.problem(2, m=8, b=8)
    lowered = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 8)).lower(params, inputs, targets)
    names = {str(held.instruction): held.name for held in lowered.memory_analysis()[1].largest}
    assert names["1RECV_F7"] == "received"


def test_what_is_computed_again_is_told_apart():
    stages, params, inputs, targets = problem(schedule := pp.one_f_one_b(2, M))
    plain, again = (
        pp.value_and_grad(stages, squared, schedule, engine=pp.engines.graph(remat=remat))
        .lower(params, inputs, targets)
        .memory_analysis()[0]
        for remat in ("none", "full")
    )
    assert plain.most.again == 0 < again.most.again
    assert again.most.residuals < plain.most.residuals


def waves(params, x):
    return (x @ params["w"]).sin().sin().sin()


def test_what_a_recompute_drops_is_not_held():
    """The residuals of one microbatch at a time, and its inputs, which are messages or of the batch."""
    schedule = split_backward(pp.gpipe(2, 6))
    params, inputs, targets = models.problem(schedule)
    lowered = {
        name: pp.value_and_grad([models.dense] * 2, squared, s).lower(params, inputs, targets)
        for name, s in (("kept", schedule), ("again", insert_recomputes(schedule)))
    }
    held = {name: low.memory_analysis()[0] for name, low in lowered.items()}
    costs = lowered["kept"].costs()
    with pytest.raises(TypeError, match="costs: got 3"):
        lowered["kept"].costs(3)
    assert held["again"].most.residuals == costs.activation[0]
    assert held["kept"].most.residuals > 3 * costs.activation[0] and held["again"].peak < held["kept"].peak
    assert costs.checkpoint[0] == inputs[:3].nbytes


def test_an_input_gradient_frees_what_a_weight_gradient_does_not_need():
    params, inputs, targets = models.problem(2, m=M)
    step = pp.value_and_grad([waves] * 2, lambda y, _: y.sum(), pp.zb_h1(2, M))
    memory = step.lower(params, inputs, targets).memory_analysis()[1]
    after = {str(moment.instruction): moment.after.residuals for moment in memory.moments}
    row = inputs[: len(inputs) // M].nbytes
    assert (after["1F0"], after["1I0"]) == (4 * row, 2 * row)  # x and three angles; x and a cotangent


def test_layers_of_torch_have_the_path_of_their_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    split = pp.split(model, torch.ones(32, 4), at=1)
    step = pp.value_and_grad(split, squared, pp.gpipe(1, M))
    memory = step.lower(split.params, *[torch.ones(M * 32, 4)] * 2).memory_analysis()[0]
    lines = {(held.kind, held.line) for held in memory.largest if held.kind not in ("params", "batch")}
    assert {("residuals", "0"), ("residuals", "1"), ("workspace", "2")} <= lines
    assert "" not in {line for _, line in lines}, "a sum of gradients has the name of its terms"


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_computing_again_a_block_at_a_time_halves_the_peak(name):
    schedule = BUILDERS[name](2, 8)
    each = 8 // schedule.stages
    params = {
        s: [attention_params(64, seed=s * each + n, dtype=torch.float32) for n in range(each)]
        for s in range(schedule.stages)
    }
    batch = torch.randn(16, 128, 64), torch.randn(16, 128, 64)

    def most(remat):
        engine = pp.engines.graph(remat=remat)
        step = pp.value_and_grad([blocks] * schedule.stages, squared, schedule, engine=engine)
        memories = step.lower(params, *batch).memory_analysis().values()
        return max(memory.peak - memory.held.params - memory.held.batch for memory in memories)

    assert most("full") < 0.5 * most("none")
