"""Split whole backwards in their two parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..instruction import Instruction, Op
from ..proof.order import in_order
from ..schedule import Program, Schedule, Step


def split_backward(schedule: Schedule, *, overlapped: bool = False) -> Schedule:
    """Replace every B by I and then, in a step of its own, W.

    Equivalent to: after each instruction that holds a B, write the W of the same stage and
    microbatch, and turn that B into I. ``merge_backward`` undoes it.

    Args:
        overlapped: whether the backward of an overlapped pair is split too.

    >>> from ppfunc.schedule import gpipe
    >>> print(*split_backward(gpipe(ranks=1, microbatches=1)).instructions(0))
    0F0 0I0 0W0
    """
    programs = tuple(tuple(_split_program(program, overlapped)) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _split_program(program: Program, overlapped: bool) -> Iterator[Step]:
    for step in program:
        now: list[Instruction] = []
        for _, instruction in in_order(step):
            first, weight = _split(instruction, overlapped)
            now.append(first)
            if weight is not None:
                yield tuple(now)
                now = [weight]
        if now or not step:
            yield tuple(now)


def _split(instruction: Instruction, overlapped: bool) -> tuple[Instruction, Instruction | None]:
    if instruction.op is Op.B:
        return instruction._replace(op=Op.I), instruction._replace(op=Op.W)
    if overlapped and instruction.parts and instruction.parts[1].op is Op.B:
        forward, backward = instruction.parts
        return instruction._replace(parts=(forward, backward._replace(op=Op.I))), backward._replace(op=Op.W)
    return instruction, None
