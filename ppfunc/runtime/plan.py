"""From stages and signatures to a bound program: what has to be worked out once per shape of the batch.

Stages are visited in the order of the data. Each rank evaluates its stages abstractly, for
every distinct input signature once, and tells the rank of the next stage, as JSON, what will
come; so both ends of an edge have the same table before data moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import FlatProgram, Signature

from .interpreter import BATCH, Bound, Edge, Home, StageCall, bind
from .transport import Transport

Key = tuple[int, int]  # (stage, microbatch)


class Served(NamedTuple):
    """A stage served for one input signature.

    Args:
        program: functions over flat tuples.
        y: signature of what goes to the next stage; of the loss or the outputs for the last.
        weighted: whether ``y`` is a loss that depends on parameters.
        random: whether the forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    y: Signature
    weighted: bool
    random: bool | None


class Table(NamedTuple):
    """What the ranks agreed on for one shape of the batch, as far as it concerns this process.

    Args:
        received: signature of the input of every local (stage, microbatch).
        sent: signature of the output of every local (stage, microbatch).
        losses: for every chain, the signature of the last stage's output, known to all ranks.
    """

    received: Mapping[Key, Signature]
    sent: Mapping[Key, Signature]
    losses: tuple[Signature, ...]


Serve = Callable[[int, int, Signature], Served]


def negotiate(schedule: Schedule, transport: Transport, serve: Serve, first: Callable[[int], Signature]) -> Table:
    """Walk the stages in the order of the data and agree on every edge.

    Args:
        schedule: the schedule.
        transport: carries the JSON.
        serve: ``(stage, microbatch, signature of x) -> Served``, for the stages of this process.
        first: signature of a microbatch of the batch.
    """
    local = set(transport.local_ranks(schedule.ranks))
    received: dict[Key, Signature] = {}
    sent: dict[Key, Signature] = {}
    losses = []
    for chain in schedule.chains:
        for stage in chain.stages:
            rank, before, after = schedule.placement[stage], schedule.predecessor(stage), schedule.successor(stage)
            if rank not in local:
                continue
            if before is None:
                inputs = [first(m) for m in chain.microbatches]
            elif schedule.placement[before] in local:
                inputs = [sent[before, m] for m in chain.microbatches]
            else:
                inputs = _read(transport.hear(rank, schedule.placement[before]))
            for m, signature in zip(chain.microbatches, inputs, strict=True):
                received[stage, m] = signature
                sent[stage, m] = serve(stage, m, signature).y
            if after is not None and schedule.placement[after] not in local:
                transport.tell(rank, schedule.placement[after], _write([sent[stage, m] for m in chain.microbatches]))
    for chain in schedule.chains:
        losses.append(_share_last(schedule, transport, chain.stages[-1], [sent.get((chain.stages[-1], m)) for m in chain.microbatches]))
    return Table(received, sent, tuple(losses))


def _share_last(schedule: Schedule, transport: Transport, stage: int, signatures: list[Signature | None]) -> Signature:
    """The signature of the last stage's first output, on every rank."""
    owner, local = schedule.placement[stage], transport.local_ranks(schedule.ranks)
    if owner in local:
        for peer in range(schedule.ranks):
            if peer not in local:
                transport.tell(owner, peer, _write(signatures[:1]))
        return signatures[0]
    return _read(transport.hear(local[0], owner))[0]


def _write(signatures: Sequence[Signature]) -> str:
    """One signature per microbatch, each distinct one written once."""
    distinct = list(dict.fromkeys(signatures))
    index = {signature: n for n, signature in enumerate(distinct)}
    return json.dumps({"signatures": [s.to_json() for s in distinct], "microbatches": [index[s] for s in signatures]})


def _read(text: str) -> list[Signature]:
    table = json.loads(text)
    distinct = [Signature.from_json(s) for s in table["signatures"]]
    return [distinct[n] for n in table["microbatches"]]


def bind_table(schedule: Schedule, transport: Transport, homes: Mapping[int, Home], table: Table, serve: Serve) -> Bound:
    """Bind the programs of this process's stages.

    Raises:
        ValueError: a stage no longer returns what was agreed.
    """
    calls = {}
    for (stage, m), x in table.received.items():
        served = serve(stage, m, x)
        if served.y != table.sent[stage, m]:
            raise ValueError(
                f"stage {stage} returns {served.y} for microbatch {m}, the ranks agreed on {table.sent[stage, m]}; "
                f"what a stage returns may change only with the shapes of the batch"
            )
        before, after = schedule.predecessor(stage), schedule.successor(stage)
        source = Edge(BATCH if before is None else before, x.leaves)
        sinks = () if after is None else (Edge(after, served.y.leaves),)
        calls[stage, m] = StageCall(served.program, (source,), sinks, served.weighted, after is None, served.random)
    return bind(schedule, calls, transport, homes)
