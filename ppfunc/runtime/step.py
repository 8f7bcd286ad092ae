"""Run steps: read the arguments, lower, compile and execute behind a cache, with all ranks in agreement.

The rooms that lower, compile and execute are imported when a step function is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from ppfunc._checks import not_copied, with_arguments
from ppfunc.stage._torch import differentiating, load_tracer, transforming
from ppfunc.stage.device import on_device

from .lowering.lowered import Pipeline
from .lowering.results import StepResult
from .lowering.ties import require_declared
from .values.arguments import RawArguments, StepArguments, by_value, read_arguments, require_no_pair
from .values.errors import Failure, StepFailed
from .values.forms import StepForm, overlap

if TYPE_CHECKING:
    from ppfunc.schedule import Schedule, Timeline

    from .compiling.compile import CompiledStep
    from .compiling.compiled_steps import CacheInfo, Entry, Guards
    from .lowering.agreement import Agreed
    from .lowering.lowered import LoweredStep
    from .paper.analysis import LoweredFunction
    from .running.record import Recorder

P = ParamSpec("P")
R = TypeVar("R")


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
        from .compiling.compiled_steps import CompiledSteps
        from .running.execute import run_step

        load_tracer()
        self.pipeline, self._read, self._returned, self._run_step = pipeline, read, returned, run_step
        self.__signature__ = inspect.signature(read)  # for help() and editors
        if pipeline.spec.finite:
            pipeline.transport.collective("world")  # to be had before the transport connects
        self._stages = pipeline.model_stages
        # How the inputs are read of a model whose shapes are steered by the values of some of them.
        first = pipeline.stages[0] and inspect.unwrap(pipeline.stages[0])
        self._known, self._by_hand = getattr(first, "known", None), not hasattr(first, "known")
        # Form and addresses of the parameters that were last checked for shared memory.
        self._addresses: tuple[StepForm, list[int]] | None = None
        self._compiled = CompiledSteps(pipeline, repr(self))
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
        """Return the schedule that runs: proved, with its communication."""
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
            args, kwargs: as of a call. A first call traces and compiles before the times begin.

        Returns:
            The return value of a call, and on every rank the timeline of all ranks, in seconds from the first
            instruction. It has the type that :func:`ppfunc.schedule.simulate` returns. Clocks of hosts are
            aligned by a handshake.

        Raises:
            As a call.
        """
        from .running.record import Recorder

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
                find = find or partial(self._compiled.find, purpose="recorded" if recorder else "run")
                device = steps[0].form.accelerator
                with nullcontext() if device is None else on_device(device):
                    result, timeline = self._run_step(find(steps), steps, transport, recorder)
            except BaseException as raised:
                self._fail(raised)
            returned = self._returned(result), timeline
        transport.ended += 1  # an interrupt acts at its first line at the latest, and takes the step
        return returned

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> LoweredFunction:
        """Lower the step for these arguments, and run nothing; where ranks are processes, every one calls it.

        Args:
            args, kwargs: as of a call. Tensors may be on the device meta, and trees may be signatures.
        """
        from .compiling.compiled_steps import Entry
        from .lowering.comparison import laid_out
        from .paper.analysis import LoweredFunction

        _, lowered, agreed, guards = self._lower(args, kwargs)

        def runner(compiled: CompiledStep) -> Callable[P, R]:
            guards.require()
            entry = Entry(lowered.form, agreed, guards, compiled, laid_out(lowered.form))
            find = partial(self._compiled.reuse, entry)
            return lambda *args, **kwargs: self._run(args, kwargs, find=find)[0]

        return LoweredFunction(lowered, self.pipeline.programs, self.pipeline.transport, runner)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what a call returns, with all tensors on the device meta, and run nothing.

        Args:
            args, kwargs: as of :meth:`lower`.
        """
        from .paper.analysis import shapes_of

        arguments, lowered, agreed, _ = self._lower(args, kwargs)
        return self._returned(shapes_of(lowered, arguments, agreed.losses))

    def _lower(self, args: Any, kwargs: Any) -> tuple[StepArguments, LoweredStep, Agreed, Guards]:
        transport = self.pipeline.transport
        with transport.hold_interrupts():
            try:
                raw = self._read(*args, **kwargs)
                first = raw[0] if isinstance(raw, list) else raw
                arguments = self._read_arguments(first, None, abstract=True)
                lowered, agreed, guards = self._compiled.lower(arguments)
                transport.end({}, {})
            except BaseException as raised:
                self._fail(raised)
        transport.ended += 1
        return arguments, lowered, agreed, guards

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
        """Count the calls that found their program compiled, and those that did not."""
        return self._compiled.info()

    def cache_clear(self) -> None:
        """Drop every compiled program, and the evaluations and programs of the stages."""
        self._compiled.clear()

    # -- one call --------------------------------------------------------------------------

    def _read_arguments(
        self, raw: RawArguments, last: StepForm | None, *, abstract: bool = False
    ) -> StepArguments:
        with_targets, weights = self.pipeline.loss_fn is not None, self.pipeline.loss_weights
        if self._known is not None and raw.inputs is not None:
            raw = replace(raw, inputs=by_value(self._known, raw.inputs, self.schedule.microbatches))
        if with_targets and raw.targets is None and self._by_hand:
            require_no_pair(raw.inputs, self.schedule, self._stages)
        read = read_arguments(
            raw, self.schedule, self._stages, with_targets, last, weights, abstract=abstract
        )
        # Peers wait for the backward of a microbatch whose loss has no weight here.
        return replace(read, left_out=frozenset()) if self.pipeline.transport.mixes_batches else read

    def _read_steps(self, raw: RawArguments | list[RawArguments]) -> Sequence[StepArguments]:
        """Read the arguments of every step of the call, all of one form."""
        steps, entry = [], self._compiled.last
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
        if self.pipeline.spec.primal and differentiating():
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
            if error is cause or not isinstance(cause, Exception):
                raise cause from cause.__cause__  # an interrupt stays what it is
            raise error from cause
        finally:
            del raised, failure, cause, error  # an error that is kept keeps this frame


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
