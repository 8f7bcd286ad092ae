"""What goes wrong on one rank is raised on every rank, at once and by name; wrong arguments before anything
runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Transport, without_method
from tests import models
from tests.clock import caught
from tests.models import dense, squared

D = 4
ROWS = 3  # of a microbatch
problem = partial(models.problem, dtype=torch.float32)


# -- wrong arguments, in process ---------------------------------------------------------------


def refused(match, call, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2))
# An argument, what both makers are given for it, and what they raise.
WRONG = [
    ("schedule", pp.gpipe, ValueError, "schedule: got <function .*ranks=4"),
    ("stages", [dense] * 3, ValueError, "stages: got 3, the schedule 'gpipe' has 2"),
    ("stages", dense, TypeError, "stages: got <function .*expected a list"),
    ("stages", MODEL, TypeError, r"stages: got Sequential\(.* of type Sequential, .*ppfunc.split"),
    ("stages", [dense, 3], TypeError, r"stages\[1\]: got 3 of type int"),
    ("stages", [MODEL] * 2, TypeError, "stage_from_module"),
    ("loss_fn", "mse", TypeError, "loss_fn: got 'mse'"),
    ("loss_weights", [1, 2, 3], ValueError, r"loss_weights: got shape \(3,\)"),
    ("transport", pp.InProcess, TypeError, r"transport: got <class .*InProcess\(\)"),
    ("engine", "graph", TypeError, "engine: got 'graph'.*ppfunc.engines.graph"),
]


@pytest.mark.parametrize(("name", "value", "error", "match"), WRONG)
def test_what_is_no_argument_of_a_step_function_is_refused(name, value, error, match):
    given = {"stages": [dense] * 2, "loss_fn": squared, "schedule": pp.gpipe(2, 4)} | {name: value}
    for make in (pp.value_and_grad, pp.evaluate):
        refused(match, make, **given, error=error)


def test_stages_losses_and_engines_that_give_what_they_should_not_are_refused():
    schedule, make = pp.gpipe(2, 4), pp.value_and_grad
    refused("no backward", make, [dense] * 2, squared, pp.inference(2, 4))
    refused("nothing", pp.evaluate, [dense] * 2, None, schedule)
    refused("loss_fn: got None", make, [dense] * 2, None, schedule, error=TypeError)
    refused(r"stages\[1\]: got None", make([dense, None], squared, schedule), *problem(2, 4))
    vector = make([dense] * 2, lambda y, t: (y - t).square().mean(0), schedule)
    refused(r"stage 1.*floating scalar, got float32\[4\]", vector, *problem(2, 4))
    mine = make([dense] * 2, squared, schedule, engine=lambda *args, **options: 3)
    told = "engine: it returned an object of type int for stage 0, expected a StageProgram"
    refused(told, mine, *problem(2, 4), error=TypeError)


def test_a_transport_that_forgets_a_method_is_refused_before_anything_runs():
    """The defaults of the protocol agree with everything: right for the ranks of one process alone."""

    class Forgetful(Transport):
        """Has all but two methods, which the protocol would have."""

    own = {"device": torch.device("cpu"), "mesh": None, "axes": pp.Axes(), "shard": "none"}
    own |= dict.fromkeys(("generation", "ended"), 0)
    own |= dict.fromkeys(("has_peers", "has_other_pipelines", "mixes_batches", "compares_layouts"), False)
    others = set(without_method(Forgetful())) - own.keys() - {"begin", "require_same"}
    for name, value in {**own, **{name: lambda self, *args: None for name in others}}.items():
        setattr(Forgetful, name, value)
    arguments = [dense] * 2, squared, pp.gpipe(2, 4)
    match = "which lacks require_same, begin of a Transport"
    refused(match, pp.value_and_grad, *arguments, Forgetful(), error=TypeError)
    refused(match, pp.Trainer, *arguments, pp.optim.sgd(1.0), Forgetful(), error=TypeError)
    assert without_method(pp.InProcess()) and pp.value_and_grad(*arguments, pp.InProcess())


def test_losses_of_several_dtypes_are_refused():
    params, inputs, targets = problem(2, 4)
    params = {s: {"w": tree["w"].double()} for s, tree in params.items()}

    def kept(params, x):
        return x @ params["w"].to(x.dtype)

    rows = pp.microbatch(inputs, 4)
    mixed = pp.Microbatches([rows[0].double(), *rows[1:]])
    step = pp.value_and_grad([kept] * 2, lambda y, t: y.mean(), pp.gpipe(2, 4))
    refused(
        r"stage 1 gives losses of different forms .*float64\[\] and .*float32\[\]",
        step,
        params,
        mixed,
        targets,
    )
    step = pp.value_and_grad([kept] * 2, lambda y, t: y.double().mean(), pp.gpipe(2, 4))
    step(params, mixed, targets)
    outputs = pp.evaluate([kept] * 2, None, pp.gpipe(2, 4), return_outputs=True)(params, mixed)
    assert [y.dtype for y in outputs] == [torch.float64, *[torch.float32] * 3]


def test_parameters_of_another_dtype_that_change_the_loss_are_refused():
    step = pp.value_and_grad([lambda p, x: x * p], squared, pp.gpipe(1, 4))
    _, inputs, targets = problem(1, 4)
    step({0: torch.ones(D)}, inputs, targets)
    wide = {0: torch.ones(D, dtype=torch.float64)}
    refused(
        r"stage 0 now gives the losses float64\[4\].*agreed on float32\[4\].*make a new step",
        step,
        wide,
        inputs,
        targets,
    )


def test_an_interrupt_stays_an_interrupt():
    armed = [False]

    def interrupted(params, x):
        if armed[0]:
            raise KeyboardInterrupt
        return dense(params, x)

    params, inputs, targets = problem(2, 4)
    step = pp.value_and_grad([dense, interrupted], squared, pp.gpipe(2, 4), engine=pp.engines.functional)
    step(params, inputs, targets)
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        step(params, inputs, targets)
    armed[0] = False
    step(params, inputs, targets)


def test_stages_that_do_not_fit_each_other_are_refused_by_name():
    params, inputs, targets = problem(2, 4)
    step = pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 4))
    params[1]["w"] = torch.ones(D + 1, D)
    told = r"stage 1: .*models.py:\d+.*given params = {'w': float32\[5,4\]}, x = float32\[3,4\]"
    refused(told, step, params, inputs, targets, error=pp.StageError)
    # Matrix products of different dtypes are found out only when they run.
    params[1]["w"] = torch.ones(D, D, dtype=torch.float64)
    refused(
        r"1F0.*float != double.*input was float32\[3,4\]",
        step,
        params,
        inputs,
        targets,
        error=pp.PipelineError,
    )


def test_a_wrong_schedule_is_refused_before_anything_runs():
    schedule = pp.gpipe(2, 4)
    broken = replace(schedule, programs=(schedule.programs[0][:-1], schedule.programs[1]))
    refused("0F3: the backward", pp.value_and_grad, [dense] * 2, squared, broken, error=pp.ScheduleError)


def test_an_error_inside_a_step_says_where_it_was():
    def failing(params, x):
        if x.sum() != 0:
            raise ArithmeticError("not zero")
        return x

    params, inputs, targets = problem(2, 4)
    inputs[:] = 0
    step = pp.value_and_grad([dense, failing], squared, pp.gpipe(2, 4), engine=pp.engines.functional)
    step(params, inputs, targets)
    inputs[2 * ROWS] = 1
    with pytest.raises(pp.PipelineError) as raised:
        step(params, inputs, targets)
    error = raised.value
    assert (error.rank, error.stage, error.microbatch, str(error.instruction)) == (1, 1, 2, "1F2")
    assert "ArithmeticError: not zero" in str(error)
    assert isinstance(error.__cause__, ArithmeticError)
    inputs[2 * ROWS] = 0
    step(params, inputs, targets)


# -- between processes -------------------------------------------------------------------------


MADE = {
    **dict.fromkeys(["microbatches", "schedule"], "every rank must make the same schedule"),
    **dict.fromkeys(
        ["call", "apart", "loss", "loss shape", "order"], "every rank must make the same step functions"
    ),
    "weights": "every rank must be given the same loss_weights",
}


def disagree(rank, ranks):
    """Make a step function that differs from that of rank 0, in each way on a transport of its own."""
    odd = {"weights": {"loss_weights": [0.1] * 8}, "apart": {"per_microbatch": True}}
    odd["loss shape"] = {"loss_shape": (2,)}
    told = {}
    for kind in MADE:
        m = 8 if kind != "microbatches" or rank == 0 else 16
        schedule = pp.one_f_one_b(ranks, m) if kind == "schedule" and rank else pp.gpipe(ranks, m)
        params, inputs, targets = problem(ranks, m)
        make = pp.evaluate if (kind == "call" and rank) or kind == "loss" else pp.value_and_grad
        loss_fn = None if kind == "loss" and rank == 0 else squared
        more = {"return_outputs": True} if kind == "loss" else {}
        with pp.P2P(timeout=60) as transport:
            made = partial(make, [dense] * ranks, loss_fn, schedule, transport, **more)
            step = made(**(odd.get(kind, {}) if rank else {}))
            if kind == "order" and rank == 0:  # it calls its second, the other its first
                step = made()
            told[kind] = caught(step, {rank: params[rank]}, inputs, None if loss_fn is None else targets)
    return told


def test_ranks_whose_step_functions_differ_are_told_so(two, soon):
    for told in two(disagree):
        for kind, (name, text, seconds) in told.items():
            assert (name, MADE[kind] in text) == ("AgreementError", True), (kind, text)
            assert "disagree" in text and seconds < soon


TOLD = {
    "shape": ("float32[2,4]", "float32[3,4]", "be given batches of the same shapes"),
    "form": ("as Microbatches", "with 3 rows each"),
    "dtype": ("float64[3,4]", "float32[3,4]"),
    "weights": (
        "rank {last} has loss weights [0.125",
        "rank 0 has loss weights [0.125",
        "be given the same loss_weights",
    ),
    "no weights": ("loss weights 1/m each", "loss weights [0.125"),
    "seed": ("seed (7, 2)", "seed (7, 1)", "be given the same seed"),
    "no seed": ("seed None", "seed (7, 1)"),
    "autocast": ("bfloat16", "autocast off", "under the same autocast"),
    "mode": ("training on rank", "evaluation on rank {last}"),
}


def differ(rank, ranks, kinds):
    """Make a call of each kind that differs on the last rank, then a right one, twice."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.5))
    fn, params, _ = pp.stage_from_module(module)
    _, inputs, targets = problem(ranks, 8)
    held, usual = {rank: params}, {"seed": (7, 1), "loss_weights": [0.125] * 8}
    given = {"shape": inputs[:16], "form": pp.microbatch(inputs, 8), "dtype": inputs.double()}
    named = {
        "weights": usual | {"loss_weights": [0.125] * 7 + [0.1250001]},
        "no weights": {"seed": (7, 1)},
        "seed": usual | {"seed": (7, 2)},
        "no seed": {"loss_weights": [0.125] * 8},
    }
    told, losses = {}, []
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([fn] * ranks, squared, pp.one_f_one_b(ranks, 8), transport)
        for kind in [*kinds] * 2:
            odd = kind if rank == ranks - 1 else None
            module.train(odd != "mode")
            with torch.autocast("cpu", torch.bfloat16, enabled=odd == "autocast"):
                failure = caught(step, held, given.get(odd, inputs), targets, **named.get(odd, usual))
            module.train()
            told.setdefault(kind, []).append(failure)
            loss, grads = step(held, inputs, targets, **usual)
            losses.append([loss, *grads[rank].values()])
    assert all(map(torch.equal, losses[0], each) for each in losses)
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_whose_calls_differ_are_told_so_at_every_step(request, ranks, soon):
    kinds = list(TOLD)[ranks == 4 :: 2]
    for told in request.getfixturevalue({2: "two", 4: "four"}[ranks])(differ, kinds):
        for kind, failures in told.items():
            for name, text, seconds in failures:
                assert name == "AgreementError", text
                assert "disagree" in text and seconds < soon
                assert all(words.format(last=ranks - 1) in text for words in TOLD[kind]), text


