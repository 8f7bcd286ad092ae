"""Data parallelism with gradient accumulation: every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator

from ..instruction import Instruction, Op
from ..schedule import Chain, Schedule, Step
from ._parts import B, F, require_counts


def data_parallel(ranks: int, microbatches: int) -> Schedule:
    """Load, forward and backward of one microbatch after another, each rank on its own share.

    Every rank is a chain of one stage: rank r holds the replica r of the model and works through
    ``m`` microbatches of its own, numbered from ``r * m``. The last step sums the gradients and
    updates. No bubble; one live activation; one buffer.

    >>> for program in data_parallel(ranks=2, microbatches=2).programs:
    ...     print(" | ".join(" ".join(map(str, step)) for step in program))
    0LOAD0@0 0F0@0 0B0@0 | 0LOAD1@0 0F1@0 0B1@0 0REDUCE_GRAD 0STEP
    1LOAD2@0 1F2@0 1B2@0 | 1LOAD3@0 1F3@0 1B3@0 1REDUCE_GRAD 1STEP

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches m of each rank.

    Raises:
        ValueError: an argument is below 1.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, DataParallelSchedule.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    chains = tuple(Chain((r,), range(r * microbatches, (r + 1) * microbatches)) for r in range(ranks))
    programs = tuple(tuple(_steps(r, chain.microbatches)) for r, chain in enumerate(chains))
    return Schedule("data_parallel", tuple(range(ranks)), chains, programs)


def _steps(stage: int, microbatches: range) -> Iterator[Step]:
    for m in microbatches:
        tail = (Instruction(Op.REDUCE_GRAD, stage), Instruction(Op.STEP, stage)) if m == microbatches[-1] else ()
        yield (Instruction(Op.LOAD, stage, m, slot=0), F(stage, m, slot=0), B(stage, m, slot=0), *tail)
