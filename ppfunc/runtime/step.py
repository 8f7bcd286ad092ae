"""Run steps: the loop of a step function, from the arguments of a call to its result.

::

    StepFunction._run        a call, which fails on every rank or on none
      read_arguments           trees -> leaves and their form
      find                     the compiled step for this form, agreed with all ranks; where it is new:
        lower                    stages, schedule, form -> LoweredStep
        compile_step             LoweredStep -> CompiledStep, one flat list of calls
      run_step                 the compiled step, run to its end on all ranks
        fill, execute            arguments -> Buffers; every call in turn
        collect                  buffers -> StepResult
        Transport.end            the sum of the losses, once every rank is at its end

With this module comes everything that traces and runs: it is imported when a step function is made.
"""

from __future__ import annotations

import inspect
import logging
import reprlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import torch

from ppfunc import _logs
from ppfunc._checks import naming_attributes, not_copied, with_arguments
from ppfunc.schedule import Schedule, Timeline
from ppfunc.schedule.passes.running import linearize
from ppfunc.stage._torch import load_tracer, profiled, transforming, transforms
from ppfunc.stage.abstract.captures import State, Watch, ambient, changes
from ppfunc.stage.abstract.evaluation import trying
from ppfunc.stage.device import on_device, preserve_rng
from ppfunc.stage.errors import warn
from ppfunc.stage.tree import tree_leaves

from .lowering.agreement import LOWERED, Agreed, Agreement, Exchange
from .lowering.lower import LoweredStep, Pipeline, StepResult, lower
from .lowering.stage_programs import CACHE_SIZE, StagePrograms
from .lowering.ties import require_declared
from .ports.protocols import Mode, Transport
from .running.calls import losses_of
from .running.compile import CompiledStep, compile_step
from .running.execute import NotFinite, collect, count_nonfinite, execute_steps, fill, locate_nonfinite
from .running.record import Recorder, gather, in_ranges
from .values.arguments import (
    BatchShapes,
    LaidOut,
    RawArguments,
    StepArguments,
    StepForm,
    by_value,
    overlap,
    read_arguments,
)
from .values.errors import Failure, StepFailed

if TYPE_CHECKING:
    from .paper.analysis import LoweredFunction

_lowering, _control = _logs.room("lowering"), _logs.room("control")
P = ParamSpec("P")
R = TypeVar("R")


