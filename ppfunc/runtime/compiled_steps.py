"""Compile steps by the form of their arguments, with all ranks in agreement, and keep them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Loss, Stage
from ppfunc.stage.interrupts import let_interrupts

from .agreement import Agreement, Began
from .arguments import StepArguments
from .cache import CacheInfo, Entries, Entry, warn_of_retraces
from .compile import CompiledStep, compile_step
from .guards import Guards
from .lower import SignatureExchange, lower
from .lowered import LoweredStep
from .spec import StepSpec
from .stage_programs import autocast, forget
from .terms import BatchShapes
from .transport import Transport

Finder = Callable[[Sequence[StepArguments]], Entry]
"""Finds the compiled step for the arguments of every pass."""


class _Last(NamedTuple):
    """The step of the last call, its arguments without their tensors, and the shapes of its batch."""

    arguments: StepArguments
    shapes: BatchShapes
    entry: Entry


class CompiledSteps:
    """Owns the compiled steps of one step function; what the ranks agreed on for them is its :class:`Agreement`'s.

    Args:
        stages, loss_fn, schedule, transport, engine, spec: of the step function.
        ranks: those of this process.
        owner: the step function, as errors name it.
    """

    def __init__(
        self, stages: Sequence[Stage | None], loss_fn: Loss | None, schedule: Schedule, transport: Transport, engine: Engine,
        spec: StepSpec, ranks: tuple[int, ...], owner: str,
    ) -> None:  # fmt: skip
        self._stages, self._loss_fn, self._schedule, self._transport = stages, loss_fn, schedule, transport
        self._engine, self._spec, self._ranks, self._owner = engine, spec, ranks, owner
        self._agreement = Agreement(schedule, spec, transport, ranks)
        self._entries = Entries()
        self._building = threading.local()
        self._last: _Last | None = None

    @property
    def last_arguments(self) -> StepArguments | None:
        """The arguments of the last call, without their tensors."""
        last = self._last
        return None if last is None else last.arguments

    def find(self, passes: Sequence[StepArguments], purpose: str) -> Entry:
        """The compiled step for these arguments; worked out with the peers where the form of the batch is new."""
        arguments, last = passes[0], self._last
        if last is not None and last.arguments.form is not arguments.form:
            last = None  # another form than that of the last call
        began = self._begin(passes, purpose, last and last.shapes)
        if last is not None and last.shapes == began.shapes and last.entry.holds(began.agreed):
            self._entries.hit()
            return last.entry
        key = (began.shapes, arguments.key, autocast())
        entry = self._entries.find(key, began.agreed) or self._build(arguments, began, key)
        self._last = _Last(arguments.without_tensors(), began.shapes, entry)
        return entry

    def lower(self, arguments: StepArguments) -> tuple[LoweredStep, Guards]:
        """Lower a step by itself, which is not kept; says what guards it."""
        began = self._begin([arguments], "lowered, not run")
        negotiation = self._agreement.negotiate(began, arguments.form)
        with let_interrupts():
            lowered = self._lower(arguments, began, negotiation)
        agreed = self._agreement.keep(began.shapes, negotiation.conclude(lowered))
        return lowered, Guards.now(lowered, agreed)

    def reuse(self, compiled: CompiledStep, guards: Guards) -> Finder:
        """Finds a step that was lowered and compiled by itself, where it holds for the arguments.

        Raises:
            ValueError: the guards no longer hold.
        """
        guards.require()
        return partial(self._reuse, Entry.of(compiled, guards))

    def _reuse(self, entry: Entry, passes: Sequence[StepArguments]) -> Entry:
        began = self._begin(passes, "run as it was compiled")
        entry.guards.require()
        if entry.guards.agreed.generation != self._transport.generation:
            raise RuntimeError("a step has failed since this one was lowered, and the ranks agree anew; lower and compile it again")
        now, then = passes[0].form_of(began.shapes.rows), entry.compiled.lowered.form
        for field, got, expected in zip(now._fields, now, then, strict=True):
            if got != expected:
                raise ValueError(
                    f"{field}: got {_described(got)}, the step was compiled for {_described(expected)}; call the step function, which "
                    f"compiles for every form"
                )
        return entry

    def info(self) -> CacheInfo:
        return self._entries.info()

    def clear(self) -> None:
        """Drop every compiled step, and what is kept of the stages' functions for other step functions."""
        self._entries.clear()
        self._last = None
        for fn in filter(None, self._stages):
            forget(fn)

    def _begin(self, passes: Sequence[StepArguments], purpose: str, shapes: BatchShapes | None = None) -> Began:
        """Begin a step with the peers.

        Args:
            shapes: of the batch, where they are known to be those of the last call.
        """
        form, last = passes[0].form, self._last
        shapes = None if form.inputs is None else shapes or BatchShapes.of(form)  # a process that was given no batch is told
        began = self._agreement.begin(passes, shapes, purpose)
        if last is not None and last.entry.guards.agreed.generation != self._transport.generation:
            self._entries.forget()  # what was compiled before a failure is of no use after it
            self._last = None
        return began

    def _build(self, arguments: StepArguments, began: Began, key: tuple[Any, ...]) -> Entry:
        """Lower and compile."""
        if getattr(self._building, "active", False):
            raise RuntimeError(
                f"a stage calls the step function that it is part of ({self._owner}); call a function of its own from a stage"
            )
        self._building.active = True
        try:
            negotiation = self._agreement.negotiate(began, arguments.form)
            with let_interrupts():
                lowered = self._lower(arguments, began, negotiation)
                compiled = compile_step(lowered, self._engine, self._transport)
            agreed = self._agreement.keep(began.shapes, negotiation.conclude(lowered))
        finally:
            self._building.active = False
        new = Entry.of(compiled, Guards.now(lowered, agreed))
        entry = self._entries.add(key, new)
        if entry is new:
            warn_of_retraces(self._spec.name, self._entries.added, arguments, self.last_arguments)
        return entry

    def _lower(self, arguments: StepArguments, began: Began, negotiation: SignatureExchange) -> LoweredStep:
        return lower(
            self._stages, self._loss_fn, self._schedule, arguments.form_of(began.shapes.rows), self._spec,
            ranks=self._ranks, exchange=negotiation, example=arguments.example,
        )  # fmt: skip


def _described(part: Any) -> str:
    """A part of the form of the arguments, for errors."""
    if isinstance(part, Mapping):
        return ", ".join(f"stage {stage} {_described(of_stage)}" for stage, of_stage in part.items()) or "none"
    return " and ".join(dict.fromkeys(map(str, part))) if isinstance(part, tuple) else str(part)
