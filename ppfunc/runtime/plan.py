"""From stages and signatures to a bound program: what has to be worked out once per shape of the batch.

Stages are visited in the order of the data. Each rank evaluates its stages abstractly, for
every distinct input signature once, and tells the ranks of the stages that follow, as JSON, what
will come; so both ends of an edge have the same table before data moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import FlatProgram, LeafSignature, Signature
from ppfunc.stage.output import received_signature

from .arguments import Arguments
from .calls import BATCH, Edge, Home, StageCall
from .copies import Description, copied, described, require_alike
from .gradients import Gradients
from .interpreter import Bound, bind
from .memory import Key
from .thunks import Overlapped
from .transport import Transport


class Served(NamedTuple):
    """A stage served for one input signature.

    Args:
        program: functions over flat tuples; its output has the leaves of what goes to the sinks, of
            the loss, of the outputs for the caller, of the metrics and of the state.
        sinks: signature of what goes to each of ``sinks_of(schedule, stage)``.
        loss: the loss, None where the stage has none.
        outputs, metrics, state: signatures of what is not differentiated.
        random: whether the forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    sinks: tuple[Signature, ...]
    loss: Signature | None
    outputs: Signature
    metrics: Signature
    state: Signature
    random: bool | None


class Table(NamedTuple):
    """What the ranks agreed on for one shape of the batch.

    Args:
        received: for every (stage, microbatch) of this process, the signature of each part of its input, as in :func:`sources_of`.
        served: those stages, served.
        losses: the loss of every stage that has one, on all ranks; ascending by stage.
        copied: signature of the parameters of those stages of this process that have copies.
    """

    received: Mapping[Key, tuple[Signature, ...]]
    served: Mapping[Key, Served]
    losses: Mapping[int, LeafSignature]
    copied: Mapping[int, Signature]


Serve = Callable[[int, int, Signature], Served]


def sources_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Where the input of a stage comes from: the stage before it or the batch, then skip connections, ascending."""
    before = schedule.predecessor(stage)
    skips = sorted(a for a, b in schedule.skips if b == stage)
    return (BATCH if before is None else before, *skips)


def sinks_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Where the output of a stage goes: the stage after it, if any, then skip connections, ascending."""
    after = schedule.successor(stage)
    skips = sorted(b for a, b in schedule.skips if a == stage)
    return (*(() if after is None else (after,)), *skips)


def negotiate(schedule: Schedule, transport: Transport, serve: Serve, arguments: Arguments) -> Table:
    """Walk the stages in the order of the data and agree on every edge.

    Args:
        schedule: the schedule.
        transport: carries the JSON.
        serve: ``(stage, microbatch, signature of x) -> Served``, for the stages of this process.
        arguments: of this call.

    Raises:
        AgreementError: the copies of a stage have other parameters.
    """
    local = set(transport.local_ranks(schedule.ranks))
    home = schedule.placement
    edges: dict[tuple[int, int], list[Signature]] = {}
    received: dict[Key, tuple[Signature, ...]] = {}
    served: dict[Key, Served] = {}
    for stage, microbatches in _in_order(schedule):
        if home[stage] not in local:
            continue
        sources = sources_of(schedule, stage)
        for source in sources:
            if source == BATCH:
                edges[source, stage] = [arguments.inputs.signatures[m] for m in microbatches]
            elif home[source] not in local:
                while (source, stage) not in edges:  # a rank tells of its edges in the order in which its own stages come
                    edge, signatures = _read(transport.hear(home[stage], home[source]))
                    edges[edge] = signatures
        columns = [edges.pop((source, stage)) for source in sources]
        for m, *parts in zip(microbatches, *columns, strict=True):
            received[stage, m] = tuple(parts)
            served[stage, m] = serve(stage, m, received_signature(sources, parts))
        for n, sink in enumerate(sinks_of(schedule, stage)):
            found = [served[stage, m].sinks[n] for m in microbatches]
            if home[sink] in local:
                edges[stage, sink] = found
            else:
                transport.tell(home[stage], home[sink], _write((stage, sink), found))
    losses, copies = _share(transport, served, described(schedule, local, arguments))
    require_alike(schedule, copies)
    return Table(received, served, losses, copied(schedule, arguments.signatures))


