"""Agree with all ranks on the step that begins, its batch, and the signatures between stages.

A step begins with the same call and the same shapes of the batch on all ranks (:meth:`Agreement.begin`). For
shapes that are new, stages pass the signatures of their outputs from rank to rank while they are lowered, and
all ranks agree on the forms of losses and of shared parameters (:class:`Exchange`). Later steps compare
without messages.
"""

from __future__ import annotations

import json
import platform
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage.device import autocast
from ppfunc.stage.signature import Signature, leaf_names
from ppfunc.stage.tree import tree_structure

from ..ports.protocols import LossPart
from ..values.arguments import BatchShapes, StepArguments, StepForm, digest, read_shapes, write_shapes
from ..values.buffers import ParameterUpdate
from ..values.errors import AgreementError
from .comparison import (
    NEW_FORMS,
    require_as_agreed,
    require_same_batch,
    require_same_layouts,
    require_same_programs,
    require_whole_parameters,
)
from .lower import EdgeKey, LoweredStep, Pipeline, routes_of
from .stage_programs import keep
from .ties import require_same_forms, require_same_values, shared_forms, sharing_ranks

Edges = dict[EdgeKey, tuple[Signature, ...]]
"""Signatures of microbatches that are lowered together, by the edge and the first of them."""

LOWERED = "lowered, not run"  # the purpose of a call that needs no values of its batch

_LEAF = tree_structure(0)


