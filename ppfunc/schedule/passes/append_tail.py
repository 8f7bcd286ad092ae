"""End a schedule with its reductions and the optimizer step."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import Instruction, Op
from ..schedule import Schedule, Step


def append_tail(schedule: Schedule, *, tied: bool | None = None, reduce_grad: bool = True, step: bool = True) -> Schedule:
    """Add one last step to every rank: the reductions and optimizer steps of all its stages.

    Equivalent to, on each rank::

        for stage in stages: sum the gradients of its tied parameters and replicas
        for stage in stages: sum the gradients over the data parallel ranks
        for stage in stages: step the optimizer

    Every stage gets each of them or none does: a stage in which nothing is tied has nothing to
    add to the sums. Replicas of a stage come in the order of their groups, so that no two ranks
    wait for each other in different sums.

    Args:
        tied: whether to write REDUCE_TIED; by default where the chains hold replicas of stages.
        reduce_grad: whether to write REDUCE_GRAD.
        step: whether to write STEP.

    >>> from ppfunc.schedule import gpipe
    >>> print(*append_tail(gpipe(ranks=1, microbatches=1), tied=True).programs[0][-1])
    0REDUCE_TIED 0REDUCE_GRAD 0STEP
    """
    tied = bool(schedule.replicas) if tied is None else tied
    ops = [op for op, wanted in ((Op.REDUCE_TIED, tied), (Op.REDUCE_GRAD, reduce_grad), (Op.STEP, step)) if wanted]
    group = {stage: number for number, stages in enumerate(schedule.replicas) for stage in stages}

    def tail(rank: int) -> Step:
        stages = sorted(schedule.stages_of(rank), key=lambda s: (group.get(s, s), s))
        return tuple(Instruction(op, stage) for op in ops for stage in stages)

    programs = ((*p, tail(rank)) if tail(rank) else p for rank, p in enumerate(schedule.programs))
    return replace(schedule, programs=tuple(programs))
