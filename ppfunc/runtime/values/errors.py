"""Define the errors of a running pipeline: which rank failed, where in its program, and why.

Ranks pass them to each other as texts.
"""

import json
from collections.abc import Callable
from typing import NamedTuple, Self

from ppfunc._checks import limited
from ppfunc.schedule import Instruction, parse_instruction, parts_of
from ppfunc.stage.errors import meant


class PipelineError(RuntimeError):
    """Raised if a step failed: nothing was returned and nothing was changed.

    Args:
        rank: the rank that failed first.
        position: index of the step in that rank's program, or None before the program began.
        instruction: the instruction that failed, or None outside the program.
        reason: the fault, in one sentence.
        reported_by: the rank that raises this error; by default the one that failed.
        gone: the process of the rank has ended or is out of reach, or it has closed its transport.
    """

    def __init__(
        self,
        rank: int,
        position: int | None,
        instruction: Instruction | None,
        reason: str,
        reported_by: int | None = None,
        gone: bool = False,
    ) -> None:
        self.rank = rank
        self.position = position
        self.instruction = instruction
        self.reason = reason
        self.reported_by = rank if reported_by is None else reported_by
        self.gone = gone
        super().__init__(self._message())

    def __reduce__(self) -> tuple:
        return type(self), (
            self.rank, self.position, self.instruction, self.reason, self.reported_by, self.gone,
        )  # fmt: skip

    @property
    def stage(self) -> int | None:
        """Return the stage of the failed instruction."""
        return None if self.instruction is None else self.instruction.stage

    @property
    def microbatch(self) -> int | None:
        """Return the microbatch of the failed instruction."""
        return None if self.instruction is None else self.instruction.microbatch

    def _message(self) -> str:
        if self.instruction is None:
            place = "outside its program"
        else:
            where = " or ".join(
                f"stage {part.stage}"
                + (f", microbatch {part.microbatch}" if part.microbatch is not None else "")
                for part in parts_of(self.instruction)
            )
            place = f"at {self.instruction}, step {self.position} of its program ({where})"
        seen = "" if self.reported_by == self.rank else f" [seen by rank {self.reported_by}]"
        return f"rank {self.rank} failed {place}: {self.reason}{seen}"


class AgreementError(RuntimeError):
    """Raised on every rank before a step begins if ranks were given different programs or batches."""


CLOSED = "got a call on a P2P() that has been closed; make a new one, on every rank"
OTHER = (
    "got a step while another step runs on the same P2P(); the order of their messages would differ between "
    "ranks: wait for the first, or make a P2P() for each thread, in the same order on every rank"
)
GONE = "its process is gone or out of reach, or it has closed its transport"


class StepRunning(RuntimeError):
    """Raised for a step that is called while another one runs on the same transport, which goes on."""

    refused = False  # whether `fail` has returned it


class Failure(NamedTuple):
    """Locate the failure of a rank: position and instruction are None outside the program.

    ``context`` says more about the instruction, such as the shapes that its stage was given.
    """

    rank: int
    position: int | None
    instruction: Instruction | None
    cause: BaseException
    context: str = ""

    @property
    def reason(self) -> str:
        """Describe the cause: its type, its message, and the context, each of a bounded length."""
        try:
            message, mend = str(self.cause), meant(self.cause)
        except Exception:
            message, mend = "(its message cannot be had)", ""
        said = f": {limited(message)}" if message else ""
        said = said.removesuffix(".") if self.context else said  # which goes on with the sentence
        return f"{type(self.cause).__name__}{said}{limited(self.context)}{mend}"


class StepFailed(Exception):
    """Carries the place of a failure from the program to the caller, who publishes it to the peers.

    Args:
        context: ``context(failure)`` describes the arguments and the line of the user's code that failed.
        which: names the step of a call that runs several, as ``; in step 1 of 4, counted from 0``.
    """

    def __init__(self, failure: Failure, context: Callable[[Failure], str], which: str = "") -> None:
        self.failure, self.which, self._context = failure, which, context
        super().__init__(failure)

    def described(self) -> Failure:
        """Return the failure with its context."""
        return self.failure._replace(context=self._context(self.failure) + self.which)


class LinkError(ConnectionError):
    """Raised if a message cannot be received or sent.

    Args:
        peer: the rank at the other end.
        kind: ``"gone"`` if it can answer no more, ``"cut"`` if its link has failed and it may live,
            ``"late"`` if it did not answer in time, ``"failed"`` if a failure has been published.
        reason: fault, in a sentence.
    """

    def __init__(self, peer: int, kind: str, reason: str = GONE) -> None:
        self.peer, self.kind, self.reason = peer, kind, reason
        super().__init__(reason)


class FailureRecord(NamedTuple):
    """Hold a failure as ranks send it: the fields of PipelineError, or of AgreementError.

    ``kind`` is that of a LinkError; else ``"disagreement"`` or ``"error"``.
    """

    rank: int
    position: int | None
    instruction: str | None
    reason: str
    reporter: int
    kind: str

    @classmethod
    def of(
        cls,
        failure: Failure,
        reporter: int,
        suspect: Callable[[int], tuple[int, str]] = lambda peer: (peer, ""),
    ) -> Self:
        """Record a failure of rank ``reporter``; ``suspect`` finds the rank that holds up a late peer."""
        cause, place = failure.cause, failure.instruction and str(failure.instruction)
        if not isinstance(cause, LinkError) or cause.kind == "failed":
            kind = "disagreement" if isinstance(cause, AgreementError) else "error"
            reason = limited(str(cause)) if kind == "disagreement" else failure.reason
            return cls(failure.rank, failure.position, place, reason, reporter, kind)
        culprit, state = suspect(cause.peer) if cause.kind == "late" else (cause.peer, "")
        victim = "" if culprit == cause.peer else f", which waits for rank {culprit}"
        victim += state and f"; {state}"
        where = "" if place is None else f" (rank {failure.rank} was at {place}, step {failure.position})"
        return cls(culprit, None, None, f"{cause.reason}{victim}{where}", reporter, cause.kind)

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(*json.loads(text))

    def write(self) -> str:
        return json.dumps(self)

    def error(self, rank: int) -> AgreementError | PipelineError:
        """Make the error of this failure that ``rank`` raises."""
        if self.kind == "disagreement":
            return AgreementError(
                self.reason if rank == self.reporter else f"{self.reason} [found by rank {self.reporter}]"
            )
        instruction = None if self.instruction is None else parse_instruction(self.instruction)
        return PipelineError(self.rank, self.position, instruction, self.reason, rank, self.kind == "gone")
