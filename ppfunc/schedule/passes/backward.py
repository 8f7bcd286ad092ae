"""Split whole backwards in their two parts, and merge the parts again."""

from collections.abc import Iterator

from ..instruction import Instruction, Op
from ..proof.order import in_order
from ..schedule import Program, Schedule, Step
from .rewrite import rewrite


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
    return rewrite(schedule, lambda program: _split_program(program, overlapped))


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


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace an I and the W of the same stage and microbatch by B where nothing stands between them.

    Equivalent to: wherever W directly follows its I in the instructions of a rank (in the same
    step or a later one), cross it out and turn I into B; a step that becomes empty is dropped.

    >>> from ppfunc.schedule import gpipe, split_backward
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> merge_backward(split_backward(schedule)) == schedule
    True
    """
    return rewrite(schedule, _merge_program)


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
    """Return ``before`` with its I turned into B, if that I is the one that ``weight`` belongs to."""
    if before.parts:
        backward = _merged(before.parts[1], weight)
        return None if backward is None else before._replace(parts=(before.parts[0], backward))
    same = (before.op, before.stage, before.microbatch) == (Op.I, weight.stage, weight.microbatch)
    return before._replace(op=Op.B) if same else None