def _in_order(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """Every stage after all that it gets data from; the same on every rank."""
    for chain in schedule.chains:
        for stage in chain.stages:
            yield stage, chain.microbatches


def _share(
    transport: Transport, served: Mapping[Key, Served], copies: Mapping[int, Description]
) -> tuple[dict[int, LeafSignature], dict[int, Description]]:
    """The losses of all stages, and the parameters of those that have copies, on every rank."""
    mine: dict[int, str] = {}
    for (stage, m), it in served.items():
        if it.loss is not None and mine.setdefault(stage, it.loss.to_json()) != it.loss.to_json():
            raise ValueError(
                f"stage {stage} gives the loss {it.loss} for microbatch {m}, {Signature.from_json(mine[stage])} for those before; "
                f"expected one dtype and shape: cast the loss"
            )
    losses: dict[int, LeafSignature] = {}
    described: dict[int, Description] = {}
    for text in transport.share(json.dumps([mine, copies])):
        theirs = json.loads(text)
        losses.update((int(stage), Signature.from_json(loss).leaves[0]) for stage, loss in theirs[0].items())
        described.update((int(stage), tuple(what)) for stage, what in theirs[1].items())
    return dict(sorted(losses.items())), described


def _write(edge: tuple[int, int], signatures: Sequence[Signature]) -> str:
    """One signature per microbatch of an edge, each distinct one written once."""
    distinct = list(dict.fromkeys(signatures))
    index = {signature: n for n, signature in enumerate(distinct)}
    return json.dumps({"edge": edge, "signatures": [s.to_json() for s in distinct], "microbatches": [index[s] for s in signatures]})


def _read(text: str) -> tuple[tuple[int, int], list[Signature]]:
    table = json.loads(text)
    distinct = [Signature.from_json(s) for s in table["signatures"]]
    source, sink = table["edge"]
    return (source, sink), [distinct[n] for n in table["microbatches"]]


def renew(schedule: Schedule, table: Table, serve: Serve, params: Mapping[int, Signature]) -> Table:
    """The same table for other parameters, targets or side inputs of this process.

    Raises:
        ValueError: a stage no longer gives the others what was agreed, or no longer has the parameters of its copies.
    """
    for stage, now in copied(schedule, params).items():
        if now != table.copied[stage]:
            raise ValueError(
                f"the parameters of stage {stage}, which has copies, are {now}, the ranks agreed on {table.copied[stage]}; "
                f"make a new step for parameters of other dtypes or shapes"
            )
    served = {}
    for (stage, m), parts in table.received.items():
        now = serve(stage, m, received_signature(sources_of(schedule, stage), parts))
        before = table.served[stage, m]
        if (now.sinks, now.loss) != (before.sinks, before.loss):
            raise ValueError(
                f"stage {stage} gives {_told(now)} for microbatch {m}, the ranks agreed on {_told(before)}; what a stage "
                f"gives may change only with the shapes of the batch: make a new step for parameters of other dtypes or shapes"
            )
        served[stage, m] = now
    return table._replace(served=served)


def _told(served: Served) -> str:
    """What a stage gives to others."""
    return ", ".join([*map(str, served.sinks), *([] if served.loss is None else [f"the loss {served.loss}"])]) or "nothing"


def bind_table(
    schedule: Schedule,
    transport: Transport,
    homes: Mapping[int, Home],
    table: Table,
    gradients: Callable[[], Gradients],
    together: Overlapped | None = None,
) -> Bound:
    """Bind the programs of this process's stages."""
    calls = {key: _call(schedule, key[0], table.received[key], served) for key, served in table.served.items()}
    return bind(schedule, calls, transport, homes, gradients, together)


def _call(schedule: Schedule, stage: int, parts: tuple[Signature, ...], served: Served) -> StageCall:
    """The call of a stage: its edges and what it keeps."""
    sources = tuple(Edge(n, s.leaves) for n, s in zip(sources_of(schedule, stage), parts, strict=True))
    sinks = tuple(Edge(n, s.leaves) for n, s in zip(sinks_of(schedule, stage), served.sinks, strict=True))
    kept = (served.loss is not None) + len(served.outputs.leaves) + len(served.metrics.leaves)
    weighted = served.loss is not None and served.loss.leaves[0].grad and not schedule.forward_only
    return StageCall(served.program, sources, sinks, weighted, kept, len(served.state.leaves), served.random)
