"""Run a compiled step to its end on all ranks, with buffers made for this step alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ppfunc.schedule import Timeline
from ppfunc.stage.interrupts import act_on_interrupts
from ppfunc.stage.tree import tree_leaves

from ..call.arguments import StepArguments
from ..call.results import StepResult, collect
from ..errors import Failure, StepFailed, in_step
from ..lowering.compile import CompiledStep
from ..lowering.compiled_steps import Entry
from ..transport.protocols import Transport
from .buffers import Buffers
from .fill import fill, losses_of
from .nonfinite import NotFinite, compare_finite, located
from .record import Recorder, gather
from .torch_state import preserve_rng, transforming


def run_step(
    entry: Entry, steps: Sequence[StepArguments], transport: Transport, recorder: Recorder | None = None
) -> tuple[StepResult, Timeline | None]:
    """Run a compiled step with the arguments of every step of the call; return once all ranks are at its end.

    Args:
        recorder: measures the step, whose timeline is returned.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    spec, losses_agreed = entry.compiled.lowered.spec, entry.agreed.losses
    compiled = entry.compiled if recorder is None else recorder.attach(entry.compiled)
    lowered = compiled.lowered
    transport.ready(entry.layouts)
    # Under a torch.func transform from outside, that transform decides what is recorded.
    with torch.set_grad_enabled(torch.is_grad_enabled() and transforming()), _generators(steps[0]):
        if (update := steps[0].update) is not None:
            weights = update.begin([arguments.loss_weights for arguments in steps])
            pairs = zip(steps, weights, strict=True)
            steps = [arguments._replace(loss_weights=share) for arguments, share in pairs]
            losses_agreed = {}  # the update has the losses, and sums them over all pipelines
        buffers = execute_steps(compiled, steps, transport)
        if update is not None:
            update.finish()
        losses = losses_of(lowered, buffers) if losses_agreed else {}
        result, compared = collect(lowered, steps, buffers), buffers.compared
        del buffers  # the step may run again
        if spec.finite and update is None:
            tensors = [*losses.values(), *tree_leaves((result.grads, result.input_grads))]
            compared = [compare_finite(tensors, entry.compiled, transport), *compared]
        timeline = None if recorder is None else gather(entry.compiled, recorder.intervals(), transport)
        try:
            loss = transport.end(losses, losses_agreed, entry.guards.mode, compared)
        except NotFinite as cause:  # on all ranks
            raise located(entry.compiled, steps[0], None, transport, cause) from cause
        if loss is not None and "losses" in spec.wants:
            return result._replace(loss=loss[0].clone(), losses=loss[1:].clone()), timeline
        return result._replace(loss=loss), timeline


def execute_steps(compiled: CompiledStep, steps: Sequence[StepArguments], transport: Transport) -> Buffers:
    """Run the steps of a call, each from the buffers of the one before; return the buffers of the last.

    Raises:
        StepFailed: with the place of the call that raised; where an update finds numbers that are not finite,
            of the first of them.
    """
    buffers: Buffers | None = None
    for n, arguments in enumerate(steps):
        before = buffers
        try:
            buffers = execute(compiled, fill(compiled.lowered, arguments, before))
        except StepFailed as failed:
            which = in_step(n, len(steps))
            if not isinstance(failed.failure.cause, NotFinite):
                failed.which = which
                raise
            cause = failed.failure.cause
            raise located(compiled, arguments, before, transport, cause, which) from cause
    assert buffers is not None
    return buffers


def execute(compiled: CompiledStep, buffers: Buffers) -> Buffers:
    """Run every call in turn.

    Args:
        compiled: what to run.
        buffers: the arguments, see :func:`fill`; hold the results afterwards.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    index = 0
    try:
        for index, call in enumerate(compiled.calls):  # noqa: B007
            act_on_interrupts()
            call(buffers)
    except BaseException as cause:
        place = compiled.places[index]
        # Without a name for the failure: its cause keeps this frame, and so the buffers.
        raise StepFailed(
            Failure(place.rank, place.position, place.instruction, cause), compiled.lowered.context_of
        ) from cause
    return buffers


def _generators(arguments: StepArguments) -> AbstractContextManager[None]:
    """Restore the generators after a step that seeds them."""
    if arguments.seed is None:
        return nullcontext()
    return preserve_rng(arguments.form.devices.values())
