"""Steps over a simulated network: with a fault at any operation of any rank they fail on all ranks or on none, and name it."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ppfunc as pp
from ppfunc.runtime.buffers import Buffers
from ppfunc.runtime.simulated import Fault, InjectedError, RankStopped, Simulated
from ppfunc.runtime.simulated.faults import KINDS
from ppfunc.runtime.transport import Failure, Link, LossPart, Tag, Transfer
from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature

LEAF = LeafSignature((3,), torch.float64, True)
CPU = torch.device("cpu")
MICROBATCHES = 2


class Ended(NamedTuple):
    """How one attempt of a step ended on one rank."""

    value: object
    error: BaseException | None


def attempts(make_step, number):
    """The function of a rank that calls its step a number of times, whatever happens."""

    def function(rank, transport):
        step, ended = make_step(rank, transport), []
        for _ in range(number):
            try:
                ended.append(Ended(step(), None))
            except RankStopped:
                raise
            except BaseException as error:
                ended.append(Ended(None, error))
        return ended

    return function


# -- a step written by hand: each rank sends to the next, and sums up what it gets ---------------


def transfer(outgoing, rank, peer, microbatch):
    source, destination = (rank, peer) if outgoing else (peer, rank)
    return Transfer(outgoing, Tag("F", source, destination, microbatch), peer, (LEAF,), CPU)


def ring_calls(rank, size, transport):
    """The program of one rank."""
    for m in range(MICROBATCHES if size > 1 else 0):
        send, recv = transfer(True, rank, (rank + 1) % size, m), transfer(False, rank, (rank - 1) % size, m)

        def load(buffers, send=send, m=m):
            buffers.values[send.tag] = (torch.full(LEAF.shape, float(rank + 10 * m), dtype=LEAF.dtype),)

        def add(buffers, recv=recv):
            buffers.kept[0, 0] = (buffers.kept.get((0, 0), (0,))[0] + buffers.values.pop(recv.tag)[0],)

        yield from (load, transport.post(rank, [send, recv]), transport.wait_recv(rank, recv), transport.wait_send(rank, send), add)


def ring(rank, transport):
    """A step as a step function makes it: it agrees anew after a failure, and tells of failures."""
    size = transport.size
    parts = {r: LossPart(r, LEAF) for r in range(size)}
    state = {"generation": None, "calls": ()}

    def step():
        place = None
        try:
            transport.begin("a step", "shapes" if rank == 0 else None, 0)
            if state["generation"] != transport.generation:
                transport.all_gather("the same everywhere")
                transport.connect([Link("F", r, (r + 1) % size) for r in range(size)])
                state.update(generation=transport.generation, calls=tuple(ring_calls(rank, size, transport)))
            buffers = Buffers()
            for place, call in enumerate(state["calls"]):
                call(buffers)
            place = None
            (mine,) = buffers.kept.get((0, 0), (torch.zeros(LEAF.shape, dtype=LEAF.dtype),))
            return float(transport.end({rank: mine}, parts).sum())
        except BaseException as cause:
            instruction = None if place is None else Instruction(Op.F, rank, 0)
            error = transport.fail(Failure(rank, place, instruction, cause))
            if error is cause or not isinstance(cause, Exception):
                raise cause
            raise error from cause

    return step


def is_right_ring(size, value):
    return value == (3.0 * sum(r + 10 * m for r in range(size) for m in range(MICROBATCHES)) if size > 1 else 0.0)


# -- what must hold ------------------------------------------------------------------------------


def struck_while_settling(network):
    """Whether a fault struck a rank between its vote, or the commitment of rank 0, and the end of the step."""
    settling = set()
    for line in network.trace:
        _, _, who, what = (*line.split(" ", 3), "", "")[:4]
        rank = who.partition(".")[0]
        if what in KINDS and rank in settling or what.startswith("loses") and "(tree)" in what:
            return True
        if what.startswith("vote") or rank == "0" and what.startswith("commit"):
            settling.add(rank)
        if what.startswith(("begin", "publish")):
            settling.discard(rank)
    return False


def problems(network, outcomes, is_right):
    """What went wrong beside the faults: wrong values, strange errors, steps that fail on some ranks only."""
    found = [f"rank {r}: {o.error!r}" for r, o in enumerate(outcomes) if o.error is not None and not isinstance(o.error, RankStopped)]
    live, mixed = [outcome.value for outcome in outcomes if outcome.error is None], False
    for attempt, ended in enumerate(zip(*live, strict=True)):
        told = f"attempt {attempt}: {[e.error and repr(e.error) for e in ended]}"
        returned = [e for e in ended if e.error is None]
        found += [f"{told}: got {e.value}" for e in returned if not is_right(e.value)]
        expected = pp.PipelineError, pp.AgreementError, InjectedError, KeyboardInterrupt
        found += [f"{told}: unexpected" for e in ended if e.error is not None and not isinstance(e.error, expected)]
        if mixed and returned:
            found.append(f"{told}: some ranks go on")
        elif 0 < len(returned) < len(live):
            mixed = True
            if not struck_while_settling(network):
                found.append(f"{told}: ranks disagree on whether the step failed")
    return found


# -- whole steps ---------------------------------------------------------------------------------


def tanh_stage(params, x):
    return torch.tanh(x @ params["w"])


def squared(y, target):
    return (y - target).square().mean()


class Problem(NamedTuple):
    """A schedule with parameters and a batch, and what the step returns where all ranks live in this thread."""

    schedule: pp.Schedule
    stages: list
    params: dict
    batch: tuple[torch.Tensor, torch.Tensor]
    loss: torch.Tensor
    grads: dict


@cache
def problem(build, ranks):
    schedule = build(ranks, 2 * ranks)
    generator = torch.Generator().manual_seed(0)
    stages = [tanh_stage] * len(set(schedule.model_stages))
    params = {s: {"w": torch.randn(4, 4, generator=generator)} for s in range(len(stages))}
    batch = torch.randn(4 * ranks, 4, generator=generator), torch.randn(4 * ranks, 4, generator=generator)
    return Problem(schedule, stages, params, batch, *pp.value_and_grad(stages, squared, schedule)(params, *batch))


def whole(setting):
    """Makes the step of one rank."""

    def make_step(rank, transport):
        here = {setting.schedule.model_stages[s] for s, r in enumerate(setting.schedule.placement) if r == rank}
        step = pp.value_and_grad(setting.stages, squared, setting.schedule, transport)
        return lambda: step({s: setting.params[s] for s in here}, *setting.batch)

    return make_step


def is_right_step(setting, value):
    """Whether a rank has the same bits as without messages."""
    loss, grads = value
    return torch.equal(loss, setting.loss) and all(torch.equal(g["w"], setting.grads[s]["w"]) for s, g in grads.items())
