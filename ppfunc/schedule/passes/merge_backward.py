"""Merge the two parts of a backward where they follow each other."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import Instruction, Op
from ..schedule import Program, Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace an I and the W of the same stage and microbatch by B where nothing stands between them.

    Equivalent to: wherever W directly follows its I in the instructions of a rank (in the same
    step or a later one), cross it out and turn I into B; a step that becomes empty is dropped.

    >>> from ppfunc.schedule import gpipe, split_backward
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> merge_backward(split_backward(schedule)) == schedule
    True
    """
    return replace(schedule, programs=tuple(map(_merge_program, schedule.programs)))


def _merge_program(program: Program) -> Program:
    steps: list[list[Instruction]] = []
    last: tuple[int, int] | None = None  # step and place of the instruction before
    for step in program:
        steps.append([])
        for instruction in step:
            if instruction.op is Op.W and last is not None:
                merged = _merged(steps[last[0]][last[1]], instruction)
                if merged is not None:
                    steps[last[0]][last[1]] = merged
                    continue
            steps[-1].append(instruction)
            last = (len(steps) - 1, len(steps[-1]) - 1)
    return tuple(tuple(new) for new, old in zip(steps, program, strict=True) if new or not old)


def _merged(before: Instruction, weight: Instruction) -> Instruction | None:
    """``before`` with its I turned into B, if that I is the one that ``weight`` belongs to."""
    if before.parts:
        backward = _merged(before.parts[1], weight)
        return None if backward is None else before._replace(parts=(before.parts[0], backward))
    same = (before.op, before.stage, before.microbatch) == (Op.I, weight.stage, weight.microbatch)
    return before._replace(op=Op.B) if same else None
