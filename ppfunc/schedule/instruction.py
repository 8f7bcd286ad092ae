"""Define the instruction of a schedule: an operation, a stage, a microbatch."""

from enum import StrEnum
from typing import NamedTuple

from ppfunc._checks import require_counts, require_type


class Op(StrEnum):
    """The kinds of instruction; each value is the token of the text form.

    Where ``torch.distributed.pipelining`` has a token for the same thing, this is that token.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    LOAD = "LOAD"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    RECOMPUTE = "RECOMPUTE"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_TIED = "REDUCE_TIED"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.OVERLAP_F_B, Op.RECOMPUTE})
COMMUNICATION = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
# Copies of residuals to the host and back.
MOVES = frozenset({Op.OFFLOAD, Op.FETCH})
# What takes residuals out of the way of a backward, and brings them back.
RESIDUAL_OPS = MOVES | {Op.RECOMPUTE}
# The instructions of compute that make no value which another stage reads.
WITHOUT_VALUE = frozenset({Op.W, Op.RECOMPUTE})
# What ends a step of training, in its order.
TAIL = (Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP)
# What gathers the parameters of a stage, and frees them again.
SHARDING = frozenset({Op.UNSHARD, Op.RESHARD})
# These belong to a stage as a whole, so their text form has no microbatch.
WHOLE_STAGE = frozenset({*SHARDING, *TAIL})


class Instruction(NamedTuple):
    """One action of one rank at one place of its program.

    Args:
        op: the kind of instruction.
        stage: the stage it belongs to. A message is named by the stage that performs it:
            ``0SEND_F3`` meets ``1RECV_F3``.
        microbatch: the microbatch, or None for the instructions of a whole stage.
        peer: for a message along a skip connection, the stage at the other end; None where
            the other end is the stage's neighbour in its chain.
        slot: the buffer that holds the value, once slots have been allocated.
        parts: for ``OVERLAP_F_B``, the forward and the backward that run as one program;
            ``stage`` and ``microbatch`` then repeat those of the forward.

    >>> str(Instruction(Op.F, 2, 0))
    '2F0'
    >>> str(Instruction(Op.SEND_F, 0, 3, peer=2, slot=1))
    '0SEND_F3>2@1'
    """

    op: Op
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    slot: int | None = None
    parts: "tuple[Instruction, ...]" = ()

    def __str__(self) -> str:
        op, stage, microbatch, peer, slot, parts = self
        if parts:
            text = f"({';'.join(map(str, parts))}){op._value_}"
        elif microbatch is None:
            text = f"{stage}{op._value_}"
        else:
            text = f"{stage}{op._value_}{microbatch}"
        if peer is not None:
            text += f">{peer}"
        return text if slot is None else f"{text}@{slot}"


def F(stage: int, microbatch: int) -> Instruction:
    """Make the forward of a stage for a microbatch.

    >>> print(F(2, 0))
    2F0
    """
    return _compute(Op.F, stage, microbatch)


def B(stage: int, microbatch: int) -> Instruction:
    """Make the backward of a stage for a microbatch: the gradients of its input and parameters."""
    return _compute(Op.B, stage, microbatch)


def I(stage: int, microbatch: int) -> Instruction:  # noqa: E743 - the field's letter
    """Make the input gradient of a backward, which the stage before waits for."""
    return _compute(Op.I, stage, microbatch)


def W(stage: int, microbatch: int) -> Instruction:
    """Make the parameter gradients of a backward, at any time after ``I``."""
    return _compute(Op.W, stage, microbatch)


def _compute(op: Op, stage: int, microbatch: int) -> Instruction:
    if type(stage) is not int or type(microbatch) is not int or stage < 0 or microbatch < 0:
        require_counts(0, stage=stage, microbatch=microbatch)
    return Instruction(op, stage, microbatch)


def overlap(forward: Instruction, backward: Instruction) -> Instruction:
    """Join the forward of one microbatch and the backward of another (B, or I), to be run as one program.

    Raises:
        ValueError: ``forward`` is no F, or ``backward`` no B or I.

    >>> print(overlap(F(0, 3), B(3, 1)))
    (0F3;3B1)OVERLAP_F_B
    """
    for name, given, ops, example in (
        ("forward", forward, (Op.F,), "F(0, 3)"),
        ("backward", backward, (Op.B, Op.I), "B(3, 1)"),
    ):
        require_type(name, given, Instruction, f"an instruction such as {example}")
        if given.op not in ops:
            raise ValueError(f"{name}: got {given}, expected an instruction such as {example}")
    return Instruction(Op.OVERLAP_F_B, forward.stage, forward.microbatch, parts=(forward, backward))


def microbatch_of(instruction: Instruction) -> int:
    """Return the microbatch of an instruction that belongs to one.

    Raises:
        ValueError: an instruction of a whole stage.

    >>> microbatch_of(Instruction(Op.F, 0, 3))
    3
    """
    if instruction.microbatch is None:
        raise ValueError(f"got {instruction}, expected an instruction of one microbatch")
    return instruction.microbatch


def parts_of(instruction: Instruction) -> tuple[Instruction, ...]:
    """Return the elementary instructions in order: the parts of an overlapped pair, else itself.

    Raises:
        TypeError: not an instruction.
    """
    try:
        return instruction.parts or (instruction,)
    except AttributeError:
        raise TypeError(
            f"instruction: got {instruction!r}, expected an instruction such as F(0, 3)"
        ) from None
