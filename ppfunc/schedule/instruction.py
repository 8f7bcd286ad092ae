"""Define operations and instructions of a schedule, and their text.

An operation is described once, by its row in :data:`KINDS`. Proof, simulation, passes, pictures, files and
the binding of a step read the row; the sets below it (``COMPUTE``, ``SENDS``, ``TAIL``, ...) follow from it.
A row says

* which **unit** of the rank is busy. Instructions of one unit run one after the other, in the order of
  the program; different units run at the same time. ``RANK`` computes, ``SEND`` and ``RECEIVE`` are links
  to other ranks, ``OUT`` and ``IN`` copy to the host and back, ``COLLECTIVE`` works with other pipelines or
  places. An instruction without a unit takes no time.
* which **values** flow: the inputs of a compute instruction, each a value (output or gradient) and the
  stages that make it (its ``OWN``, the stages ``BEFORE`` it or ``AFTER`` it along the edges), and its
  product. Edges belong to the schedule: an edge that shifts a value by microbatches, as a carry does, or one
  that joins two flows, changes what ``BEFORE`` and ``AFTER`` stand for in `dataflow`, and no row.
* which **states** it needs and gives: of the residuals and the data of a microbatch, and of the parameters
  of a stage. Only schedules with an instruction that brings about such a state have it, see `certificate`.
* how many **activations** it changes, and the shares of them that wait for W.
* whether it belongs to a **microbatch**, or to a stage as a whole.
* the name of its time in ``Costs``, its legend and colours in pictures, its name in DeepSpeed.

One instruction as text, of which all that ``torch.distributed.pipelining`` can write is a part::

    cell        = elementary | "(" F ";" (B or I) ")OVERLAP_F_B"
    elementary  = STAGE OP [MICROBATCH] [">" PEER] ["@" SLOT]

``>PEER`` names the stage at the other end of a message along a skip connection, or along one of several
edges of a stage, ``@SLOT`` the buffer that holds the value. Numbers are decimal, without sign or leading
zeros; there are no blanks.
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum, auto
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
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


class Unit(Enum):
    """The parts of a rank that work at the same time."""

    RANK = auto()
    SEND = auto()
    RECEIVE = auto()
    OUT = auto()
    IN = auto()
    COLLECTIVE = auto()


class Kind(NamedTuple):
    """Describe an operation: a row of the table in the module's docstring.

    Args:
        unit: part of the rank that is busy, None for an instruction that takes no time.
        label: words of the legend; empty for an operation that pictures leave out.
        colour: colour of its bars on a light page, ``#rrggbb``.
        dark: colour on a dark page; empty for the same colour.
        inputs: pairs (value, stages that make it).
        product: value that it computes. W and RECOMPUTE, which make no value for another instruction, have
            the value that they belong to.
        makes: whether it is the one that computes the product.
        needs: states that a thing must be in, by the name of the thing.
        gives: state that a thing is left in, by the name of the thing.
        held: change of the number of whole activations, and of shares that wait for W.
        microbatch: whether it belongs to one microbatch; else to a stage as a whole.
        cost: name of its time in ``Costs``, where that is not its token in small letters.
        deepspeed: name in DeepSpeed, if there is one.
    """

    unit: Unit | None
    label: str = ""
    colour: str = ""
    dark: str = ""
    inputs: tuple[tuple[int, int], ...] = ()
    product: int = 0
    makes: bool = False
    needs: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    gives: Mapping[str, str] = MappingProxyType({})
    held: tuple[int, int] = (0, 0)
    microbatch: bool = True
    cost: str = ""
    deepspeed: str = ""


OUTPUT, GRADIENT = 0, 1
OWN, BEFORE, AFTER = 0, -1, 1
_BACKWARD = ((OUTPUT, OWN), (GRADIENT, AFTER))
_USABLE = {"residuals": ("here", "back"), "parameters": ("whole",)}
_USED = {"residuals": "used up"}

KINDS = {
    Op.F: Kind(
        Unit.RANK,
        "forward",
        "#3f72d0",
        "#4477dd",
        inputs=((OUTPUT, BEFORE),),
        makes=True,
        needs={"residuals": ("not computed",), "data": ("loaded", "received"), "parameters": ("whole",)},
        gives={"residuals": "here"},
        held=(1, 0),
        cost="forward",
        deepspeed="ForwardPass",
    ),
    Op.B: Kind(
        Unit.RANK,
        "backward",
        "#23906c",
        "#23906c",
        inputs=_BACKWARD,
        product=GRADIENT,
        makes=True,
        needs=_USABLE,
        gives=_USED,
        held=(-1, 0),
        cost="backward",
        deepspeed="BackwardPass",
    ),
    Op.I: Kind(
        Unit.RANK,
        "input gradient",
        "#8a5cc8",
        "#9165d6",
        inputs=_BACKWARD,
        product=GRADIENT,
        makes=True,
        needs=_USABLE,
        held=(-1, 1),
        cost="backward_input",
    ),
    Op.W: Kind(
        Unit.RANK,
        "weight gradient",
        "#e5a62f",
        "#e5ad42",
        inputs=((GRADIENT, OWN),),
        product=GRADIENT,
        needs=_USABLE,
        gives=_USED,
        held=(0, -1),
        cost="backward_weight",
    ),
    Op.RECOMPUTE: Kind(
        Unit.RANK,
        "forward again",
        "#6a8fb8",
        inputs=((OUTPUT, OWN),),
        needs={"residuals": ("dropped",), "parameters": ("whole",)},
        gives={"residuals": "back"},
        held=(1, 0),
    ),
    Op.OFFLOAD: Kind(
        Unit.OUT,
        "copy to the host",
        "#b0568f",
        needs={"residuals": ("here",)},
        gives={"residuals": "away"},
        held=(-1, 0),
    ),
    Op.FETCH: Kind(
        Unit.IN,
        "copy from the host",
        "#4f8f3a",
        needs={"residuals": ("away",)},
        gives={"residuals": "back"},
        held=(1, 0),
    ),
    Op.OVERLAP_F_B: Kind(Unit.RANK, cost="overlapped"),
    Op.SEND_F: Kind(Unit.SEND, deepspeed="SendActivation"),
    Op.RECV_F: Kind(Unit.RECEIVE, deepspeed="RecvActivation"),
    Op.SEND_B: Kind(Unit.SEND, product=GRADIENT, deepspeed="SendGrad"),
    Op.RECV_B: Kind(Unit.RECEIVE, product=GRADIENT, deepspeed="RecvGrad"),
    Op.LOAD: Kind(None, needs={"data": ("missing",)}, gives={"data": "loaded"}, deepspeed="LoadMicroBatch"),
    Op.UNSHARD: Kind(
        Unit.COLLECTIVE,
        "gather of parameters",
        "#0f8c9b",
        needs={"parameters": ("sharded",)},
        gives={"parameters": "whole"},
        microbatch=False,
    ),
    Op.RESHARD: Kind(
        None, needs={"parameters": ("whole",)}, gives={"parameters": "sharded"}, microbatch=False
    ),
    Op.REDUCE_TIED: Kind(
        Unit.COLLECTIVE, "sum over tied places", "#7d6a4f", microbatch=False, deepspeed="ReduceTiedGrads"
    ),
    Op.REDUCE_GRAD: Kind(
        Unit.COLLECTIVE, "sum over data ranks", "#c04a4a", microbatch=False, deepspeed="ReduceGrads"
    ),
    Op.STEP: Kind(
        Unit.RANK,
        "optimizer step",
        "#5b6577",
        needs={"parameters": ("sharded",)},
        microbatch=False,
        deepspeed="OptimizerStep",
    ),
}
"""What each operation is; in the order of legends."""


def _ops(*units: Unit) -> frozenset[Op]:
    return frozenset(op for op, kind in KINDS.items() if kind.unit in units)


WHOLE_STAGE = frozenset(op for op, kind in KINDS.items() if not kind.microbatch)
COMPUTE = _ops(Unit.RANK) - WHOLE_STAGE
SENDS = _ops(Unit.SEND)
COMMUNICATION = SENDS | _ops(Unit.RECEIVE)
MOVES = _ops(Unit.OUT, Unit.IN)
# What runs beside compute, each unit one after the other, and holds up its rank only where it is used.
BESIDE = _ops(Unit.COLLECTIVE, Unit.IN)
ELEMENTARY = COMPUTE - {Op.OVERLAP_F_B}  # compute apart from pairs
WITHOUT_VALUE = frozenset(op for op in ELEMENTARY if not KINDS[op].makes)
# What takes residuals out of the way of a backward, and brings them back.
RESIDUAL_OPS = MOVES | {Op.RECOMPUTE}
# What ends a step of training, in its order.
TAIL = (Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP)
# What gathers the parameters of a stage, and frees them again.
SHARDING = WHOLE_STAGE.difference(TAIL)


class Instruction(NamedTuple):
    """One action of one rank at one place of its program.

    Args:
        op: the kind of instruction.
        stage: the stage it belongs to. A message is named by the stage that performs it:
            ``0SEND_F3`` meets ``1RECV_F3``.
        microbatch: the microbatch, or None for the instructions of a whole stage.
        peer: stage at the other end of a message along a skip connection, or along one of several edges;
            None where only one edge leads there, as in a chain.
        slot: the buffer that holds the value, once slots have been allocated.
        parts: forward and backward of an ``OVERLAP_F_B``, which run as one program;
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
    """Return the microbatch of an instruction that has a microbatch.

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


def elementary(program: Iterable[Iterable[Instruction]]) -> list[Instruction]:
    """List the instructions of a program in order, the parts of overlapped pairs apart."""
    parts = list(chain.from_iterable(program))
    return list(chain.from_iterable(map(parts_of, parts))) if any(map(itemgetter(5), parts)) else parts


_NUMBER = r"(0|[1-9][0-9]{0,39})"
_ELEMENTARY = re.compile(rf"{_NUMBER}([A-Z_]{{1,12}}){_NUMBER}?(?:>{_NUMBER})?(?:@{_NUMBER})?")
_OVERLAP = re.compile(r"\(([^();]{1,200});([^();]{1,200})\)OVERLAP_F_B")
_BY_TOKEN = {op.value: op for op in Op if op is not Op.OVERLAP_F_B}


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
    ppfunc.schedule.instruction.FormatError: '0F1junk' is not an instruction: ...

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
    if token not in _BY_TOKEN:
        raise FormatError(
            f"{shortened(text)} has the unknown operation {token}: expected one of {' '.join(_BY_TOKEN)}"
        )
    op = _BY_TOKEN[token]
    numbered = KINDS[op].microbatch
    if numbered == (microbatch is None):
        needs = "needs a microbatch" if numbered else "belongs to a whole stage: expected no microbatch"
        raise FormatError(f"{shortened(text)}: {token} {needs}")
    if peer is not None and op not in COMMUNICATION:
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
