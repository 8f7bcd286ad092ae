"""Compile steps by the form of their arguments, with all ranks in agreement, and keep them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Loss, Stage

from .agreement import Agreement, Began, batch_name, rows_of
from .arguments import StepArguments
from .cache import CACHE_SIZE, RETRACES, CacheInfo, Entry, Last, keep, warn_of_retraces
from .compile import CompiledStep, compile_step
from .form import StepForm
from .interrupts import let_interrupts
from .lower import Exchange, lower
from .lowered import LoweredStep
from .spec import StepSpec
from .stage_programs import autocast
from .transport import Transport

_MODES = 3  # programs that are kept for other modes of the modules


class LoweredFor(NamedTuple):
    """A step that was lowered by itself, for what arguments, and after how many failures."""

    last: Last
    generation: int | None


class CompiledSteps:
    """The compiled steps of one step function.

    Args:
        stages, loss_fn, schedule, transport, engine, spec: of the step function.
        ranks: those of this process.
        owner: the step function, as errors name it.

    Attributes:
        last: the step of the last call.
    """

    def __init__(
        self, stages: Sequence[Stage | None], loss_fn: Loss | None, schedule: Schedule, transport: Transport, engine: Engine,
        spec: StepSpec, ranks: tuple[int, ...], owner: str,
    ) -> None:  # fmt: skip
        self.last: Last | None = None
        self._stages, self._loss_fn, self._schedule, self._transport = stages, loss_fn, schedule, transport
        self._engine, self._spec, self._ranks, self._owner = engine, spec, ranks, owner
        self._agreement = Agreement(schedule, spec, transport, ranks)
        self._lock = threading.Lock()
        self._building = threading.local()
        self._entries: OrderedDict[tuple[Any, ...], list[Entry]] = OrderedDict()
        self._hits = self._misses = 0

    def find(self, passes: Sequence[StepArguments], purpose: str) -> Entry:
        """The compiled step for these arguments; worked out with the peers where the form of the batch is new."""
        arguments, last, now = passes[0], self.last, autocast()
        if last is not None and (last.arguments.form is not arguments.form or last.autocast != now):
            last = None  # another form than that of the last call
        name, known = self._begin(passes, last and last.name, purpose)
        if last is not None and last is self.last and last.name == name and last.entry.holds() and known:
            self._hits += 1
            return last.entry
        own = (name, arguments.key, now)
        with self._lock:
            if not known:  # the ranks agree anew, and nobody may be left out: agreements are evicted in another order than programs
                self._entries.pop(own, None)
            entry = self._found(own)
        entry = entry or self._build(arguments, name, own)
        self.last = Last.of(arguments, name, entry)
        return entry

    def lower(self, arguments: StepArguments) -> LoweredFor:
        """Lower a step by itself, which is not kept."""
        name, _ = self._begin([arguments], None, "lowered, not run")
        exchange, generation = self._agreement.exchange(name, arguments.form), self._agreement.generation
        with let_interrupts():
            lowered = self._lower(arguments, name, exchange)
        agreed = self._agreement.conclude(name, lowered, exchange)
        return LoweredFor(Last.of(arguments, name, Entry.of(CompiledStep(lowered, {}, (), ()), agreed.parts)), generation)

    def reuse(self, kept: LoweredFor, passes: Sequence[StepArguments]) -> Entry:
        """The step that was lowered and compiled by itself, where it holds for these arguments."""
        name, _ = self._begin(passes, None, "run as it was compiled")
        kept.last.require_same_modes()
        if self._agreement.generation != kept.generation:
            raise RuntimeError("a step has failed since this one was lowered, and the ranks agree anew; lower and compile it again")
        now, then = _form(passes[0], name), kept.last.entry.compiled.lowered.form
        for field, got, expected in zip(now._fields, now, then, strict=True):
            if got != expected:
                raise ValueError(
                    f"{field}: got {_described(got)}, the step was compiled for {_described(expected)}; call the step function, which "
                    f"compiles for every form"
                )
        return kept.last.entry

    def info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, CACHE_SIZE, len(self._entries))

    def clear(self) -> None:
        self._forget()
        self._hits = self._misses = 0

    def _forget(self) -> None:
        with self._lock:
            self._entries.clear()
            self.last = None

    def _begin(self, passes: Sequence[StepArguments], name: str | None, purpose: str) -> Began:
        """Begin a step with the peers; what was compiled before a failure is of no use after it."""
        form = passes[0].form
        if form.inputs is None:  # this process was given no batch, and is told its name
            name = None
        elif name is None:
            name = batch_name(form)
        generation = self._agreement.generation
        began = self._agreement.begin(passes, name, purpose)
        if self._agreement.generation != generation:
            self._forget()
        return began

    def _found(self, own: tuple[Any, ...]) -> Entry | None:
        """The compiled step of a key that holds for the modes of the modules, if there is one; under the lock."""
        entry = next((e for e in self._entries.get(own, ()) if e.holds()), None)
        if entry is not None:
            self._hits += 1
            self._entries.move_to_end(own)
        return entry

    def _build(self, arguments: StepArguments, name: str, own: tuple[Any, ...]) -> Entry:
        """Lower and compile."""
        if getattr(self._building, "active", False):
            raise RuntimeError(
                f"a stage calls the step function that it is part of ({self._owner}); call a function of its own from a stage"
            )
        self._building.active = True
        try:
            exchange = self._agreement.exchange(name, arguments.form)
            with let_interrupts():
                lowered = self._lower(arguments, name, exchange)
                compiled = compile_step(lowered, self._engine, self._transport)
            agreed = self._agreement.conclude(name, lowered, exchange)
        finally:
            self._building.active = False
        entry = Entry.of(compiled, agreed.parts)
        with self._lock:
            if (built := self._found(own)) is not None:  # by another thread meanwhile
                return built
            self._misses += 1
            keep(self._entries, own, [*self._entries.get(own, [])[-_MODES:], entry])
        if self._misses == RETRACES:
            warn_of_retraces(self._spec.name, self._misses, arguments, self.last and self.last.arguments)
        return entry

    def _lower(self, arguments: StepArguments, name: str, exchange: Exchange) -> LoweredStep:
        return lower(
            self._stages, self._loss_fn, self._schedule, _form(arguments, name), self._spec,
            ranks=self._ranks, exchange=exchange, example=arguments.example,
        )  # fmt: skip


def _form(arguments: StepArguments, name: str) -> StepForm:
    """The form of the arguments; a process that was not given the batch learns of its name whether it is a whole one."""
    form = arguments.form
    return form._replace(rows=rows_of(name)) if form.inputs is None else form


def _described(part: Any) -> str:
    """A part of the form of the arguments, for errors."""
    if isinstance(part, Mapping):
        return ", ".join(f"stage {stage} {_described(of_stage)}" for stage, of_stage in part.items()) or "none"
    return " and ".join(dict.fromkeys(map(str, part))) if isinstance(part, tuple) else str(part)
