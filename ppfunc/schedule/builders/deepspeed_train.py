"""DeepSpeed's training stream: 1F1B in lock step, with loads, messages, buffers and reductions."""

from __future__ import annotations

from collections.abc import Iterator

from ...parallel.placement import loop
from ..instruction import Instruction, Op
from ..schedule import Chain, Schedule, Step
from ._parts import require, require_counts

TAIL = (Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP)


def deepspeed_train(ranks: int, microbatches: int, order: str = "source") -> Schedule:
    """1F1B in ``2(m + p - 1)`` steps, forward where step and stage are both even or both odd.

    The two orders of messages inside a step each go with their own number of buffers:
    ``source`` receives an activation before it sends a gradient and sends an activation before
    it receives a gradient, with ``max(2, min(p - r + 1, m))`` buffers on rank r; ``head`` has
    both the other way round, and ``max(2, min(p - r, m))``. Bubble ``(p - 1)/(m + p - 1)``.

    >>> for program in deepspeed_train(ranks=2, microbatches=1).programs:
    ...     print(" | ".join(" ".join(map(str, step)) or "-" for step in program))
    0LOAD0@0 0F0@0 | 0SEND_F0@0 | - | 0RECV_B0@0 0B0@0 0REDUCE_TIED 0REDUCE_GRAD 0STEP
    - | 1RECV_F0@0 1LOAD0@0 1F0@0 | 1B0@0 | 1SEND_B0@0 1REDUCE_TIED 1REDUCE_GRAD 1STEP

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.
        order: ``"source"`` or ``"head"``.

    Raises:
        ValueError: a count below 1, or another order.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, TrainSchedule, before and after pull request 2862.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("order", order, order in ("source", "head"), "'source' or 'head'", "name one of the two orders")
    programs = tuple(tuple(_steps(r, ranks, microbatches, order == "head")) for r in range(ranks))
    return Schedule("deepspeed_train", loop(ranks), (Chain(tuple(range(ranks)), range(microbatches)),), programs)


def _steps(stage: int, stages: int, microbatches: int, head: bool) -> Iterator[Step]:
    buffers = max(2, min(stages - stage + (not head), microbatches))
    last = 2 * (microbatches + stages - 1) - 1
    before = -1
    for step in range(last + 1):
        forward = (step - stage) % 2 == 0
        now = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        linked = stage > 0 if forward else stage < stages - 1
        give, take = (Op.SEND_B, Op.RECV_F) if forward else (Op.SEND_F, Op.RECV_B)
        messages = [(give, before, linked), (take, now, linked)]
        compute = [(Op.LOAD, now, forward and stage in (0, stages - 1)), (Op.F if forward else Op.B, now, True)]
        wanted = (messages if forward == head else messages[::-1]) + compute
        numbered = (Instruction(op, stage, m, slot=m % buffers) for op, m, holds in wanted if holds and 0 <= m < microbatches)
        yield (*numbered, *(Instruction(op, stage) for op in TAIL if step == last))
        before = now
