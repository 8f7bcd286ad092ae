"""Run a compiled step, and end it on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ppfunc.schedule import Timeline
from ppfunc.stage.interrupts import let_interrupts
from ppfunc.stage.tree import tree_leaves

from .arguments import StepArguments
from .buffers import Buffers
from .cache import Entry
from .functorch import transforming
from .losses import losses_of
from .nonfinite import require_finite
from .passes import execute_passes
from .record import Recorder, gather
from .results import StepResult, collect
from .rng import preserve_rng
from .transport import Transport


def run_step(
    entry: Entry, passes: Sequence[StepArguments], transport: Transport, recorder: Recorder | None = None
) -> tuple[StepResult, Timeline | None]:
    """Run a compiled step with the arguments of every pass; return its results once all ranks have come to its end.

    Args:
        recorder: measures the step, whose timeline is returned.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    spec, parts = entry.compiled.lowered.spec, entry.guards.agreed.parts
    compiled = entry.compiled if recorder is None else recorder.attach(entry.compiled)
    lowered = compiled.lowered
    buffers: Buffers | None = None
    transport.ready(entry.laid)
    try:
        # Under a torch.func transform from outside, that transform decides what is recorded.
        with torch.set_grad_enabled(torch.is_grad_enabled() and transforming()), _generators(passes[0]):
            with let_interrupts():
                if spec.update is not None:
                    passes, parts = spec.update.begin(passes), {}  # it has the losses, and sums them over all pipelines
                buffers = execute_passes(compiled, passes, transport)
                if spec.update is not None:
                    spec.update.finish(buffers)
                losses = losses_of(lowered, buffers) if parts else {}
                result = collect(lowered, passes, buffers)
                buffers = None
                if spec.finite and spec.update is None:
                    made = [*losses.values(), *tree_leaves((result.grads, result.input_grads))]
                    require_finite(made, entry.compiled, passes, transport)
                timeline = None if recorder is None else gather(entry.compiled, recorder.intervals(), transport)
            return result._replace(loss=transport.end(losses, parts, entry.guards.mode())), timeline
    finally:
        buffers = None  # an error that is kept keeps this frame, and must not keep what it held


def _generators(arguments: StepArguments) -> AbstractContextManager[None]:
    """Restores the generators after a step that seeds them."""
    if arguments.seed is None:
        return nullcontext()
    return preserve_rng(device for device in arguments.form.devices.values() if device.type == "cuda")
