"""The errors of a running pipeline: they say which rank failed, where in its program, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppfunc.schedule import Instruction, Op, parts_of
from ppfunc.stage.abstract import place as line_of

if TYPE_CHECKING:
    from .lower import LoweredStep
    from .transport import Failure


class PipelineError(RuntimeError):
    """A step failed: nothing was returned and nothing was changed.

    Args:
        rank: the rank that failed first.
        position: index of the step in that rank's program, or None before the program began.
        instruction: the instruction that failed, or None outside the program.
        reason: what went wrong, in one sentence.
        reported_by: the rank that raises this error, where it is not the one that failed.
    """

    def __init__(
        self,
        rank: int,
        position: int | None,
        instruction: Instruction | None,
        reason: str,
        reported_by: int | None = None,
    ) -> None:
        self.rank = rank
        self.position = position
        self.instruction = instruction
        self.reason = reason
        self.reported_by = rank if reported_by is None else reported_by
        super().__init__(self._message())

    def __reduce__(self) -> tuple:
        return type(self), (self.rank, self.position, self.instruction, self.reason, self.reported_by)

    @property
    def stage(self) -> int | None:
        """The stage of the failed instruction."""
        return None if self.instruction is None else self.instruction.stage

    @property
    def microbatch(self) -> int | None:
        """The microbatch of the failed instruction."""
        return None if self.instruction is None else self.instruction.microbatch

    def _message(self) -> str:
        if self.instruction is None:
            place = "outside its program"
        else:
            where = " or ".join(f"stage {part.stage}, microbatch {part.microbatch}" for part in parts_of(self.instruction))
            place = f"at {self.instruction}, step {self.position} of its program ({where})"
        seen = "" if self.reported_by == self.rank else f" [seen by rank {self.reported_by}]"
        return f"rank {self.rank} failed {place}: {self.reason}{seen}"


class AgreementError(RuntimeError):
    """The ranks of a pipeline were given different programs; raised on every rank before a step begins."""


def describe_inputs(failure: Failure, lowered: LoweredStep) -> str:
    """The line of the user's code that failed, and the shapes that the stage of a failed forward was given."""
    if failure.instruction is None or not isinstance(failure.cause, Exception):
        return ""
    line = line_of(failure.cause)
    for part in parts_of(failure.instruction):
        if part.op is Op.F and part.microbatch is not None:
            low = lowered.stages[part.stage, part.microbatch]
            params = lowered.form.params[lowered.schedule.model_stages[part.stage]]
            return f"{line}; its input was {', '.join(map(str, low.received))}, its parameters {params}"
    return line
