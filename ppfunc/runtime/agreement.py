"""Agree with the other ranks on a step: on the call that begins, and on the forms of what crosses between processes."""

from __future__ import annotations

import json
import platform
import re
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.tree import tree_structure

from .arguments import StepArguments
from .cache import keep
from .errors import AgreementError
from .form import StepForm
from .layouts import laid_out, require_same_layouts
from .lowered import LoweredStep
from .spec import StepSpec
from .stage_programs import autocast
from .ties import require_same_forms, routes_of_shared, shared_forms
from .transport import ControlTransport, LossPart, Route, Transport

Edges = dict[tuple[int, int], tuple[Signature, ...]]  # by (source, destination), the signature of every microbatch

_KNOWN = "; run before: "
_MEND = "make a new step function for parameters of other dtypes or shapes"
_LEAF = tree_structure(0)


class Agreed(NamedTuple):
    """Facts that the ranks agreed on for one form of the batch.

    Args:
        edges: the signatures on edges to and from other processes.
        parts: the form of the losses of all ranks.
        shared: the forms of parameters that other processes hold too.
    """

    edges: Edges
    parts: dict[int, LossPart]
    shared: Mapping[str, str]


class Began(NamedTuple):
    """A step that has begun on all ranks: the name of its batch, and whether they have agreed on it before."""

    name: str
    known: bool


class Agreement:
    """Keeps what the ranks have agreed on for one step function, until the next failure.

    Args:
        schedule, spec, transport: of the step function.
        ranks: those of this process.
    """

    def __init__(self, schedule: Schedule, spec: StepSpec, transport: Transport, ranks: tuple[int, ...]) -> None:
        self._schedule, self._spec, self._transport, self._ranks = schedule, spec, transport, ranks
        self._number = transport.register_step()
        self._agreed: OrderedDict[tuple[object, ...], Agreed] = OrderedDict()  # the same forms on all ranks
        self._lock = threading.Lock()
        self.generation: int | None = None
        self.source = schedule.placement[schedule.chains[0].stages[0]]  # the rank whose batch names the shapes

    def begin(self, passes: Sequence[StepArguments], name: str | None, purpose: str) -> Began:
        """Begin a step on all ranks, with the same call; meet them first where there was a failure since.

        Args:
            passes: the arguments of every pass of the schedule.
            name: of the batch; None where this process was given none.
            purpose: of the call: what the ranks have to agree on, too.

        Raises:
            AgreementError: another rank makes another call, or has another batch.
        """
        mine = None if name is None else f"{name}{_KNOWN}{self._has_run(name)}"
        common, own = self._terms(passes)
        name, _, known = self._transport.begin(own, mine, self.source, f"{common}; {purpose}").rpartition(_KNOWN)
        if mine is None and known != self._has_run(name):
            raise AgreementError(
                "the ranks disagree on the step that begins: whether it has run with these shapes before, rank "
                f"{self.source} says {known}, rank {self._ranks[0]} does not; every rank must call the same step function in the same order"
            )
        if self._transport.generation != self.generation:
            self._meet(passes[0])
        with self._lock:
            if (name, autocast()) in self._agreed:
                self._agreed.move_to_end((name, autocast()))
        return Began(name, known == "yes")

    def exchange(self, name: str, form: StepForm) -> Negotiation | Replay:
        """How the signatures on edges get to other processes, for a batch of this name.

        Raises:
            AgreementError: another rank of a mesh that arguments lie over lays them out otherwise.
        """
        agreed = self._agreed.get((name, autocast()))
        if not self._transport.compares_layouts:
            require_same_layouts(form)
        elif agreed is None:  # on all ranks, which meet here before anything is traced; later, when they are ready
            self._transport.require_same(str(laid_out(form)), "peers")
        return Negotiation(self._schedule, self._transport) if agreed is None else Replay(agreed)

    def conclude(self, name: str, lowered: LoweredStep, exchange: Negotiation | Replay) -> Agreed:
        """Agree on the forms of the losses and of shared parameters, or compare them with those agreed before."""
        if isinstance(exchange, Replay):
            self._compare(lowered, exchange.agreed)
            return exchange.agreed
        agreed = self._tell(lowered, exchange.agreed)
        with self._lock:
            keep(self._agreed, (name, autocast()), agreed)
        return agreed

    def _terms(self, passes: Sequence[StepArguments]) -> tuple[str, str]:
        """Terms that all ranks have to agree on, and those that run the same batch; nobody compares them without peers."""
        if not self._transport.has_peers:
            return "", ""
        common = f"step function {self._number} ({self._spec.name}); autocast {autocast() or 'off'}"
        return f"{common}; {passes[0].common}" if passes[0].common else common, call_terms(self._schedule, passes)

    def _has_run(self, name: str) -> str:
        """Whether the ranks have agreed on this form of the batch before, which all of them have or none."""
        return "yes" if self.generation == self._transport.generation and (name, autocast()) in self._agreed else "no"

    def _meet(self, arguments: StepArguments) -> None:
        """Compare with the peers what must be the same everywhere, and connect."""
        with self._lock:
            self._agreed.clear()
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        tied = f", tied {', '.join(f'{name}: {places}' for name, places in self._spec.tied)}" if self._spec.tied else ""
        facts = f"{versions}, schedule {self._schedule.name[:60]} ({self._schedule.digest}){tied}"
        common, held = self._spec.update.facts(arguments.update_state) if self._spec.update else ("", "")
        self._transport.require_same("; ".join(filter(None, (facts, common))))
        forms = (f"params[{s}] {form}" for s, form in arguments.form.params.items())
        self._transport.require_same("; ".join(filter(None, (*forms, held))), "data")
        self._transport.connect(routes_of(self._schedule, self._spec))
        self.generation = self._transport.generation

    def _tell(self, lowered: LoweredStep, edges: Edges) -> Agreed:
        losses = {stage: [part.rank, Signature(_LEAF, (part.leaf,)).to_json()] for stage, part in lowered.losses.items()}
        shared = shared_forms(self._schedule, lowered.form.params, self._spec.tied)
        told = [json.loads(text) for text in self._transport.all_gather(json.dumps([losses, shared]))]
        parts = {int(stage): LossPart(rank, _leaf(form)) for theirs, _ in told for stage, (rank, form) in theirs.items()}
        if not parts and "loss" in self._spec.wants:
            raise ValueError("no stage has returned a loss")
        require_same_forms([forms for _, forms in told])
        return Agreed(edges, dict(sorted(parts.items())), shared)

    def _compare(self, lowered: LoweredStep, agreed: Agreed) -> None:
        """Raise where losses or parameters of this process have another form than the ranks agreed on."""
        now, before = ({s: part.leaf for s, part in found.items() if part.rank in self._ranks} for found in (lowered.losses, agreed.parts))
        if now != before:
            stage = min(s for s in now.keys() | before.keys() if now.get(s) != before.get(s))
            raise ValueError(
                f"stage {self._schedule.model_stages[stage]} now gives the losses {now.get(stage, 'none')} (one for each microbatch), "
                f"the ranks agreed on {before.get(stage, 'none')}; {_MEND}"
            )
        for name, form in shared_forms(self._schedule, lowered.form.params, self._spec.tied).items():
            if form != agreed.shared[name]:
                raise AgreementError(
                    f"{name} differ between the processes that hold them: rank {self._ranks[0]} now has {form}, "
                    f"all had {agreed.shared[name]}; {_MEND}, on every rank"
                )


