"""Represent a schedule as one word of items per rank, time it, and replay it in both directions of time.

Nothing is lost if microbatches take their turn in every operation of a stage. A *code* is an operation of a
stage: 5 s is F of stage s, 5 s + 1 the end of its copy to the host, 5 s + 2 the beginning of its copy back,
or F again, 5 s + 3 its I, 5 s + 4 its W; an *item* is a code for a microbatch, ``code * microbatches +
microbatch``. An order is a word of items per rank. Its items say what becomes of residuals: those of a
microbatch without 5 s + 2 stay, those with 5 s + 1 move, the others are computed again.

A *direction* reads such words forwards in time, or backwards from the end, where the last microbatch comes
first, what acquires memory releases it, and each item waits for those that wait for it forwards. What holds
forwards and backwards is written once, for both.

Slices of a sequence have their backwards from the last slice to the first. Their I and W are numbered in that
order, so that microbatches take their turn, and the first waits for the forward of the last slice.

A *replay* is a list schedule in an order: operations may overtake where data and memory let them. In time
order, a rank that is free takes the first operation of its remaining order that is ready. One that comes
later in the order may overtake only if the rest of the order then still keeps the cap, so a replay never gets
stuck, and its result is again an order that fits. A rank runs ahead while the head of its order is ready,
which nothing could overtake. Replaying an order backwards and forwards in turn is *double justification*: it
pushes every operation to the end and then to the start.

References:
    Li and Willis, An iterative scheduling technique for resource-constrained project scheduling, EJOR 1992.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
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
        codes: codes of each rank; codes that release memory come first.
        code: code of every item.
        first: the first item of every code, -1 for none.
        following: the next item of the same code, -1 for none.
        duration: the time of an item on its rank.
        readers: the items that wait for it, with their rank, the time until its product is there, and the
            link of their rank that carries it, -1 for none. A link carries one after the other.
        missing: number of items that it waits for.
        change: memory held after it less that before it.
        need: memory held during it less that before it, at most.
        cap: memory of each rank.
        objective: time to minimise.
        begin: start of the time of each rank that no order can beat.
        release: time at which each rank is free.
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
    """Yield (time, change of memory, need of memory) of each letter of a stage.

    A letter without an item yields None.
    """
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
            yield (f[k], f[k] + 5 * m, p.down[s], -1) if s < last else (f[_last_slice(p, k)], i[k], 0, -1)
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


def _last_slice(p: Problem, microbatch: int) -> int:
    return microbatch - microbatch % p.per_sequence + p.per_sequence - 1


def ahead(p: Problem, order: Order) -> Order:
    """Let the forwards of an order run ``slices - 1`` slices ahead, so that a backward finds its sequence."""
    m, lead = p.microbatches, p.per_sequence - 1

    def moved(word: Word) -> Word:
        first = sorted(item for item in word if item // m % 5 == FORWARD and item % m < lead)
        rest = (item + lead * (item // m % 5 == FORWARD) for item in word)
        return first + [new for new, item in zip(rest, word, strict=True) if new // m == item // m]

    return tuple(map(moved, order)) if lead else order


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
    """Run every item as early as the order lets it.

    Returns:
        The timing; None if the order deadlocks.
    """
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
    """Return the ways of the residuals of an order."""
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
        slice_of = k if code % 5 == FORWARD else _last_slice(p, k) - k % p.per_sequence
        return Instruction(ops[moves.get((code // 5, k)) is Op.OFFLOAD and len(ops) > 1], code // 5, slice_of)

    programs = (list(map(written, word)) for word in order)
    return single_chain(name, p.place, p.microbatches, programs, slices=p.slices)


Hold = Mapping[int, Number]
"""``{item: time}``: how much later than it arrives an item counts as ready."""

NO_HOLD: Hold = {}


class Manner(NamedTuple):
    """Choose how a replay picks the next operation.

    Args:
        patience: a rank waits for an operation that the order has earlier than the first ready one, if it
            arrives within this share of the time of that one.
        lazy: whether weight gradients come only where nothing else is ready.
        hold: operations that are held back.
    """

    patience: float = 0
    lazy: bool = False
    hold: Hold = NO_HOLD


class Replayed(NamedTuple):
    """The order that a replay took, and its value: the largest end less begin of a rank."""

    value: Number
    order: Order


def replay(d: Direction, order: Order, manner: Manner = Manner()) -> Replayed:  # noqa: B008 - a value
    """Replay ``order``, which fits its caps, in its own direction of time."""
    duration, change, readers, code_of, following = d.duration, d.change, d.readers, d.code, d.following
    lazy, hold = manner.lazy, manner.hold
    rests, words = [word[:] for word in order], tuple(Word() for _ in order)
    missing, nexts, free, held = d.missing[:], d.first[:], list(d.release), [0] * d.ranks
    arrivals: list[Number] = [inf if count else hold.get(i, 0) for i, count in enumerate(missing)] + [inf]
    so_far: dict[int, Number] = {}  # of items that wait for more
    links: list[Number] = [0] * (2 * d.ranks)  # when each is free
    due = [arrivals[item] for item in nexts]  # of no item, -1, never
    wake: list[Number] = [0] * d.ranks  # where a rank sleeps: until when
    events = sorted((time, rank) for rank, time in enumerate(free))  # a heap of the times at which ranks look
    while events:
        now, rank = heappop(events)
        if not free[rank] <= now >= wake[rank]:
            continue
        rest, word, wake[rank], started = rests[rank], words[rank], 0, False
        while rest:
            item, place = rest[0], 0
            if arrivals[item] > now or (lazy and code_of[item] % 5 == WEIGHT):
                place, soon = (-1, now) if started else _choose(d, rank, rest, due, nexts, held, now, manner)
                if place < 0:
                    wake[rank] = 0 if started else soon
                    if soon < inf:
                        heappush(events, (soon, rank))
                    break
            item = rest.pop(place)
            word.append(item)
            held[rank] += change[item]
            free[rank] = now = now + duration[item]
            started, code = True, code_of[item]
            nexts[code] = following[item]
            due[code] = arrivals[nexts[code]]
            for reader, reading_rank, latency, link in readers[item]:
                arrival = now + latency
                if link >= 0:
                    links[link] = arrival = max(now, links[link]) + latency
                missing[reader] -= 1
                if hold and reader in hold:
                    arrival += hold[reader]
                if missing[reader]:
                    so_far[reader] = max(arrival, so_far.get(reader, 0))
                    continue
                arrivals[reader] = arrival = max(arrival, so_far.get(reader, 0))
                if nexts[code_of[reader]] == reader:
                    due[code_of[reader]] = arrival
                    if arrival < wake[reading_rank]:
                        wake[reading_rank] = arrival
                        heappush(events, (arrival, reading_rank))
    assert not any(rests), "a replay got stuck: its order does not fit"
    return Replayed(max(end - begin for end, begin in zip(free, d.begin, strict=True)), words)


def justify(rules: tuple[Direction, Direction], order: Order, back: Manner, forth: Manner) -> Replayed:
    """Replay an order backwards in time, and the result forwards."""
    forwards, backwards = rules
    late = replay(backwards, _reversed(order), back)
    return replay(forwards, _reversed(late.order), forth)


def _reversed(order: Order) -> Order:
    return tuple(word[::-1] for word in order)


def _choose(
    d: Direction,
    rank: int,
    rest: Word,
    due: list[Number],
    nexts: list[int],
    held: list[int],
    now: Number,
    manner: Manner,
) -> tuple[int, Number]:
    """Choose the place in ``rest`` to start now, -1 to sleep, and the time of the next known arrival.

    ``nexts`` is the next item of each code, ``due`` when it arrives: infinity where that is not known or none
    is left.
    """
    patience, lazy, _ = manner
    ready, soon = [], inf
    for code in d.codes[rank]:
        time = due[code]
        if time <= now:
            ready.append(code)
        elif time < soon:
            soon = time
    count, room = len(rest), d.cap[rank] - held[rank]
    found = none = 2 * count
    for code in ready:
        place = rest.index(nexts[code])
        turn = place + count if lazy and code % 5 == WEIGHT else place
        if turn < found and _may_overtake(d, rest, place, room):
            found = turn
    if found == none:
        return -1, soon
    if found and soon - now <= (wait := patience * d.duration[rest[found % count]]):
        for code in d.codes[rank]:
            if (
                0 < due[code] - now <= wait
                and (place := rest.index(nexts[code])) < found
                and _may_overtake(d, rest, place, room)
            ):
                return -1, soon
    return found % count, soon


def _may_overtake(d: Direction, rest: Word, place: int, room: int) -> bool:
    """Tell whether the order keeps the cap after the item at ``place`` goes first."""
    change, need, item = d.change, d.need, rest[place]
    if need[item] > room:
        return False
    if change[item] <= 0:
        return True
    room -= change[item]
    for other in rest[:place]:
        if need[other] > room:
            return False
        room -= change[other]
    return True
