"""Agree with the other ranks on the step that begins, its batch, and the signatures between stages.

A step begins with the same call and the same shapes of the batch on all ranks (:meth:`Agreement.begin`). For
shapes that are new, stages pass the signatures of their outputs from rank to rank while they are lowered, and
all ranks agree on the forms of losses and of shared parameters (:class:`Negotiation`); later steps compare
without messages (:class:`Replay`).
"""

from __future__ import annotations

import json
import platform
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Self

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.tree import tree_structure

from ..call.arguments import StepArguments, StepForm
from ..call.spec import Pipeline, StepSpec
from ..errors import AgreementError
from ..lowering.lowered import LoweredStep
from ..lowering.stage_programs import autocast, keep
from ..transport.protocols import ControlTransport, LossPart, Route
from .comparison import laid_out, require_same_layouts
from .ties import require_same_forms, require_same_values, shared_forms, sharing_ranks

Edges = dict[tuple[int, int], tuple[Signature, ...]]
"""Signatures of the microbatches, by source and destination of an edge."""

_MEND = "make a new step function, or trainer, for parameters or targets of other dtypes or shapes"
_LEAF = tree_structure(0)


class Agreement:
    """Caches the facts that the ranks have agreed on for one step function, until the next failure.

    They are cached by shapes of the batch and autocast.

    Args:
        pipeline: of the step function.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._schedule, self._spec, self._ranks = pipeline.schedule, pipeline.spec, pipeline.ranks
        self._transport = pipeline.transport
        self._number = self._transport.register_step()
        # The rank whose batch names the shapes.
        self._source = self._schedule.placement[self._schedule.chains[0].stages[0]]
        self._agreed: OrderedDict[tuple[object, ...], Agreed] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = -1  # of the transport, when the ranks last met; before they have, -1

    def begin(self, steps: Sequence[StepArguments], shapes: BatchShapes | None, purpose: str) -> Began:
        """Begin a step on all ranks, with the same call; meet them first if one has failed since.

        Args:
            steps: the arguments of every step of the call.
            shapes: of the batch; None if this process was given none.
            purpose: of the call, on which the ranks also have to agree.

        Raises:
            AgreementError: another rank makes another call, or has another batch.
        """
        mine = None if shapes is None else write_shapes(shapes, self._known(shapes) is not None)
        common, terms = self._terms(steps)
        shapes, known = read_shapes(self._transport.begin(terms, mine, self._source, f"{common}; {purpose}"))
        if mine is None and known != (self._known(shapes) is not None):
            has = "has not" if known else "has"
            raise AgreementError(
                f"the ranks disagree on the step that begins: rank {self._ranks[0]} {has} run it with these"
                f" shapes before, unlike rank {self._source}; every rank must call the same step function in"
                " the same order"
            )
        if self._transport.generation != self._generation:
            self._meet(steps[0])
        with self._lock:
            if (agreed := self._known(shapes)) is not None:
                self._agreed.move_to_end((shapes, autocast()))
        return Began(shapes, agreed)

    def negotiate(self, began: Began, form: StepForm) -> Negotiation | Replay:
        """Begin to agree on signatures and forms; without messages if the ranks have agreed on them before.

        Raises:
            AgreementError: another rank of a mesh that arguments lie over lays them out otherwise.
        """
        if not self._transport.compares_layouts:
            require_same_layouts(form)
        elif began.agreed is None:
            # On all ranks, which meet here before anything is traced; later, when they are ready.
            self._transport.require_same(str(laid_out(form)), "peers")
        if began.agreed is not None:
            return Replay(began.agreed)
        return Negotiation(self._schedule, self._transport, self._generation)

    def keep(self, shapes: BatchShapes, agreed: Agreed) -> Agreed:
        """Keep what the ranks have agreed on, unless another thread has kept it meanwhile."""
        with self._lock:
            key = shapes, autocast()
            agreed = self._agreed.get(key, agreed)
            keep(self._agreed, key, agreed)
        return agreed

    def _known(self, shapes: BatchShapes) -> Agreed | None:
        """Look up what the ranks agreed on since the last failure, which all of them have or none."""
        return (
            self._agreed.get((shapes, autocast())) if self._generation == self._transport.generation else None
        )

    def _terms(self, steps: Sequence[StepArguments]) -> tuple[str, str]:
        """Name the terms for all ranks, and those for the ranks of one batch; empty without peers."""
        if not self._transport.has_peers:
            return "", ""
        common = f"step function {self._number} ({self._spec.name}); autocast {autocast() or 'off'}"
        common = f"{common}; {steps[0].common}" if steps[0].common else common
        return common, _call_terms(self._schedule, steps)

    def _meet(self, arguments: StepArguments) -> None:
        """Compare with the peers what must be the same everywhere, and connect."""
        with self._lock:
            self._agreed.clear()
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        tied = ", ".join(f"{name}: {places}" for name, places in self._spec.tied)
        tied = f", tied {tied}" if tied else ""
        facts = f"{versions}, schedule {self._schedule.name[:60]} ({self._schedule.digest}){tied}"
        update = arguments.update
        common, held = update.facts() if update is not None else ("", "")
        self._transport.require_same("; ".join(filter(None, (facts, common))))
        forms = (f"params[{s}] {form}" for s, form in arguments.form.params.items())
        self._transport.require_same("; ".join(filter(None, (*forms, held))), "data")
        if update is not None:
            require_same_values(
                self._schedule, arguments.form.params, update.params(), self._spec.tied, self._transport
            )
        for ranks in sharing_ranks(self._schedule, self._spec.tied):
            if set(ranks) & set(self._ranks):
                self._transport.collective(ranks)  # to be had before the transport connects
        routes = routes_of(self._schedule, self._spec)
        self._transport.connect(routes, arguments.form.devices.values())
        self._generation = self._transport.generation


def routes_of(schedule: Schedule, spec: StepSpec) -> Iterator[Route]:
    """List where messages travel between ranks: along edges and back, and where chains begin."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])
    if "input_grads" in spec.wants:
        firsts = {home[chain.stages[0]] for chain in schedule.chains}
        yield from (Route("R", a, b) for a in firsts for b in firsts if a != b)


