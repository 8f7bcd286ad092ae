"""A fault at every instruction of every builder, in the beginning, the end and the failure of a step, at
every point in between.

All ranks train in this process, over the seeded network, with the real control protocol: whatever goes wrong,
they end with the bits of a clean run, or with the name of the rank that is to blame, and never one step apart
without being told.
"""

from __future__ import annotations

import opcode
import os
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import NamedTuple

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import Schedule, remove_tail
from tests.builders import BUILDERS
from tests.models import squared, traced_once
from tests.network.network import Fault, InjectedError, RankStopped, interrupt
from tests.network.simulated import Simulated

STEPS = 2
RATE = 0.25
TIMEOUT = 300.0  # of the network, in virtual seconds


# -- what is trained ---------------------------------------------------------------------------


class Problem(NamedTuple):
    """A schedule, and what a clean run computes: the loss of every step, the parameters before each and after
    the last.

    ``make(schedule, transport, instructions)`` makes a step of it; ``instructions`` changes the step function
    in it.
    """

    make: Callable
    schedule: Schedule
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[torch.Tensor]
    params: list[dict[int, torch.Tensor]]


def tanh_stage(w, x):
    return torch.tanh(x @ w)


def functional(schedule, transport=None, instructions=lambda step: step):
    """``step(params, inputs, targets) -> (loss, new params)``, where a schedule is forward only the old
    ones.
    """
    stages = [tanh_stage] * len(set(schedule.model_stages))
    if schedule.forward_only:
        loss_of = instructions(pp.evaluate(stages, squared, schedule, transport, engine=traced_once))
        return lambda params, *batch: (loss_of(params, *batch), params)
    gradients_of = instructions(pp.value_and_grad(stages, squared, schedule, transport, engine=traced_once))

    def step(params, *batch):
        loss, grads = gradients_of(params, *batch)
        return loss, {s: w - RATE * grads[s] for s, w in params.items()}

    return step


def trained(schedule, transport=None, instructions=lambda step: step, times=0):
    """The same of a trainer, whose state is in the place of the parameters; some updates by each batch
    together, where asked for.
    """
    stages = [tanh_stage] * len(set(schedule.model_stages))
    optimizer = pp.optim.sgd(RATE, momentum=0.5)
    trainer = pp.Trainer(stages, squared, schedule, optimizer, transport=transport, engine=traced_once)
    trainer._step = instructed = instructions(trainer._step)
    if not hasattr(instructed, "returning"):
        instructed.returning = lambda *more: instructed

    def step(before, *batch):
        state = trainer.init(before) if isinstance(before, dict) else before
        state, metrics = trainer.steps(state, [batch] * times) if times else trainer.step(state, *batch)
        return torch.stack([each.loss for each in metrics]).sum() if times else metrics.loss, state

    return step


trained_together = partial(trained, times=2)


def params_of(state):
    return state if isinstance(state, dict) else state.params


@cache
def problem(name, ranks, make=functional):
    build = BUILDERS[name]
    microbatches = next(m for m in (ranks, ranks + 1, 2 * ranks) if fits(build, ranks, m))
    schedule = remove_tail(build(ranks, microbatches))
    normal = torch.Generator().manual_seed(ranks)
    count = len(set(schedule.model_stages))
    params = [{s: torch.randn(3, 3, generator=normal) for s in range(count)}]
    batches = [
        tuple(torch.randn(schedule.microbatches, 3, generator=normal) for _ in range(2)) for _ in range(STEPS)
    ]
    step, losses, state = make(schedule), [], params[0]
    for batch in batches:
        loss, state = step(state, *batch)
        losses.append(loss)
        params.append(params_of(state))
    return Problem(make, schedule, batches, losses, params)


def fits(build, ranks, microbatches):
    try:
        build(ranks, microbatches)
    except ValueError:
        return False
    return True


def sizes(name):
    """Numbers of ranks that a builder takes."""
    return [
        ranks
        for ranks in (2, 3, 4)
        if any(fits(BUILDERS[name], ranks, m) for m in (ranks, ranks + 1, 2 * ranks))
    ]


# -- how it is trained -------------------------------------------------------------------------


class Trained(NamedTuple):
    """How a rank has ended: steps that it has got, its errors, each with the step that it tried, and what was
    wrong.
    """

    got: int
    errors: list[tuple[int, BaseException]]
    wrong: list[str]