def stop_between_steps(rank, ranks, error):
    params, inputs, targets = problem(ranks, 4)
    with contextlib.suppress(error), pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4), transport)
        step({rank: params[rank]}, inputs, targets)
        if rank == 1:
            raise error("no more batches")
        return caught(step, {rank: params[rank]}, inputs, targets)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_between_steps_reaches_the_peers_with_its_text(two, soon, error):
    """With a trainer it did; of a transport alone, or an interrupt, they heard that it had been closed."""
    name, text, seconds = two(stop_between_steps, error)[0]
    assert name == "PipelineError"
    assert f"rank 1 failed outside its program: {error.__name__}: no more batches" in text
    assert seconds < soon


def long_name(rank, ranks):
    params, inputs, targets = problem(ranks, 4)
    schedule = replace(pp.gpipe(ranks, 4), name="é" * 400)
    with pp.P2P(timeout=60) as transport:
        return caught(
            pp.value_and_grad([dense] * ranks, squared, schedule, transport),
            {rank: params[rank]},
            inputs,
            targets,
        )


def test_a_schedule_may_have_a_long_name(two):
    assert [name for name, _, _ in two(long_name)] == [None, None]


def wrong_size(rank, ranks):
    """Every rank makes the same mistake, and goes on with a new transport."""
    params, inputs, targets = problem(ranks, 4)
    held = {rank: params[rank]}
    with pp.P2P(timeout=60) as transport:
        failures = [
            caught(pp.value_and_grad, [dense] * 3, squared, pp.gpipe(3, 4), transport) for _ in range(2)
        ]
        step = pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4), transport)
        failures.append(caught(step, held, inputs, targets))
        dist.barrier()
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4), transport)
        return failures, caught(step, held, inputs, targets)


