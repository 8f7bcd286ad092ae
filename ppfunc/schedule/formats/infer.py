"""What a table of instructions implies: the rank of every stage, and the chains of stages.

A table says neither, so both are read off its compute instructions, in linear time and without
trusting a single number of it: a stage belongs to the rank that computes it (most often, where
ranks disagree), and the number of chains is the one that the microbatches fit best. A wrong table
so keeps its nearest meaning, and ``check`` names what is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..errors import ScheduleError
from ..instruction import COMPUTE, Instruction, Op, parts_of
from ..schedule import Chain

Row = Sequence[Instruction | None]


def infer_layout(rows: Sequence[Row]) -> tuple[tuple[int, ...], tuple[Chain, ...]]:
    """Placement and chains of the table ``rows``, one row per rank.

    Raises:
        ScheduleError: no assignment of stages to ranks exists, or a stage or microbatch number
            is larger than the number of instructions could ever need.
    """
    cells = sum(len(row) for row in rows)
    forwards = 0
    owners: dict[int, Counter[int]] = {}
    for rank, position, part in _compute(rows):
        _bounded(rank, position, part, cells)
        owners.setdefault(part.stage, Counter())[rank] += 1
        forwards += part.op is Op.F
    placement = _placement(rows, owners)
    for rank in sorted(set(range(len(rows))) - set(placement)):
        raise ScheduleError(rank, None, None, f"rank {rank} computes nothing: every row needs at least one stage")
    return placement, _chains(rows, len(placement), forwards)


def _compute(rows: Sequence[Row]) -> Iterator[tuple[int, int, Instruction]]:
    for rank, row in enumerate(rows):
        for position, instruction in enumerate(row):
            if instruction is not None and instruction.op in COMPUTE:
                for part in parts_of(instruction):
                    yield rank, position, part


def _bounded(rank: int, position: int, part: Instruction, cells: int) -> None:
    """Refuse numbers that would need more instructions than the whole table has."""
    for what, number in (("stage", part.stage), ("microbatch", part.microbatch or 0)):
        if number >= cells:
            raise ScheduleError(
                rank, (position, 0), part, f"{what} {number} is out of range: numbers begin at 0 and have no gaps, and a table of "
                f"{cells} cells has fewer than {cells} of them"
            )


def _placement(rows: Sequence[Row], owners: dict[int, Counter[int]]) -> tuple[int, ...]:
    highest = max(owners, default=-1)
    for stage in range(highest):
        if stage not in owners:
            rank, position, part = next(c for c in _compute(rows) if c[2].stage > stage)
            raise ScheduleError(rank, (position, 0), part, f"no rank computes stage {stage}, but this is stage {part.stage}")
    if highest < 0:
        raise ScheduleError(None, None, None, "the table holds no compute instruction")
    # The first of equals, so that the answer does not depend on the order of a dictionary.
    return tuple(min(owners[s], key=lambda rank, s=s: (-owners[s][rank], rank)) for s in range(highest + 1))


def _chains(rows: Sequence[Row], stages: int, forwards: int) -> tuple[Chain, ...]:
    """The division into equal chains that the forwards contradict least.

    With k chains, chain j holds stages ``j*S/k`` to ``(j+1)*S/k - 1`` and the j-th of k equal
    ranges of microbatches; k is 1 unless another one leaves fewer forwards missing or out of place.
    """
    present = Counter({(p.stage, p.microbatch) for _, _, p in _compute(rows) if p.op is Op.F})
    total = 1 + max((p.microbatch or 0) for _, _, p in _compute(rows))
    best, least = 1, stages * total - len(present)
    for count in (k for k in range(2, stages + 1) if stages % k == 0 and total % k == 0):
        length, share = stages // count, total // count
        outside = sum(stage // length != microbatch // share for stage, microbatch in present)
        missing = stages * share - (len(present) - outside)
        if outside + missing < least:
            best, least = count, outside + missing
    if least > 2 * len(present) + 1000:
        raise _far_too_few(rows, total, forwards)
    length, share = stages // best, total // best
    return tuple(
        Chain(tuple(range(j * length, (j + 1) * length)), range(j * share, (j + 1) * share)) for j in range(best)
    )


def _far_too_few(rows: Sequence[Row], total: int, forwards: int) -> ScheduleError:
    """The table names stages and microbatches whose product is far beyond its forwards."""
    rank, position, part = next(c for c in _compute(rows) if c[2].microbatch == total - 1)
    return ScheduleError(
        rank, (position, 0), part, f"microbatch {part.microbatch} needs a forward of it and of every one before it in each stage, "
        f"but the table has only {forwards} forwards"
    )
