"""Compile steps by the form of their arguments, with all ranks in agreement, and keep them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from ppfunc.stage import Outline
from ppfunc.stage.errors import warn

from ..agreement.agreement import Agreed, Agreement, BatchShapes, Began
from ..agreement.comparison import LaidOut, laid_out
from ..call.arguments import StepArguments
from ..call.spec import Pipeline
from ..transport.protocols import Mode
from .compile import CompiledStep, compile_step
from .lower import SignatureExchange, lower
from .lowered import LoweredStep
from .stage_programs import CACHE_SIZE, autocast, keep, modes

_RETRACES = 8  # so many forms are unusual enough for a warning
_MODES = 3  # compiled steps of one form that are kept for other modes of the modules


class CacheInfo(NamedTuple):
    """Use of the cache of a step function, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Guards(NamedTuple):
    """Facts under which a step was lowered, beside the form of its arguments; it holds while they do.

    Args:
        modes: of its modules, by outline of a stage.
        autocast: which was on.
        agreed: what the ranks agreed on for it.
    """

    modes: tuple[tuple[Outline, tuple[bool, ...]], ...]
    autocast: tuple[Hashable, ...]
    agreed: Agreed

    @classmethod
    def now(cls, lowered: LoweredStep, agreed: Agreed) -> Self:
        """Take the guards of a step that is lowered now."""
        outlines = {id(low.outline): low.outline for low in lowered.stages.values()}.values()
        return cls(tuple((outline, modes(outline)) for outline in outlines), autocast(), agreed)

    def hold(self) -> bool:
        """Tell whether modules and autocast are in the modes of then."""
        return self.autocast == autocast() and all(modes(outline) == before for outline, before in self.modes)

    def require(self) -> None:
        """Raise ValueError where they do not hold."""
        if not self.hold():
            raise ValueError(
                "modules or autocast have another mode than when the step was lowered; lower and compile it"
                " again"
            )

    def mode(self) -> Mode:
        """Return the mode of all modules."""
        distinct = {mode for _, every in self.modes for mode in every}
        return "mixed" if len(distinct) != 1 else "training" if distinct.pop() else "evaluation"


class Entry(NamedTuple):
    """Compiled step, the guards under which it holds, and how its DTensors lie."""

    compiled: CompiledStep
    guards: Guards
    laid: LaidOut


Finder = Callable[[Sequence[StepArguments]], Entry]
"""Finds the compiled step for the arguments of every step."""


class _Last(NamedTuple):
    """Step of the last call, its arguments without their tensors, and the shapes of its batch."""

    arguments: StepArguments
    shapes: BatchShapes
    entry: Entry


