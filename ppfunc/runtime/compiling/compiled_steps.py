"""Compile steps by the form of their arguments, with all ranks in agreement, and keep them."""

import json
import reprlib
import threading
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import NamedTuple, Self
from urllib.parse import quote

from ppfunc.stage.abstract.captures import State, Watch, ambient, changes
from ppfunc.stage.abstract.evaluation import trying
from ppfunc.stage.errors import warn

from ..lowering.agreement import LOWERED, Agreed, Agreement, Exchange
from ..lowering.comparison import laid_out
from ..lowering.lower import lower
from ..lowering.lowered import LoweredStep, Pipeline
from ..lowering.stage_programs import CACHE_SIZE, StagePrograms
from ..ports.protocols import Mode
from ..values.arguments import StepArguments
from ..values.batch import BatchShapes
from ..values.forms import LaidOut, StepForm
from .compile import CompiledStep, compile_step

_RETRACES = 8  # so many forms are unusual enough for a warning


class CacheInfo(NamedTuple):
    """Count the use of a step function's cache, as ``functools.lru_cache`` does."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Guards(NamedTuple):
    """Note what the stages of a step read beside their arguments: it may run for the same values only.

    Args:
        states: of these values, with what watches them.
        ambient: what torch holds, such as autocast.
        mode: of all modules.
        changed: what has changed of these values since the first step, to compare with other ranks.
    """

    states: tuple[tuple[Watch, State], ...]
    ambient: tuple[Hashable, ...]
    mode: Mode
    changed: str

    @classmethod
    def now(cls, lowered: LoweredStep, programs: StagePrograms) -> Self:
        """Take the guards of a step that is lowered now."""
        functions = {id(low.call.function): low.call.function for low in lowered.stages.values()}
        states = dict(chain.from_iterable(map(programs.states, functions.values())))
        modules = {module for low in lowered.stages.values() for module in low.outline.modules}
        modes = {module.training for module in modules}
        mode: Mode = "mixed" if len(modes) != 1 else "training" if modes.pop() else "evaluation"
        read = (programs.changes(low.call) for low in lowered.stages.values())
        changed = dict(chain.from_iterable(read))
        return cls(tuple(states.items()), ambient(), mode, quote(json.dumps(changed)) if changed else "")

    def hold(self) -> bool:
        """Tell whether all is as noted."""
        return self.ambient == ambient() and all(watch.state() is state for watch, state in self.states)

    @property
    def changes(self) -> str:
        """Name what has changed; empty if nothing has."""
        texts = chain.from_iterable(changes(then, watch.state()) for watch, then in self.states)
        torchs = [] if self.ambient == ambient() else ["another autocast, default dtype or mode of torch"]
        return ", ".join([*dict.fromkeys(texts), *torchs][:4])

    def require(self) -> None:
        """Raise ValueError where they do not hold."""
        if not self.hold():
            raise ValueError(
                f"what the stages read has changed since the step was lowered: {self.changes}; lower and"
                " compile it again"
            )


class Entry(NamedTuple):
    """Keep a compiled step with the conditions under which it may run.

    Args:
        form: of the arguments of the last call that ran it.
        agreed: the facts that the ranks agreed on for it.
        guards: what the stages read beside their arguments.
        compiled: the step.
        layouts: how its DTensors lie.
    """

    form: StepForm
    agreed: Agreed
    guards: Guards
    compiled: CompiledStep
    layouts: LaidOut


class CompiledSteps:
    """Owns the compiled steps of one step function, for a bounded number of forms.

    Several threads may use it. Its :class:`Agreement` has the facts that the ranks agreed on.

    Args:
        pipeline: of the step function.
        owner: the step function, as errors name it.
    """

    def __init__(self, pipeline: Pipeline, owner: str) -> None:
        self._pipeline, self._owner = pipeline, owner
        self._agreement = Agreement(pipeline)
        self._building = threading.local()
        self._lock = threading.Lock()
        self._entries: list[Entry] = []  # the one that ran last comes last
        self._hits = self._misses = self._traced = 0
        self._warned = False  # of microbatches whose rows count unlike

    @property
    def last(self) -> Entry | None:
        """Return the compiled step of the last call."""
        entries = self._entries
        return entries[-1] if entries else None

    def find(self, steps: Sequence[StepArguments], purpose: str) -> Entry:
        """Return the compiled step for these arguments, built with the peers if their form is new."""
        self._require_frozen_unchanged()
        form, last, transport = steps[0].form, self.last, self._pipeline.transport
        if last is not None and (last.form is not form or not last.guards.hold()):
            last = None  # of another form or mode than those of the last call
        # Without peers there is nothing to agree on, unless places of a parameter may have been written.
        update = steps[0].update
        alone = not transport.has_peers and (update is None or update.known)
        if last is None or not alone or last.agreed.generation != transport.generation:
            exchange = self._begin(steps, purpose, last and last.agreed.shapes)
            if last is None or last.agreed is not exchange.agreed:
                with self._lock:
                    entry = self._cached(form, exchange.agreed)
                return entry or self._build(steps[0], exchange)
        self._hits += 1
        return last

    def lower(self, arguments: StepArguments) -> tuple[LoweredStep, Agreed, Guards]:
        """Lower a step without keeping it. Return it with the conditions under which it may run."""
        exchange = self._begin([arguments], LOWERED)
        lowered = self._lower(arguments, exchange)
        agreed = exchange.conclude(lowered, arguments.update)
        return lowered, agreed, Guards.now(lowered, self._pipeline.programs)

    def reuse(self, entry: Entry, steps: Sequence[StepArguments]) -> Entry:
        """Begin a step with the peers, and return the compiled step of ``step.lower(...).compile()`` for it.

        Raises:
            ValueError: the arguments have another form than those compiled for, or a guard fails.
            RuntimeError: a step has failed since it was lowered.
        """
        exchange = self._begin(steps, "run as it was compiled")
        entry.guards.require()
        self._require_frozen_unchanged()
        if entry.agreed.generation != self._pipeline.transport.generation:
            raise RuntimeError(
                "a step has failed since this one was lowered, and the ranks agree anew; lower and compile it"
                " again"
            )
        now, then = _described(steps[0].form, exchange.shapes), _described(entry.form, entry.agreed.shapes)
        for name in sorted(now.keys() | then.keys()):
            got, expected = now.get(name, ("none",)), then.get(name, ("none",))
            if got != expected:
                raise ValueError(
                    f"{name}: got {' '.join(map(str, got))}, the step was compiled for"
                    f" {' '.join(map(str, expected))}; call the step function, which compiles for every form"
                )
        return entry

    def info(self) -> CacheInfo:
        """Count the calls that found their step compiled, and those that did not."""
        return CacheInfo(self._hits, self._misses, CACHE_SIZE, len(self._entries))

    def clear(self) -> None:
        """Drop every compiled step, and the programs of the stages."""
        self._entries = []
        self._hits = self._misses = self._traced = 0
        self._pipeline.programs.clear()

    def _begin(
        self, steps: Sequence[StepArguments], purpose: str, shapes: BatchShapes | None = None
    ) -> Exchange:
        """Begin a step with the peers.

        Args:
            shapes: of the batch, where they are known to be those of the last call.
        """
        form, last = steps[0].form, self.last
        # A process that was given no batch learns its shapes.
        shapes = None if form.inputs is None else shapes or BatchShapes.of(form.inputs, form.rows)
        exchange = self._agreement.begin(steps, shapes, purpose)
        if last is not None and last.agreed.generation != self._pipeline.transport.generation:
            self._entries = []  # what was compiled before a failure is of no use after it
        return exchange

    def _cached(self, form: StepForm, agreed: Agreed | None) -> Entry | None:
        """Return the entry that holds for arguments of this form, if there is one; under the lock."""
        for n, entry in enumerate(self._entries):
            if entry.agreed is agreed and entry.form.key == form.key and entry.guards.hold():
                self._hits += 1
                entry = entry._replace(form=form)
                self._entries = [*self._entries[:n], *self._entries[n + 1 :], entry]
                return entry
        return None

    def _build(self, arguments: StepArguments, exchange: Exchange) -> Entry:
        """Lower, compile and keep a step; return that of another thread, if one has built it meanwhile."""
        if getattr(self._building, "active", False):
            raise RuntimeError(
                f"a stage calls the step function that it is part of ({self._owner}); call a function of its"
                " own from a stage"
            )
        self._building.active, before = True, self._pipeline.programs.evaluations
        try:
            given = arguments.inputs, arguments.targets, *arguments.extras.values()
            with trying(chain.from_iterable(given)):
                lowered = self._lower(arguments, exchange)
                compiled = compile_step(lowered, self._pipeline.programs, self._pipeline.transport)
            agreed = exchange.conclude(lowered, arguments.update)
        finally:
            self._building.active = False
        form = arguments.form
        with self._lock:
            if (built := self._cached(form, agreed)) is not None:
                return built
            last = self.last
            entry = Entry(
                form, agreed, Guards.now(lowered, self._pipeline.programs), compiled, laid_out(lowered.form)
            )
            self._misses += 1
            self._entries = [*self._entries[1 - CACHE_SIZE :], entry]
            self._traced += (anew := self._pipeline.programs.evaluations > before)
        if anew and self._traced == _RETRACES and last is not None:
            _warn_of_retraces(self._pipeline, form, last)
        if lowered.losses and arguments.loss_weights is None and not self._warned:
            self._warned = _warn_of_rows(form)
        return entry

    def _lower(self, arguments: StepArguments, exchange: Exchange) -> LoweredStep:
        pipeline, form = self._pipeline, arguments.form
        if form.inputs is None:  # of a process that was not given the batch
            form = form._replace(rows=exchange.shapes.rows)
        exchange.require_same_layouts(form)
        lowered = lower(pipeline, form, arguments.example, exchange)
        if pipeline.spec.frozen is not None:
            for low in {id(low.outline): low for low in lowered.stages.values()}.values():
                pipeline.spec.frozen.watch(low.model_stage, low.outline.modules)
        return lowered

    def _require_frozen_unchanged(self) -> None:
        frozen = self._pipeline.spec.frozen
        if frozen is not None and frozen.watched and not self._pipeline.schedule.forward_only:
            frozen.require_unchanged()


def _described(form: StepForm, shapes: BatchShapes) -> dict[str, tuple[object, ...]]:
    """Describe what a step was compiled for, by name: arguments, the batch, then all parameters.

    Signatures are compared as values: the text of a large tree is cut short.
    """
    trees = {
        name: (tree.signature,) if tree.rows is None else (tree.signature, "of each microbatch")
        for name, tree in form.trees.items()
    }
    strides = tuple(form.trees[f"params[{stage}]"].strides for stage in form.params)
    rest = {"the batch": (shapes.text,), "strides": (strides,), "the devices of stages": (form.devices,)}
    return {**trees, **rest}


def _warn_of_rows(form: StepForm) -> bool:
    """Warn of microbatches with unlike numbers of rows, which weigh the same; tell whether it has warned."""
    given = form.targets or form.inputs or ()
    rows = [tree.leaves[0].shape[0] for tree in given if tree.leaves and tree.leaves[0].shape]
    if len(set(rows)) > 1:
        warn(
            f"microbatches of {reprlib.repr(rows)} rows have equal weights, so that rows count unlike in a"
            f" loss that is their mean; pass loss_weights=[n / {sum(rows)} for n in {reprlib.repr(rows)}],"
            f" or, where it is meant, [1 / {len(rows)}] * {len(rows)}"
        )
    return len(set(rows)) > 1


def _warn_of_retraces(pipeline: Pipeline, now: StepForm, last: Entry) -> None:
    """Warn once that a step function traces again and again, and say what changed."""
    before = last.form
    changed = [n for n, tree in now.trees.items() if n not in before.trees or before.trees[n].key != tree.key]
    what = f"{last.guards.changes} changed" if last.guards.changes else "fewer arguments are given"
    if changed:
        signature, then = now.trees[changed[0]].signature, before.trees.get(changed[0])
        what = f"{changed[0]} is now {signature}"
        what += "" if then is None else f", it was {then.signature}"
        if then is not None and then.signature == signature:
            what += ", in memory of another type, layout or device"
    fixed = pipeline.programs.dynamic or not all(getattr(fn, "sizes_vary", True) for fn in pipeline.stages)
    varying = "" if fixed else "let sizes vary, engine=ppfunc.engines.graph(dynamic=True), "
    warn(
        f"{pipeline.spec.name} has been traced {_RETRACES} times, each for another form of its arguments, or"
        f" for other values that its stages read: {what}; {varying}pad batches to few shapes, give numbers"
        " that change as tensors, or use the functional engine"
    )