class Agreed(NamedTuple):
    """Hold the facts that the ranks agreed on for one form of the batch.

    Args:
        generation: number of failures of the transport before; a later failure makes this stale.
        edges: the signatures on edges to and from other processes.
        losses: the form of the losses of all ranks, by stage of the schedule.
        shared: the forms of parameters that other processes hold too.
    """

    generation: int
    edges: Edges
    losses: dict[int, LossPart]
    shared: Mapping[str, str]


class Negotiation:
    """Passes signatures from process to process, for a form of the batch on which the ranks have not agreed.

    Args:
        schedule: says which rank has which stage.
        control: carries the texts.
        generation: failures before.
    """

    def __init__(self, schedule: Schedule, control: ControlTransport, generation: int) -> None:
        self._schedule, self._control, self._generation = schedule, control, generation
        self._agreed: Edges = {}
        self._early: Edges = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self._agreed[edge] = tuple(signatures)
        index = {signature: n for n, signature in enumerate(dict.fromkeys(signatures))}  # each written once
        table = {
            "edge": edge,
            "signatures": [s.to_json() for s in index],
            "microbatches": [index[s] for s in signatures],
        }
        self._control.send_text(self._schedule.placement[edge[1]], json.dumps(table))

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        while edge not in self._early:  # a rank sends its edges in the order of its own stages
            table = json.loads(self._control.recv_text(self._schedule.placement[edge[0]]))
            distinct = [Signature.from_json(s) for s in table["signatures"]]
            source, destination = table["edge"]
            self._early[source, destination] = tuple(distinct[n] for n in table["microbatches"])
        self._agreed[edge] = self._early.pop(edge)
        return self._agreed[edge]

    def conclude(self, lowered: LoweredStep) -> Agreed:
        """Agree on the forms of the losses and of shared parameters.

        Raises:
            AgreementError: ranks hold one parameter in different forms.
        """
        losses = {
            stage: [part.rank, Signature(_LEAF, (part.leaf,)).to_json()]
            for stage, part in lowered.losses.items()
        }
        shared = _shared_forms(lowered)
        by_rank = [json.loads(text) for text in self._control.all_gather(json.dumps([losses, shared]))]
        every = {
            int(stage): LossPart(rank, _leaf(form))
            for theirs, _ in by_rank
            for stage, (rank, form) in theirs.items()
        }
        if not every and "loss" in lowered.spec.wants:
            raise ValueError("no stage has returned a loss")
        require_same_forms([forms for _, forms in by_rank])
        return Agreed(self._generation, self._agreed, dict(sorted(every.items())), shared)


def _leaf(text: str) -> LeafSignature:
    return Signature.from_json(text).leaves[0]


def _shared_forms(lowered: LoweredStep) -> dict[str, str]:
    frozen = {low.model_stage: low.function.frozen for low in lowered.stages.values()}
    return shared_forms(lowered.schedule, lowered.form.params, lowered.spec.tied, frozen)


