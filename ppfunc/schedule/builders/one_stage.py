"""Build schedules of one stage per rank: GPipe, 1F1B, ZB-H1, ZB-H2, inference, the streams of DeepSpeed.

Their orders, and the form of a schedule of one chain, serve other builders as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.placement import Placement, loop

from ..instruction import TAIL, B, F, I, Instruction, Op, W
from ..schedule import Chain, Schedule, Step, single_chain


@naming_arguments
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards, both in the order of the microbatches.

    Bubble time ``(p - 1)(F + B)``; ``m`` live activations on every rank.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(gpipe(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
    rank 1   .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
    rank 2   .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    return rank_by_rank(
        "gpipe",
        loop(ranks),
        ranks,
        microbatches,
        lambda r: (op(r, m) for op in (F, B) for m in range(microbatches)),
    )


@naming_arguments
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Run warm-up forwards by distance from the last rank, then forward and backward in turn.

    Bubble time ``(p - 1)(F + B)``, of the makespan ``(p - 1) / (m + p - 1)``; at most
    ``min(p - r, m)`` live activations on rank r.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(one_f_one_b(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1 0F4 0B2  .  0B3  .  0B4
    rank 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2 1F4 1B3  .  1B4  .
    rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4  .   .

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Narayanan et al., PipeDream-flush (arXiv:2006.09503), section 2; Fan et al., DAPPLE, PPoPP 2021.
    """

    def program_of(r: int) -> Iterator[Instruction]:
        walk = range(microbatches)
        return alternate([F(r, m) for m in walk], [[B(r, m)] for m in walk], ranks - 1 - r)

    return rank_by_rank("1f1b", loop(ranks), ranks, microbatches, program_of)


@naming_arguments
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Run forwards and input gradients as in 1F1B; rank r starts weight gradients after r + 1 of them.

    Bubble time ``(p - 1)(F + I - W)`` where ``m >= p`` and W <= I; on every rank at most p
    activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zb_h1(ranks=3, microbatches=5)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.1.
    """
    return _zero_bubble("zb_h1", ranks, microbatches, 1)


@naming_arguments
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Double the warm-up of 1F1B, and delay weight gradients twice as long as ZB-H1: a parallelogram.

    Bubble time ``(p - 1)(F + I - 2W)`` of the span, none where F = I = W; at most ``2p - 1``
    activations wait for their W. The ranks end one after another: the optimizer step must not
    be a barrier, or the last rank's start is waited for.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zb_h2(ranks=3, microbatches=6)), end="")
    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5  .   .
    rank 1   .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5  .
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 2.2.
    """
    return _zero_bubble("zb_h2", ranks, microbatches, 2)


def _zero_bubble(name: str, ranks: int, microbatches: int, times: int) -> Schedule:
    """Warm up ``times`` as long as 1F1B, and delay weight gradients by ``times * r`` input gradients."""

    def program_of(r: int) -> Iterator[Instruction]:
        walk = range(microbatches)
        warm_up, delay = times * (ranks - 1 - r), times * r
        return delayed_weights([F(r, m) for m in walk], [(r, m) for m in walk], warm_up, delay)

    return rank_by_rank(name, loop(ranks), ranks, microbatches, program_of)


@naming_arguments
def inference(ranks: int, microbatches: int) -> Schedule:
    """Run the forwards of all microbatches in order, and no backward.

    Bubble time ``(p - 1)F``; nothing is kept for a backward.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(inference(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2 0F3  .   .
    rank 1   .  1F0 1F1 1F2 1F3  .
    rank 2   .   .  2F0 2F1 2F2 2F3

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965), section 2.3.
    """
    return rank_by_rank(
        "inference", loop(ranks), ranks, microbatches, lambda r: (F(r, m) for m in range(microbatches))
    )


def rank_by_rank(
    name: str,
    placement: Placement,
    ranks: int,
    microbatches: int,
    program_of: Callable[[int], Iterable[Instruction]],
) -> Schedule:
    """Make the schedule of one chain in which rank r runs ``program_of(r)``."""
    require_counts(microbatches=microbatches)
    return single_chain(name, placement, microbatches, map(program_of, range(ranks)))


def require(name: str, got: object, holds: bool, expected: str, mend: str) -> None:
    """Raise ValueError with the argument's name, value, what was expected and how to mend it."""
    if not holds:
        raise ValueError(f"{name} = {got!r}, expected {expected}: {mend}")


def alternate(
    forwards: Sequence[Instruction], backwards: Iterable[Sequence[Instruction]], warm_up: int
) -> Iterator[Instruction]:
    """Run ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    yield from forwards[:warm_up]
    for k, backward in enumerate(backwards):
        yield from forwards[warm_up + k : warm_up + k + 1]
        yield from backward


def delayed_weights(
    forwards: Sequence[Instruction], backwards: Sequence[tuple[int, int]], warm_up: int, delay: int
) -> Iterator[Instruction]:
    """Alternate forwards and input gradients, the weight gradients some input gradients late.

    Args:
        forwards: the forwards in order.
        backwards: ``(stage, microbatch)`` of the input gradients in order; the weight gradients follow it.
        warm_up: forwards before the first input gradient's own.
        delay: input gradients whose weight gradient is still to be done in the steady state.
    """
    late: list[list[Instruction]] = [[]] * delay + [[W(*backward)] for backward in backwards]
    pairs = zip(backwards, late, strict=False)
    yield from alternate(forwards, [[I(*backward), *weight] for backward, weight in pairs], warm_up)
    yield from (weight for weights in late[len(backwards) :] for weight in weights)


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
        "deepspeed_train", loop(ranks), (Chain(tuple(range(ranks)), range(microbatches)),), programs
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
        "deepspeed_inference", loop(ranks), (Chain(tuple(range(ranks)), range(microbatches)),), programs
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
    chains = tuple(Chain((r,), range(r * microbatches, (r + 1) * microbatches)) for r in range(ranks))
    programs = tuple(tuple(_accumulating_steps(r, chain.microbatches)) for r, chain in enumerate(chains))
    return Schedule("data_parallel", tuple(range(ranks)), chains, programs)


def _accumulating_steps(stage: int, microbatches: range) -> Iterator[Step]:
    for m in microbatches:
        tail = (
            (Instruction(Op.REDUCE_GRAD, stage), Instruction(Op.STEP, stage)) if m == microbatches[-1] else ()
        )
        yield (*(Instruction(op, stage, m, slot=0) for op in (Op.LOAD, Op.F, Op.B)), *tail)