def announced(transport):
    """Makes a step every call of whose program is an operation of the network, too, so that faults strike in
    it.
    """

    def of(call, place):
        def run(buffers):
            transport.links.operation(f"run {place.instruction}")
            call(buffers)

        return run

    def instructions(step):
        def find(passes):
            entry = step._find(passes, "run")
            calls = tuple(map(of, entry.compiled.calls, entry.compiled.places))
            return entry._replace(compiled=entry.compiled._replace(calls=calls))

        return lambda *args: step._run(args, {}, find=find)[0]

    return instructions


def going_on(setting, patience, around):
    """The function of a rank: it goes on after failures, until it has got all steps, or its patience ends."""

    def function(rank, transport):
        step = around(rank, transport, setting.make(setting.schedule, transport, announced(transport)))
        own = setting.schedule.model_stages_of(rank)
        params, got, errors, wrong = {s: setting.params[0][s] for s in own}, 0, [], []
        while got < STEPS and len(errors) < patience:
            try:
                loss, params = step(params, *setting.batches[got])
            except RankStopped:
                raise
            except BaseException as error:
                errors.append((got, error))
                if isinstance(error, pp.AgreementError):
                    break
                continue
            finally:
                if not torch.is_grad_enabled():
                    wrong.append("gradients are off")
            if not torch.equal(loss, setting.losses[got]):
                wrong.append(f"loss of step {got}: {loss}, not {setting.losses[got]}")
            got += 1
            wrong += [
                f"stage {s} after step {got}"
                for s in own
                if not torch.equal(params_of(params)[s], setting.params[got][s])
            ]
        return Trained(got, errors, wrong)

    return function


def train(setting, seed, faults=(), patience=4, around=lambda rank, transport, call: call):
    network = Simulated(setting.schedule.ranks, seed, faults, timeout=TIMEOUT)
    return network, network.run(going_on(setting, patience, around))


def problems(network, outcomes, faults):
    """What a run has shown that must not be: wrong bits, strange errors, ranks that are apart, wrong
    names.
    """
    found = [
        f"rank {r}: {o.error!r}"
        for r, o in enumerate(outcomes)
        if o.error is not None and not isinstance(o.error, RankStopped)
    ]
    live = {r: o.value for r, o in enumerate(outcomes) if o.error is None}
    found += [f"rank {r}: {text}" for r, ended in live.items() for text in ended.wrong]
    expected = pp.PipelineError, pp.AgreementError, InjectedError, KeyboardInterrupt
    errors = [(r, at, error) for r, ended in live.items() for at, error in ended.errors]
    found += [f"rank {r}: step {at}: {error!r}" for r, at, error in errors if not isinstance(error, expected)]
    # A rank whose result was taken in the last step waits for others that have ended.
    if undecidable(network) and any(fault.kind == "interrupt" for fault in faults):
        return found
    return found + apart(network, live) + names(live, faults, outcomes)


def apart(network, live):
    """Ranks that have not got the same steps, where nobody has died and nobody was told."""
    told = all(
        any(isinstance(error, pp.AgreementError) for _, error in ended.errors) for ended in live.values()
    )
    if len({ended.got for ended in live.values()}) > 1 and not told and not undecidable(network):
        return [f"steps: { {r: ended.got for r, ended in live.items()} }"]
    return []


def undecidable(network):
    """Whether a rank has stopped, or its message or, by an interrupt, its result was lost, between its vote
    and the end of the step: nobody can tell those below.

    What a rank that is killed has told them of the end may be lost as long as it has told them nothing after
    it.
    """
    voted, telling, struck = {"0"}, set(), False
    for line in network.trace:
        if found := re.search(r" rank (\d+)\.\d+ (vote|begin|publish)", line):
            (voted.add if found[2] == "vote" or found[1] == "0" else voted.discard)(found[1])
        elif found := re.search(r" rank (\d+)\.\d+ send tree", line):
            (telling.add if found[1] in voted else telling.discard)(found[1])
        elif found := re.search(
            r" rank (\d+) (?:(kill|freeze|drop|interrupt)|loses \d+ messages to \d+ \(tree\))$", line
        ):
            struck |= found[1] in (voted if found[2] else telling)
    return struck