@naming_attributes
class StepFunction(Generic[P, R]):
    """Runs a step and caches its compiled programs by the form of the arguments.

    Args:
        pipeline: the stages, the schedule and the transport.
        read: makes the arguments of a step from those of a call, or a list of those of several steps. Its
            errors fail the step on all ranks.
        returned: makes the return value of a call from the results.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        read: Callable[P, RawArguments | list[RawArguments]],
        returned: Callable[[StepResult], R],
    ) -> None:
        load_tracer()
        self.pipeline, self._read, self._returned = pipeline, read, returned
        self.__signature__ = inspect.signature(read)  # for help() and editors
        if pipeline.spec.finite:
            pipeline.transport.collective("world")  # to be had before the transport connects
        self._stages = pipeline.model_stages
        self._targeted = pipeline.targeted
        # How the inputs are read of a model whose shapes are steered by the values of some of them.
        first = pipeline.stages[0] and inspect.unwrap(pipeline.stages[0])
        self._known = getattr(first, "known", None)
        # Form and addresses of the parameters that were last checked for shared memory.
        self._addresses: tuple[StepForm, list[int]] | None = None
        self._agreement = Agreement(pipeline)
        self._building = threading.local()
        self._lock = threading.Lock()
        self._entries: list[Entry] = []  # the one that ran last comes last
        self._hits = self._misses = self._traced = 0
        self._warned = False  # of microbatches whose rows count unlike
        self._siblings: dict[tuple[str, ...], StepFunction[P, R]] = {}

    __reduce__ = not_copied(
        "a step function",
        "save the parameters by ppfunc.checkpoint.save, and make the step function in each process",
    )

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self._stages))
        return f"<step function {self.pipeline.spec.name}, {self.schedule!r}, stages {stages} here>"

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that runs, proved, with its communication."""
        return self.pipeline.schedule

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step.

        Raises:
            PipelineError: an instruction failed, here or on another rank.
            AgreementError: the ranks were given different programs or batches.
            StageError: the engine cannot serve a stage.
            ValueError, TypeError: the arguments do not fit the schedule.
        """
        return self._run(args, kwargs)[0]

    def record(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Timeline]:
        """Run one step and measure it; where ranks are processes, every one calls it.

        Args:
            args, kwargs: arguments of a call. A first call traces and compiles before the times begin.

        Returns:
            The return value of a call, and on every rank the timeline of all ranks, in seconds from the first
            instruction. It has the type that :func:`ppfunc.schedule.simulate` returns. Clocks of hosts are
            aligned by a handshake.

        Raises:
            As a call.
        """
        result, timeline = self._run(args, kwargs, Recorder())
        assert timeline is not None
        return result, timeline

    def _run(
        self,
        args: Any,
        kwargs: Any,
        recorder: Recorder | None = None,
        find: Callable[[Sequence[StepArguments]], Entry] | None = None,
    ) -> tuple[R, Timeline | None]:
        """Run one step, and measure it if a recorder is given.

        ``find`` finds the compiled step, by default in the cache.

        Over a transport between processes, interrupts act between the calls of a step, and while this rank
        waits for peers before its vote. They fail the step as an error does. From the vote on they wait until
        the step has ended on all ranks: a handler that raises then takes the result, and peers are told in
        the next step. With :class:`InProcess` they act anywhere except while a stage is traced.
        """
        transport = self.pipeline.transport
        with (
            transport.hold_interrupts(),
            _outside_inference_mode() if torch.is_inference_mode_enabled() else nullcontext(),
        ):
            try:
                if transforming():
                    self._require_servable_under_transforms()
                steps = self._read_steps(self._read(*args, **kwargs))
                find = find or partial(self._find, purpose="recorded" if recorder else "run")
                device = steps[0].form.accelerator
                with nullcontext() if device is None else on_device(device):
                    result, timeline = run_step(find(steps), steps, transport, recorder)
            except BaseException as raised:
                self._fail(raised)
            returned = self._returned(result), timeline
        transport.ended += 1  # an interrupt acts at its first line at the latest, and takes the step
        return returned

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> LoweredFunction:
        """Lower the step for these arguments, and run nothing; where ranks are processes, every one calls it.

        Args:
            args, kwargs: arguments of a call. Tensors may be on the device meta, and trees may be signatures.
        """
        from .paper.analysis import LoweredFunction

        _, lowered, entry = self._lower(args, kwargs)

        def runner(compiled: CompiledStep) -> Callable[P, R]:
            entry.require()
            find = partial(self._reuse, entry._replace(compiled=compiled))
            return lambda *args, **kwargs: self._run(args, kwargs, find=find)[0]

        return LoweredFunction(lowered, self.pipeline.programs, self.pipeline.transport, runner)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the results of a call with all tensors on the device meta, and run nothing.

        Args:
            args, kwargs: arguments of :meth:`lower`.
        """
        from .paper.analysis import shapes_of

        arguments, lowered, entry = self._lower(args, kwargs)
        return self._returned(shapes_of(lowered, arguments, entry.agreed.losses))

    def _lower(self, args: Any, kwargs: Any) -> tuple[StepArguments, LoweredStep, Entry]:
        """Lower a step without keeping it. Return it with the conditions under which it may run."""
        transport, programs = self.pipeline.transport, self.pipeline.programs
        with transport.hold_interrupts():
            try:
                raw = self._read(*args, **kwargs)
                first = raw[0] if isinstance(raw, list) else raw
                arguments = self._read_arguments(first, None, abstract=True)
                exchange = self._begin([arguments], LOWERED)
                lowered = self._lower_step(arguments, exchange)
                agreed = exchange.conclude(lowered, arguments.update)
                entry = Entry.of(lowered.form, agreed, lowered, programs)
                transport.end({}, {})
            except BaseException as raised:
                self._fail(raised)
        transport.ended += 1
        return arguments, lowered, entry

    def returning(self, *more: str) -> StepFunction[P, R]:
        """Return the step function of this pipeline that makes these results too, fields of a StepResult."""
        if not more:
            return self
        if more not in self._siblings:
            spec = self.pipeline.spec
            spec = spec._replace(wants=(*spec.wants, *more))
            sibling = StepFunction(self.pipeline._replace(spec=spec), self._read, self._returned)
            self._siblings[more] = sibling
        return self._siblings[more]

    def cache_info(self) -> CacheInfo:
        """Count the calls that found their program compiled, and the calls that compiled it."""
        return CacheInfo(self._hits, self._misses, CACHE_SIZE, len(self._entries))

    def cache_clear(self) -> None:
        """Drop every compiled program, and the evaluations and programs of the stages."""
        self._entries = []
        self._hits = self._misses = self._traced = 0
        self.pipeline.programs.clear()

    # -- one call --------------------------------------------------------------------------

    def _read_arguments(
        self, raw: RawArguments, last: StepForm | None, *, abstract: bool = False
    ) -> StepArguments:
        weights = self.pipeline.loss_weights
        if self._known is not None and raw.inputs is not None:
            raw = replace(raw, inputs=by_value(self._known, raw.inputs, self.schedule.microbatches))
        # Peers wait for the backward of a microbatch whose loss has no weight here.
        mixed = self.pipeline.transport.mixes_batches
        return read_arguments(
            raw, self.schedule, self._stages, self._targeted, last, weights, abstract=abstract, mixed=mixed
        )

    def _read_steps(self, raw: RawArguments | list[RawArguments]) -> Sequence[StepArguments]:
        """Read the arguments of every step of the call, all of one form."""
        steps, entry = [], self._last
        form = None if entry is None else entry.form
        for each in raw if isinstance(raw, list) else [raw]:
            steps.append(self._read_arguments(each, form))
            form = steps[-1].form
            if form is not steps[0].form:
                raise ValueError(
                    f"inputs: step {len(steps) - 1} of this call has a batch of another form than step 0; pad"
                    " them to one form"
                )
        self._require_declared(steps[0])
        return steps

    def _require_servable_under_transforms(self) -> None:
        if self.pipeline.spec.finite:
            raise ValueError(
                "got a step that raises where numbers are not finite, under a torch.func transform, which has"
                " none to read; make one with on_nonfinite='ignore'"
            )
        if self.pipeline.spec.primal and not transforms().isdisjoint(("Grad", "Jvp")):
            raise ValueError(
                f"got a step of ppfunc.{self.pipeline.spec.name} under a torch.func transform that"
                " differentiates it once more, which is wrong for some operators; take further derivatives of"
                " the whole model by torch.func"
            )
        if len(self.pipeline.ranks) < self.schedule.ranks:
            raise ValueError(
                "got a step under a torch.func transform, whose ranks are in several processes, where the"
                " transform would end at each message; run it with InProcess(), or use ppfunc.jvp, hvp,"
                " ensemble or per_sample_grad"
            )

    def _require_declared(self, arguments: StepArguments) -> None:
        """Raise ValueError for untied parameters that share memory, each of which would get a gradient."""
        spec, form, params = self.pipeline.spec, arguments.form, arguments.params
        if "grads" in spec.wants or (spec.updates and not spec.sharded):
            leaves = chain.from_iterable(params[stage] for stage in form.params)
            addresses = None if transforming() else (form, list(map(torch.Tensor.data_ptr, leaves)))
            if addresses is None or addresses != self._addresses:
                if addresses is None or overlap(addresses[1], form.extents):
                    require_declared(params, form.params, form.extents, spec.tied, spec.primal)
                self._addresses = addresses

    def _fail(self, raised: BaseException) -> NoReturn:
        """Tell the peers of a failure, and raise."""
        trace = raised.__traceback__
        # Raised by the call itself, not within it.
        if isinstance(raised, TypeError) and trace is not None and trace.tb_next is None:
            raised = TypeError(with_arguments(str(raised), self._read))
        failure = (
            raised.described()
            if isinstance(raised, StepFailed)
            else Failure(self.pipeline.ranks[0], None, None, raised)
        )
        cause = error = failure.cause
        try:
            error = self.pipeline.transport.fail(failure)
            _log_failure(self.pipeline, failure, str(error))
            if error is cause or not isinstance(cause, Exception):
                raise cause from cause.__cause__  # an interrupt stays what it is
            raise error from cause
        finally:
            del raised, failure, cause, error  # an error that is kept keeps this frame

    # -- the compiled step of a call -------------------------------------------------------

    @property
    def _last(self) -> Entry | None:
        """Return the compiled step of the last call."""
        entries = self._entries  # which another thread may replace
        return entries[-1] if entries else None

    def _find(self, steps: Sequence[StepArguments], purpose: str) -> Entry:
        """Return the compiled step for these arguments, built with the peers if their form is new."""
        self._require_frozen_unchanged()
        form, last, transport = steps[0].form, self._last, self.pipeline.transport
        if last is not None and (last.form is not form or not last.holds()):
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

    def _reuse(self, entry: Entry, steps: Sequence[StepArguments]) -> Entry:
        """Begin a step with the peers, and return the compiled step of ``step.lower(...).compile()`` for it.

        Raises:
            ValueError: the arguments have another form than those compiled for, or a guard fails.
            RuntimeError: a step has failed since it was lowered.
        """
        exchange = self._begin(steps, "run as it was compiled")
        entry.require()
        self._require_frozen_unchanged()
        if entry.agreed.generation != self.pipeline.transport.generation:
            raise RuntimeError(
                "a step has failed since this one was lowered, and the ranks agree anew; lower and compile it"
                " again"
            )
        other = _difference(steps[0].form, entry.form)
        if other or exchange.shapes != entry.agreed.shapes:
            raise ValueError(
                f"{other or f'the batch has {exchange.shapes.text}, it had {entry.agreed.shapes.text}'}, when"
                " the step was compiled; call the step function, which compiles for every form"
            )
        return entry

    def _begin(
        self, steps: Sequence[StepArguments], purpose: str, shapes: BatchShapes | None = None
    ) -> Exchange:
        """Begin a step with the peers.

        Args:
            shapes: shapes of the batch, if it has the form of the last call.
        """
        form, last = steps[0].form, self._last
        # A process that was given no batch learns its shapes.
        shapes = None if form.inputs is None else shapes or BatchShapes.of(form.inputs, form.rows)
        exchange = self._agreement.begin(steps, shapes, purpose)
        if last is not None and last.agreed.generation != self.pipeline.transport.generation:
            self._entries = []  # what was compiled before a failure is of no use after it
        return exchange

    def _cached(self, form: StepForm, agreed: Agreed | None) -> Entry | None:
        """Find the entry that holds for arguments of this form; called under the lock."""
        for n, entry in enumerate(self._entries):
            if entry.agreed is agreed and entry.form.key == form.key and entry.holds():
                self._hits += 1
                entry = entry._replace(form=form)
                self._entries = [*self._entries[:n], *self._entries[n + 1 :], entry]
                return entry
        return None

    def _build(self, arguments: StepArguments, exchange: Exchange) -> Entry:
        """Lower, compile and keep a step. Return the entry of another thread that has built it meanwhile."""
        if getattr(self._building, "active", False):
            raise RuntimeError(
                f"a stage calls the step function that it is part of ({self.pipeline.spec.name}); call a"
                " function of its own from a stage"
            )
        self._building.active, before = True, self.pipeline.programs.evaluations
        name, form, last = self.pipeline.spec.name, arguments.form, self._last
        new = last and (_difference(form, last.form) or last.changes or "the ranks agree anew")
        _lowering.info(
            "%s of %r, stages %s here: %s", name, self.schedule, self._stages, new or "the first call"
        )
        try:
            given = arguments.inputs, arguments.targets, *arguments.extras.values()
            with trying(chain.from_iterable(given)):
                with _logs.timed(_lowering.info, "lowered %s", name):
                    lowered = self._lower_step(arguments, exchange)
                with _logs.timed(_lowering.info, "compiled %s", name):
                    compiled = compile_step(lowered, self.pipeline.programs, self.pipeline.transport)
            _lowering.debug("calls of %s: %s", name, [str(place.instruction) for place in compiled.places])
            agreed = exchange.conclude(lowered, arguments.update)
        finally:
            self._building.active = False
        with self._lock:
            if (built := self._cached(form, agreed)) is not None:
                return built
            last = self._last
            entry = Entry.of(form, agreed, lowered, self.pipeline.programs, compiled)
            self._misses += 1
            self._entries = [*self._entries[1 - CACHE_SIZE :], entry]
            self._traced += (anew := self.pipeline.programs.evaluations > before)
        if anew and self._traced == _RETRACES and last is not None:
            _warn_of_retraces(self.pipeline, form, last)
        if lowered.losses and arguments.loss_weights is None and not self._warned:
            self._warned = _warn_of_rows(form)
        return entry

    def _lower_step(self, arguments: StepArguments, exchange: Exchange) -> LoweredStep:
        pipeline, form = self.pipeline, arguments.form
        if form.inputs is None:  # of a process that was not given the batch
            form = form._replace(rows=exchange.shapes.rows)
        exchange.require_same_layouts(form)
        lowered = lower(pipeline, form, arguments.example, exchange.send, exchange.recv)
        if pipeline.spec.frozen is not None:
            for low in {id(low.outline): low for low in lowered.stages.values()}.values():
                pipeline.spec.frozen.watch(low.model_stage, low.outline.modules)
        return lowered

    def _require_frozen_unchanged(self) -> None:
        frozen = self.pipeline.spec.frozen
        if frozen is not None and frozen.watched and not self.pipeline.schedule.forward_only:
            frozen.require_unchanged()


