"""Write and read the CSV form of ``torch.distributed.pipelining``: one row per rank, one instruction per
cell.

What torch has a token for comes out as torch's own file, compute only or with communication, and the files
of all its versions are read, blanks included. Everything else is written in the same grammar (see
:mod:`ppfunc.schedule.instruction`): ``0LOAD3 0OFFLOAD3 0FETCH3 0RECOMPUTE3 0REDUCE_TIED 0STEP``, the peer of
a skip connection as ``>PEER`` and a slot as ``@SLOT``.

* A cell is a step of its own, as torch runs it: the cells of one step stand in its order.
* A blank is an idle step. Only a file of nothing but compute may have blanks.
* The rank of a stage is the row that computes it, most often where rows disagree: ``check`` names what is
  wrong.
* Chains are those that the forwards contradict least. All stages work on all microbatches: one chain.
  Two chains, as in DualPipe, are stages ``0..p-1`` working on the first half of the microbatches and
  stages ``p..2p-1`` on the second half; k chains likewise, in k equal parts.
* Slices are told by a first line of one cell, ``slices=4``: a word of ours, without which each microbatch is
  a sequence.
* Skip connections are the edges that messages with ``>PEER`` travel.
* Waits, which torch has from 2.15 on (``0WAIT_SEND_F3``, ``0WAIT_REDUCE_GRAD``), stand behind what they wait
  for, one for each, and are in no schedule: when a rank waits for its sends follows from the messages, see
  :func:`~ppfunc.schedule.passes.running.send_completion`.
* The name is not in the file; a schedule that is read gets the name of its file.

torch divides the gradients by the number of microbatches where a ``REDUCE_GRAD`` stands, and nowhere
else: a file without that instruction gives it the sum over the microbatches.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import itemgetter

from ppfunc._checks import naming_arguments, require_type

from ..errors import ScheduleError, require_schedule
from ..instruction import (
    COMMUNICATION,
    COMPUTE,
    SENDS,
    FormatError,
    Instruction,
    Op,
    microbatch_of,
    parse_instruction,
    parts_of,
    shortened,
)
from ..passes.rewrite import compute_only
from ..passes.running import send_completion
from ..proof.certificate import check
from ..proof.timeline import Timeline, simulate
from ..schedule import Flow, Schedule, by_place

_Row = list[Instruction | None]
_UNITS = 10  # steps of idle time that an instruction may stand for
_ONCE = COMPUTE | COMMUNICATION
_AWAITED = SENDS | {Op.REDUCE_GRAD}
_WAIT = "WAIT_"
_SLICES = "slices="


@naming_arguments
def to_csv(schedule: Schedule, *, waits: bool = False) -> str:
    r"""Return the CSV text of ``schedule``: a row per rank, a cell per instruction.

    >>> from ppfunc.schedule import gpipe, place_communication
    >>> to_csv(gpipe(ranks=2, microbatches=2))
    '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    >>> to_csv(place_communication(gpipe(ranks=2, microbatches=1)), waits=True).splitlines()[0]
    '0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0'

    Args:
        schedule: a schedule, with ``waits`` one that ``check`` accepts.
        waits: whether a wait follows for every send, where ``send_completion`` says, and for every
            REDUCE_GRAD, at once: torch's runtime wants them from 2.15 on, and knows none before; a bool.

    Skip connections are told by their messages alone: place these before, or write JSON.

    Raises:
        ValueError: a schedule whose stages are no chains.
    """
    require_schedule(schedule)
    if not schedule.chained:
        raise ValueError(
            f"{schedule.name} is a graph of stages, of which CSV knows no edges and no replicas; write JSON"
        )
    rows = (",".join(_cells(schedule, rank, waits)) for rank in range(schedule.ranks))
    head = f"{_SLICES}{schedule.slices}\n" if schedule.slices else ""
    return head + "".join(row + "\n" for row in rows)


def _cells(schedule: Schedule, rank: int, waits: bool) -> Iterator[str]:
    idle = [""] if schedule.ops <= COMPUTE else []
    completed = send_completion(schedule, rank) if waits else {}
    for number, step in enumerate(schedule.programs[rank]):
        awaited = [i for i in step if waits and i.op is Op.REDUCE_GRAD] + completed.get(number, [])
        yield from [*map(str, step), *(str(i).replace(i.op, _WAIT + i.op) for i in awaited)] or idle


@naming_arguments
def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read the schedule that the CSV ``text`` describes; it is not yet checked.

    >>> from_csv("0F0,0B0\\n1F0,1B0\\n").placement
    (0, 1)
    >>> from_csv("0F0,0B0\\n1F0,1B0junk\\n")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ppfunc.schedule.instruction.FormatError: row 2 (rank 1), column 2: '1B0junk' is not an instruction: ...

    Args:
        text: the content of a file.
        name: the name of the schedule.

    Raises:
        FormatError: a cell that is not an instruction, with row and column (both from 1).
        ScheduleError: the numbers of stages and microbatches cannot be those of any schedule.
    """
    require_type("text", text, str, "the content of a file")
    slices, text = _sliced(text)
    rows = _rows(text)
    if not rows:
        raise FormatError("the text is empty: expected one row of instructions per rank")
    ops = {i.op for row in rows for i in row if i is not None}
    if not ops <= COMPUTE:
        _refuse_blanks(rows, min(op.value for op in ops - COMPUTE))
    instructions = sum(len(row) - row.count(None) for row in rows)
    for rank, row in enumerate(rows):
        if (blanks := row.count(None)) > _UNITS * instructions:
            raise FormatError(
                f"row {rank + 1} (rank {rank}): {blanks} blanks, far more than {instructions} instructions"
                " can take"
            )
    placement, flows = _layout(rows)
    programs = tuple(tuple(() if i is None else (i,) for i in row) for row in rows)
    skips = _skips(rows, len(placement))
    return Schedule(name, placement, flows, programs, skips, slices, by_place(flows))


