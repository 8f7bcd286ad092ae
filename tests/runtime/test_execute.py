"""Bound calls: where they come from, what their buffers hold, and for how long."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.lowering.lower import BATCH
from ppfunc.runtime.running.compile import load
from ppfunc.runtime.running.execute import execute, fill
from ppfunc.runtime.values.arguments import RawArguments, read_arguments
from ppfunc.runtime.values.buffers import Buffers, Tag
from ppfunc.runtime.values.errors import StepFailed
from ppfunc.stage import FlatProgram
from tests.models import dense, problem, squared

D, M = 4, 6


@pytest.mark.parametrize("schedule", [pp.one_f_one_b(2, M), pp.zb_h1(2, M)], ids=["1f1b", "zb_h1"])
def test_residuals_are_used_once_by_their_only_owner_and_dropped(schedule):
    alive, most, owners = set(), [0], []

    def watched(fn, example, **options):
        program = pp.engines.graph(fn, example, **options)
        flat = program.flat

        def forward(params, x, consts):
            outputs, residuals = flat.forward(params, x, consts)
            alive.add(id(residuals))
            most[0] = max(most[0], len(alive))
            return outputs, residuals

        def use(function):
            def run(residuals, gy):
                owners.append(sys.getrefcount(residuals) - 1)
                alive.discard(id(residuals))
                return function(residuals, gy)

            return run

        return program._replace(
            flat=FlatProgram(forward, use(flat.backward), use(flat.backward_input), flat.backward_weight)
        )

    params, inputs, targets = problem(2, M)
    pp.value_and_grad([dense] * 2, squared, schedule, engine=watched)(params, inputs, targets)
    assert owners == [1] * 2 * M
    assert not alive
    assert most[0] <= 3  # rank 0 holds two microbatches, rank 1 one


def compiled_for(given, schedule=None):
    """A compiled step of two stages, and the arguments as it takes them."""
    step = pp.value_and_grad([dense] * 2, squared, schedule or pp.gpipe(2, M))
    compiled = step.lower(*given).compile().step
    return compiled, read_arguments(RawArguments(*given), compiled.lowered.schedule, [0, 1], {1})


@pytest.mark.parametrize("builder", [pp.gpipe, pp.zb_h1])
def test_what_is_consumed_is_gone_from_the_buffers(builder):
    given = problem(2, M)
    compiled, arguments = compiled_for(given, builder(2, M))
    buffers = execute(compiled, fill(compiled.lowered, arguments))
    assert not (buffers.values or buffers.residuals or buffers.pending)
    assert set(buffers.kept) == {(1, m) for m in range(M)}  # the losses
    _, grads = pp.value_and_grad([dense] * 2, squared, builder(2, M))(*given)
    assert not buffers.gradients[0].take(arguments.params[0], lambda t: t)[0].sub(grads[0]["w"]).any()


def test_a_call_that_raises_tells_its_place():
    """Its buffers lack the input of a microbatch: its forward fails, and says so."""
    compiled, arguments = compiled_for(problem(2, M))
    buffers = fill(compiled.lowered, arguments)
    missing = next(tag for tag in buffers.values if tag.microbatch == 3)
    del buffers.values[missing]
    with pytest.raises(StepFailed) as caught:
        execute(compiled, buffers)
    assert str(caught.value.failure.instruction) == "0F3"
    assert caught.value.failure.rank == 0


@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_function_keeps_no_tensor_of_its_calls(calls):
    """Not of the arguments, not of the results; a step that failed neither."""
    step = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, M))
    for _ in range(calls):
        given, weights = problem(2, M), torch.ones(M, dtype=torch.float64)
        result = step(*given, loss_weights=weights)
    seen = [weakref.ref(t) for t in optree.tree_leaves((given, weights, result))]
    with pytest.raises(ValueError, match="inputs: got 5 rows"):
        step(given[0], torch.zeros(5, D), given[2])
    del given, weights, result
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_a_step_that_failed_lets_go_of_its_tensors_with_its_error():
    """At once, not when cycles are collected: whoever runs out of memory tries again with a smaller batch."""
    broken = threading.Event()

    def breaking(params, x):
        if broken.is_set():
            raise MemoryError
        return dense(params, x)

    step = pp.value_and_grad([dense, breaking], squared, pp.gpipe(2, M), engine=pp.engines.functional)
    step(*problem(2, M))
    broken.set()
    gc.disable()
    try:
        given = problem(2, M)
        seen = [weakref.ref(t) for t in optree.tree_leaves(given)]
        with contextlib.suppress(pp.PipelineError):
            step(*given)
        del given
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()


def test_a_microbatch_is_brought_to_the_device_alone():
    step = pp.value_and_grad([dense] * 2, squared, pp.one_f_one_b(2, M))
    low = step.lower(*problem(2, M)).step.stages[0, 0]
    tags = [Tag("F", BATCH, 0, microbatch) for microbatch in range(M)]
    buffers = Buffers(
        values={tag: (torch.ones(2),) for tag in tags}, extras={(0, m): (torch.ones(1),) for m in range(M)}
    )
    load(low._replace(call=low.call._replace(device=torch.device("meta"))), (0, 2))(buffers)
    assert [buffers.values[tag][0].device.type for tag in tags] == ["cpu", "cpu", "meta", "cpu", "cpu", "cpu"]
    assert [m for m in range(M) if buffers.extras[0, m][0].is_meta] == [2]
