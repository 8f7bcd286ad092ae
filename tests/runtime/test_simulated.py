"""Steps over a simulated network: deterministic, and with a fault at any operation of any rank they fail on all ranks or on none."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from ppfunc.runtime.buffers import Buffers
from ppfunc.runtime.errors import AgreementError, PipelineError
from ppfunc.runtime.simulated import Fault, InjectedError, RankStopped, Simulated
from ppfunc.runtime.simulated.faults import KINDS
from ppfunc.runtime.transport import Failure, Link, LossPart, Tag, Transfer
from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature

LEAF = LeafSignature((3,), torch.float64, True)
MICROBATCHES = 2


class Ended(NamedTuple):
    """How one attempt of a step ended on one rank."""

    value: float | None
    error: BaseException | None


def transfer(outgoing, rank, peer, direction, microbatch):
    """One end of a message between two ranks, each with one stage."""
    source, destination = (rank, peer) if outgoing else (peer, rank)
    return Transfer(outgoing, Tag(direction, source, destination, microbatch), peer, (LEAF,), torch.device("cpu"))


def ring(rank, size):
    """The calls of a rank that sends each microbatch to the next rank, gets one of the rank before, and adds it up."""
    after, before = (rank + 1) % size, (rank - 1) % size

    def program(transport):
        for m in range(MICROBATCHES):
            send, recv = transfer(True, rank, after, "F", m), transfer(False, rank, before, "F", m)

            def load(buffers, send=send, m=m):
                buffers.values[send.tag] = (torch.full((3,), float(rank + 10 * m), dtype=torch.float64),)

            def add(buffers, recv=recv):
                buffers.values[0] = buffers.values.get(0, 0) + buffers.values.pop(recv.tag)[0]

            yield load
            yield transport.post(rank, [send, recv])
            yield transport.wait_recv(rank, recv)
            yield transport.wait_send(rank, send)
            yield add

    return program


class Stepper:
    """Runs steps on one rank as a session does: agrees anew after a failure, tells of failures."""

    def __init__(self, rank, size, transport):
        self.rank, self.size, self.transport = rank, size, transport
        self.generation = None
        self.parts = {r: LossPart(r, LEAF) for r in range(size)}

    def __call__(self):
        place = None
        try:
            self.transport.begin("a step", "shapes" if self.rank == 0 else None, 0)
            if self.generation != self.transport.generation:
                self.transport.all_gather("the same everywhere")
                self.transport.connect([Link("F", r, (r + 1) % self.size) for r in range(self.size)])
                self.generation = self.transport.generation
                self.calls = list(ring(self.rank, self.size)(self.transport)) if self.size > 1 else []
            buffers = Buffers()
            for place, call in enumerate(self.calls):
                call(buffers)
            place = None
            mine = buffers.values.get(0, torch.zeros(3, dtype=torch.float64))
            return float(self.transport.end({self.rank: mine}, self.parts).sum())
        except BaseException as cause:
            instruction = None if place is None else Instruction(Op.F, self.rank, 0)
            error = self.transport.fail(Failure(self.rank, place, instruction, cause))
            if error is cause or not isinstance(cause, Exception):
                raise cause
            raise error from cause


def attempts(size, number):
    """The function of a rank that tries a number of steps."""

    def function(rank, transport):
        step = Stepper(rank, size, transport)
        ended = []
        for _ in range(number):
            try:
                ended.append(Ended(step(), None))
            except RankStopped:
                raise
            except BaseException as error:
                ended.append(Ended(None, error))
        return ended

    return function


def right(size):
    return 3.0 * sum(r + 10 * m for r in range(size) for m in range(MICROBATCHES)) if size > 1 else 0.0


def struck_while_settling(network, size):
    """Whether a fault struck a rank between its vote, or the commitment of rank 0, and the end of the step."""
    settling = [False] * size
    for line in network.trace:
        _, _, who, what = (*line.split(" ", 3), "", "", "")[:4]
        if "." in who:
            rank = int(who.split(".")[0])
            settling[rank] |= what.startswith("vote") or (rank == 0 and what.startswith("commit"))
            settling[rank] &= not what.startswith(("begin", "publish"))
        elif who and (what in KINDS and settling[int(who)] or what.startswith("loses") and "(tree)" in what):
            return True
    return False


def problems(network, outcomes, size):
    """What went wrong in attempts beside the faults: ranks that hang or raise what they should not, steps that fail on some ranks only."""
    found = [f"rank {r}: {o.error!r}" for r, o in enumerate(outcomes) if o.error is not None and not isinstance(o.error, RankStopped)]
    live = [outcome.value for outcome in outcomes if outcome.error is None]
    mixed = False
    for attempt, ended in enumerate(zip(*live, strict=True)):
        returned = [e for e in ended if e.error is None]
        found += [f"attempt {attempt}: got {e.value}" for e in returned if e.value != right(size)]
        allowed = PipelineError, AgreementError, InjectedError, KeyboardInterrupt
        found += [f"attempt {attempt}: {e.error!r}" for e in ended if e.error is not None and not isinstance(e.error, allowed)]
        if mixed and returned:
            found.append(f"attempt {attempt}: some ranks go on")
        if 0 < len(returned) < len(live) and not mixed:
            mixed = True
            if not struck_while_settling(network, size):
                found.append(f"attempt {attempt}: {[e.error and str(e.error) for e in ended]}")
    return found