def test_a_schedule_for_another_number_of_ranks_is_refused(two):
    for (first, second, (name, told, _)), (last, text, _) in two(wrong_size):
        assert last is None, text
        for refused, text, _ in (first, second):
            assert refused == "ValueError"
            assert "schedule is for 3 ranks, the transport has 2" in text
        assert name in ("RuntimeError", "PipelineError") and "the transport has 2" in told


def fail_once(rank, ranks):
    """In several ways a step that fails on the last rank while the others wait, then the same step again."""
    armed, told = threading.Event(), {}

    def last(params, x):
        if armed.is_set():
            raise ArithmeticError("armed")
        return dense(params, x)

    params, inputs, targets = problem(ranks, 5)
    held, here, stages = {rank: params[rank]}, rank == ranks - 1, [dense] * (ranks - 1) + [last]
    make = partial(pp.value_and_grad, stages, squared, pp.one_f_one_b(ranks, 5))
    with pp.P2P(timeout=60) as transport, pp.P2P(timeout=60) as unused:
        step, first = (make(each, engine=pp.engines.functional) for each in (transport, unused))
        loss, grads = step(held, inputs, targets)
        # On a fresh transport nobody has met anybody yet.
        for kind in ("stage", "argument", "weights", "first call"):
            if here and kind == "stage":
                armed.set()
            given = None if here and kind in ("argument", "first call") else targets
            weights = [1.0] if here and kind == "weights" else None
            failing = first if kind == "first call" else step
            told[kind] = caught(failing, held, inputs, given, loss_weights=weights)
            armed.clear()
            again, same = failing(held, inputs, targets)
            assert torch.equal(again, loss) and torch.equal(same[rank]["w"], grads[rank]["w"])
    return told


