"""Read a schedule from a file of any form, CSV, JSON or Chrome trace, whatever the file may hold; write the
one that the runtime of ``torch.distributed.pipelining`` loads as ``compute_comms`` and runs.
"""

import stat
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from ..certificate import check
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, parts_of
from ..passes.rewrite import compute_only
from ..schedule import Schedule
from ..timeline import Timeline, simulate
from .csv import from_csv, to_csv
from .json import from_document, load
from .text import FormatError
from .trace import from_trace

LIMIT = 256 * 2**20


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule from a file, unchecked: JSON or a trace if it begins with ``{``, else CSV.

    Raises:
        OSError: the file cannot be read.
        FormatError: it is no text of these forms, no regular file, or larger than 256 MiB.
        ScheduleError: its numbers of stages and microbatches cannot be those of any schedule.
    """
    return parse(read_text(path), Path(path).stem)[0]


def parse(text: str, name: str) -> tuple[Schedule, Timeline | None]:
    """Read a schedule from text, and its times if the text is a trace.

    Raises as :func:`read_schedule`. A schedule whose text has no name gets ``name``.
    """
    if not text.strip():
        raise FormatError(
            "nothing is in it: expected a schedule, as `ppfunc show 1f1b --ranks 4 --microbatches 8 --format"
            " csv` writes one"
        )
    if text.startswith("rank 0"):
        raise FormatError(
            "a grid or a list of steps, which only people read: expected CSV or JSON (ppfunc show --format)"
        )
    if not text.lstrip().startswith("{"):
        return from_csv(text, name), None
    document = load(text)
    if "traceEvents" not in document:
        return from_document(document), None
    timeline = from_trace(document)
    return timeline.schedule, timeline


def read_text(path: str | PathLike[str]) -> str:
    """Read a regular file of text; raises as :func:`read_schedule`."""
    mode = Path(path).stat().st_mode
    # Opening a directory fails, opening a pipe can wait for ever.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FormatError(
            f"{path}: a pipe or a device, expected a file; ppfunc reads standard input where its file is"
            " called -"
        )
    with Path(path).open("rb") as file:
        return text_of(file, str(path))


def text_of(file: BinaryIO, name: str) -> str:
    """Read all of ``file``, called ``name`` in errors, within the limit of size."""
    data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise FormatError(f"{name}: larger than {LIMIT // 2**20} MiB: no schedule that can be run is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}: not text: byte {error.start} is not UTF-8") from None


_PLACED = COMMUNICATION | {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
_UNSHARDED = 3  # stages of a rank that have their whole parameters at one time, as in torch's own lowering
# In a moment of time messages come first, then the reductions of what has just ended, then what begins.
_MESSAGE, _REDUCTION, _COMPUTE = range(3)
_Item = tuple[float, int, int, Instruction]


def to_torch_csv(schedule: Schedule) -> str:
    r"""Return the CSV text with which torch's runtime computes the mean gradients over the microbatches.

    The order of the compute is that of ``schedule``. Everything else is placed anew: messages one by one, at
    both ends in the order in which they are made, which no communicator that all ranks share can block;
    REDUCE_GRAD, where torch divides by the number of microbatches (``scale_grads=True``) and reduces FSDP's
    gradients, after the last backward of its stage; UNSHARD and RESHARD, without which a stage under FSDP
    cannot compute, around the next three stages.

    Raises:
        ScheduleError: the schedule is wrong.
        ValueError: it has what torch's runtime cannot do: several chains, skip connections, no backward, or
            loads, offloads, sums of tied parameters and optimizer steps.

    >>> from ppfunc.schedule import gpipe
    >>> to_torch_csv(gpipe(ranks=2, microbatches=1)).splitlines()[0]
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
    return to_csv(lowered)


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
