"""Agree with the other ranks on the step that begins."""

from __future__ import annotations

import platform
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ppfunc.schedule import Schedule

from .arguments import StepArguments
from .cache import keep
from .errors import AgreementError
from .exchange import Agreed, Negotiation, Replay
from .form import StepForm
from .layouts import laid_out, require_same_layouts
from .spec import StepSpec
from .stage_programs import autocast
from .terms import BatchShapes, call_terms, read_shapes, write_shapes
from .ties import require_same_values, routes_of_shared
from .transport import Route, Transport


class Began(NamedTuple):
    """A step that has begun on all ranks.

    Args:
        shapes: of its batch.
        agreed: what the ranks agreed on for these shapes before; None on all of them where they did not.
    """

    shapes: BatchShapes
    agreed: Agreed | None


class Agreement:
    """Keeps what the ranks have agreed on for one step function, by shapes of the batch and autocast, until the next failure.

    Args:
        schedule, spec, transport: of the step function.
        ranks: those of this process.
    """

    def __init__(self, schedule: Schedule, spec: StepSpec, transport: Transport, ranks: tuple[int, ...]) -> None:
        self._schedule, self._spec, self._transport, self._ranks = schedule, spec, transport, ranks
        self._number = transport.register_step()
        self._source = schedule.placement[schedule.chains[0].stages[0]]  # the rank whose batch names the shapes
        self._agreed: OrderedDict[tuple[object, ...], Agreed] = OrderedDict()  # for the same shapes on all ranks
        self._lock = threading.Lock()
        self._generation = -1  # of the transport, when the ranks last met; before they have, -1

    def begin(self, passes: Sequence[StepArguments], shapes: BatchShapes | None, purpose: str) -> Began:
        """Begin a step on all ranks, with the same call; meet them first where there was a failure since.

        Args:
            passes: the arguments of every pass of the schedule.
            shapes: of the batch; None where this process was given none.
            purpose: of the call: what the ranks have to agree on, too.

        Raises:
            AgreementError: another rank makes another call, or has another batch.
        """
        mine = None if shapes is None else write_shapes(shapes, self._known(shapes) is not None)
        common, own = self._terms(passes)
        shapes, known = read_shapes(self._transport.begin(own, mine, self._source, f"{common}; {purpose}"))
        if mine is None and known != (self._known(shapes) is not None):
            has = "has not" if known else "has"
            raise AgreementError(
                f"the ranks disagree on the step that begins: rank {self._ranks[0]} {has} run it with these shapes before, unlike rank "
                f"{self._source}; every rank must call the same step function in the same order"
            )
        if self._transport.generation != self._generation:
            self._meet(passes[0])
        with self._lock:
            if (agreed := self._known(shapes)) is not None:
                self._agreed.move_to_end((shapes, autocast()))
        return Began(shapes, agreed)

    def negotiate(self, began: Began, form: StepForm) -> Negotiation | Replay:
        """Begin to agree on what these shapes do not tell; without messages where the ranks have agreed on it before.

        Raises:
            AgreementError: another rank of a mesh that arguments lie over lays them out otherwise.
        """
        if not self._transport.compares_layouts:
            require_same_layouts(form)
        elif began.agreed is None:  # on all ranks, which meet here before anything is traced; later, when they are ready
            self._transport.require_same(str(laid_out(form)), "peers")
        if began.agreed is not None:
            return Replay(began.agreed)
        return Negotiation(self._schedule, self._transport, self._generation)

    def keep(self, shapes: BatchShapes, agreed: Agreed) -> Agreed:
        """Keep what the ranks have agreed on; what another thread has kept meanwhile stays."""
        with self._lock:
            agreed = self._agreed.get((shapes, autocast()), agreed)
            keep(self._agreed, (shapes, autocast()), agreed)
        return agreed

    def _known(self, shapes: BatchShapes) -> Agreed | None:
        """Look up what the ranks agreed on for these shapes since the last failure, which all of them have or none."""
        return self._agreed.get((shapes, autocast())) if self._generation == self._transport.generation else None

    def _terms(self, passes: Sequence[StepArguments]) -> tuple[str, str]:
        """Terms that all ranks have to agree on, and those that run the same batch; nobody compares them without peers."""
        if not self._transport.has_peers:
            return "", ""
        common = f"step function {self._number} ({self._spec.name}); autocast {autocast() or 'off'}"
        return f"{common}; {passes[0].common}" if passes[0].common else common, call_terms(self._schedule, passes)

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
        if self._spec.update is not None:
            kept = self._spec.update.kept(arguments.update_state)
            require_same_values(self._schedule, arguments.form.params, kept, self._spec.tied, self._transport)
        self._transport.connect(routes_of(self._schedule, self._spec))
        self._generation = self._transport.generation


def routes_of(schedule: Schedule, spec: StepSpec) -> Iterator[Route]:
    """Where messages travel between ranks: along edges and back, and between the places of a parameter."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])
    yield from routes_of_shared(schedule, spec.tied)
