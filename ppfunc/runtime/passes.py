"""Run the passes of a step over its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .arguments import StepArguments
from .buffers import Buffers
from .compile import CompiledStep
from .errors import StepFailed, in_pass
from .execute import execute, fill
from .nonfinite import NotFinite, located
from .transport import Transport


class Start(NamedTuple):
    """Where the passes of a step begin: their numbers among all passes, and the buffers of the one before, None for the first."""

    first: int
    before: Buffers | None

    @classmethod
    def of(cls, first: int, before: Buffers | None) -> Start:
        """As they are now; the states of stages are about to change."""
        if before is not None:
            before = Buffers(params=before.params, state=dict(before.state), scale=before.scale, update_state=before.update_state)
        return cls(first, before)


def execute_passes(compiled: CompiledStep, passes: Sequence[StepArguments], transport: Transport) -> Buffers:
    """Run the passes of a step; return the buffers of the last.

    Raises:
        StepFailed: with the place of the call that raised; where an update finds numbers that are not finite, of the first of them.
    """
    buffers: Buffers | None = None
    start = Start(0, None)
    for n, part in enumerate(passes):
        if compiled.lowered.spec.finite and (buffers is None or buffers.ends):
            start = Start.of(n, buffers)
        try:
            buffers = execute(compiled, fill(compiled.lowered, part, buffers))
        except StepFailed as failed:
            if not isinstance(failed.failure.cause, NotFinite):
                failed.which = in_pass(n, len(passes))
                raise
            again, cause = passes[start.first : n + 1], failed.failure.cause
            raise located(compiled, again, start.before, transport, cause, start.first, len(passes)) from failed.failure.cause
    assert buffers is not None
    return buffers
