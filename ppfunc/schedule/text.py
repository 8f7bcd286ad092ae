"""Read one instruction from text, the strict inverse of ``str(Instruction)``; write all in DeepSpeed's names.

The grammar, of which everything that ``torch.distributed.pipelining`` can write is a part::

    cell        = elementary | "(" F ";" (B or I) ")OVERLAP_F_B"
    elementary  = STAGE OP [MICROBATCH] [">" PEER] ["@" SLOT]

``UNSHARD RESHARD REDUCE_TIED REDUCE_GRAD STEP`` belong to a whole stage and have no microbatch
and no slot; every other operation has a microbatch. ``>PEER`` names the stage at the other end
of a message along a skip connection, ``@SLOT`` the buffer that holds the value. Numbers are
decimal, without sign or leading zeros; there are no blanks.
"""

import re

from ppfunc._checks import require_type

from .errors import require_schedule
from .instruction import COMMUNICATION, WHOLE_STAGE, Instruction, Op, overlap
from .schedule import Schedule

_NUMBER = r"(0|[1-9][0-9]{0,39})"
_ELEMENTARY = re.compile(rf"{_NUMBER}([A-Z_]{{1,12}}){_NUMBER}?(?:>{_NUMBER})?(?:@{_NUMBER})?")
_OVERLAP = re.compile(r"\(([^();]{1,200});([^();]{1,200})\)OVERLAP_F_B")
# Per token: the operation, whether it has a microbatch, whether it may have a peer.
_OPS = {op.value: (op, op not in WHOLE_STAGE, op in COMMUNICATION) for op in Op if op is not Op.OVERLAP_F_B}


class FormatError(ValueError):
    """Raised for text that is not a schedule, with the place, got and expected."""


def shortened(text: str, limit: int = 40) -> str:
    """Quote ``text`` for an error message, cut in the middle where it is long."""
    if len(text) <= limit:
        return repr(text)
    return f"{text[: limit // 2]!r}...{text[-limit // 4 :]!r} ({len(text)} characters)"


def parse_instruction(text: str) -> Instruction:
    """Return the instruction whose ``str`` is ``text``.

    >>> parse_instruction("2F0")
    Instruction(op=<Op.F: 'F'>, stage=2, microbatch=0, peer=None, slot=None, parts=())
    >>> str(parse_instruction("(0F3;3B1)OVERLAP_F_B"))
    '(0F3;3B1)OVERLAP_F_B'
    >>> parse_instruction("0F1junk")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ppfunc.schedule.text.FormatError: '0F1junk' is not an instruction: ...

    Raises:
        FormatError: ``text`` is not one whole instruction; nothing is guessed.
    """
    require_type("text", text, str, "the text of an instruction, such as '2F0'")
    if text.startswith("("):
        return _parse_overlap(text)
    match = _ELEMENTARY.fullmatch(text)
    if match is None:
        raise FormatError(
            f"{shortened(text)} is not an instruction: expected STAGE OP MICROBATCH such as 2F0 or 0SEND_F3"
        )
    stage, token, microbatch, peer, slot = match.groups()
    if token not in _OPS:
        raise FormatError(
            f"{shortened(text)} has the unknown operation {token}: expected one of {' '.join(_OPS)}"
        )
    op, numbered, message = _OPS[token]
    if numbered == (microbatch is None):
        needs = "needs a microbatch" if numbered else "belongs to a whole stage: expected no microbatch"
        raise FormatError(f"{shortened(text)}: {token} {needs}")
    if peer is not None and not message:
        raise FormatError(f"{shortened(text)}: only a message has a peer (>{peer}), {token} is none")
    if slot is not None and not numbered:
        raise FormatError(f"{shortened(text)}: {token} uses no buffer: expected no slot (@{slot})")
    return Instruction(op, int(stage), _integer(microbatch), _integer(peer), _integer(slot))


def _integer(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _parse_overlap(text: str) -> Instruction:
    match = _OVERLAP.fullmatch(text)
    if match is None:
        raise FormatError(
            f"{shortened(text)} is not an overlapped pair: expected a form such as (0F3;3B1)OVERLAP_F_B"
        )
    forward, backward = (parse_instruction(part) for part in match.groups())
    if forward.op is not Op.F or backward.op not in (Op.B, Op.I):
        raise FormatError(
            f"{shortened(text)}: expected a forward, then a backward (B or I), got {forward} and {backward}"
        )
    return overlap(forward, backward)


NAMES = {
    Op.F: "ForwardPass",
    Op.B: "BackwardPass",
    Op.SEND_F: "SendActivation",
    Op.RECV_F: "RecvActivation",
    Op.SEND_B: "SendGrad",
    Op.RECV_B: "RecvGrad",
    Op.LOAD: "LoadMicroBatch",
    Op.REDUCE_TIED: "ReduceTiedGrads",
    Op.REDUCE_GRAD: "ReduceGrads",
    Op.STEP: "OptimizerStep",
}


def to_steps(schedule: Schedule) -> str:
    """Write a schedule in the form of DeepSpeed's instruction streams: every rank, step by step.

    A line ``rank R``, then a line per step, its instructions separated by blanks, or ``-`` for an empty step.
    An operation on a buffer names its slot, as in ``ForwardPass(buffer_id=0)``; one without a slot names its
    microbatch, ``ForwardPass(micro_batch_id=3)``. What belongs to a whole stage has empty parentheses,
    ``OptimizerStep()``. On a rank that holds several stages each names its own,
    ``ForwardPass(stage_id=2, micro_batch_id=3)``. An operation that DeepSpeed has no name for keeps its
    token, ``0W3``.

    >>> from ppfunc.schedule import gpipe
    >>> print(to_steps(gpipe(ranks=1, microbatches=1)), end="")
    rank 0
    ForwardPass(micro_batch_id=0)
    BackwardPass(micro_batch_id=0)
    """
    require_schedule(schedule)
    lines = []
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}")
        several = len(schedule.stages_of(rank)) > 1
        lines += [" ".join(_name(i, several) for i in step) or "-" for step in program]
    return "\n".join(lines) + "\n"


def _name(instruction: Instruction, several: bool) -> str:
    if instruction.op not in NAMES:
        return str(instruction)
    arguments = [f"stage_id={instruction.stage}"] if several else []
    if instruction.slot is not None:
        arguments.append(f"buffer_id={instruction.slot}")
    elif instruction.op not in WHOLE_STAGE:
        arguments.append(f"micro_batch_id={instruction.microbatch}")
    return f"{NAMES[instruction.op]}({', '.join(arguments)})"