def names(live, faults, outcomes):
    """Errors that name somebody who has done nothing."""
    if any(
        fault.kind == "drop" for fault in faults
    ):  # the rank that waits in vain is at the end of the chain of those that wait
        return []
    guilty = {fault.rank for fault in faults if fault.kind != "delay"}
    errors = [(r, error) for r, ended in live.items() for _, error in ended.errors]
    named = [(r, error) for r, error in errors if isinstance(error, pp.PipelineError)]
    found = [f"rank {r} names {error.rank}: {error}" for r, error in named if error.rank not in guilty]
    own = InjectedError, KeyboardInterrupt
    return found + [
        f"rank {r}: {error!r}" for r, error in errors if isinstance(error, own) and r not in guilty
    ]


def check(setting, seed, faults, patience=4, around=lambda rank, transport, call: call):
    network, outcomes = train(setting, seed, faults, patience, around)
    assert problems(network, outcomes, faults) == [], replay(setting, seed, faults)
    return network, outcomes


def replay(setting, seed, faults):
    return f"replay: {setting.schedule.name} over {setting.schedule.ranks} ranks, seed {seed}, {faults}"


# -- faults at operations ----------------------------------------------------------------------

KINDS = [(kind, None) for kind in ("raise", "interrupt", "kill", "drop", "freeze")]
KINDS += [("delay", 1.0), ("freeze", 1.0), ("freeze", 500.0)]
HARMLESS = [("delay", 1.0), ("freeze", 1.0)]


@cache
def operations(name, ranks, make=functional):
    """How many operations a clean run has, by rank."""
    network, _ = check(problem(name, ranks, make), 0, ())
    return network.operations


def single_faults(name, make, large):
    """Faults at operations, with the number of ranks: all of them, or some at one number of ranks."""
    random, found = Random(name), sizes(name)
    cases = [
        (ranks, Fault(kind, rank, at, seconds))
        for ranks in (found if large else [random.choice(found)]) for rank, count in enumerate(operations(name, ranks, make))  # noqa: E501
        for at in range(count) for kind, seconds in KINDS
    ]  # fmt: skip
    return cases if large else random.sample(cases, 3)


def is_large(request):
    return request.config.getoption("--large")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_fault_at_every_instruction(name, request):
    for ranks, fault in single_faults(name, functional, is_large(request)):
        network, outcomes = check(problem(name, ranks), fault.at, [fault])
        require_outcome(network, outcomes, fault)


@pytest.mark.parametrize("make", [trained, trained_together])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_fault_at_every_instruction_of_training(name, make, request):
    for ranks, fault in single_faults(name, make, is_large(request)):
        network, outcomes = check(problem(name, ranks, make), fault.at, [fault])
        require_outcome(network, outcomes, fault)


def require_outcome(network, outcomes, fault):
    """What follows of one fault: nothing, one failed step, or the name of a rank that is gone."""
    live = {r: outcome.value for r, outcome in enumerate(outcomes) if outcome.error is None}
    errors = {r: [error for _, error in ended.errors] for r, ended in live.items()}
    told = f"{fault}: {errors}"
    if (fault.kind, fault.seconds) in HARMLESS:
        assert not any(errors.values()), told
    if fault.kind in ("kill", "freeze") and fault.seconds is None:
        assert fault.rank not in live, told
        assert undecidable(network) or all(
            live[r].got == STEPS or isinstance(own[-1], pp.PipelineError) for r, own in errors.items()
        ), told
        return
    if undecidable(network):
        return
    assert all(ended.got == STEPS for ended in live.values()) and len(live) == len(outcomes), told
    if fault.kind in ("raise", "interrupt"):
        assert len({len(error) for error in errors.values()}) == 1 and len(errors[fault.rank]) <= 1, told
        place = next(
            (
                line.split()[-1]
                for line in network.trace
                if re.search(rf" rank {fault.rank}\.{fault.at} run ", line)
            ),
            None,
        )
        if place is not None:
            named = {str(error.instruction) for r, (error,) in errors.items() if r != fault.rank}
            assert len(named) == 1, told
            assert fault.kind == "interrupt" or named == {place}, told  # which acts at the next call


