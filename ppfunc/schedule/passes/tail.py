"""Write what ends a step of training into a schedule: the sums of gradients and the optimizer steps."""

from collections.abc import Collection
from dataclasses import replace

from ppfunc._checks import require_stages

from ..instruction import SHARDING, TAIL, Instruction, Op, parts_of
from ..proof.structure import require_schedule
from ..schedule import Program, Schedule, Step
from .rewrite import cross_out, insert, rewrite


def append_tail(
    schedule: Schedule,
    *,
    tied: bool | Collection[int] | None = None,
    reduce_grad: bool = True,
    step: bool = True,
) -> Schedule:
    """Add one last step to every rank: the reductions and optimizer steps of all its stages.

    Equivalent to, on each rank::

        for stage in stages: sum the gradients of its tied parameters and replicas
        for stage in stages: sum the gradients over the data parallel ranks
        for stage in stages: step the optimizer

    What a stage has already stays where it is, unless something is added that must come before it. Replicas
    of a stage come in the order of their groups, so that no two ranks wait for each other in different sums.

    Args:
        tied: the stages that get REDUCE_TIED, or whether all do: a stage in which nothing is tied has nothing
            to add to the sums. By default all where the chains hold replicas of stages, else none.
        reduce_grad: whether to write REDUCE_GRAD, in every stage.
        step: whether to write STEP, in every stage.

    Raises:
        ValueError: a tied stage that does not exist.

    >>> from ppfunc.schedule import gpipe
    >>> print(*append_tail(gpipe(ranks=1, microbatches=1), tied=True).programs[0][-1])
    0REDUCE_TIED 0REDUCE_GRAD 0STEP
    >>> print(append_tail(gpipe(ranks=2, microbatches=1), tied=[1], step=False))
    0F0 0B0 0REDUCE_GRAD
    1F0 1B0 1REDUCE_TIED+1REDUCE_GRAD
    """
    require_schedule(schedule)
    tied = bool(schedule.replicas) if tied is None else tied
    if isinstance(tied, bool):
        tied = range(schedule.stages) if tied else ()
    chosen = require_stages("tied", tied, schedule.stages)
    there = {
        (i.op, i.stage) for program in schedule.programs for step in program for i in step if i.op in TAIL
    }
    added: list[Instruction] = []
    group = {stage: number for number, stages in enumerate(schedule.replicas) for stage in stages}
    for stage in sorted(range(schedule.stages), key=lambda s: (group.get(s, s), s)):
        wanted = {Op.REDUCE_TIED: stage in chosen, Op.REDUCE_GRAD: reduce_grad, Op.STEP: step}
        ops = [op for op in TAIL if wanted[op] or (op, stage) in there]
        first = next((n for n, op in enumerate(ops) if (op, stage) not in there), len(ops))
        added += [Instruction(op, stage) for op in ops[first:]]
    tails = [
        tuple(i for op in TAIL for i in added if i.op is op and schedule.placement[i.stage] == r)
        for r in range(schedule.ranks)
    ]
    bare = cross_out(schedule, added.__contains__)
    return replace(
        bare, programs=tuple((*p, tail) if tail else p for p, tail in zip(bare.programs, tails, strict=True))
    )


def reduce_early(schedule: Schedule) -> Schedule:
    """Put every REDUCE_GRAD right behind the last backward of its stage, to overlap other compute.

    Equivalent to: cross out every REDUCE_GRAD; after the last B or W of each stage and the gathers that stand
    behind it, or after its REDUCE_TIED where that is later, write REDUCE_GRAD. A schedule without a backward
    stays as it is.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> print(reduce_early(append_tail(gpipe(ranks=1, microbatches=1))))
    0F0 0B0+0REDUCE_GRAD 0STEP
    """
    require_schedule(schedule)
    if schedule.forward_only:
        return schedule
    return rewrite(cross_out(schedule, lambda i: i.op is Op.REDUCE_GRAD), _with_reductions)


def _behind_unshards(step: Step, place: int) -> int:
    return next((n for n in range(place, len(step) - 1) if step[n + 1].op not in SHARDING), len(step) - 1)


def _with_reductions(program: Program) -> Program:
    last: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(program):
        for place, instruction in enumerate(step):
            for part in parts_of(instruction):
                if part.op in (Op.B, Op.W, Op.REDUCE_TIED):
                    last[part.stage] = (number, place)
        # Parameters that are gathered for the next compute come first.
        last |= {s: (n, _behind_unshards(step, place)) for s, (n, place) in last.items() if n == number}
    behind: dict[tuple[int, int], list[Instruction]] = {}
    for stage, position in sorted(last.items()):
        behind.setdefault(position, []).append(Instruction(Op.REDUCE_GRAD, stage))
    return insert(program, {}, behind)