def _sliced(text: str) -> tuple[int, str]:
    """Read the number of slices from the first line, if it gives a number, and return the lines below."""
    head, _, rest = text.partition("\n")
    if not head.startswith(_SLICES):
        return 0, text
    digits = head.removeprefix(_SLICES).strip().rstrip(",")  # with which a table is filled up
    if not re.fullmatch("[1-9][0-9]{0,8}", digits):
        raise FormatError(f"line 1: got {shortened(head)}, expected a number of slices, such as {_SLICES}4")
    return int(digits), rest


def _rows(text: str) -> list[_Row]:
    """Read the instructions of every row without the waits. A blank is read as None."""
    rows: list[_Row] = []
    seen: set[str] = set()
    unawaited: set[Instruction] = set()  # what no wait has followed yet, in the row
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise FormatError(f"row {len(rows) + 1} (rank {len(rows)}): not CSV: {error}") from None
        if cells is None:
            return rows
        if not any(cells):
            raise ScheduleError(
                len(rows), (0, 0), None, "its row is empty: expected at least one stage in every row"
            )
        row: _Row = []
        rows.append(row)
        unawaited.clear()
        for column, cell in enumerate(cells, 1):
            place = f"row {len(rows)} (rank {len(rows) - 1}), column {column}"
            instruction = _cell(cell.replace(_WAIT, "", 1), place) if cell else None
            if instruction is not None and _WAIT in cell:
                if instruction not in unawaited:
                    raise FormatError(
                        f"{place}: {cell!r} waits for {instruction}, which does not stand before it in its"
                        " row, or has a wait already"
                    )
                unawaited.remove(instruction)
                continue
            if instruction is not None and instruction.op in _AWAITED:
                unawaited.add(instruction)
            # Told here, and not by the proof, so that a file of nothing else takes no time.
            if instruction is not None and cell in seen and instruction.op in _ONCE:
                raise ScheduleError(len(rows) - 1, (len(row), 0), instruction, _first(rows, instruction))
            seen.add(cell)
            row.append(instruction)


def _cell(cell: str, place: str) -> Instruction:
    try:
        return parse_instruction(cell)
    except FormatError as error:
        raise FormatError(f"{place}: {error}") from None


def _first(rows: list[_Row], instruction: Instruction) -> str:
    rank = next(rank for rank, row in enumerate(rows) if instruction in row)
    return f"it is there twice, first on rank {rank}, step {rows[rank].index(instruction)}"


def _refuse_blanks(rows: list[_Row], token: str) -> None:
    for rank, row in enumerate(rows):
        if None in row:
            place = f"row {rank + 1} (rank {rank}), column {row.index(None) + 1}"
            raise FormatError(
                f"{place}: a blank, but only files of nothing but compute may have blanks: this has {token}"
            )


def _skips(rows: list[_Row], stages: int) -> tuple[tuple[int, int], ...]:
    """Collect the edges of messages that name their peer, each from its source stage."""
    edges = set()
    for rank, row in enumerate(rows):
        for position, i in enumerate(row):
            if i is not None and i.peer is not None:
                if max(i.stage, i.peer) >= stages:
                    reason = f"there are only {stages} stages: expected a peer from 0 to {stages - 1}"
                    raise ScheduleError(rank, (position, 0), i, reason)
                edges.add((i.stage, i.peer) if i.op in (Op.SEND_F, Op.RECV_B) else (i.peer, i.stage))
    return tuple(sorted(edges))


def _layout(rows: list[_Row]) -> tuple[tuple[int, ...], tuple[Flow, ...]]:
    """Infer placement and chains from the compute instructions, in linear time and trusting no number.

    A wrong table so keeps its nearest meaning, which ``check`` can refuse with a place.
    """
    held = []
    forwards: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for rank, row in enumerate(rows):
        parts = _compute(row)
        if not parts:
            raise ScheduleError(
                rank, (0, 0), row[0], "its row computes nothing: expected at least one stage in every row"
            )
        held.append(Counter([part.stage for part in parts]))
        forwards.update((part.stage, microbatch_of(part)) for part in parts if part.op is Op.F)
        others.update((part.stage, microbatch_of(part)) for part in parts if part.op is not Op.F)
    stages = 1 + max(map(max, held))
    placement = _placement(rows, held, stages)
    return placement, _chains(stages, _microbatches(forwards or others), forwards)


