"""Step functions: read the arguments, lower, compile and execute behind a cache, with all ranks in agreement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from ppfunc.schedule import Schedule, Timeline
from ppfunc.stage import Engine, Loss, Stage
from ppfunc.stage.interrupts import let_interrupts
from ppfunc.stage.tree import tree_leaves

from .analysis import Lowered
from .arguments import RawArguments, StepArguments, read_arguments
from .buffers import Buffers
from .cache import CacheInfo, Entry
from .compile import CompiledStep
from .compiled_steps import CompiledSteps
from .errors import Failure, PipelineError
from .exchange import Refrozen, is_of_refrozen
from .execute import StepFailed, describe_inputs
from .form import StepForm
from .functorch import transforming
from .losses import losses_of
from .nonfinite import require_finite
from .passes import execute_passes
from .record import Recorder, gather
from .results import StepResult, collect
from .rng import preserve_rng
from .spec import StepSpec
from .stage_programs import forget
from .ties import require_declared
from .transport import Transport

P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """Runs a step and caches its compiled programs by the form of the arguments.

    Args:
        stages, loss_fn: of the model; None for stages of other processes.
        schedule: proved, with communication placed.
        transport: carries messages between processes.
        engine: how a stage is differentiated.
        spec: what is wanted of a step.
        prepare: makes the arguments out of those of the call, or a list of those of several passes of the schedule; what it
            raises is told to all ranks.
        finish: makes the return value out of the results, of the last pass, and what ``prepare`` has made.
    """

    def __init__(
        self,
        stages: Sequence[Stage | None],
        loss_fn: Loss | None,
        schedule: Schedule,
        transport: Transport,
        engine: Engine,
        spec: StepSpec,
        prepare: Callable[P, Any],
        finish: Callable[[StepResult, Any], R],
    ) -> None:
        self.schedule, self.transport, self.spec = schedule, transport, spec
        self._stages, self._loss_fn, self._engine, self._prepare, self._finish = stages, loss_fn, engine, prepare, finish
        self._ranks = transport.local_ranks(schedule.ranks)
        self._local = tuple(sorted({stage for rank in self._ranks for stage in schedule.model_stages_of(rank)}))
        self.__signature__ = inspect.signature(prepare)  # for help() and editors
        if spec.finite:
            transport.collective("world")  # to be had before the transport connects
        self._memory: tuple[StepForm, list[int]] | None = None  # where parameters lay, in the last call in which they were looked at
        self._compiled = CompiledSteps(stages, loss_fn, schedule, transport, engine, spec, self._ranks, repr(self))

    def __repr__(self) -> str:
        return f"<step function {self.spec.name}, {self.schedule!r}, stages {', '.join(map(str, self._local))} here>"

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
            args, kwargs: as of a call. What is traced or compiled in a first call does not count, since it comes before.

        Returns:
            What a call returns, and the timeline of all ranks in seconds from the first call of a program on, on every
            rank; of the type that :func:`ppfunc.schedule.simulate` returns. Clocks of hosts are aligned by a handshake.

        Raises:
            As a call.
        """
        result, timeline = self._run(args, kwargs, Recorder())
        assert timeline is not None
        return result, timeline

    def _run(
        self, args: Any, kwargs: Any, recorder: Recorder | None = None, ready: Callable[[Sequence[StepArguments]], Entry] | None = None
    ) -> tuple[R, Timeline | None]:
        """Run one step, measured where there is a recorder; ``ready`` gives the compiled step, by default that of the cache.

        Over a transport between processes, interrupts act while stages run, are compiled or traced, and while this rank waits for
        peers that have not come to the end. With :class:`InProcess` they act anywhere. While a stage is traced, they act in its own
        Python, and between its operators.

        Where what is frozen has changed on some rank, which the others cannot know when they begin, all run it a second time. A rank
        that an interrupt of its own has ended before goes on with another step, which is refused.
        """
        ended = False
        try:
            with self.transport.hold_interrupts(later=True), _outside_inference_mode():
                try:
                    result, timeline, raw = self._attempt(args, kwargs, recorder, ready)
                except (Refrozen, PipelineError) as error:
                    if self.transport.compares_layouts or not is_of_refrozen(error):  # peers may be in a collective of a stage
                        raise
                    again = None if recorder is None else Recorder()
                    result, timeline, raw = self._attempt(args, kwargs, again, ready, ", once more")
                ended = True
                return self._finish(result, raw), timeline
        except BaseException:
            if ended:
                self.transport.lose_step()
            raise

    def _attempt(
        self, args: Any, kwargs: Any, recorder: Recorder | None, ready: Callable[[Sequence[StepArguments]], Entry] | None, which: str = "",
    ) -> tuple[StepResult, Timeline | None, Any]:  # fmt: skip
        """Run one step to its end on all ranks, or tell them that it has failed; returns what was prepared, too.

        Args:
            which: of several runs with the same arguments, as ranks compare it.
        """
        entry: Entry | None = None
        try:
            self._require_servable_under_transforms()
            raw = self._prepare(*args, **kwargs)
            passes = self._read_passes(raw if isinstance(raw, list) else [raw])
            entry = ready(passes) if ready else self._compiled.find(passes, ("recorded" if recorder else "run") + which)
            return *self._execute(entry, passes, recorder), raw
        except BaseException as raised:
            self._fail(self._failure(raised, entry))

    def _execute(self, entry: Entry, passes: Sequence[StepArguments], recorder: Recorder | None) -> tuple[StepResult, Timeline | None]:
        """Run a compiled step, and end it on all ranks."""
        update, parts = self.spec.update, entry.guards.agreed.parts
        compiled = entry.compiled if recorder is None else recorder.attach(entry.compiled)
        lowered = compiled.lowered
        buffers: Buffers | None = None
        self.transport.ready(entry.laid)
        try:
            # Under a torch.func transform from outside, that transform decides what is recorded.
            with torch.set_grad_enabled(torch.is_grad_enabled() and transforming()), _generators(passes[0]):
                with let_interrupts():
                    if update is not None:
                        passes, parts = update.begin(passes), {}  # it has the losses, and sums them over all pipelines
                    buffers = execute_passes(compiled, passes, self.transport)
                    if update is not None:
                        update.finish(buffers)
                    losses = losses_of(lowered, buffers) if parts else {}
                    result = collect(lowered, passes, buffers)
                    buffers = None
                    if self.spec.finite and update is None:
                        made = [*losses.values(), *tree_leaves((result.grads, result.input_grads))]
                        require_finite(made, entry.compiled, passes, self.transport)
                    timeline = None if recorder is None else gather(entry.compiled, recorder.intervals(), self.transport)
                return result._replace(loss=self.transport.end(losses, parts, entry.guards.mode())), timeline
        finally:
            buffers = None  # an error that is kept keeps this frame, and must not keep what it held

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lower the step for these arguments, and run nothing; where ranks are processes, every one calls it.

        Args:
            args, kwargs: as of a call. Tensors may be on the device meta, and trees may be signatures.
        """
        with self.transport.hold_interrupts():
            try:
                lowered, guards = self._compiled.lower(self._read(self._prepare(*args, **kwargs), None, abstract=True))
                self.transport.end({}, {})
            except BaseException as raised:
                self._fail(self._failure(raised, None))

        def runs(compiled: CompiledStep) -> Callable[P, R]:
            guards.require()
            ready = partial(self._compiled.reuse, Entry.of(compiled, guards))
            return lambda *args, **kwargs: self._run(args, kwargs, ready=ready)[0]

        return Lowered(lowered, self._engine, self.transport, runs)

    def cache_info(self) -> CacheInfo:
        """Count the calls that found their program compiled, and those that did not."""
        return self._compiled.info()

    def cache_clear(self) -> None:
        """Drop every compiled program, and what is kept of the stages' functions for other step functions."""
        self._compiled.clear()
        for fn in filter(None, self._stages):
            forget(fn)

    # -- one call --------------------------------------------------------------------------

    def _read(self, raw: RawArguments, known: StepArguments | None, *, abstract: bool = False) -> StepArguments:
        return read_arguments(raw, self.schedule, self._local, self._loss_fn is not None, known, abstract=abstract)

    def _read_passes(self, raw: Sequence[RawArguments]) -> Sequence[StepArguments]:
        """The arguments of every pass of the schedule, all of one form."""
        first = self._read(raw[0], self._compiled.last_arguments)
        passes = [first, *(self._read(other, first) for other in raw[1:])]
        for n, other in enumerate(passes):
            if other.form is not first.form:
                raise ValueError(f"inputs: pass {n} of the schedule has a batch of another form than pass 0; pad them to one form")
        if "grads" in self.spec.wants or (self.spec.update is not None and self.spec.update.unshard is None):
            self._require_declared(first)
        return passes

    def _require_declared(self, arguments: StepArguments) -> None:
        """Raise ValueError where parameters share memory and are not tied; where they lie as in the last call, that is known."""
        form, leaves = arguments.form, chain.from_iterable(arguments.params[stage] for stage in arguments.form.params)
        memory = None if transforming() else (form, list(map(torch.Tensor.data_ptr, leaves)))
        if memory is None or memory != self._memory:
            require_declared(arguments.params, form, self.spec.tied, self.spec.primal)
            self._memory = memory

    def _fail(self, failure: Failure) -> NoReturn:
        """Tell the peers of a failure, and raise."""
        cause = error = failure.cause
        try:
            error = self.transport.fail(failure)
            if error is cause or not isinstance(cause, Exception):
                raise cause from cause.__cause__  # an interrupt stays what it is
            raise error from cause
        finally:
            del failure, cause, error  # an error that is kept keeps this frame

    def _failure(self, raised: BaseException, entry: Entry | None) -> Failure:
        if not isinstance(raised, StepFailed) or entry is None:
            return Failure(self._ranks[0], None, None, raised)
        return raised.failure._replace(context=describe_inputs(raised.failure, entry.compiled.lowered))

    def _require_servable_under_transforms(self) -> None:
        if transforming() and self.spec.finite:
            raise ValueError(
                "got a step that raises where numbers are not finite, under a torch.func transform, which has none to read; "
                "make one with on_nonfinite='ignore'"
            )
        if transforming() and len(self._ranks) < self.schedule.ranks:
            raise ValueError(
                "got a step under a torch.func transform, whose ranks are in several processes, where the transform "
                "would end at each message; run it with InProcess(), or use ppfunc.jvp, hvp, gnvp, ensemble or per_sample_grad"
            )


def _outside_inference_mode() -> AbstractContextManager[object]:
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes


def _generators(arguments: StepArguments) -> AbstractContextManager[None]:
    """Restores the generators after a step that seeds them."""
    if arguments.seed is None:
        return nullcontext()
    return preserve_rng(device for device in arguments.form.devices.values() if device.type == "cuda")