class Replay:
    """Returns the facts agreed on before, and raises if this process would now send other signatures."""

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._now: dict[tuple[int, int], Sequence[Signature]] = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self._now[edge] = tuple(signatures)

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        return self._agreed.edges[edge]

    def conclude(self, lowered: LoweredStep) -> Agreed:
        """Compare what this process would send with what was agreed on."""
        for edge, signatures in self._now.items():
            if signatures == self._agreed.edges[edge]:
                continue
            got, known = (
                " and ".join(map(str, dict.fromkeys(s))) for s in (signatures, self._agreed.edges[edge])
            )
            raise ValueError(
                f"stage {edge[0]} now gives {got} to stage {edge[1]}, the ranks agreed on {known}; what a"
                f" stage gives may change only with the shapes of the batch: {_MEND}"
            )
        schedule, agreed, rank = lowered.schedule, self._agreed, lowered.ranks[0]
        now, before = (
            {s: part.leaf for s, part in losses.items() if part.rank in lowered.ranks}
            for losses in (lowered.losses, agreed.losses)
        )
        if now != before:
            stage = min(s for s in now.keys() | before.keys() if now.get(s) != before.get(s))
            raise ValueError(
                f"stage {schedule.model_stages[stage]} now gives the losses {now.get(stage, 'none')} (one for"
                f" each microbatch), the ranks agreed on {before.get(stage, 'none')}; {_MEND}"
            )
        for name, form in _shared_forms(lowered).items():
            if form != agreed.shared[name]:
                raise AgreementError(
                    f"{name} differ between the processes that hold them: rank {rank} now has {form}, all had"
                    f" {agreed.shared[name]}; {_MEND}, on every rank"
                )
        return agreed


class Began(NamedTuple):
    """Describe a step that has begun on all ranks.

    Args:
        shapes: of its batch.
        agreed: the facts agreed on for these shapes before; None on all ranks if there are none.
    """

    shapes: BatchShapes
    agreed: Agreed | None


class BatchShapes(NamedTuple):
    """Describe the shapes of a batch to ranks that are not given it; equal for batches of one form.

    Args:
        microbatches: their number.
        shapes: of those that differ, as text; may be cut short.
        digest: of the signatures of all.
        rows: of a microbatch of a whole batch; None if the inputs came as Microbatches.
    """

    microbatches: int
    shapes: str
    digest: str
    rows: int | None

    def __str__(self) -> str:
        whole = "as Microbatches" if self.rows is None else f"with {self.rows} rows each"
        return (
            f"{self.microbatches} microbatches of {self.shapes.replace(';', ',')} ({self.digest[:8]}) {whole}"
        )

    @classmethod
    def of(cls, form: StepForm) -> Self:
        """Describe a batch that this process was given."""
        inputs = form.inputs or ()
        index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
        shown = ", ".join(map(str, index))
        text = "\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)])
        return cls(len(inputs), shown if len(shown) <= 60 else f"{shown[:57]}...", _digest(text), form.rows)


@lru_cache(maxsize=64)
def write_shapes(shapes: BatchShapes, run_before: bool) -> str:
    """Write the shapes of a batch, and whether the ranks have agreed on them before.

    The text is a line for people, then JSON for :func:`read_shapes`.
    """
    known = "run before" if run_before else "not run before"
    return f"{shapes}, {known}\n{json.dumps({**shapes._asdict(), 'run_before': run_before})}"


@lru_cache(maxsize=64)
def read_shapes(text: str) -> tuple[BatchShapes, bool]:
    """Read what :func:`write_shapes` wrote.

    >>> shapes = BatchShapes(4, "float32[2,3]", "0123", rows=2)
    >>> read_shapes(write_shapes(shapes, True)) == (shapes, True)
    True
    """
    fields = json.loads(text.partition("\n")[2])
    run_before = fields.pop("run_before")
    return BatchShapes(**fields), run_before


def _call_terms(schedule: Schedule, steps: Sequence[StepArguments]) -> str:
    """Name the schedule, the weights of the microbatches of all steps, and the seed."""
    weights = "1/m each"
    if explicit := [step.loss_weights for step in steps if step.loss_weights is not None]:
        every = torch.cat(explicit).tolist()
        weights = f"{reprlib.repr(every)} ({_digest(repr(every))})"
        # A rank with the weights on its device leaves out none.
        if left_out := sum(len(step.left_out) for step in steps):
            weights += f", {left_out} left out"
    # Without what separates terms, or cannot be sent.
    name = schedule.name[:60].replace(";", ",").encode(errors="backslashreplace").decode()
    return (
        f"schedule {name} of {schedule.microbatches} microbatches ({schedule.digest[:8]}); loss weights"
        f" {weights}; seed {steps[0].seed}"
    )


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
