"""Represent a schedule as one word of items per rank, and time it.

Nothing is lost if microbatches take their turn in every operation of a stage. A *code* is an operation of a
stage: 5 s is F of stage s, 5 s + 1 the end of its copy to the host, 5 s + 2 the beginning of its copy back,
or F again, 5 s + 3 its I, 5 s + 4 its W; an *item* is a code for a microbatch, ``code * microbatches +
microbatch``. An order is a word of items per rank. Its items say what becomes of residuals: those of a
microbatch without 5 s + 2 stay, those with 5 s + 1 move, the others are computed again.

A *direction* reads such words forwards in time, or backwards from the end, where the last microbatch comes
first, what acquires memory releases it, and each item waits for those that wait for it forwards. What holds
forwards and backwards is written once, for both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import neg, sub
from typing import NamedTuple

from ..costs import Number
from ..instruction import Instruction, Op, parts_of
from ..schedule import Schedule, single_chain
from .problem import Objective, Problem

Word = list[int]
Order = tuple[Word, ...]
Choices = Mapping[tuple[int, int], Op]
"""By stage and microbatch, OFFLOAD or RECOMPUTE for residuals that do not stay."""
FORWARD, LEAVE, RETURN, INPUT, WEIGHT = LETTERS = range(5)
_Edge = tuple[int, int, Number, int]  # source, target, latency, link or -1


class Direction(NamedTuple):
    """The rules of one direction of time, per item or code.

    Args:
        codes: per rank, its codes, those that release memory first.
        code: of every item.
        first: the first item of every code, -1 for none.
        following: the next item of the same code, -1 for none.
        duration: the time of an item on its rank.
        readers: the items that wait for it, with their rank, the time until its product is there, and the
            link of their rank that carries it, -1 for none. A link carries one after the other.
        missing: for how many others it waits.
        change: memory held after it less that before it.
        need: memory held during it less that before it, at most.
        cap: memory of each rank.
        objective: what is to be short.
        begin: per rank, a start of its time that no order can beat.
        release: per rank, when it is free.
    """

    codes: list[list[int]]
    code: list[int]
    first: list[int]
    following: list[int]
    duration: list[Number]
    readers: list[list[tuple[int, int, Number, int]]]
    missing: list[int]
    change: list[int]
    need: list[int]
    cap: list[int]
    objective: Objective
    begin: list[Number]
    release: list[Number]

    @property
    def ranks(self) -> int:
        return len(self.codes)


def directions(p: Problem, choices: Choices = {}) -> tuple[Direction, Direction]:  # noqa: B006 - only read
    """Return the rules forwards and backwards in time."""
    early, late = _first_starts(p)
    begin, none = early if p.objective == "span" else [0] * p.ranks, [0] * p.ranks
    edges, rows = list(_edges(p, choices)), [(0, 0, 0)] * (5 * len(p.place) * p.microbatches)
    there = set[int]()
    for s, k, item in (
        (s, k, 5 * s * p.microbatches + k) for s in range(len(p.place)) for k in range(p.microbatches)
    ):
        for letter, row in zip(LETTERS, _rows(p, s, choices.get((s, k))), strict=True):
            if row is not None:
                rows[item + letter * p.microbatches] = row
                there.add(item + letter * p.microbatches)
    duration, change, need = map(list, zip(*rows, strict=True))
    turned = [(target, source, latency, link) for source, target, latency, link in edges]
    back = list(map(neg, change)), list(map(sub, need, change))
    return (
        _direction(p, sorted(there), edges, duration, change, need, begin, none),
        _direction(p, sorted(there, reverse=True), turned, duration, *back, none, late),
    )


def _rows(p: Problem, s: int, choice: Op | None) -> Iterator[tuple[Number, int, int] | None]:
    """Yield time, change and need of memory of each letter of a stage, None without such an item."""
    again, moves, held = choice is Op.RECOMPUTE, choice is Op.OFFLOAD, p.held[s]
    yield p.forward[s], p.stub[s] if again else held, held
    yield (0, -held, 0) if moves else None
    back = held - p.stub[s] if again else held
    yield (p.again[s] if again else 0, back, back) if choice else None
    yield p.backward[s], p.kept[s] - held, 0
    yield p.weight[s], -p.kept[s], 0


def _edges(p: Problem, choices: Choices) -> Iterator[_Edge]:
    """Yield which item waits for which, forwards."""
    m, last = p.microbatches, len(p.place) - 1
    for s in range(last + 1):
        f, leave, back, i, w = (range((5 * s + letter) * m, (5 * s + letter + 1) * m) for letter in LETTERS)
        for k in range(m):
            yield (f[k], f[k] + 5 * m, p.down[s], -1) if s < last else (f[k], i[k], 0, -1)
            if s:
                yield i[k], i[k] - 5 * m, p.up[s], -1
            yield i[k], w[k], 0, -1
            if choices.get((s, k)) is Op.OFFLOAD:
                yield f[k], leave[k], p.out[s], 0
                yield leave[k], back[k], 0, -1
                yield back[k], i[k], p.back[s], 1
            elif (s, k) in choices:
                yield f[k], back[k], 0, -1
                yield back[k], i[k], 0, -1


def _direction(
    p: Problem,
    items: Sequence[int],
    edges: Iterable[_Edge],
    duration: list[Number],
    change: list[int],
    need: list[int],
    begin: list[Number],
    release: list[Number],
) -> Direction:
    """Build the rules of one direction of time; ``items`` of a code are in its order."""
    m, count = p.microbatches, len(duration)
    first, following = [-1] * (count // m), [-1] * count
    latest: dict[int, int] = {}
    for item in items:
        code = item // m
        if code in latest:
            following[latest[code]] = item
        else:
            first[code] = item
        latest[code] = item
    readers: list[list[tuple[int, int, Number, int]]] = [[] for _ in duration]
    missing = [0] * count
    for source, target, latency, link in edges:
        rank = p.place[target // m // 5]
        readers[source].append((target, rank, latency, link if link < 0 else 2 * rank + link))
        missing[target] += 1
    codes: list[list[int]] = [[] for _ in range(p.ranks)]
    for code in sorted(latest, key=lambda code: (change[first[code]], code)):
        codes[p.place[code // 5]].append(code)
    of = [item // m for item in range(count)]
    return Direction(
        codes,
        of,
        first,
        following,
        duration,
        readers,
        missing,
        change,
        need,
        list(p.cap),
        p.objective,
        begin,
        release,
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
    """Run every item as early as the order lets it; None if the order deadlocks."""
    duration, readers = d.duration, d.readers
    missing, arrivals = d.missing[:], [0] * len(duration)
    at, free, links = [0] * d.ranks, [0] * d.ranks, [0] * (2 * d.ranks)
    begins: list[Number] = [0] * d.ranks
    waiting: dict[int, int] = {}
    stack = list(range(d.ranks))
    while stack:
        rank = stack.pop()
        word, now = order[rank], free[rank]
        for place in range(at[rank], len(word)):
            item = word[place]
            if missing[item]:
                at[rank], free[rank] = place, now
                waiting[item] = rank
                break
            if arrivals[item] > now:
                now = arrivals[item]
            if not place:
                begins[rank] = now
            now += duration[item]
            for reader, _, latency, link in readers[item]:
                start = now if link < 0 else max(now, links[link])
                arrival = start + latency
                if link >= 0:
                    links[link] = arrival
                if arrival > arrivals[reader]:
                    arrivals[reader] = arrival
                missing[reader] -= 1
                if not missing[reader] and reader in waiting:
                    stack.append(waiting.pop(reader))
        else:
            at[rank], free[rank] = len(word), now
    if any(place < len(word) for place, word in zip(at, order, strict=True)):
        return None
    value = max(free) if d.objective == "makespan" else max(map(sub, free, begins))
    return Timing(value, free)


def fits(d: Direction, order: Order) -> bool:
    """Tell whether every rank stays within its cap."""
    for word, cap in zip(order, d.cap, strict=True):
        held = 0
        for item in word:
            if held + d.need[item] > cap:
                return False
            held += d.change[item]
    return True


def order_of(schedule: Schedule) -> Order:
    """Read the order of a single-chain schedule, splitting B into I and W."""
    letters = {op: (letter,) for letter, ops in enumerate(_OPS) for op in ops} | {Op.B: (INPUT, WEIGHT)}
    m, ranks = schedule.microbatches, range(schedule.ranks)
    rows = (
        [part for i in schedule.instructions(r) for part in parts_of(i) if part.op in letters] for r in ranks
    )
    words = (
        [(5 * i.stage + x) * m + (i.microbatch or 0) for i in row for x in letters[i.op]] for row in rows
    )
    return tuple(in_turn(m, word) for word in words)


def in_turn(microbatches: int, word: Word) -> Word:
    """Let microbatches take their turn in every operation of a stage."""
    turns: dict[int, list[int]] = {}
    for item in sorted(word, reverse=True):
        turns.setdefault(item // microbatches, []).append(item)
    return [turns[item // microbatches].pop() for item in word]


_OPS = ((Op.F,), (Op.OFFLOAD,), (Op.RECOMPUTE, Op.FETCH), (Op.I,), (Op.W,))


def choices_of(p: Problem, order: Order) -> Choices:
    """Return what becomes of the residuals of an order."""
    found: dict[tuple[int, int], Op] = {}
    for word in order:
        for code, k in (divmod(item, p.microbatches) for item in word):
            if code % 5 in (LEAVE, RETURN):
                found.setdefault((code // 5, k), Op.OFFLOAD if code % 5 == LEAVE else Op.RECOMPUTE)
    return found


def schedule_of(p: Problem, order: Order, name: str = "plan") -> Schedule:
    """Write an order as a schedule."""
    moves = choices_of(p, order)

    def written(item: int) -> Instruction:
        code, k = divmod(item, p.microbatches)
        ops = _OPS[code % 5]
        return Instruction(ops[moves.get((code // 5, k)) is Op.OFFLOAD and len(ops) > 1], code // 5, k)

    return single_chain(name, p.place, p.microbatches, (list(map(written, word)) for word in order))
