"""Infer the rank of every stage and the chains of stages from a table of instructions.

A table says neither, so both are read off its compute instructions, in linear time and without
trusting a single number of it: a stage belongs to the rank that computes it (most often, where
ranks disagree), and the numbers of microbatches and of chains are those that the forwards fit best.
A wrong table so keeps its nearest meaning, and ``check`` names what is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import ScheduleError
from ..instruction import COMPUTE, Instruction, Op, microbatch_of
from ..schedule import Chain

Row = Sequence[Instruction | None]


def infer_layout(rows: Sequence[Row]) -> tuple[tuple[int, ...], tuple[Chain, ...]]:
    """Return placement and chains of the table ``rows``, one row per rank.

    Raises:
        ScheduleError: a rank or a stage has no compute, or the numbers of stages and microbatches
            need far more forwards than there are.
    """
    held = []
    forwards: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for rank, row in enumerate(rows):
        parts = _compute(row)
        if not parts:
            raise ScheduleError(rank, (0, 0), row[0], "its row computes nothing: expected at least one stage in every row")
        held.append(Counter([part.stage for part in parts]))
        forwards.update((part.stage, microbatch_of(part)) for part in parts if part.op is Op.F)
        others.update((part.stage, microbatch_of(part)) for part in parts if part.op is not Op.F)
    stages = 1 + max(map(max, held))
    placement = _placement(rows, held, stages)
    return placement, _chains(rows, stages, _microbatches(forwards or others), forwards)


def _compute(row: Row) -> list[Instruction]:
    return [part for i in row if i is not None and i.op in COMPUTE for part in (i.parts or (i,))]


def _refuse(rows: Sequence[Row], wrong: Callable[[Instruction], bool], reason: str) -> None:
    """Raise the error for the first compute instruction that is ``wrong``."""
    for rank, row in enumerate(rows):
        for position, instruction in enumerate(row):
            for part in _compute([instruction]):
                if wrong(part):
                    raise ScheduleError(rank, (position, 0), instruction, f"stage or microbatch out of range: {reason}")


def _placement(rows: Sequence[Row], held: list[Counter[int]], stages: int) -> tuple[int, ...]:
    owners: dict[int, tuple[int, int]] = {}  # how often, then the rank, negative: the lowest of equals
    for rank, counts in enumerate(held):
        for stage, often in counts.items():
            owners[stage] = max(owners.get(stage, (0, 0)), (often, -rank))
    gap = next((stage for stage in range(stages) if stage not in owners), None)
    if gap is not None:
        _refuse(rows, lambda part: part.stage > gap, f"no rank computes stage {gap}, but stages have no gaps")
    return tuple(-owners[stage][1] for stage in range(stages))


def _microbatches(computed: set[tuple[int, int]]) -> int:
    """The number of microbatches for which least is missing below it and least stands out of range above it.

    Each microbatch is expected in as many stages as most are; of equals the largest number.
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


def _chains(rows: Sequence[Row], stages: int, microbatches: int, forwards: set[tuple[int, int]]) -> tuple[Chain, ...]:
    """The division into equal chains that the forwards contradict least.

    With k chains, chain j holds stages ``j*S/k`` to ``(j+1)*S/k - 1`` and the j-th of k equal
    ranges of microbatches; k is 1 unless another one leaves fewer forwards missing or out of place.
    """
    # Beyond this many missing forwards it is no schedule at all, and a proof would walk them all.
    too_many = 2 * len(forwards) + 1000
    best, least = 1, stages * microbatches - len(forwards)
    for count in range(2, stages + 1) if least else ():
        length, share = stages // count, microbatches // count
        divides = stages == length * count and microbatches == share * count
        if divides and stages * share - len(forwards) < min(least, too_many):
            outside = sum(stage // length != microbatch // share for stage, microbatch in forwards)
            missing = stages * share - (len(forwards) - outside)
            if outside + missing < least:
                best, least = count, outside + missing
    if least > too_many:
        reason = f"{stages} stages with {microbatches} microbatches need far more than the {len(forwards)} forwards there are"
        _refuse(rows, lambda part: part.microbatch == microbatches - 1, reason)
    length, share = stages // best, microbatches // best
    return tuple(Chain(tuple(range(j * length, (j + 1) * length)), range(j * share, (j + 1) * share)) for j in range(best))
