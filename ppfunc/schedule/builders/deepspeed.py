"""Build the instruction streams of DeepSpeed: training, inference, data parallelism."""

from collections.abc import Iterator, Sequence

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import loop

from ..instruction import TAIL, Instruction, Op
from ..schedule import Flow, Schedule, Step, by_place
from .loops import require


@naming_arguments
def deepspeed_train(ranks: int, microbatches: int, order: str = "source") -> Schedule:
    """Run 1F1B in ``2(m + p - 1)`` steps, forward where step and stage are both even or both odd.

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
    programs = tuple(tuple(_training_steps(r, ranks, microbatches, order == "head")) for r in range(ranks))
    return Schedule(
        "deepspeed_train", loop(ranks), (Flow(tuple(range(ranks)), range(microbatches)),), programs
    )


def _training_steps(stage: int, stages: int, microbatches: int, head: bool) -> Iterator[Step]:
    buffers = max(2, min(stages - stage + (not head), microbatches))
    last = 2 * (microbatches + stages - 1) - 1
    before = -1
    for step in range(last + 1):
        forward = (step - stage) % 2 == 0
        now = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        linked = stage > 0 if forward else stage < stages - 1
        give, take = (Op.SEND_B, Op.RECV_F) if forward else (Op.SEND_F, Op.RECV_B)
        messages = [(give, before, linked), (take, now, linked)]
        compute = [
            (Op.LOAD, now, forward and stage in (0, stages - 1)),
            (Op.F if forward else Op.B, now, True),
        ]
        wanted = (messages if forward == head else messages[::-1]) + compute
        numbered = (
            Instruction(op, stage, m, slot=m % buffers)
            for op, m, holds in wanted
            if holds and 0 <= m < microbatches
        )
        yield (*numbered, *(Instruction(op, stage) for op in TAIL if step == last))
        before = now


@naming_arguments
def deepspeed_inference(ranks: int, microbatches: int) -> Schedule:
    """Run the forward of microbatch ``step - r`` on rank r, in ``m + p - 1`` steps and two buffers.

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
    programs = tuple(tuple(_inference_steps(r, ranks, microbatches)) for r in range(ranks))
    return Schedule(
        "deepspeed_inference", loop(ranks), (Flow(tuple(range(ranks)), range(microbatches)),), programs
    )


def _inference_steps(stage: int, stages: int, microbatches: int) -> Iterator[Step]:
    for step in range(microbatches + stages - 1):
        now = step - stage
        into = (step + stage % 2) % 2
        out = 1 - into
        send = (Op.SEND_F, now - 1, out, stage < stages - 1)
        receive = (Op.RECV_F, now, into, stage > 0)
        load = (Op.LOAD, now, into, stage in (0, stages - 1))
        messages = (receive, send) if stage % 2 else (send, receive)
        wanted = (load, *messages, (Op.F, now, into, True))
        yield tuple(
            Instruction(op, stage, m, slot=slot)
            for op, m, slot, holds in wanted
            if holds and 0 <= m < microbatches
        )


@naming_arguments
def data_parallel(ranks: int, microbatches: int) -> Schedule:
    """Run load, forward and backward of one microbatch after another, each rank on its own share.

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
    chains = tuple(Flow((r,), range(r * microbatches, (r + 1) * microbatches)) for r in range(ranks))
    programs = tuple(tuple(_accumulating_steps(r, chain.microbatches)) for r, chain in enumerate(chains))
    return Schedule("data_parallel", tuple(range(ranks)), chains, programs, replicas=by_place(chains))


def _accumulating_steps(stage: int, microbatches: Sequence[int]) -> Iterator[Step]:
    for m in microbatches:
        tail = (
            (Instruction(Op.REDUCE_GRAD, stage), Instruction(Op.STEP, stage)) if m == microbatches[-1] else ()
        )
        yield (*(Instruction(op, stage, m, slot=0) for op in (Op.LOAD, Op.F, Op.B)), *tail)
