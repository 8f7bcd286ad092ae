"""Step functions: read the arguments, lower, compile and execute behind a cache, with all ranks in agreement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from ppfunc.schedule import Schedule, Timeline
from ppfunc.stage import Engine, Loss, Stage

from .analysis import Lowered
from .arguments import RawArguments, StepArguments, read_arguments
from .cache import CacheInfo
from .compiled_steps import CompiledSteps, Ready
from .errors import Failure, PipelineError, Refrozen, StepFailed, is_of_refrozen
from .record import Recorder
from .refusals import PassRefusals, require_servable_under_transforms
from .results import StepResult
from .run import run_step
from .spec import StepSpec
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
        self._refusals = PassRefusals(spec)
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

    def _run(self, args: Any, kwargs: Any, recorder: Recorder | None = None, ready: Ready | None = None) -> tuple[R, Timeline | None]:
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
        self, args: Any, kwargs: Any, recorder: Recorder | None, ready: Ready | None, which: str = "",
    ) -> tuple[StepResult, Timeline | None, Any]:  # fmt: skip
        """Run one step to its end on all ranks, or tell them that it has failed; returns what was prepared, too.

        Args:
            which: of several runs with the same arguments, as ranks compare it.
        """
        try:
            require_servable_under_transforms(self.schedule, self.spec, self._ranks)
            raw = self._prepare(*args, **kwargs)
            passes = self._read_passes(raw if isinstance(raw, list) else [raw])
            entry = ready(passes) if ready else self._compiled.find(passes, ("recorded" if recorder else "run") + which)
            return *run_step(entry, passes, self.transport, recorder), raw
        except BaseException as raised:
            self._fail(raised)

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
                self._fail(raised)
        return Lowered(lowered, self._engine, self.transport, lambda compiled: self._running(self._compiled.reuse(compiled, guards)))

    def cache_info(self) -> CacheInfo:
        """Count the calls that found their program compiled, and those that did not."""
        return self._compiled.info()

    def cache_clear(self) -> None:
        """Drop every compiled program, and what is kept of the stages' functions for other step functions."""
        self._compiled.clear()

    # -- one call --------------------------------------------------------------------------

    def _read(self, raw: RawArguments, known: StepArguments | None, *, abstract: bool = False) -> StepArguments:
        return read_arguments(raw, self.schedule, self._local, self._loss_fn is not None, known, abstract=abstract)

    def _read_passes(self, raw: Sequence[RawArguments]) -> Sequence[StepArguments]:
        """The arguments of every pass of the schedule, all of one form."""
        first = self._read(raw[0], self._compiled.last_arguments)
        passes = [first, *(self._read(other, first) for other in raw[1:])]
        self._refusals.require(passes)
        return passes

    def _running(self, ready: Ready) -> Callable[P, R]:
        """Runs a step that was compiled by itself."""
        return lambda *args, **kwargs: self._run(args, kwargs, ready=ready)[0]

    def _fail(self, raised: BaseException) -> NoReturn:
        """Tell the peers of a failure, and raise."""
        failure = raised.described() if isinstance(raised, StepFailed) else Failure(self._ranks[0], None, None, raised)
        cause = error = failure.cause
        try:
            error = self.transport.fail(failure)
            if error is cause or not isinstance(cause, Exception):
                raise cause from cause.__cause__  # an interrupt stays what it is
            raise error from cause
        finally:
            del raised, failure, cause, error  # an error that is kept keeps this frame


def _outside_inference_mode() -> AbstractContextManager[object]:
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes
