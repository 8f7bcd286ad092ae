"""Ranks stay together: a step fails on all of them or on none, and what one of them does differently is told
at once.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Route
from ppfunc.runtime.values.errors import Failure
from tests import clock, models
from tests.clock import busy
from tests.models import dense, squared
from tests.unseen import Unseen

D = 4
ROWS = 3  # of a microbatch
problem = partial(models.problem, dtype=torch.float32)


caught = partial(clock.caught, keep=[])  # for as long as the process lives


class Fails(torch.autograd.Function):
    """The identity, whose backward fails where its switch is on."""

    @staticmethod
    def forward(ctx, x, switch):
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.switch[0] == 0:
            raise ArithmeticError("late")
        ctx.switch[0] -= 1
        return g, None


def fail_late(rank, ranks, who):
    """The last backward of one rank fails, when others may be done with the step; then come two other
    batches.
    """
    m, left = 8, Unseen(10**9)

    def failing(p, x):
        z = x @ p["w"]
        return torch.tanh(Fails.apply(z, left) if rank == who else z)

    params, inputs, targets = problem(ranks, m)
    schedule, held = pp.one_f_one_b(ranks, m), {rank: params[rank]}
    alone = pp.value_and_grad([dense] * ranks, squared, schedule, engine=pp.engines.eager)
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([failing] * ranks, squared, schedule, transport, engine=pp.engines.eager)
        step(held, inputs, targets)
        left[0] = m - 1
        failure = caught(step, held, inputs, targets)
        left[0] = 10**9
        for seed in (1, 2):
            _, inputs, targets = problem(ranks, m, seed)
            loss, grads = step(held, inputs, targets)
            want, all_grads = alone(params, inputs, targets)
            assert torch.equal(loss, want)
            assert torch.equal(grads[rank]["w"], all_grads[rank]["w"])
    return failure


@pytest.mark.parametrize("who", [0, 2])
def test_a_step_that_fails_at_its_end_fails_on_every_rank_and_the_next_batches_are_not_mixed(four, who, soon):
    for name, text, seconds in four(fail_late, who):
        assert name == "PipelineError"
        assert f"rank {who} failed at {who}B7" in text
        assert seconds < soon


def evaluate_fails(rank, ranks):
    """Without a loss nothing comes back to the first ranks, which could be a call ahead of one that fails."""
    armed = Unseen()

    def last(p, x):
        if armed[0]:
            raise ArithmeticError("armed")
        return dense(p, x)

    params, inputs, _ = problem(ranks, 4)
    stages = [dense] * (ranks - 1) + [last]
    with pp.P2P(timeout=60) as transport:
        judge = pp.evaluate(
            stages, None, pp.gpipe(ranks, 4), transport, return_outputs=True, engine=pp.engines.functional
        )
        judge({rank: params[rank]}, inputs)
        armed[0] = rank == ranks - 1
        return caught(judge, {rank: params[rank]}, inputs)


def test_an_evaluation_that_fails_at_its_end_fails_on_every_rank(four, soon):
    for name, text, seconds in four(evaluate_fails):
        assert name == "PipelineError"
        assert "rank 3 failed at 3F0" in text
        assert seconds < soon


FAULTS = {"stages": [dense] * 3}, {"argnums": (0, 0)}, {"loss_weights": [1.0]}, {"typo": 1}


def refused_first(rank, ranks):
    """One rank cannot make its step function and goes on with another; the others lose a step by it, so none
    may run any more. For each fault.
    """
    params, inputs, targets = problem(ranks, 4)
    held, schedule, found = {rank: params[rank]}, pp.gpipe(ranks, 4), []
    for fault in FAULTS:
        with pp.P2P(timeout=60) as transport:
            if rank == 0:
                wrong = {"stages": [dense] * 2} | fault
                made = caught(pp.value_and_grad, wrong.pop("stages"), squared, schedule, transport, **wrong)
                assert made[0] in ("ValueError", "TypeError")
            step = pp.value_and_grad([dense] * ranks, squared, schedule, transport)
            found += [caught(step, held, inputs, targets) for _ in range(2)]
        dist.barrier()
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([dense] * ranks, squared, schedule, transport)
        assert caught(step, held, inputs, targets)[0] is None
    return found


def test_a_step_function_that_one_rank_could_not_make_ends_the_transport(two, soon):
    for found in two(refused_first):
        for name, text, seconds in found:
            assert (
                name in ("PipelineError", "RuntimeError") and "rank 0 failed outside its program" in text
            ) or "make a new P2P()" in text
            assert seconds < soon


def keep_the_error(rank, ranks):
    """Rank 1 finds that it differs; its error, which it keeps, must not keep the connection that rank 2 waits
    on.
    """
    params, inputs, targets = problem(ranks, 8)
    schedule = pp.gpipe(ranks, 8)
    transport = pp.P2P(timeout=60)  # not closed: that would end the connection, too
    step = pp.value_and_grad([dense] * ranks, squared, schedule, transport)
    step({rank: params[rank]}, inputs, targets)
    failure = caught(step, {rank: params[rank]}, inputs[:16] if rank == 1 else inputs, targets)
    dist.barrier()
    return failure


def test_an_error_that_is_kept_does_not_keep_the_other_ranks_waiting(four, soon):
    for name, _, seconds in four(keep_the_error):
        assert name == "AgreementError"
        assert seconds < soon


def come_late(rank, ranks):
    """Rank 0 gives up twice before rank 1 comes, which hears of both at once."""
    params, inputs, targets = problem(ranks, 4)
    held, schedule = {rank: params[rank]}, pp.gpipe(ranks, 4)
    with pp.P2P(timeout=1 if rank == 0 else 60) as transport:
        step = pp.value_and_grad([dense] * ranks, squared, schedule, transport)
        if rank > 0:
            dist.barrier()
        failures = [caught(step, held, inputs, targets) for _ in range(2)]
        if rank == 0:
            dist.barrier()
    with pp.P2P(timeout=60) as transport:
        return failures, caught(
            pp.value_and_grad([dense] * ranks, squared, schedule, transport), held, inputs, targets
        )


def test_a_rank_that_comes_to_what_others_have_given_up_hears_at_once(two, soon):
    (early, fine), (late, well) = two(come_late)
    assert fine[0] is None and well[0] is None
    for name, text, _ in early:
        assert name == "PipelineError" and " in 1 s" in text
        assert "rank 1 failed outside its program: rank 0 waited for rank 1, which has not" in text
    for name, text, seconds in late:
        assert name == "PipelineError" and "rank 0 waited for rank 1, which has not" in text
        assert seconds < soon / 2


WRONG = {
    "another's stage": ("ValueError", "params: got the stages [{stages}], this process runs"),
    "only another's": ("ValueError", "params: got the stages [{other}], this process runs"),
    "lacks a stage": ("ValueError", "params: got the stages [{first}], this process runs"),
    "no number": ("ValueError", "params: got the stages ['"),
    "no dictionary": ("TypeError", "of type list, expected a dictionary {{stage: tree}}"),
    "meta": ("ValueError", "['w']: got a tensor on the device meta, which has no values"),
    "another shape": ("StageError", "stage {first}"),
    "another's extras": ("ValueError", "extras: got the stages [{other}], this process runs"),
    "scalar weights": ("ValueError", "loss_weights: got shape ()"),
}


def wrong_arguments(rank, ranks, who, kinds):
    """One rank is given what does not fit, at its first call or at a later one; the same step then goes on.
    What each kind raises; ``kinds`` says whether it comes first.
    """
    schedule, told = pp.zbv(ranks, 2 * ranks), {}
    params, inputs, targets = problem(2 * ranks, 2 * ranks)
    own = {s: params[s] for s in schedule.model_stages_of(rank)}
    stages = [dense if s in own else None for s in params]
    other = next(s for s in params if s not in own)
    wrong = {
        "another's stage": {**own, other: params[other]},
        "only another's": {other: params[other]},
        "lacks a stage": {min(own): params[min(own)]},
        "no number": {str(s): tree for s, tree in own.items()},
        "no dictionary": list(own.values()),
        "meta": {s: {"w": tree["w"].to("meta")} for s, tree in own.items()},
        "another shape": {s: {"w": tree["w"][:3]} for s, tree in own.items()},
    }
    options = {"another's extras": {"extras": {other: inputs}}, "scalar weights": {"loss_weights": 0.5}}
    want, wanted = pp.value_and_grad([dense] * len(params), squared, schedule)(params, inputs, targets)
    with pp.P2P(timeout=60) as shared:
        warm = pp.value_and_grad(stages, squared, schedule, shared)
        warm(own, inputs, targets)
        for kind, first in kinds.items():
            with pp.P2P(timeout=60) if first else nullcontext() as transport:
                step = pp.value_and_grad(stages, squared, schedule, transport) if first else warm
                given, more = (wrong.get(kind, own), options.get(kind, {})) if rank == who else (own, {})
                told[kind] = caught(step, given, inputs, targets, **more)
                loss, grads = step(own, inputs, targets)
            assert torch.equal(loss, want)
            assert all(torch.equal(grads[s]["w"], wanted[s]["w"]) for s in own)
    return told


def test_wrong_arguments_of_one_rank_are_refused_by_name_on_all(two, soon):
    kinds = dict(zip(WRONG, cycle([True, False]), strict=False))
    check_wrong(two(wrong_arguments, 1, kinds), 1, soon)


@pytest.mark.parametrize("who", [0, 2])
def test_wrong_arguments_of_one_rank_of_four(four, who, soon):
    kinds = dict.fromkeys(["lacks a stage", "another shape"], True)
    check_wrong(four(wrong_arguments, who, kinds), who, soon)


def check_wrong(answers, who, soon):
    own = [who, 2 * len(answers) - 1 - who]
    other = next(s for s in range(2 * len(answers)) if s not in own)
    for rank, by_kind in enumerate(answers):
        for kind, (name, text, seconds) in by_kind.items():
            error, told = WRONG[kind]
            stages = ", ".join(map(str, [*sorted(own), other]))
            assert told.format(stages=stages, first=min(own), other=other) in text
            assert name == (error if rank == who else "PipelineError")
            assert rank == who or f"rank {who} failed outside its program: {error}" in text
            assert seconds < soon


def failing(p, x):
    raise LookupError("no such table")


def writing(p, x):
    return dense(p, x.add_(1))


MAKING = {"number of stages": [dense] * 5, "no function": [3] * 2, "schedule": None}
TRACING = {"own stage None": [None] * 4, "engine": None, "raises": [failing] * 4, "writes": [writing] * 4}


def wrong_maker(rank, ranks, kinds):
    """A step function that cannot be made, or traced, on one rank; the others have made theirs and call it.
    What each kind raises, on the rank that ``kinds`` names, and then a step of another transport.
    """
    params, inputs, targets = problem(ranks, 4)
    plain, held, told = pp.gpipe(ranks, 4), {rank: params[rank]}, {}
    for kind, who in kinds.items():
        stages, schedule, options = [dense] * ranks, plain, {}
        if rank == who:
            wrong = {**MAKING, **TRACING}.get(kind)
            stages = stages if wrong is None else wrong if kind == "number of stages" else wrong[:ranks]
            options = {"argnums": {"argnums": (0, 0)}, "engine": {"engine": lambda *args, **options: 3}}
            options = options.get(kind, {})
            if kind == "schedule":
                schedule = replace(plain, programs=plain.programs[::-1])

        def make_and_call(transport, given=(stages, squared, schedule), options=options):
            return pp.value_and_grad(*given, transport, **options)(held, inputs, targets)

        with pp.P2P(timeout=60) as transport:
            failure = caught(make_and_call, transport)
            # who closes its transport before others have heard of the failure may be named instead
            dist.barrier()
        told[kind] = failure
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([dense] * ranks, squared, plain, transport)
        return told, caught(step, held, inputs, targets)


def test_a_step_function_that_fails_on_one_rank_only_fails_on_all(two, soon):
    kinds = dict(zip([*MAKING, "argnums", *TRACING], cycle([0, 1]), strict=False))
    check_makers(two(wrong_maker, kinds), kinds, soon)


def test_a_step_function_that_fails_on_one_rank_of_four_fails_on_all(four, soon):
    kinds = {"number of stages": 2, "raises": 2}
    check_makers(four(wrong_maker, kinds), kinds, soon)


def check_makers(answers, kinds, soon):
    for rank, (told, again) in enumerate(answers):
        assert again[0] is None, again
        for kind, (name, text, seconds) in told.items():
            who = kinds[kind]
            assert name == "PipelineError" if rank != who else name not in (None, "PipelineError"), text
            assert rank == who or f"rank {who} failed outside its program" in text
            assert seconds < soon


def two_threads(rank, ranks, who):
    """On one rank a second thread comes while a stage of the first one's step runs; another transport takes
    it.
    """
    params, inputs, targets = problem(ranks, 4)
    held, inside, done = {rank: params[rank]}, threading.Event(), threading.Event()

    def waiting(p, x):
        if rank == who and threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(30)
        return dense(p, x)

    with pp.P2P(timeout=60) as transport, pp.P2P(timeout=60) as another:
        schedule = pp.gpipe(ranks, 4)
        first, second, beside = (
            pp.value_and_grad([waiting] * ranks, squared, schedule, t, engine=pp.engines.functional)
            for t in (transport, transport, another)
        )
        want, wanted = first(held, inputs, targets)
        results = []
        thread = threading.Thread(target=lambda: results.append(first(held, inputs, targets)))
        thread.start()
        assert rank != who or inside.wait(30)
        refused = [caught(step, held, inputs, targets) for step in (first, second)] if rank == who else []
        other, _ = beside(held, inputs, targets)
        done.set()
        thread.join()
        again, _ = second(held, inputs, targets)
    ((loss, grads),) = results
    assert torch.equal(loss, want) and torch.equal(again, want) and torch.equal(other, want)
    assert torch.equal(grads[rank]["w"], wanted[rank]["w"])
    return refused


@pytest.mark.parametrize("who", [0, 1])
def test_two_threads_on_one_transport_are_refused_and_the_running_step_is_not_disturbed(two, who, soon):
    refused = two(two_threads, who)[who]
    assert len(refused) == 2
    for name, text, seconds in refused:
        assert name == "StepRunning"
        assert (
            "got a step while another step runs on the same P2P()" in text
            and "make a P2P() for each thread" in text
        )
        assert seconds < soon


def closed(rank, ranks):
    """A closed transport is no longer to be used, on the rank that closed it and on the others."""
    params, inputs, targets = problem(ranks, 4)
    transport = pp.P2P(timeout=60)
    step = pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4), transport)
    step({rank: params[rank]}, inputs, targets)
    if rank == 0:
        transport.close()
        transport.close()
    failure = caught(step, {rank: params[rank]}, inputs, targets)
    transport.close()
    return failure


def test_a_closed_transport_is_told(two, soon):
    (name, text, _), (other, seen, seconds) = two(closed)
    assert name == "RuntimeError" and "P2P() that has been closed; make a new one" in text
    assert (
        other == "PipelineError"
        and "rank 0 failed outside its program" in seen
        and "closed its transport" in seen
    )
    assert seconds < soon


class ClosesSlowly(pp.P2P):
    """Calls something before it lets go of its communicators."""

    before = staticmethod(lambda: None)

    def disconnect(self):
        self.before()
        return super().disconnect()


def steps_while_it_closes(rank, ranks):
    params, inputs, targets = problem(ranks, 4)
    transport, failures = ClosesSlowly(timeout=20), []
    step = pp.value_and_grad(
        [dense] * ranks, squared, pp.gpipe(ranks, 4), transport, engine=pp.engines.functional
    )
    step({rank: params[rank]}, inputs, targets)
    transport.before = lambda: failures.append(caught(step, {rank: params[rank]}, inputs, targets))
    transport.close()
    return failures


def test_a_step_while_another_thread_closes_its_transport_is_told(two):
    """It was told that another step runs."""
    for ((name, text, _),) in two(steps_while_it_closes):
        assert name == "StepRunning" and "P2P() that has been closed; make a new one" in text


def is_closed_by_a_thread(rank, ranks, who, moment):
    """A second thread of one rank closes its transport while a step runs there. What each rank has heard of
    this step and the next.
    """
    params, inputs, targets = problem(ranks, 4)
    armed = Unseen()

    def close():
        closing = threading.Thread(target=transport.close)
        closing.start()
        closing.join()

    def closes(p, x):
        if armed[0] and moment == "in a stage":
            armed[0] = False
            close()
        return dense(p, x)

    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad(
            [closes] * ranks, squared, pp.one_f_one_b(ranks, 4), transport, engine=pp.engines.functional
        )
        step({rank: params[rank]}, inputs, targets)
        armed[0] = rank == who
        timer = threading.Timer(0.3, close)
        if moment == "while it waits":
            timer.start() if armed[0] else time.sleep(1.0)
        told = [caught(step, {rank: params[rank]}, inputs, targets) for _ in range(2)]
        if timer.ident is not None:
            timer.join()
        return told


@pytest.mark.parametrize("moment", ["in a stage", "while it waits"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_transport_that_another_thread_closes_during_a_step_is_told(two, who, moment):
    """The step used communicators that were gone, descriptors that were closed, or named the peer that had
    heard of it.
    """
    answers = two(is_closed_by_a_thread, who, moment)
    for name, text, _ in answers[who]:
        assert name in ("RuntimeError", "PipelineError") and "P2P() that has been closed" in text, answers
    for name, text, seconds in answers[1 - who]:
        assert name == "PipelineError" and f"rank {who} failed" in text and seconds < 10 * busy(), answers


class Shaped:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"Shaped({self.value.shape})"


def fails_on_what_cannot_be_shown(rank, size):
    torch.utils._pytree.register_pytree_node(Shaped, lambda t: ([t.value], None), lambda c, _: Shaped(*c))
    params, inputs, targets = problem(2, 4)
    armed = Unseen()

    def fails(params, x):
        if armed[0] and rank == 1:
            raise ValueError("armed")
        return torch.tanh(x @ params.value)

    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad(
            [fails] * 2, squared, pp.gpipe(2, 4), transport, engine=pp.engines.functional
        )
        given = {rank: Shaped(params[rank]["w"])}, inputs, targets
        step(*given)
        armed[0] = True
        return caught(step, *given)


def test_a_failure_on_what_cannot_be_shown_is_told(two):
    """The class of the parameters raised as the error was written: peers were told nothing, and waited."""
    for name, text, _ in two(fails_on_what_cannot_be_shown):
        assert name == "PipelineError" and "rank 1 failed at 1F0" in text
        assert "ValueError: armed at" in text and "its parameters a tree of float32[4,4]" in text


def come_to_what_was_given_up(rank, ranks):
    """Rank 0 waits for rank 1 to open a connection, and gives up as rank 2 fails; then rank 1 comes."""
    with pp.P2P(timeout=20) as transport:
        transport.begin("the same", "the same", 0)
        if rank == 0:
            seen = caught(transport.connect, [Route("F", 0, 1)], [torch.device("cpu")])
        if rank == 2:
            time.sleep(0.3)
            transport.fail(Failure(2, None, None, RuntimeError("given up")))
        if rank == 1:
            time.sleep(0.6)
            seen = caught(transport.connect, [Route("F", 0, 1)], [torch.device("cpu")])
        dist.barrier()
        return seen if rank < 2 else None


def test_a_rank_that_comes_to_a_connection_that_the_other_has_given_up_is_told(four, soon):
    for name, text, seconds in four(come_to_what_was_given_up)[:2]:
        assert name == "LinkError" and "a rank has failed" in text
        assert seconds < soon


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


OWN = {
    "connection": (
        RuntimeError("my database: Connection reset by peer"),
        "RuntimeError: my database: Connection reset by peer",
    ),
    "network": (dist.DistNetworkError("my own group"), "DistNetworkError: my own group"),
    "late": (RuntimeError("Timed out waiting for my files"), "RuntimeError: Timed out waiting for my files"),
    "unprintable": (Unprintable(), "Unprintable: (its message cannot be had)"),
}


def raise_own(rank, ranks):
    armed = Unseen(-1)

    def broken(p, x):
        if armed[0] >= 0:
            raise OWN[[*OWN][armed[0]]][0]
        return dense(p, x)

    params, inputs, targets = problem(ranks, 4)
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(
            [dense, broken], squared, pp.gpipe(ranks, 4), transport, engine=pp.engines.functional
        )
        told = {}
        for n, kind in enumerate(OWN):
            armed[0] = -1
            step({rank: params[rank]}, inputs, targets)
            armed[0] = n if rank == 1 else -1
            told[kind] = caught(step, {rank: params[rank]}, inputs, targets)
        return told


def test_an_error_of_a_stage_is_not_taken_for_one_of_the_transport(two, soon):
    where = "rank 1 failed at 1F0, step 1 of its program (stage 1, microbatch 0)"
    for told in two(raise_own):
        for kind, (name, text, seconds) in told.items():
            assert name == "PipelineError" and f"{where}: {OWN[kind][1]}" in text
            assert "waited" not in text and seconds < soon


def each_device_its_backend(rank, ranks):
    group = dist.new_group(backend="cpu:gloo")
    params, inputs, targets = problem(ranks, 4)
    with pp.P2P(group, timeout=60) as transport:
        loss, _ = pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4), transport)(
            {rank: params[rank]}, inputs, targets
        )
    assert torch.equal(
        loss, pp.value_and_grad([dense] * ranks, squared, pp.gpipe(ranks, 4))(params, inputs, targets)[0]
    )


def test_a_group_may_name_a_backend_for_each_device(two):
    two(each_device_its_backend)


def test_the_part_of_an_overlapped_pair_that_failed_is_named():
    armed = Unseen()

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if armed[0]:
                raise ArithmeticError("armed")
            return g

    schedule = pp.dualpipev(2, 4)
    pairs = [
        i
        for program in schedule.programs
        for step in program
        for i in step
        if i.op is pp.schedule.Op.OVERLAP_F_B
    ]
    stages = [lambda p, x: Backward.apply(dense(p, x))] * 4
    params, inputs, targets = problem(4, 4)
    step = pp.value_and_grad(stages, squared, schedule, engine=pp.engines.eager)
    step(params, inputs, targets)
    armed[0] = True
    with pytest.raises(pp.PipelineError) as caught:
        step(params, inputs, targets)
    assert pairs
    assert caught.value.instruction.op in (pp.schedule.Op.B, pp.schedule.Op.I)


def test_stages_that_draw_random_numbers_in_two_threads_do_not_disturb_each_other():
    schedule, results = pp.one_f_one_b(2, 8), {}
    params, inputs, targets = problem(2, 8)

    def dropped(p, x):
        return F.dropout(dense(p, x), 0.5)

    def work(k):
        step = pp.value_and_grad([dropped] * 2, squared, schedule, engine=pp.engines.functional)
        results[k] = [step(params, inputs, targets, seed=(k, 1))[0] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    before = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for k in range(2):
        want, _ = pp.value_and_grad([dropped] * 2, squared, schedule)(params, inputs, targets, seed=(k, 1))
        assert all(torch.equal(loss, want) for loss in results[k])


def test_stages_are_traced_in_several_threads():
    params, inputs, targets = problem(2, 4)
    found = []

    def work(k):
        def own(p, x):
            return dense(p, x) * (k + 1)

        try:
            found.append(
                (k, pp.value_and_grad([own] * 2, squared, pp.gpipe(2, 4))(params, inputs, targets)[0])
            )
        except Exception as error:
            found.append((k, error))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, loss in found:
        want, _ = pp.value_and_grad([lambda p, x, k=k: dense(p, x) * (k + 1)] * 2, squared, pp.gpipe(2, 4))(
            params, inputs, targets
        )
        assert torch.equal(loss, want)
    assert len(found) == 8