@pytest.mark.parametrize("name", BUILDERS)
def test_faults_while_the_first_is_handled(name, request):
    random, large = Random(name), is_large(request)
    found = sizes(name) if large else [Random(name).choice(sizes(name))]
    for _ in range(400 if large else 3):
        ranks = random.choice(found)
        counts = operations(name, ranks)
        rank = random.randrange(ranks)
        at = random.randrange(counts[rank])
        faults = [Fault(*random.choice(KINDS[:2]), None)._replace(rank=rank, at=at, seconds=None)]
        for _ in range(random.choice((1, 1, 2))):
            kind, seconds = random.choice(KINDS)
            other = random.choice((rank, random.randrange(ranks)))
            near = (
                at + random.randint(0, 12)
                if other == rank
                else at * counts[other] // counts[rank] + random.randint(-8, 16)
            )
            faults.append(Fault(kind, other, max(0, near), seconds))
        network, outcomes = check(problem(name, ranks), random.randrange(2**32), faults)
        if all(fault.kind in ("raise", "interrupt", "delay") for fault in faults):
            assert all(outcome.value.got == STEPS for outcome in outcomes), replay(
                problem(name, ranks), network, faults
            )


# -- interrupts at every point at which Python looks for signals --------------------------------

_LOOKS = {
    number
    for name, number in opcode.opmap.items()
    if name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
}
_LOOKS |= {number for name, number in opcode.opmap.items() if name.startswith("POP_JUMP_BACKWARD")}
_PACKAGE = re.escape(os.path.dirname(pp.__file__))
_TRACED = re.compile(rf"{_PACKAGE}/(runtime/[a-z_/]+|training/(trainer|update/[a-z_]+))\.py")


def at_points(act):
    """A trace function that calls ``act()`` wherever the interpreter, in functions of the runtime, would run
    handlers of signals.
    """
    last: dict[int, int | None] = {}  # by frame, the operation before

    def local(frame, event, arg):
        key = id(frame)
        if event == "opcode":
            before, last[key] = last.get(key), frame.f_code.co_code[frame.f_lasti]
            if before in _LOOKS:
                act()
        elif event == "exception":
            last[key] = None  # the operation has not come to its end, where it would look
        elif event == "return":
            last.pop(key, None)
        return local

    def start(frame, event, arg):
        if not _TRACED.fullmatch(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    return start


def interrupted(setting, victim, number, counted=None, late=None):
    """Interrupts a rank at a point of its run before the last step, counted from 0; ``counted`` gets the
    numbers of all points, ``late`` whether the rank had voted for the end of the step.
    """

    def around(rank, transport, call):
        if rank != victim:
            return call
        points, last = iter(range(10**9)), setting.batches[-1][0]

        def act():
            n = next(points)
            if counted is not None:
                counted.append(n)
            if n == number:
                links = transport.links
                if late is not None:
                    late.append(links._member.settling or links._network.committed > transport.ended)
                interrupt()

        def traced(params, inputs, targets):
            if inputs is last:  # there is no step after it that would tell of a difference
                return call(params, inputs, targets)
            before = sys.gettrace()
            sys.settrace(at_points(act))
            try:
                return call(params, inputs, targets)
            finally:
                sys.settrace(before)

        return traced

    return around


FIRST = {"nothing": [], "a failure there": ["victim"], "a failure elsewhere": ["other"]}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(
    ("name", "ranks", "victim"),
    [("1f1b", 2, 0), ("1f1b", 2, 1), ("zb_h1", 3, 0), ("1f1b", 4, 1), ("dualpipe", 4, 3)],
)
def test_an_interrupt_at_every_point(name, ranks, victim, first, request):
    setting, counted, told = problem(name, ranks), [], 0
    struck = {"victim": victim, "other": (victim + 1) % ranks}
    faults = [
        Fault("raise", struck[who], operations(name, ranks)[struck[who]] * 3 // 4) for who in FIRST[first]
    ]
    check(
        setting,
        0,
        [*faults, Fault("delay", victim, 0, 0.0)],
        around=interrupted(setting, victim, -1, counted),
    )
    points = range(len(counted))
    for number in points if is_large(request) else Random(name).sample(points, 2):
        late = []
        around = interrupted(setting, victim, number, late=late)
        network, outcomes = train(setting, number, faults, around=around)
        blamed = [*faults, Fault("interrupt", victim, 0)]
        assert problems(network, outcomes, blamed) == [], (number, replay(setting, number, faults))
        alike = {outcome.value.got for outcome in outcomes}
        told += alike != {STEPS} and late != [True]  # a handler that raises after the vote takes the result
        assert alike == {STEPS} or all(
            isinstance(outcome.value.errors[-1][1], pp.AgreementError) for outcome in outcomes
        ), number
    assert told <= 6, "too many places where a result is lost before the vote for the end of a step"