def _compute(row: _Row) -> list[Instruction]:
    return [part for i in row if i is not None and i.op in COMPUTE for part in parts_of(i)]


def _placement(rows: list[_Row], held: list[Counter[int]], stages: int) -> tuple[int, ...]:
    owners: dict[int, tuple[int, int]] = {}  # how often, then the rank, negative: the lowest of equals
    for rank, counts in enumerate(held):
        for stage, often in counts.items():
            owners[stage] = max(owners.get(stage, (0, 0)), (often, -rank))
    gap = next((stage for stage in range(stages) if stage not in owners), stages)
    for rank, row in enumerate(rows if gap < stages else ()):
        for position, instruction in enumerate(row):
            if any(part.stage > gap for part in _compute([instruction])):
                reason = (
                    f"stage out of range: no rank computes stage {gap}, but stages have no gaps; give a row"
                    " for each rank"
                )
                raise ScheduleError(rank, (position, 0), instruction, reason)
    return tuple(-owners[stage][1] for stage in range(stages))


def _microbatches(computed: set[tuple[int, int]]) -> int:
    """Infer the number M of microbatches from an incomplete file: minimise forwards missing below M plus
    forwards at or above M.

    Each microbatch is expected in as many stages as most are. Ties go to the larger M.
    """
    stages_of = Counter(microbatch for _, microbatch in computed)
    usual = max((often, stages) for stages, often in Counter(stages_of.values()).items())[1]
    best, least, below = 1, usual, 0
    for microbatch in sorted(stages_of):
        below += stages_of[microbatch]
        wrong = usual * (microbatch + 1) - 2 * below  # what is missing and what is above, but for a constant
        if wrong <= least:
            best, least = microbatch + 1, wrong
    return best


def _chains(stages: int, microbatches: int, forwards: set[tuple[int, int]]) -> tuple[Flow, ...]:
    """Choose the division into equal chains that the forwards contradict least.

    With k chains, chain j holds stages ``j*S/k`` to ``(j+1)*S/k - 1`` and the j-th of k equal
    ranges of microbatches; k is 1 unless another one leaves fewer forwards missing or out of place.
    """
    best, least = 1, stages * microbatches - len(forwards)
    for number in range(2, stages + 1) if least else ():
        length, share = stages // number, microbatches // number
        divides = stages == length * number and microbatches == share * number
        if divides and stages * share - len(forwards) < least:
            outside = sum(stage // length != microbatch // share for stage, microbatch in forwards)
            missing = stages * share - (len(forwards) - outside)
            if outside + missing < least:
                best, least = number, outside + missing
    length, share = stages // best, microbatches // best
    return tuple(
        Flow(tuple(range(j * length, (j + 1) * length)), range(j * share, (j + 1) * share))
        for j in range(best)
    )


_PLACED = COMMUNICATION | {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
_WAITING = (2, 15)  # the first torch that wants waits
_UNSHARDED = 3  # stages of a rank that have their whole parameters at one time, as in torch's own lowering
# In a moment of time messages come first, then the reductions of what has just ended, then what begins.
_MESSAGE, _REDUCTION, _COMPUTE = range(3)
_Item = tuple[float, int, int, Instruction]


@naming_arguments
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
    _require_torch(schedule)
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
        return tuple(map(int, version("torch").split(".")[:2])) >= _WAITING
    return True


def _require_torch(schedule: Schedule) -> None:
    more = sorted(op.value for op in schedule.ops - (COMPUTE - {Op.RECOMPUTE}) - _PLACED)
    if more:
        mend = "compute_only(schedule), or `ppfunc show --format csv`, leaves the compute"
        raise ValueError(f"{schedule.name} has {', '.join(more)}, which torch's runtime cannot read: {mend}")
    if len(schedule.flows) > 1 or not schedule.chained:
        raise ValueError(
            f"{schedule.name} has {len(schedule.flows)} chains of stages, torch's runtime runs one"
        )
    if schedule.skips:
        raise ValueError(
            f"{schedule.name} has skip connections such as {schedule.skips[0]}, which torch's runtime has not"
        )
    if schedule.slices:
        raise ValueError(f"{schedule.name} has slices with a carry, which torch's runtime has not")
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
    numbers, stages = count(), range(schedule.stages)
    after, before = (list(map(end, stages)) for end in (schedule.successor, schedule.predecessor))
    for rank, (instructions, ends) in enumerate(
        zip(map(schedule.instructions, range(schedule.ranks)), timeline.ends, strict=True)
    ):
        for instruction, end in zip(instructions, ends, strict=True):
            for op, stage, microbatch, *_ in parts_of(instruction):
                forward = op is Op.F
                peer = (after if forward else before)[stage]
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