def _leaf(text: str) -> LeafSignature:
    return Signature.from_json(text).leaves[0]


def routes_of(schedule: Schedule, spec: StepSpec) -> Iterator[Route]:
    """Where messages travel between ranks: along edges and back, and between the places of a parameter."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])
    yield from routes_of_shared(schedule, spec.tied)


# -- signatures on edges -------------------------------------------------------------------------------------------


class Negotiation:
    """Passes signatures from process to process, and remembers them.

    Args:
        schedule: says which rank has which stage.
        control: carries the texts.
    """

    def __init__(self, schedule: Schedule, control: ControlTransport) -> None:
        self._schedule, self._control = schedule, control
        self.agreed: Edges = {}
        self._early: Edges = {}

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        self.agreed[edge] = tuple(signatures)
        index = {signature: n for n, signature in enumerate(dict.fromkeys(signatures))}  # each distinct one is written once
        table = {"edge": edge, "signatures": [s.to_json() for s in index], "microbatches": [index[s] for s in signatures]}
        self._control.send_text(self._schedule.placement[edge[1]], json.dumps(table))

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        while edge not in self._early:  # a rank tells of its edges in the order in which its own stages come
            table = json.loads(self._control.recv_text(self._schedule.placement[edge[0]]))
            distinct = [Signature.from_json(s) for s in table["signatures"]]
            source, destination = table["edge"]
            self._early[source, destination] = tuple(distinct[n] for n in table["microbatches"])
        self.agreed[edge] = self._early.pop(edge)
        return self.agreed[edge]


class Replay:
    """Gives the signatures that were agreed before; raises where this process would now tell others."""

    def __init__(self, agreed: Agreed) -> None:
        self.agreed = agreed

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        if tuple(signatures) != self.agreed.edges[edge]:
            now, before = (" and ".join(map(str, dict.fromkeys(s))) for s in (signatures, self.agreed.edges[edge]))
            raise ValueError(
                f"stage {edge[0]} now gives {now} to stage {edge[1]}, the ranks agreed on {before}; what a stage gives may change "
                f"only with the shapes of the batch: {_MEND}"
            )

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        return self.agreed.edges[edge]


def call_terms(schedule: Schedule, passes: Sequence[StepArguments]) -> str:
    """The schedule, the weights of the microbatches of all passes, and the seed."""
    weights = "1/m each"
    if given := [part.loss_weights for part in passes if part.loss_weights is not None]:
        every = torch.cat(given).tolist()
        weights = f"{reprlib.repr(every)} ({_digest(repr(every))})"
    named = f"{_plain(schedule.name[:60])} of {schedule.microbatches} microbatches ({schedule.digest[:8]})"
    return f"schedule {named}; loss weights {weights}; seed {passes[0].seed}"


def batch_name(form: StepForm) -> str:
    """The form of a batch, with the rows of a microbatch where it was given whole."""
    inputs = form.inputs or ()
    index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
    text = "\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)])
    shown = _plain(", ".join(map(str, index)))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    given = "as Microbatches" if form.rows is None else f"with {form.rows} rows each"
    return f"{len(inputs)} microbatches of {shown} ({_digest(text)}) {given}"


def rows_of(name: str) -> int | None:
    """The rows of a microbatch, of the name of a batch.

    >>> rows_of("4 microbatches of float32[2,3] (0123) with 2 rows each"), rows_of("4 microbatches of ... as Microbatches")
    (2, None)
    """
    found = re.search(r" with (\d+) rows each$", name)
    return int(found[1]) if found else None


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _plain(text: str) -> str:
    """A text without what separates terms, and without characters that cannot be sent."""
    return text.replace(";", ",").encode(errors="backslashreplace").decode()
