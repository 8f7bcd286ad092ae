"""Represent a schedule as one word of codes per rank, and time it.

Nothing is lost if microbatches take their turn in every operation of a stage. So an order is, per rank, a
word of *codes*: 3 s is F of stage s, 3 s + 1 its I, 3 s + 2 its W, and the k-th time that a code occurs it is
for microbatch k.

A *direction* reads such words forwards in time, or backwards from the end, where the last microbatch comes
first, I and W acquire memory and F releases it. What holds forwards and backwards is written once, for both.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from ..costs import Number
from ..instruction import Instruction, Op, parts_of
from ..schedule import Schedule, single_chain
from .problem import Objective, Problem

Word = list[int]
Order = tuple[Word, ...]
_LETTERS = (Op.F, Op.I, Op.W)
_CodeRules = tuple[int, Number, int, int]


class Direction(NamedTuple):
    """The rules of one direction of time, per code.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        rank: the rank that runs the code.
        duration: its time.
        source: the code whose product it consumes, -1 for none.
        latency: the time from the end of the source until the product is there.
        local: another code of the same rank that has to come first, -1 for none.
        change: memory held after it less that before it; what it acquires is there from its start, what it
            releases until its end.
        cap: memory of each rank.
        objective: what is to be short.
        begin: per rank, a start of its time that no order can beat.
        readers: the codes whose source it is, with their rank and latency.
        codes: per rank, its codes, those that release memory first.
    """

    ranks: int
    microbatches: int
    rank: list[int]
    duration: list[Number]
    source: list[int]
    latency: list[Number]
    local: list[int]
    change: list[int]
    cap: list[int]
    objective: Objective
    begin: list[Number]
    release: list[Number]
    readers: list[list[tuple[int, int, Number]]]
    codes: list[list[int]]


def directions(p: Problem) -> tuple[Direction, Direction]:
    """Return the rules forwards and backwards in time."""
    stages = range(len(p.place))
    last = len(stages) - 1
    early, late = _first_starts(p)

    def forward_rows(s: int) -> Iterable[_CodeRules]:
        yield 3 * (s - 1) if s else -1, p.down[s - 1] if s else 0, -1, p.held[s]
        yield (
            (3 * (s + 1) + 1, p.up[s + 1], -1, p.kept[s] - p.held[s])
            if s < last
            else (3 * s, 0, -1, p.kept[s] - p.held[s])
        )
        yield 3 * s + 1, 0, -1, -p.kept[s]

    def backward_rows(s: int) -> Iterable[_CodeRules]:
        yield (3 * (s + 1), p.down[s], -1, -p.held[s]) if s < last else (3 * s + 1, 0, -1, -p.held[s])
        yield (
            (3 * (s - 1) + 1, p.up[s], 3 * s + 2, p.held[s] - p.kept[s])
            if s
            else (3 * s + 2, 0, -1, p.held[s] - p.kept[s])
        )
        yield -1, 0, -1, p.kept[s]

    begin = early if p.objective == "span" else [0] * p.ranks
    forwards = _direction(p, (row for s in stages for row in forward_rows(s)), begin, [0] * p.ranks)
    return forwards, _direction(p, (row for s in stages for row in backward_rows(s)), [0] * p.ranks, late)


def _direction(
    p: Problem, rows: Iterable[_CodeRules], begin: list[Number], release: list[Number]
) -> Direction:
    """Build the rules of one direction of time from those of every code."""
    rank = [r for r in p.place for _ in _LETTERS]
    duration = [time for times in zip(p.forward, p.backward, p.weight, strict=True) for time in times]
    source, latency, local, change = (list(column) for column in zip(*rows, strict=True))
    readers: list[list[tuple[int, int, Number]]] = [[] for _ in rank]
    for code, other in enumerate(source):
        if other >= 0:
            readers[other].append((code, rank[code], latency[code]))
    codes: list[list[int]] = [[] for _ in range(p.ranks)]
    for code in sorted(range(len(rank)), key=change.__getitem__):
        codes[rank[code]].append(code)
    return Direction(
        p.ranks,
        p.microbatches,
        rank,
        duration,
        source,
        latency,
        local,
        change,
        list(p.cap),
        p.objective,
        begin,
        release,
        readers,
        codes,
    )


def _first_starts(p: Problem) -> tuple[list[Number], list[Number]]:
    """Return the earliest first start of each rank, forwards and backwards in time."""
    early: list[Number] = [0] * p.ranks
    now: Number = 0
    seen = set()
    for stage, rank in enumerate(p.place):
        if rank not in seen:
            early[rank] = now
            seen.add(rank)
        now += p.forward[stage] + p.down[stage]
    return early, [max(early) - e for e in early] if p.objective == "span" else [0] * p.ranks


class Timing(NamedTuple):
    """Hold the result of running an order: its value under the objective, and the end of every rank."""

    value: Number
    ends: list[Number]


def evaluate(d: Direction, order: Order) -> Timing | None:
    """Run every operation as early as the order lets it; None if the order deadlocks."""
    ends: list[list[Number]] = [[] for _ in d.rank]
    at = [0] * d.ranks
    free: list[Number] = [0] * d.ranks
    waiting: list[list[int]] = [[] for _ in d.rank]
    stack = list(range(d.ranks))
    while stack:
        rank = stack.pop()
        word, now = order[rank], free[rank]
        for place in range(at[rank], len(word)):
            code = word[place]
            mine, source = ends[code], d.source[code]
            if source >= 0:
                made = ends[source]
                if len(mine) >= len(made):
                    at[rank], free[rank] = place, now
                    waiting[source].append(rank)
                    break
                arrival = made[len(mine)] + d.latency[code]
                if arrival > now:
                    now = arrival
            now += d.duration[code]
            mine.append(now)
            if waiting[code]:
                stack += waiting[code]
                waiting[code] = []
        else:
            at[rank], free[rank] = len(word), now
    if any(place < len(word) for place, word in zip(at, order, strict=True)):
        return None
    if d.objective == "makespan":
        return Timing(max(free), free)
    return Timing(
        max(end - ends[word[0]][0] + d.duration[word[0]] for end, word in zip(free, order, strict=True)), free
    )


def fits(d: Direction, order: Order) -> bool:
    """Tell whether every rank stays within its cap."""
    for word, cap in zip(order, d.cap, strict=True):
        held = 0
        for code in word:
            held += d.change[code]
            if held > cap:
                return False
    return True


def order_of(schedule: Schedule) -> Order:
    """Read the order of a single-chain schedule, splitting B into I and W."""
    letters = {Op.F: (0,), Op.I: (1,), Op.W: (2,), Op.B: (1, 2)}
    parts = ((part for i in schedule.instructions(r) for part in parts_of(i)) for r in range(schedule.ranks))
    return tuple(
        [3 * i.stage + letter for i in row if i.op in letters for letter in letters[i.op]] for row in parts
    )


def schedule_of(p: Problem, order: Order, name: str = "plan") -> Schedule:
    """Write an order as a schedule."""
    return single_chain(name, p.place, p.microbatches, (_program(word) for word in order))


def _program(word: Sequence[int]) -> Iterable[Instruction]:
    numbers = [count() for _ in range(max(word) + 3)]
    return [Instruction(_LETTERS[code % 3], code // 3, next(numbers[code])) for code in word]