_LAST = 24  # steps of programs that the log of a failure has


def _log_failure(pipeline: Pipeline, failure: Failure, error: str) -> None:
    """Log a failure on this rank, or of a peer, and the last steps of the programs of this process."""
    for log in (_control, _logs.flight):
        log.info("%s has failed: %s", pipeline.spec.name, error)
        if log.isEnabledFor(logging.DEBUG):
            ranks = f"rank{'s' * (len(pipeline.ranks) > 1)} {', '.join(map(str, pipeline.ranks))}"
            log.debug("last instructions of %s: %s", ranks, _last_steps(pipeline, failure))


def _last_steps(pipeline: Pipeline, failure: Failure) -> str:
    if failure.position is None:
        return "none: it was between the programs of two steps"
    order = [place for place in linearize(pipeline.schedule) if place[0] in pipeline.ranks]
    end = order.index((failure.rank, failure.position)) + 1
    programs, steps = pipeline.schedule.programs, order[max(0, end - _LAST) : end]
    text = " ".join("+".join(map(str, programs[rank][position])) for rank, position in steps)
    return f"{text}, where it was at {failure.instruction}"


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def run_step(
    entry: Entry, steps: Sequence[StepArguments], transport: Transport, recorder: Recorder | None = None
) -> tuple[StepResult, Timeline | None]:
    """Run a compiled step with the arguments of every step of the call; return once all ranks are at its end.

    Args:
        recorder: measures the step, whose timeline is returned.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    plain, loss_parts = entry.compiled, entry.agreed.losses
    assert plain is not None
    compiled, lowered = plain if recorder is None else recorder.attach(plain), plain.lowered
    spec = lowered.spec
    if profiled():
        compiled = in_ranges(compiled)
    transport.ready(entry.layouts)
    # Under a torch.func transform from outside, that transform decides what is recorded.
    with (
        torch.set_grad_enabled(torch.is_grad_enabled() and transforming() is not None),
        nullcontext() if steps[0].seed is None else preserve_rng(lowered.form.devices.values()),
    ):
        if (update := steps[0].update) is not None:
            weights = update.begin([arguments.loss_weights for arguments in steps])
            pairs = zip(steps, weights, strict=True)
            steps = [
                args if divided is None else replace(args, loss_weights=divided) for args, divided in pairs
            ]
            loss_parts = {}  # the update has the losses, and sums them over all pipelines
        buffers = execute_steps(compiled, steps, transport)
        if update is not None:
            update.finish()
        losses = losses_of(lowered, buffers) if loss_parts else {}
        result, compared = collect(lowered, steps, buffers), buffers.compared
        del buffers  # the step may run again
        if spec.finite and update is None:
            tensors = [*losses.values(), *tree_leaves((result.grads, result.input_grads))]
            compared = [count_nonfinite(tensors, plain, transport), *compared]
        timeline = None if recorder is None else gather(plain, recorder.intervals(), transport)
        try:
            loss = transport.end(losses, loss_parts, entry.mode, compared, entry.changed)
        except NotFinite as cause:  # on all ranks
            raise locate_nonfinite(plain, fill(lowered, steps[0]), transport, cause) from cause
        if loss is not None and "losses" in spec.wants:
            return result._replace(loss=loss[0].clone(), losses=loss[1:].clone()), timeline
        return result._replace(loss=loss), timeline


_RETRACES = 8  # so many forms are unusual enough for a warning


class CacheInfo(NamedTuple):
    """Count the use of a step function's cache, as ``functools.lru_cache`` does."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Entry(NamedTuple):
    """Keep a compiled step with the conditions under which it may run.

    Its stages read values beside their arguments; it runs while these are as they were.

    Args:
        form: form of the arguments of the last call that ran it.
        agreed: the facts that the ranks agreed on for it.
        layouts: layouts of its DTensors.
        states: state of the values that stages read, with the watch that reads it.
        ambient: state of torch, such as autocast.
        mode: mode of all modules.
        changed: values that have changed since the first step, in JSON, to compare with other ranks.
        compiled: the step; None if it is lowered alone.
    """

    form: StepForm
    agreed: Agreed
    layouts: LaidOut
    states: tuple[tuple[Watch, State], ...]
    ambient: tuple[Hashable, ...]
    mode: Mode
    changed: Mapping[str, str]
    compiled: CompiledStep | None = None

    @classmethod
    def of(
        cls,
        form: StepForm,
        agreed: Agreed,
        lowered: LoweredStep,
        programs: StagePrograms,
        compiled: CompiledStep | None = None,
    ) -> Self:
        """Note the conditions of a step that is lowered now, for arguments of this form."""
        functions = {id(low.call.function): low.call.function for low in lowered.stages.values()}
        states = dict(chain.from_iterable(map(programs.states, functions.values())))
        modules = {module for low in lowered.stages.values() for module in low.outline.modules}
        modes = {module.training for module in modules}
        mode: Mode = "mixed" if len(modes) != 1 else "training" if modes.pop() else "evaluation"
        changed = dict(chain.from_iterable(programs.changes(low.call) for low in lowered.stages.values()))
        layouts = lowered.form.laid_out()
        return cls(form, agreed, layouts, tuple(states.items()), ambient(), mode, changed, compiled)

    def holds(self) -> bool:
        """Tell whether the values that stages read are as noted."""
        return self.ambient == ambient() and all(watch.state() is state for watch, state in self.states)

    @property
    def changes(self) -> str:
        """Name the values that have changed, in words."""
        texts = chain.from_iterable(changes(then, watch.state()) for watch, then in self.states)
        torchs = [] if self.ambient == ambient() else ["another autocast, default dtype or mode of torch"]
        return ", ".join([*dict.fromkeys(texts), *torchs][:4])

    def require(self) -> None:
        """Raise ValueError where the values that stages read have changed."""
        if not self.holds():
            raise ValueError(
                f"what the stages read has changed since the step was lowered: {self.changes}; lower and"
                " compile it again"
            )