class CompiledSteps:
    """Owns the compiled steps of one step function, for a bounded number of forms.

    Several threads may use it. What the ranks agreed on for them is its :class:`Agreement`'s.

    Args:
        pipeline: of the step function.
        owner: the step function, as errors name it.
    """

    def __init__(self, pipeline: Pipeline, owner: str) -> None:
        self._pipeline, self._owner = pipeline, owner
        self._agreement = Agreement(pipeline)
        self._building = threading.local()
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Any, ...], list[Entry]] = OrderedDict()
        self._hits = self._misses = 0
        self._added = 0  # entries, since all were dropped
        self._last: _Last | None = None

    @property
    def last_arguments(self) -> StepArguments | None:
        """Return the arguments of the last call, without their tensors."""
        last = self._last
        return None if last is None else last.arguments

    def find(self, steps: Sequence[StepArguments], purpose: str) -> Entry:
        """Return the compiled step for these arguments; worked out with the peers where their form is new."""
        self._require_same_frozen()
        arguments, last = steps[0], self._last
        if last is not None and last.arguments.form is not arguments.form:
            last = None  # another form than that of the last call
        began = self._begin(steps, purpose, last and last.shapes)
        if last is not None and last.shapes == began.shapes and _holds(last.entry, began.agreed):
            self._hits += 1
            return last.entry
        key = (began.shapes, arguments.key, autocast())
        with self._lock:
            entry = self._find(key, began.agreed)
        entry = entry or self._build(arguments, began, key)
        self._last = _Last(arguments.without_tensors(), began.shapes, entry)
        return entry

    def lower(self, arguments: StepArguments) -> tuple[LoweredStep, Guards]:
        """Lower a step by itself, which is not kept; return what guards it, too."""
        began = self._begin([arguments], "lowered, not run")
        negotiation = self._agreement.negotiate(began, arguments.form)
        lowered = self._lower(arguments, began, negotiation)
        agreed = self._agreement.keep(began.shapes, negotiation.conclude(lowered))
        return lowered, Guards.now(lowered, agreed)

    def reuse(self, compiled: CompiledStep, guards: Guards) -> Finder:
        """Return a finder of a step that was lowered and compiled by itself, for arguments of its form.

        Raises:
            ValueError: the guards no longer hold.
        """
        guards.require()
        return partial(self._reuse, Entry(compiled, guards, laid_out(compiled.lowered.form)))

    def _reuse(self, entry: Entry, steps: Sequence[StepArguments]) -> Entry:
        began = self._begin(steps, "run as it was compiled")
        entry.guards.require()
        self._require_same_frozen()
        if entry.guards.agreed.generation != self._pipeline.transport.generation:
            raise RuntimeError(
                "a step has failed since this one was lowered, and the ranks agree anew; lower and compile it"
                " again"
            )
        now, then = steps[0].form_of(began.shapes.rows), entry.compiled.lowered.form
        for field, got, expected in zip(now._fields, now, then, strict=True):
            if got != expected:
                raise ValueError(
                    f"{field}: got {_described(got)}, the step was compiled for {_described(expected)}; call"
                    " the step function, which compiles for every form"
                )
        return entry

    def info(self) -> CacheInfo:
        """Count the calls that found their step compiled, and those that did not."""
        return CacheInfo(self._hits, self._misses, CACHE_SIZE, len(self._entries))

    def clear(self) -> None:
        """Drop every compiled step, and the programs of the stages."""
        self._drop()
        self._hits = self._misses = 0
        self._pipeline.programs.clear()

    def _drop(self) -> None:
        with self._lock:
            self._entries.clear()
            self._added = 0
        self._last = None

    def _begin(
        self, steps: Sequence[StepArguments], purpose: str, shapes: BatchShapes | None = None
    ) -> Began:
        """Begin a step with the peers.

        Args:
            shapes: of the batch, where they are known to be those of the last call.
        """
        form, last = steps[0].form, self._last
        # A process that was given no batch learns its shapes.
        shapes = None if form.inputs is None else shapes or BatchShapes.of(form)
        began = self._agreement.begin(steps, shapes, purpose)
        if last is not None and last.entry.guards.agreed.generation != self._pipeline.transport.generation:
            self._drop()  # what was compiled before a failure is of no use after it
        return began

    def _find(self, key: tuple[Any, ...], agreed: Agreed | None) -> Entry | None:
        """Return an entry of this key that holds, if there is one; under the lock."""
        for entry in self._entries.get(key, ()):
            if _holds(entry, agreed):
                self._hits += 1
                self._entries.move_to_end(key)
                return entry
        return None

    def _add(self, key: tuple[Any, ...], entry: Entry, arguments: StepArguments) -> Entry:
        """Keep a new entry, and return it; or that which another thread has built meanwhile."""
        agreed = entry.guards.agreed
        with self._lock:
            if (built := self._find(key, agreed)) is not None:
                return built
            self._misses += 1
            self._added += 1
            others = [other for other in self._entries.get(key, ()) if other.guards.agreed is agreed]
            keep(self._entries, key, [*others[-_MODES:], entry])
        if self._added == _RETRACES:
            _warn_of_retraces(self._pipeline.spec.name, arguments, self.last_arguments)
        return entry

    def _build(self, arguments: StepArguments, began: Began, key: tuple[Any, ...]) -> Entry:
        """Lower and compile."""
        if getattr(self._building, "active", False):
            raise RuntimeError(
                f"a stage calls the step function that it is part of ({self._owner}); call a function of its"
                " own from a stage"
            )
        self._building.active = True
        try:
            negotiation = self._agreement.negotiate(began, arguments.form)
            lowered = self._lower(arguments, began, negotiation)
            compiled = compile_step(lowered, self._pipeline.programs, self._pipeline.transport)
            agreed = self._agreement.keep(began.shapes, negotiation.conclude(lowered))
        finally:
            self._building.active = False
        return self._add(key, Entry(compiled, Guards.now(lowered, agreed), laid_out(lowered.form)), arguments)

    def _lower(self, arguments: StepArguments, began: Began, negotiation: SignatureExchange) -> LoweredStep:
        p = self._pipeline
        lowered = lower(
            p.stages, p.loss_fn, p.schedule, arguments.form_of(began.shapes.rows), p.spec, p.programs,
            ranks=p.ranks, exchange=negotiation, example=arguments.example,
        )  # fmt: skip
        if p.spec.frozen is not None:
            for low in lowered.stages.values():
                p.spec.frozen.watch(low.model_stage, low.outline.modules)
        return lowered

    def _require_same_frozen(self) -> None:
        frozen = self._pipeline.spec.frozen
        if frozen is not None and not self._pipeline.schedule.forward_only:  # which takes no gradients
            frozen.require_unchanged()


def _holds(entry: Entry, agreed: Agreed | None) -> bool:
    """Tell whether an entry holds where the ranks agree on this. Where they agree anew, none may be left out
    that has kept a program.
    """
    return entry.guards.agreed is agreed and entry.guards.hold()


def _warn_of_retraces(name: str, arguments: StepArguments, last: StepArguments | None) -> None:
    """Warn once that a step function traces again and again, and say what changed."""
    before = {} if last is None else last.trees
    changed = [n for n, form in arguments.trees.items() if n not in before or before[n].key != form.key]
    what = "modules or autocast have another mode, or fewer arguments are given"
    if changed:
        now, then = arguments.trees[changed[0]], before.get(changed[0])
        what = f"{changed[0]} is now {now.signature}"
        what += "" if then is None else f", it was {then.signature}"
        if then is not None and then.signature == now.signature:
            what += ", in memory of another type, layout or device"
    warn(
        f"{name} has been traced {_RETRACES} times, each for another form of its arguments: {what}; "
        f"pad batches to few shapes, or use the functional engine"
    )


def _described(part: Any) -> str:
    """Describe a part of the form of the arguments, for errors."""
    if isinstance(part, Mapping):
        return (
            ", ".join(f"stage {stage} {_described(of_stage)}" for stage, of_stage in part.items()) or "none"
        )
    return " and ".join(dict.fromkeys(map(str, part))) if isinstance(part, tuple) else str(part)
