"""Write the CSV file that the runtime of ``torch.distributed.pipelining`` loads as ``compute_comms`` and
runs.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import itemgetter

from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, parts_of
from ..passes.rewrite import compute_only
from ..proof.certificate import check
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .csv import to_csv

_PLACED = COMMUNICATION | {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
_WAITS = (2, 15)  # the first torch that wants waits
_UNSHARDED = 3  # stages of a rank that have their whole parameters at one time, as in torch's own lowering
# In a moment of time messages come first, then the reductions of what has just ended, then what begins.
_MESSAGE, _REDUCTION, _COMPUTE = range(3)
_Item = tuple[float, int, int, Instruction]


def to_torch_csv(schedule: Schedule, *, waits: bool | None = None) -> str:
    r"""Return the CSV text with which torch's runtime computes the mean gradients over the microbatches.

    The order of the compute is that of ``schedule``. Everything else is placed anew: messages one by one, at
    both ends in the order in which they are made, which no communicator that all ranks share can block;
    REDUCE_GRAD, where torch divides by the number of microbatches (``scale_grads=True``) and reduces FSDP's
    gradients, after the last backward of its stage; UNSHARD and RESHARD, without which a stage under FSDP
    cannot compute, around the next three stages. From torch 2.15 on its runtime wants waits for sends, which
    stand where :func:`send_completion` says, and for reductions, which follow at once.

    Args:
        schedule: a schedule, with or without communication.
        waits: whether waits are written, a bool; as the installed torch wants where none is given, or as the
            newest where torch is not installed.

    Raises:
        ScheduleError: the schedule is wrong.
        ValueError: it has what torch's runtime cannot do: several chains, skip connections, no backward, or
            loads, offloads, sums of tied parameters and optimizer steps.

    >>> from ppfunc.schedule import gpipe
    >>> to_torch_csv(gpipe(ranks=2, microbatches=1), waits=False).splitlines()[0]
    '0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD'
    """
    check(schedule)
    _refuse(schedule)
    schedule = compute_only(schedule)
    timeline = simulate(schedule)
    items = [list(_around_compute(schedule, rank, timeline)) for rank in range(schedule.ranks)]
    for time, number, sender, send, receiver, receive in _messages(schedule, timeline):
        items[sender].append((time, _MESSAGE, number, send))
        items[receiver].append((time, _MESSAGE, number, receive))
    orders = (sorted(of_rank, key=itemgetter(0, 1, 2)) for of_rank in items)
    lowered = replace(schedule, programs=tuple(tuple((item[-1],) for item in order) for order in orders))
    check(lowered)
    return to_csv(lowered, waits=_installed_waits() if waits is None else waits)


def _installed_waits() -> bool:
    """Tell whether the installed torch, which is not imported for it, wants waits in its files."""
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return tuple(map(int, version("torch").split(".")[:2])) >= _WAITS
    return True


def _refuse(schedule: Schedule) -> None:
    more = sorted(op.value for op in schedule.ops - (COMPUTE - {Op.RECOMPUTE}) - _PLACED)
    if more:
        mend = "compute_only(schedule), or `ppfunc show --format csv`, leaves the compute"
        raise ValueError(f"{schedule.name} has {', '.join(more)}, which torch's runtime cannot read: {mend}")
    if len(schedule.chains) > 1:
        raise ValueError(
            f"{schedule.name} has {len(schedule.chains)} chains of stages, torch's runtime runs one"
        )
    if schedule.skips:
        raise ValueError(
            f"{schedule.name} has skip connections such as {schedule.skips[0]}, which torch's runtime has not"
        )
    if schedule.forward_only:
        raise ValueError(f"{schedule.name} has no backward, torch's runtime needs one of every microbatch")


def _around_compute(schedule: Schedule, rank: int, timeline: Timeline) -> Iterator[_Item]:
    """Yield the compute of a rank, its reductions, and UNSHARD and RESHARD before the compute they serve."""
    compute = list(schedule.instructions(rank))
    numbers = count()
    left = {stage: 0 for stage in schedule.stages_of(rank)}
    for i in compute:
        for part in parts_of(i):
            left[part.stage] += part.op in (Op.B, Op.W)
    active: list[int] = []
    for instruction, start, end, wanted in zip(
        compute, timeline.starts[rank], timeline.ends[rank], _next_stages(compute), strict=True
    ):
        for stage in sorted(set(active) - set(wanted)):
            yield start, _COMPUTE, next(numbers), Instruction(Op.RESHARD, stage)
        for stage in wanted:
            if stage not in active:
                yield start, _COMPUTE, next(numbers), Instruction(Op.UNSHARD, stage)
        active = wanted
        yield start, _COMPUTE, next(numbers), instruction
        for part in parts_of(instruction):
            left[part.stage] -= part.op in (Op.B, Op.W)
            if part.op in (Op.B, Op.W) and not left[part.stage]:
                yield end, _REDUCTION, next(numbers), Instruction(Op.REDUCE_GRAD, part.stage)
    for stage in active:
        yield timeline.makespan, _COMPUTE, next(numbers), Instruction(Op.RESHARD, stage)


def _next_stages(compute: list[Instruction]) -> list[list[int]]:
    """List up to three stages used next, soonest first, before each instruction."""
    order: list[int] = []
    soonest = []
    for instruction in reversed(compute):
        used = [part.stage for part in parts_of(instruction)]
        order = list(dict.fromkeys([*used, *order]))
        soonest.append(order[:_UNSHARDED])
    return soonest[::-1]


def _messages(
    schedule: Schedule, timeline: Timeline
) -> Iterator[tuple[float, int, int, Instruction, int, Instruction]]:
    """Yield for every message: time, number, then rank and instruction at either end."""
    numbers = count()
    for rank, (instructions, ends) in enumerate(
        zip(map(schedule.instructions, range(schedule.ranks)), timeline.ends, strict=True)
    ):
        for instruction, end in zip(instructions, ends, strict=True):
            for op, stage, microbatch, *_ in parts_of(instruction):
                forward = op is Op.F
                peer = schedule.successor(stage) if forward else schedule.predecessor(stage)
                if op is Op.W or peer is None or schedule.placement[peer] == rank:
                    continue
                send, receive = (Op.SEND_F, Op.RECV_F) if forward else (Op.SEND_B, Op.RECV_B)
                other = schedule.placement[peer]
                yield (
                    end,
                    next(numbers),
                    rank,
                    Instruction(send, stage, microbatch),
                    other,
                    Instruction(receive, peer, microbatch),
                )