class Agreement:
    """Caches the facts that the ranks have agreed on for one step function, until the next failure.

    They are cached by shapes of the batch and autocast.

    Args:
        pipeline: pipeline of the step function.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._schedule, self._spec, self._ranks = pipeline.schedule, pipeline.spec, pipeline.ranks
        self.transport, self.homes = pipeline.transport, pipeline.schedule.placement
        self._number, self.compares_programs = pipeline.number, pipeline.programs.compared
        cuts = {getattr(unwrap(stage), "cut", "") if stage else "" for stage in pipeline.stages}
        self._cut = cuts.pop() if len(cuts) == 1 else ""  # of a model that was split; by hand there is none
        # The rank whose batch names the shapes.
        self._source = self._schedule.placement[self._schedule.flows[0].stages[0]]
        self._agreed: OrderedDict[tuple[object, ...], Agreed] = OrderedDict()
        self._lock = threading.Lock()
        self.generation = -1  # of the transport, when the ranks last met; before they have, -1
        self._read = -1  # likewise when they last compared the values of a batch

    def begin(self, steps: Sequence[StepArguments], shapes: BatchShapes | None, purpose: str) -> Exchange:
        """Begin a step on all ranks, and compare its call; after a failure also options and values.

        Args:
            steps: the arguments of every step of the call.
            shapes: shapes of the batch; None if this process was not given the batch.
            purpose: purpose of the call, on which the ranks also have to agree.

        Raises:
            AgreementError: another rank makes another call, or has another batch.
        """
        mine = None if shapes is None else write_shapes(shapes, self._known(shapes) is not None)
        common, terms = self._terms(steps)
        shapes, known = read_shapes(self.transport.begin(terms, mine, self._source, f"{common}; {purpose}"))
        if mine is None and known != (self._known(shapes) is not None):
            has = "has not" if known else "has"
            raise AgreementError(
                f"the ranks disagree on the step that begins: rank {self._ranks[0]} {has} run it with these"
                f" shapes before, unlike rank {self._source}; every rank must call the same step function in"
                " the same order"
            )
        update, generation = steps[0].update, self.transport.generation
        met, due = generation != self.generation, update is not None and not update.known
        if met:
            self._meet(steps[0])
        elif due:
            self._require_same_options(steps[0])
            self._require_alike(steps[0])
        if (due or self._read != generation) and self.transport.has_peers and purpose != LOWERED:
            axes, mesh = self.transport.axes, self.transport.mesh
            part = "".join(f" ({a} {mesh.get_local_rank(a)})" for a in axes.model_axes if mesh is not None)
            gather = partial(self.transport.gather, axes=(axes.pipe, *axes.model_axes))
            require_same_batch(steps, part, gather)
            self._read = generation
        with self._lock:
            if (agreed := self._known(shapes)) is not None:
                self._agreed.move_to_end((shapes, autocast()))
        return Exchange(self, shapes, agreed, met)

    def keep(self, agreed: Agreed) -> Agreed:
        """Keep the facts that the ranks agreed on. Return them, or those of a thread that was first."""
        with self._lock:
            key = agreed.shapes, autocast()
            agreed = self._agreed.get(key, agreed)
            keep(self._agreed, key, agreed)
        return agreed

    def _known(self, shapes: BatchShapes) -> Agreed | None:
        """Look up the facts that the ranks agreed on since the last failure: all ranks have them, or none."""
        return (
            self._agreed.get((shapes, autocast())) if self.generation == self.transport.generation else None
        )

    def _terms(self, steps: Sequence[StepArguments]) -> tuple[str, str]:
        """Name the terms for all ranks, and the terms for the ranks of this batch; empty without peers."""
        if not self.transport.has_peers:
            return "", ""
        own = f"step function {self._number} ({self._spec.terms})", self._spec.options
        common = (*own, f"autocast {autocast() or 'off'}", steps[0].common)
        return "; ".join(filter(None, common)), _call_terms(self._schedule, steps)

    def _require_same_options(self, arguments: StepArguments) -> None:
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        tied = ", ".join(f"{name}: {places}" for name, places in self._spec.tied)
        tied = f", tied {tied}" if tied else ""
        cut = self._cut and f", {self._cut}"
        facts = f"{versions}, schedule {self._schedule.name[:60]} ({self._schedule.digest}){cut}{tied}"
        update = arguments.update
        common, by_axes = update.facts() if update is not None else ("", {})
        forms = "; ".join(f"params[{s}] {form}" for s, form in arguments.form.params.items())
        self.transport.require_same("; ".join(filter(None, (facts, common))))
        self.transport.require_same(forms, self.transport.axes.data_axes)
        for axes, text in by_axes.items():
            self.transport.require_same(text, axes)

    def _meet(self, arguments: StepArguments) -> None:
        """Compare options, forms and shared values, which must be the same on all ranks, and connect."""
        with self._lock:
            self._agreed.clear()
        if self.transport.has_peers:
            self._require_same_options(arguments)
        update = arguments.update
        leaves = [t for tree in arguments.params.values() for t in tree]
        lowered = update is not None and any(t.is_meta for t in leaves)
        if not lowered:  # else there are no values to compare
            self._require_alike(arguments)
        shares = self._spec.shares(self._schedule)
        for ranks in sharing_ranks(self._schedule, self._spec.tied) if shares else ():
            if set(ranks) & set(self._ranks):
                self.transport.collective(ranks)  # to be had before the transport connects
        self.transport.connect(routes_of(self._schedule), arguments.form.devices.values())
        self.generation = -1 if lowered else self.transport.generation

    def _require_alike(self, arguments: StepArguments) -> None:
        """Compare the places of parameters that several stages hold, where steps update them."""
        if (update := arguments.update) is not None and self._spec.shares(self._schedule):
            require_same_values(
                self._schedule, self._ranks, arguments.form.params, update.alike(), self._spec.tied,
                self.transport,
            )  # fmt: skip


class Agreed(NamedTuple):
    """Hold the facts that the ranks agreed on for one form of the batch.

    Args:
        shapes: shapes of the batch.
        generation: number of failures of the transport before; a later failure makes this stale.
        received: the signatures on edges from other processes.
        returned: the signatures that stages of this process return, see :class:`Exchange`.
        losses: the form of the losses of all ranks, by stage of the schedule.
        shared: the forms of parameters that other processes hold too.
    """

    shapes: BatchShapes
    generation: int
    received: Edges
    returned: Mapping[tuple[int, int | None, int], tuple[object, ...]]
    losses: dict[int, LossPart]
    shared: Mapping[str, str]


class Exchange:
    """Passes signatures between processes while a step is lowered that has begun on all ranks.

    Facts agreed on before for these shapes are used without messages. A process that would now send another
    signature raises.

    Args:
        agreement: agreement of the step function.
        shapes: shapes of the batch.
        agreed: the facts agreed on for these shapes before; None on all ranks if there are none.
        met: whether all ranks have met in this step, those of other batches too.
    """

    def __init__(self, agreement: Agreement, shapes: BatchShapes, agreed: Agreed | None, met: bool) -> None:
        self.shapes, self.agreed, self._agreement, self._met = shapes, agreed, agreement, met
        self._received: Edges = {}
        self._early: Edges = {}
        # By stage, the stage that receives, and microbatch: signatures; None receives the losses.
        self._returned: dict[tuple[int, int | None, int], tuple[object, ...]] = {}

    def require_same_layouts(self, form: StepForm) -> None:
        """Compare how arguments of a new form lie over meshes, before anything is traced.

        Raises:
            AgreementError: another rank of a mesh lays them out otherwise.
            ValueError: this rank holds a part of a parameter that lies over data ranks.
        """
        transport = self._agreement.transport
        if form.distributed:
            require_whole_parameters(form)
            if not transport.compares_layouts:
                require_same_layouts(form)
        if transport.compares_layouts and self.agreed is None:
            # On all ranks, which meet here; later, when they are ready.
            transport.require_same(str(form.laid_out()), transport.axes.model_axes)

    def send(self, edge: EdgeKey, signatures: Sequence[Signature]) -> None:
        self._returned[edge] = tuple(signatures)
        if self.agreed is not None:
            return
        index = {signature: n for n, signature in enumerate(dict.fromkeys(signatures))}  # each written once
        table = {
            "edge": edge,
            "signatures": [s.to_json() for s in index],
            "microbatches": [index[s] for s in signatures],
        }
        self._agreement.transport.send_text(self._agreement.homes[edge[1]], json.dumps(table))

    def recv(self, edge: EdgeKey) -> Sequence[Signature]:
        if self.agreed is not None:
            return self.agreed.received[edge]
        while edge not in self._early:  # a rank sends its edges in the order of its own stages
            table = json.loads(self._agreement.transport.recv_text(self._agreement.homes[edge[0]]))
            distinct = [Signature.from_json(s) for s in table["signatures"]]
            source, destination, first = table["edge"]
            self._early[source, destination, first] = tuple(distinct[n] for n in table["microbatches"])
        self._received[edge] = self._early.pop(edge)
        return self._received[edge]

    def conclude(self, lowered: LoweredStep, update: ParameterUpdate | None) -> Agreed:
        """Agree on the forms of the losses and of shared parameters, and on the programs of stages.

        Raises:
            AgreementError: ranks hold one parameter in different forms, or run different programs of a stage.
            ValueError: a stage returns other forms than the ranks agreed on before, or none returns a loss; a
                pattern of the update takes no leaf of any rank.
        """
        self._returned |= {(stage, None, 0): (part.leaf,) for stage, part in lowered.losses.items()}
        frozen = {low.model_stage: low.call.function.frozen for low in lowered.stages.values()}
        shared, shares = dict[str, str](), lowered.spec.shares(lowered.schedule)
        if shares:
            shared = shared_forms(lowered.schedule, lowered.form.params, lowered.spec.tied, frozen)
        if self.agreed is not None:
            require_as_agreed(self._returned, self.agreed.returned, lowered.schedule.model_stages)
            if shares:
                require_same_forms({lowered.ranks[0]: shared}, self.agreed.shared, NEW_FORMS)
            return self.agreed
        transport = self._agreement.transport
        loss_forms = {
            s: [p.rank, Signature(_LEAF, (p.leaf,)).to_json(), p.each] for s, p in lowered.losses.items()
        }
        patterns = {} if update is None else dict(update.patterns())
        mine = json.dumps([loss_forms, shared, patterns])
        by_rank = [json.loads(text) for text in transport.all_gather(mine)]
        losses = {
            int(stage): LossPart(rank, Signature.from_json(form).leaves[0], tuple(each))
            for theirs, *_ in by_rank
            for stage, (rank, form, each) in theirs.items()
        }
        if not losses and "loss" in lowered.spec.wants:
            raise ValueError(
                "no stage has returned a loss; give loss_fn, or have a stage return Output(y, loss=...)"
            )
        _require_taken([theirs for *_, theirs in by_rank], lowered.form)
        if shares:
            require_same_forms({rank: forms for rank, (_, forms, _) in enumerate(by_rank)})
        if self._met and self._agreement.compares_programs:
            evaluated = ((low.model_stage, low.outline) for low in lowered.stages.values())
            # Ranks along the other axes may run parts of a stage that their place tells apart.
            names, apart = transport.axes, transport.axes.of_stages
            axes = (names.pipe, *(axis for axis in names.data_axes if axis not in apart))
            require_same_programs(evaluated, partial(transport.gather, axes=axes))
        losses = dict(sorted(losses.items()))
        generation = self._agreement.generation
        agreed = Agreed(self.shapes, generation, self._received, self._returned, losses, shared)
        return self._agreement.keep(agreed)


def _require_taken(noted: Sequence[Mapping[str, bool]], form: StepForm) -> None:
    """Raise ValueError for a pattern that takes no leaf of any rank; ``noted`` has the patterns of each."""
    used = {text for theirs in noted for text, takes in theirs.items() if takes}
    if unused := [text for theirs in noted for text in theirs if text not in used]:
        trees = form.state if unused[0].startswith("reduce_state") else form.params
        names = sorted({repr(name) for signature in trees.values() for name in leaf_names(signature)})
        here = ", ".join(names[:4]) + ", ..." * (len(names) > 4) or "none"
        raise ValueError(
            f"{unused[0]} takes no leaf of any rank, frozen ones aside; mend the pattern, or leave it out;"
            f" the leaves here are {here}"
        )


def _call_terms(schedule: Schedule, steps: Sequence[StepArguments]) -> str:
    """Name the schedule, the weights of the microbatches of all steps, and the seed."""
    weights = "1/m each"
    if explicit := [step.loss_weights for step in steps if step.loss_weights is not None]:
        every = torch.cat(explicit).tolist()
        weights = f"{reprlib.repr(every)} ({digest(repr(every))})"
        # A rank with the weights on its device leaves out none.
        if left_out := sum(len(step.left_out) for step in steps):
            weights += f", {left_out} left out"
    carry = "; first carries given" if steps[0].carry else ""
    # Without what separates terms, or cannot be sent.
    name = schedule.name[:60].replace(";", ",").encode(errors="backslashreplace").decode()
    return (
        f"schedule {name} of {schedule.microbatches} microbatches ({schedule.digest[:8]}); loss weights"
        f" {weights}; seed {steps[0].seed}{carry}"
    )
