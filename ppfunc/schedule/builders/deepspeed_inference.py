"""DeepSpeed's inference stream: forwards in lock step, two buffers, sends one step late."""

from __future__ import annotations

from collections.abc import Iterator

from ...parallel.placement import loop
from ..instruction import Instruction, Op
from ..schedule import Chain, Schedule, Step
from ._parts import require_counts


def deepspeed_inference(ranks: int, microbatches: int) -> Schedule:
    """Forward of microbatch ``step - r`` on rank r, in ``m + p - 1`` steps and two buffers.

    Even ranks send before they receive, odd ranks after; the first and the last rank load
    their part of the microbatch before the messages. Bubble time ``(p - 1)F``.

    >>> for program in deepspeed_inference(ranks=2, microbatches=2).programs:
    ...     print(" | ".join(" ".join(map(str, step)) or "-" for step in program))
    0LOAD0@0 0F0@0 | 0LOAD1@1 0SEND_F0@0 0F1@1 | 0SEND_F1@1
    - | 1LOAD0@0 1RECV_F0@0 1F0@0 | 1LOAD1@1 1RECV_F1@1 1F1@1

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        DeepSpeed, ``runtime/pipe/schedule.py``, InferenceSchedule.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    programs = tuple(tuple(_steps(r, ranks, microbatches)) for r in range(ranks))
    return Schedule("deepspeed_inference", loop(ranks), (Chain(tuple(range(ranks)), range(microbatches)),), programs)


def _steps(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    for step in range(microbatches + stages - 1):
        now = step - stage
        into = (step + stage % 2) % 2
        out = 1 - into
        send = (Op.SEND_F, now - 1, out, stage < stages - 1)
        receive = (Op.RECV_F, now, into, stage > 0)
        load = (Op.LOAD, now, into, stage in (0, stages - 1))
        messages = (receive, send) if stage % 2 else (send, receive)
        wanted = (load, *messages, (Op.F, now, into, True))
        yield tuple(Instruction(op, stage, m, slot=slot) for op, m, slot, holds in wanted if holds and 0 <= m < microbatches)