def _difference(now: StepForm, before: StepForm) -> str:
    """Name the first tree of other signature or strides than before, or other devices of the stages."""
    for name in {**now.trees, **before.trees}:
        tree, then = now.trees.get(name), before.trees.get(name)
        if tree is None or then is None or (tree.signature, tree.strides) != (then.signature, then.strides):
            got, known = (each.signature if each else "none" for each in (tree, then))
            memory = ", in memory of another layout" if got == known else ""
            return f"{name} is now {got}, it was {known}{memory}"
    same = now.devices == before.devices
    return "" if same else f"the stages are now on {now.devices}, they were on {before.devices}"


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
    """Warn once that a step function traces again and again, and name the change."""
    what = _difference(now, last.form) or f"{last.changes or 'a type or device of tensors'} changed"
    fixed = pipeline.programs.dynamic or not all(getattr(fn, "sizes_vary", True) for fn in pipeline.stages)
    varying = "" if fixed else "let sizes vary, engine=ppfunc.engines.graph(dynamic=True), "
    warn(
        f"{pipeline.spec.name} has been traced {_RETRACES} times, each for another form of its arguments, or"
        f" for other values that its stages read: {what}; {varying}pad batches to few shapes, give numbers"
        " that change as tensors, or use the functional engine"
    )