def test_a_failure_reaches_every_rank_by_name_and_the_retry_gives_the_same_bits(four, soon):
    for rank, told in enumerate(four(fail_once)):
        for kind, (name, text, seconds) in told.items():
            assert seconds < soon
            assert "rank 3 failed" in text or (rank == 3 and kind != "stage")
            assert rank == 3 or (name == "PipelineError" and f"seen by rank {rank}" in text)
            assert kind != "stage" or ("3F0" in text and "ArithmeticError: armed" in text)


CHILD_LIVES = 8.0


OPEN = []  # transports that end with their process: one that is closed is taken for one that is gone


def leave_a_child(rank, ranks):
    """One process ends after a step that has failed, while a child that was forked, such as a worker of a
    data loader, lives for some seconds more; the other says what it saw of it, and how long that took.
    """
    params, inputs, targets = problem(ranks, 5)
    armed = threading.Event()

    def fragile(p, x):
        if armed.is_set():
            raise ArithmeticError("armed")
        return dense(p, x)

    OPEN.append(pp.P2P(timeout=60))
    step = partial(
        pp.value_and_grad(
            [fragile] * ranks, squared, pp.one_f_one_b(ranks, 5), OPEN[-1], engine=pp.engines.functional
        ),
        {rank: params[rank]},
        inputs,
        targets,
    )
    step()
    if rank == 1:
        armed.set()
    assert caught(step)[0] == "PipelineError"
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(CHILD_LIVES)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    # Who waits for data already is let go only by the end of the child, which holds gloo's connections.
    time.sleep(0.5)
    return caught(step)


def test_a_process_that_ends_is_noticed_by_the_next_step_although_a_child_of_it_lives(fresh, soon):
    """A child inherits connections: with those of control open, nobody noticed before the child ended."""
    processes = fresh(2)
    processes.start(leave_a_child)
    (name, text, seconds), gone = processes.answers()
    assert gone is None
    assert name == "PipelineError" and "rank 1 failed" in text
    assert seconds < min(soon, CHILD_LIVES / 2)
