"""Rewrite the programs of a schedule, one rank at a time: take instructions or slots out of it, split and
merge backwards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import require_schedule
from ..instruction import COMMUNICATION, COMPUTE, SHARDING, TAIL, Instruction, Op, parts_of
from ..proof.order import in_order
from ..schedule import Program, Schedule, Step

Place = tuple[int, int]
"""Step, and place in the step."""
Insertions = Mapping[Place, Sequence[Instruction]]


def rewrite(schedule: Schedule, program_of: Callable[[Program], Iterable[Step]]) -> Schedule:
    """Return the schedule with each program replaced by ``program_of(program)``.

    Raises:
        ScheduleError: a value that is no schedule.
    """
    require_schedule(schedule)
    return replace(schedule, programs=tuple(tuple(program_of(program)) for program in schedule.programs))


def cross_out(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """Return the schedule without some instructions; a step that held nothing else is dropped."""

    def program_of(program: Program) -> Iterable[Step]:
        steps = ((step, tuple(i for i in step if not unwanted(i))) for step in program)
        return (new for old, new in steps if new or not old)

    return rewrite(schedule, program_of)


def insert(program: Program, before: Insertions, behind: Insertions) -> Program:
    """Write instructions before and behind those at some places: the step, and the place in it."""
    return tuple(
        tuple(
            new
            for place, i in enumerate(step)
            for new in (*before.get((number, place), ()), i, *behind.get((number, place), ()))
        )
        for number, step in enumerate(program)
    )


def remove_communication(schedule: Schedule) -> Schedule:
    """Cross out every SEND and RECV; a step that held nothing else is dropped.

    For a compute-only schedule without idle steps it undoes ``place_communication``.

    >>> from ppfunc.schedule import gpipe, place_communication
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> remove_communication(place_communication(schedule)) == schedule
    True
    """
    return cross_out(schedule, lambda i: i.op in COMMUNICATION)


def remove_tail(schedule: Schedule) -> Schedule:
    """Cross out REDUCE_TIED, REDUCE_GRAD and STEP: undoes ``append_tail``.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> remove_tail(append_tail(gpipe(ranks=1, microbatches=1))) == gpipe(ranks=1, microbatches=1)
    True
    """
    return cross_out(schedule, lambda i: i.op in TAIL)


def remove_unshards(schedule: Schedule) -> Schedule:
    """Cross out UNSHARD and RESHARD: undoes ``insert_unshards``.

    >>> from ppfunc.schedule import gpipe, insert_unshards
    >>> remove_unshards(insert_unshards(gpipe(ranks=1, microbatches=1))) == gpipe(ranks=1, microbatches=1)
    True
    """
    return cross_out(schedule, lambda i: i.op in SHARDING)


def remove_slots(schedule: Schedule) -> Schedule:
    """Return the schedule without slots; passes that add instructions begin with this.

    >>> from ppfunc.schedule import allocate_slots, gpipe
    >>> remove_slots(allocate_slots(gpipe(ranks=2, microbatches=2))) == gpipe(ranks=2, microbatches=2)
    True
    """
    require_schedule(schedule)
    if not schedule.has_slots:
        return schedule
    return rewrite(schedule, lambda program: (tuple(map(_bare, step)) for step in program))


def compute_only(schedule: Schedule) -> Schedule:
    """Keep the compute of ``schedule``, as builders write it; a step without any becomes an idle one.

    All residuals are kept then: nothing is computed again.

    >>> from ppfunc.schedule import deepspeed_train
    >>> print(*compute_only(deepspeed_train(ranks=2, microbatches=1)).instructions(1))
    1F0 1B0
    """
    kept = COMPUTE - {Op.RECOMPUTE}
    return remove_slots(
        rewrite(schedule, lambda program: (tuple(i for i in step if i.op in kept) for step in program))
    )


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the loads and forwards in their order, without communication: the schedule for evaluation.

    Equivalent to: cross out every backward, reduction and message; an overlapped pair leaves its forward.
    """
    kept = rewrite(schedule, lambda program: filter(None, map(_forwards, program)))
    return replace(kept, name=f"{schedule.name} (forward only)")


def _bare(instruction: Instruction) -> Instruction:
    return instruction._replace(slot=None, parts=tuple(map(_bare, instruction.parts)))


def _forwards(step: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(part for i in step for part in parts_of(i) if part.op in (Op.F, Op.LOAD))


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
