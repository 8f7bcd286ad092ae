"""A fault at every instruction of every builder, in the beginning, the end and the failure of a step, at every point in between.

All ranks train in this process, over the seeded network, with the real control protocol: whatever goes wrong, they end with
the bits of a clean run, or with the name of the rank that is to blame, and never one step apart without being told.
"""

from __future__ import annotations

import inspect
import opcode
import re
import sys
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.interrupts import let_interrupts
from ppfunc.runtime.simulated import Fault, InjectedError, RankStopped, Simulated
from ppfunc.schedule import BUILDERS, Schedule, remove_tail

STEPS = 2
RATE = 0.25
TIMEOUT = 300.0  # of the network, in virtual seconds


# -- what is trained ---------------------------------------------------------------------------


class Problem(NamedTuple):
    """A schedule, and what a clean run computes: the loss of every step, the parameters before each and after the last."""

    schedule: Schedule
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[torch.Tensor]
    params: list[dict[int, torch.Tensor]]


def tanh_stage(w, x):
    return torch.tanh(x @ w)


def squared(y, target):
    return (y - target).square().mean()


def make_step(problem_or_schedule, transport=None):
    """``step(params, inputs, targets) -> (loss, new params)``, where a schedule is forward only the old ones."""
    schedule = problem_or_schedule
    stages = [tanh_stage] * len(set(schedule.model_stages))
    if schedule.forward_only:
        step = pp.evaluate(stages, squared, schedule, transport)
        return step, lambda params, result: (result, params)
    step = pp.value_and_grad(stages, squared, schedule, transport)
    return step, lambda params, result: (result[0], {s: w - RATE * result[1][s] for s, w in params.items()})


@cache
def problem(name, ranks):
    build = BUILDERS[name]
    microbatches = next(m for m in (ranks, ranks + 1, 2 * ranks) if fits(build, ranks, m))
    schedule = remove_tail(build(ranks, microbatches))
    normal = torch.Generator().manual_seed(ranks)
    count = len(set(schedule.model_stages))
    params = [{s: torch.randn(3, 3, generator=normal) for s in range(count)}]
    batches = [tuple(torch.randn(schedule.microbatches, 3, generator=normal) for _ in range(2)) for _ in range(STEPS)]
    step, update = make_step(schedule)
    losses = []
    for batch in batches:
        loss, after = update(params[-1], step(params[-1], *batch))
        losses.append(loss)
        params.append(after)
    return Problem(schedule, batches, losses, params)


def fits(build, ranks, microbatches):
    try:
        build(ranks, microbatches)
    except ValueError:
        return False
    return True


def sizes(name):
    """Numbers of ranks that a builder takes."""
    return [ranks for ranks in (2, 3, 4) if any(fits(BUILDERS[name], ranks, m) for m in (ranks, ranks + 1, 2 * ranks))]


# -- how it is trained -------------------------------------------------------------------------


class Trained(NamedTuple):
    """How a rank has ended: steps that it has got, its errors, each with the step that it tried, and what was wrong."""

    got: int
    errors: list[tuple[int, BaseException]]
    wrong: list[str]


def announced(transport, call, place):
    """A call that is an operation of the network, too, so that faults strike in it."""

    def run(buffers):
        transport.links.operation(f"run {place.instruction}")
        call(buffers)

    return run


def trainer_of(setting, patience, around=lambda rank, transport, call: call):
    """The function of a rank: it goes on after failures, until it has got all steps, or its patience ends."""

    def function(rank, transport):
        step, update = make_step(setting.schedule, transport)

        def ready(arguments):
            entry = step._ready(arguments, "run")
            pairs = zip(entry.compiled.calls, entry.compiled.places, strict=True)
            calls = tuple(announced(transport, call, place) for call, place in pairs)
            return entry._replace(compiled=entry.compiled._replace(calls=calls))

        run = around(rank, transport, lambda *args: step._run(args, {}, ready=ready)[0])
        own = setting.schedule.model_stages_of(rank)
        params, got, errors, wrong = {s: setting.params[0][s] for s in own}, 0, [], []
        while got < STEPS and len(errors) < patience:
            try:
                result = run(params, *setting.batches[got])
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
            loss, params = update(params, result)
            if not torch.equal(loss, setting.losses[got]):
                wrong.append(f"loss of step {got}: {loss}, not {setting.losses[got]}")
            got += 1
            wrong += [f"stage {s} after step {got}" for s in own if not torch.equal(params[s], setting.params[got][s])]
        return Trained(got, errors, wrong)

    return function


def train(setting, seed, faults=(), patience=4, around=lambda rank, transport, call: call):
    network = Simulated(setting.schedule.ranks, seed, faults, timeout=TIMEOUT)
    return network, network.run(trainer_of(setting, patience, around))


def problems(network, outcomes, faults):
    """What a run has shown that must not be: wrong bits, strange errors, ranks that are apart, wrong names."""
    found = [f"rank {r}: {o.error!r}" for r, o in enumerate(outcomes) if o.error is not None and not isinstance(o.error, RankStopped)]
    live = {r: o.value for r, o in enumerate(outcomes) if o.error is None}
    found += [f"rank {r}: {text}" for r, ended in live.items() for text in ended.wrong]
    expected = pp.PipelineError, pp.AgreementError, InjectedError, KeyboardInterrupt
    errors = [(r, at, error) for r, ended in live.items() for at, error in ended.errors]
    found += [f"rank {r}: step {at}: {error!r}" for r, at, error in errors if not isinstance(error, expected)]
    return found + apart(network, live) + names(live, faults, outcomes)


def apart(network, live):
    """Ranks that have not got the same steps, where nobody has died and nobody was told."""
    told = all(any(isinstance(error, pp.AgreementError) for _, error in ended.errors) for ended in live.values())
    if len({ended.got for ended in live.values()}) > 1 and not told and not undecidable(network):
        return [f"steps: { {r: ended.got for r, ended in live.items()} }"]
    return []


def undecidable(network):
    """Whether a rank has stopped, or its message was lost, between its vote and the end of the step: nobody can tell those below."""
    voted = {"0"}
    for line in network.trace:
        if found := re.search(r" rank (\d+)\.\d+ (vote|begin|publish)", line):
            (voted.add if found[2] == "vote" or found[1] == "0" else voted.discard)(found[1])
        elif (found := re.search(r" rank (\d+) (kill|freeze|drop)$", line)) and found[1] in voted:
            return True
    return False


def names(live, faults, outcomes):
    """Errors that name somebody who has done nothing."""
    if any(fault.kind == "drop" for fault in faults):  # the rank that waits in vain is at the end of the chain of those that wait
        return []
    guilty = {fault.rank for fault in faults if fault.kind != "delay"}
    errors = [(r, error) for r, ended in live.items() for _, error in ended.errors]
    found = [f"rank {r} names {error.rank}: {error}" for r, error in errors if isinstance(error, pp.PipelineError) and error.rank not in guilty]
    own = InjectedError, KeyboardInterrupt
    return found + [f"rank {r}: {error!r}" for r, error in errors if isinstance(error, own) and r not in guilty]


def check(setting, seed, faults, patience=4, around=lambda rank, transport, call: call):
    network, outcomes = train(setting, seed, faults, patience, around)
    assert problems(network, outcomes, faults) == [], replay(setting, seed, faults)
    return network, outcomes


def replay(setting, seed, faults):
    return f"replay: check(problem({setting.schedule.name!r}, {setting.schedule.ranks}), {seed}, {faults})"
