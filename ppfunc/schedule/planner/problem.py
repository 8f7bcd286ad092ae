"""State a planning problem as plain numbers per stage, and bound from below the time of all its schedules.

Times and latencies are in ticks, memory is in whole units.

Rank r holds the stages s_1 < ... < s_v (its chunks). One microbatch walks the *chain* F_0 ... F_S-1, I_S-1
... I_0; ``start`` and ``end`` of an operation are its times on that way when nothing else runs. Nothing is
lost by running the microbatches of every operation in order, and chunk j of a microbatch is in memory
whenever chunk j + 1 is. Two windows of time are idle on r but for the work that memory lets in:

* the **head**, from the first start of r to c(0), the first microbatch of an operation c of r. Until then the
  others can only be at states that come before c, and what they hold fits in the cap; ``_most`` is the most
  work in such states.
* the **tail**, from the end of b(m - 1) to the start of d(m - 1), for operations b before d of r. What other
  microbatches still have to do there is ``left(b)``, again the most work in states that fit, and what m - 1
  itself may do there is known.

From these follow three bounds: ``work``, all work of r with head and tail; ``path``, the end of c(m - 1) on
r, before which all but ``left(c)`` and the rest of m - 1 is done, and the way of m - 1 from there to its last
weight gradient; and ``cycle``, where memory for the forward of microbatch i comes from the backward of i - k,
so that whole round trips follow each other.

Where residuals may move or be computed again, a rank can hold any number of microbatches, so these three are
those without a cap. A fourth, ``memory``, is the area of memory over time of a rank. Residuals of a stage
take ``held`` from the start of F to the end of I: if they stay, that is at least the way from F to I on the
chain; if they move, at least F, both copies and I; if they are computed again, F, F again and I, and their
checkpoint in between. ``kept`` lasts for W at least. All of it lies within the span of the rank, so its sum
is at most cap times span. To compute again takes time of the rank beside its other work, and copies take the
time of a link in each direction; within the span there is room for so many of them. The most area that they
can save is found apart for both, as a fractional knapsack; together they save no more than
that. The least span in which the rest fits is the bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import lcm
from numbers import Rational, Real
from typing import Any, Literal, NamedTuple, Self, get_args

from ppfunc._checks import naming_arguments, require_counts, require_type
from ppfunc.parallel.topology import explicit, stages_of

from ..costs import Costs, Number, exact_portion, require_costs

Objective = Literal["makespan", "span"]
Cap = Number | Sequence[Number] | None

# Of a cap that is a float: a sum of activations and shares may be rounded to a float below it.
_ROUNDING = 2.0**-50


class Problem(NamedTuple):
    """One chain of stages on ranks, with all its numbers.

    Times are whole numbers of ticks where those of the costs are exact, else floats; memory is counted in
    whole units. So sums are exact, and quick.

    Args:
        place: rank of every stage.
        microbatches: number of microbatches m.
        forward: time of F, per stage.
        backward: time of I, per stage.
        weight: time of W, per stage.
        down: latency from the end of F of a stage to the F of the next one.
        up: latency from the end of I of a stage to the I of the one before.
        held: memory from the start of F to the end of I.
        kept: the part of it that is held on until the end of W.
        cap: memory of each rank for activations.
        again: time of F that runs again, per stage; None where it may not.
        out, back: time of a copy of what is held to the host, and back; None where it may not move.
        stub: memory held between F and the start of the one that runs again.
        ticks: number of ticks in one unit of time.
        objective: time to minimise, ``"makespan"`` or ``"span"``.
        slices: slices of a sequence; backwards begin with the last of them.
    """

    place: tuple[int, ...]
    microbatches: int
    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    weight: tuple[Number, ...]
    down: tuple[Number, ...]
    up: tuple[Number, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    cap: tuple[int, ...]
    again: tuple[Number | None, ...]
    out: tuple[Number | None, ...]
    back: tuple[Number | None, ...]
    stub: tuple[int, ...]
    ticks: int
    objective: Objective
    slices: int = 0

    @property
    def per_sequence(self) -> int:
        """Count the microbatches of a sequence."""
        return max(self.slices, 1)

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @property
    def stages_by_rank(self) -> list[list[int]]:
        """List the stages of each rank, ascending."""
        return [list(stages_of(self.place, rank)) for rank in range(self.ranks)]

    @property
    def work(self) -> list[Number]:
        """Return the time that each rank computes."""
        one = [f + i + w for f, i, w in zip(self.forward, self.backward, self.weight, strict=True)]
        return [self.microbatches * sum(one[s] for s in stages) for stages in self.stages_by_rank]

    @property
    def flexible(self) -> bool:
        """Tell whether residuals of any stage may move or be computed again."""
        return any(time is not None for time in (*self.again, *self.out))

    def roomy(self) -> "Problem":
        """Return the problem in which all activations fit, and stay."""
        whole = [self.microbatches * sum(self.held[s] for s in stages) for stages in self.stages_by_rank]
        none = (None,) * len(self.place)
        return self._replace(cap=tuple(whole), again=none, out=none)

    def time_of(self, ticks: Number) -> Number:
        """Convert a time to the unit of the costs, whole if it can be."""
        return ticks if self.ticks == 1 else exact_portion(ticks, 1, self.ticks)


def problem_of(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    cap: Cap = None,
    objective: Objective = "makespan",
    slices: int = 0,
) -> Problem:
    """Collect the numbers of a problem.

    Args:
        costs: times, latencies, activations, shares and parameters per stage.
        placement: rank of every stage; the stages form one chain.
        microbatches: number of microbatches.
        cap: memory of a rank for activations and parameters, one number or one per rank; None for no limit.
        objective: ``"makespan"`` or ``"span"``.
        slices: number of slices of a sequence, a divisor of ``microbatches``; 0 without a carry.

    Raises:
        ValueError: an argument that is out of range, costs for another number of stages, or a cap
            in which one microbatch, or all slices of a sequence, do not fit.
    """
    place = explicit(placement)
    require_counts(microbatches=microbatches)
    require_counts(0, slices=slices)
    if slices and microbatches % slices:
        raise ValueError(f"microbatches = {microbatches}, expected whole sequences of {slices} slices")
    if objective not in get_args(Objective):
        raise ValueError(f"objective is {objective!r}, expected 'makespan' or 'span'")
    costs = require_costs(costs).fitting(len(place))
    if costs.slices:
        raise ValueError(
            "costs have slices, but a plan and its bound take slices of equal costs: cut them by cost, by"
            " ppfunc.parallel.slice_lengths, and leave slices out"
        )
    (forward, backward, weight, down, up, again, out, back), ticks = _times(costs, place)
    held, kept, stub, caps = _memory(costs, place, microbatches, cap)
    times = forward, backward, weight, down, up
    problem = Problem(place, microbatches, *times, held, kept, caps, again, out, back, stub, ticks, objective)
    problem = problem._replace(slices=slices)
    if problem.flexible and slices > 1:
        raise ValueError(
            "costs have recompute or offload, but residuals of slices stay: leave both out, or insert"
            " instructions in the schedule of the plan"
        )
    for rank, mine in enumerate(problem.stages_by_rank):
        need = problem.per_sequence * sum(held[s] for s in mine)
        if need > caps[rank]:
            least = float(
                sum(
                    problem.per_sequence * costs.of("activation", s) + costs.of("parameters", s) for s in mine
                )
            )
            fit = "one microbatch" if slices < 2 else f"the {slices} slices of a sequence"
            limit = cap[rank] if isinstance(cap, Sequence) else cap
            raise ValueError(
                f"cap is {limit}, but {fit} and the parameters of rank {rank} take"
                f" {least:g}: raise it to that"
            )
    return problem


def _exact(value: Number) -> Number:
    from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

    return Fraction(value if isinstance(value, Rational) else float(value))


def _times(costs: Costs, place: tuple[int, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """Return per stage F, I, W, latencies down and up, F again, and copies out and back, in ticks; and the
    ticks in a unit of time. None stays None.
    """
    rows = [
        [costs.of(name, s) for s in range(len(place))]
        for name in ("forward", "backward_input", "backward_weight")
    ]
    crosses = [a != b for a, b in pairwise(place)]
    rows.append([*(costs.message_of(s) if cross else 0 for s, cross in enumerate(crosses)), 0])
    rows.append([0, *(costs.message_of(s) if cross else 0 for s, cross in enumerate(crosses, start=1))])
    rows += [[costs.of(name, s) for s in range(len(place))] for name in ("recompute", "offload", "fetch")]
    rows[-1] = [out if back is None else back for out, back in zip(*rows[-2:], strict=True)]
    times: list[Number] = [time for row in rows for time in row if time is not None]
    if not all(isinstance(time, Rational) for time in times):
        return [tuple(None if time is None else float(time) for time in row) for row in rows], 1
    ticks = lcm(*(int(time.denominator) for time in times))
    return [tuple(None if time is None else int(time * ticks) for time in row) for row in rows], ticks


def _memory(costs: Costs, place: tuple[int, ...], microbatches: int, cap: Cap) -> list[tuple[int, ...]]:
    """Convert activations, shares kept for W, checkpoints, and the caps of the ranks to one whole unit."""
    stages, ranks = range(len(place)), max(place) + 1
    held = [_exact(costs.of("activation", s)) for s in stages]
    kept = [size * _exact(costs.of("weight_share", s)) for s, size in enumerate(held)]
    stub = [min(size, _exact(costs.of("checkpoint", s))) for s, size in enumerate(held)]
    unit = lcm(*(size.denominator for size in (*held, *kept, *stub)))
    if cap is None:
        free = [
            microbatches * sum(size for s, size in enumerate(held) if place[s] == rank)
            for rank in range(ranks)
        ]
    else:
        free = [
            _exact(limit) * (1 if isinstance(limit, Rational) else 1 + _exact(_ROUNDING))
            for limit in _limits(cap, ranks)
        ]
        for stage in stages:
            free[place[stage]] -= _exact(costs.of("parameters", stage))
    return [tuple(int(size * unit // 1) for size in sizes) for sizes in (held, kept, stub, free)]


def _limits(cap: Cap, ranks: int) -> Sequence[Number]:
    limits = cap if isinstance(cap, Sequence) and not isinstance(cap, str | bytes) else [cap] * ranks
    if len(limits) != ranks:
        raise ValueError(f"cap has {len(limits)} numbers, expected {ranks}, one per rank")
    for limit in limits:
        if not isinstance(limit, Real) or isinstance(limit, bool) or limit <= 0 or not limit < float("inf"):
            raise ValueError(f"cap is {limit!r}, expected a finite number above 0; leave it out for no limit")
    return limits


_HALVINGS, _ROUNDED = 50, 1e-9  # of an interval of spans; share that sums of floats may be off


class Bound(NamedTuple):
    """A lower bound, and where it comes from.

    Args:
        value: no schedule is shorter.
        name: ``"work"``, ``"path"``, ``"cycle"`` or ``"memory"``.
        rank: the rank that binds.
    """

    value: Number
    name: str
    rank: int


@naming_arguments
def lower_bound(
    costs: Costs, placement: Sequence[int], microbatches: int, cap: Cap = None, objective: Objective = "span"
) -> Bound:
    """Return a lower bound of every schedule of a placement.

    Args:
        costs: times, messages, activations, their shares and parameters, per stage. Residuals may be computed
            again, or move to the host, where it has ``recompute`` or ``offload``.
        placement: rank of every stage; the stages form one chain.
        microbatches: number of microbatches m.
        cap: memory of a rank, one number or one per rank; None for no limit.
        objective: ``"span"``, largest over the ranks of last end minus first start, or ``"makespan"``, the
            last end.

    Raises:
        ValueError: an argument that is out of range, or a cap in which one microbatch does not fit.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 3, for the work of one stage per rank.

    >>> lower_bound(Costs(weight_share=1), range(4), microbatches=8, cap=4)
    Bound(value=27, name='work', rank=0)
    """
    require_type("placement", placement, Iterable, "the rank of every stage")
    return bound_of(problem_of(costs, placement, microbatches, cap, objective))


def bound_of(problem: Problem) -> Bound:
    """Return the lower bound of a problem: the best over all ranks."""
    chain = _Path.of(problem)
    areas = _areas(problem, chain) if problem.flexible else ()
    if problem.flexible:
        problem = problem.roomy()
    stages, work = problem.stages_by_rank, problem.work
    most = cache(_left), cache(_filled)  # equal for ranks with equal stages
    bounds = (
        bound
        for rank in range(problem.ranks)
        for bound in _bounds(problem, chain, stages, rank, work[rank], *most)
    )
    best = max((*bounds, *areas), key=lambda bound: bound.value)
    return best._replace(value=problem.time_of(best.value))


def _areas(p: Problem, chain: "_Path") -> Iterator[Bound]:
    """Yield the bound of every rank by its memory over time, where residuals may go other ways."""
    m, way = p.microbatches, [chain.end[-1 - s] - chain.start[s] for s in range(len(p.place))]  # F to I
    for rank, (stages, work, cap) in enumerate(zip(p.stages_by_rank, p.work, p.cap, strict=True)):
        stay = sum(p.held[s] * way[s] + p.kept[s] * p.weight[s] for s in stages) * m
        # The time, of the rank or of a link in the mean of both directions, and the area that it saves.
        apart = {s: way[s] - p.forward[s] - p.backward[s] for s in stages}
        again = [
            (time, (p.held[s] - p.stub[s]) * max(0, apart[s] - time))
            for s in stages
            if (time := p.again[s]) is not None
        ]
        moved = [
            ((out + p.back[s]) / 2, p.held[s] * max(0, apart[s] - out - p.back[s]))
            for s in stages
            if (out := p.out[s]) is not None
        ]
        low, high = float(work), float(max(work, stay / cap if cap else 0))
        for _ in range(_HALVINGS):
            time = (low + high) / 2
            saved = _saved(again, time - work, m) + _saved(moved, time, m)
            low, high = (low, time) if stay - saved <= cap * time else (time, high)
        value = low * (1 - _ROUNDED)
        begin = chain.start[stages[0]] if p.objective == "makespan" else 0
        yield Bound(begin + (int(value) if isinstance(work, int) else value), "memory", rank)


def _saved(ways: list[tuple[Number, Number]], time: Number, count: int) -> Number:
    """Return the most that ``count`` of each way save, which take some time each, within a time."""
    total = 0
    for each, saved in sorted(ways, key=lambda way: way[0] / (way[1] or 1e-9)):
        some = min(count, time / each) if each else count
        total, time = total + some * saved, time - some * each
    return total


class _Path(NamedTuple):
    """Start, end and time of the operations of one microbatch, F of stages 0, 1, ... and then I of stages
    ..., 1, 0.
    """

    start: list[Number]
    end: list[Number]
    length: list[Number]

    @classmethod
    def of(cls, p: Problem) -> Self:
        lengths = [*p.forward, *reversed(p.backward)]
        gaps = [0, *p.down[:-1], 0, *p.up[:0:-1]]
        end = list(accumulate(length + gap for length, gap in zip(lengths, gaps, strict=True)))
        return cls([e - length for e, length in zip(end, lengths, strict=True)], end, lengths)


class _Load(NamedTuple):
    """The operations c = 0 .. 2v - 1 of a rank in the order of the chain: F of chunks 1 .. v, then I of
    chunks v .. 1.

    Args:
        microbatches: number of microbatches m.
        cap: memory of the rank.
        length: time of each operation.
        weight: time of W, per chunk.
        held: memory from F to I, per chunk.
        kept: the part of it that is held on until W, per chunk.
    """

    microbatches: int
    cap: int
    length: tuple[Number, ...]
    weight: tuple[Number, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def chunks(self) -> int:
        return len(self.weight)


class _Window(NamedTuple):
    """A rank's load, and the place in the chain, the start and the end of each of its operations."""

    load: _Load
    at: list[int]
    start: list[Number]
    end: list[Number]

    @classmethod
    def of(cls, p: Problem, chain: _Path, stages: Sequence[int], cap: int) -> Self:
        at = [*stages, *(2 * len(p.place) - 1 - s for s in reversed(stages))]
        start, end, length = ([times[c] for c in at] for times in chain)
        weight, held, kept = (tuple(values[s] for s in stages) for values in (p.weight, p.held, p.kept))
        return cls(_Load(p.microbatches, cap, tuple(length), weight, held, kept), at, start, end)


def _bounds(
    p: Problem,
    chain: _Path,
    stages: list[list[int]],
    rank: int,
    work: Number,
    left_of: Callable[[_Load, int], Number],
    filled_of: Callable[[_Load, int], Number],
) -> Iterator[Bound]:
    """Yield the bounds that follow from the windows of one rank."""
    window = _Window.of(p, chain, stages[rank], p.cap[rank])
    load = window.load
    begin, codes = window.start[0], range(len(window.at))
    finish = _finish(p, chain, stages, stages[rank][0])
    left = [left_of(load, c) for c in codes]
    heads = [max(0, window.start[c] - begin - filled_of(load, c)) for c in codes]
    before = [
        max(head for other, head in enumerate(heads) if other <= c or _must_start(load, other, c))
        for c in codes
    ]
    idle = [max([before[d], *(before[b] + _tail(window, b, d, left[b]) for b in range(d))]) for d in codes]
    yield Bound(work + max(*heads, *idle) + (begin if p.objective == "makespan" else 0), "work", rank)
    rest = sum(load.weight)
    for c in reversed(codes):
        done = begin + max([before[c], *idle[1 : c + 1]]) + work - rest - left[c]
        yield Bound(done + finish[window.at[c]] - window.end[c], "path", rank)
        rest += load.length[c]
    for j in range(1, load.chunks + 1):
        for start in _cycles(window, heads, j):
            yield Bound(begin + start + finish[window.at[-j]] - window.start[-j], "cycle", rank)


def _finish(p: Problem, chain: _Path, stages: list[list[int]], first: int) -> list[Number]:
    """Return, per operation of the chain, when the last W behind it ends if nothing else runs.

    Under the span, an end counts from the first start of its own rank. Where that rank comes no later in the
    chain than stage ``first``, it starts no later than on the chain; the ends of all others do not count.
    """
    last = len(p.place) - 1
    ends = [chain.end[2 * last + 1 - s] + p.weight[s] for s in range(last + 1)]
    if p.objective == "span":
        ends = [
            end - chain.start[stages[r][0]] if stages[r][0] <= first else 0
            for end, r in zip(ends, p.place, strict=True)
        ]
    best = list(accumulate(ends, max))
    return [best[-1]] * (last + 1) + best[::-1]


def _most(states: Sequence[tuple[int, Number]], count: int, memory: int) -> Number:
    """Maximise the work of ``count`` microbatches, in any mix of states (memory, work), within memory.

    Equivalent to: ``count`` times the concave hull of the states at ``memory / count``.
    """
    hull: list[tuple[int, Number]] = []
    for size, work in sorted(states):
        if hull and work <= hull[-1][1]:
            continue
        if hull and hull[-1][0] == size:
            hull.pop()
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (size - hull[-1][0]) <= (work - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((size, work))
    for (low, less), (high, more) in pairwise(hull):
        if memory < count * high:
            # Rounds down to whole units if times are whole.
            a = (memory - count * low) * (more - less)
            b = high - low
            return count * less + (a // b if isinstance(a, int) else a / b)
    return count * hull[-1][1]


def _left(load: _Load, c: int) -> Number:
    """Bound from above the work that other microbatches still have on the rank when c(m - 1) ends."""
    v, length = load.chunks, load.length
    states: list[tuple[int, Number]] = []
    for q in range(c, 2 * v):
        full = v if q < v else 2 * v - 1 - q
        reached = min(q + 1, full)
        memory = sum(load.held[:reached])
        work = sum(length[q + 1 :]) + sum(load.weight[:full])
        states.append((memory, work))
        # The W that may wait while the chunks up to ``full`` lack their I, by memory per work.
        pairs = zip(load.kept[full:], load.weight[full:], strict=True)
        for kept, weight in sorted((w for w in pairs if w[1]), key=lambda pair: pair[0] / pair[1]):
            memory, work = memory + kept, work + weight
            states.append((memory, work))
    return _most(states, load.microbatches - 1, load.cap - sum(load.held[: min(c + 1, 2 * v - c)]))


def _filled(load: _Load, c: int) -> Number:
    """Bound from above the work that the rank can do before c(0) starts."""
    v, length = load.chunks, load.length
    states: list[tuple[int, Number]] = [(0, 0)]
    for q in range(c):
        full = v if q < v else 2 * v - 1 - q
        states.append((sum(load.held[: min(q + 1, full)]), sum(length[: q + 1]) + sum(load.weight[full:])))
    memory = load.cap - (load.held[c] if c < v else 0)
    return _most(states, load.microbatches, memory)


def _must_start(load: _Load, later: int, c: int) -> bool:
    """Tell whether memory forces ``later(0)``, later in the chain, to start before c(m - 1) ends."""
    chunks = min(c + 1, 2 * load.chunks - max(load.chunks, later))
    return load.microbatches * sum(load.held[:chunks]) > load.cap


def _tail(window: _Window, b: int, d: int, left: Number) -> Number:
    """Return the idle time forced between the end of b(m - 1) and the start of d(m - 1)."""
    own = sum(window.load.length[b + 1 : d]) + sum(
        window.load.weight[2 * window.load.chunks - d :] if d > window.load.chunks else ()
    )
    return max(0, window.start[d] - window.end[b] - own - left)


def _cycles(window: _Window, heads: Sequence[Number], j: int) -> Iterator[Number]:
    """Bound from below the start of I of chunk j of microbatch m - 1, by rounds of the first j chunks.

    With room for K = j k + e of their activations, at most j i + e have been acquired when I(i - k) of chunk
    j starts, and F(i) needs j (i + 1). So j - e of their F and I, and W where it holds all, lie between the
    two: a round from I(i - k) to I(i).
    """
    load = window.load
    v, length, m = load.chunks, load.length, load.microbatches
    room = load.cap // min(load.held[:j]) if min(load.held[:j]) else m * v
    k, e = divmod(room, j)
    if k >= m:
        return
    forward, backward = length[:j], length[2 * v - j :]
    weight = min(load.weight[:j]) if load.held[:j] == load.kept[:j] else 0
    gap = window.start[-j] - window.end[j - 1]
    round_trip = (
        gap + length[j - 1] + length[-j] + (j - e - 1) * (min(forward) + min(backward)) + (j - e) * weight
    )
    for i in {(m - 1) % k, (m - 1) % k + k, m - 1}:
        released = max(0, j * (i + 1) - room)
        above = -(-released // j) * sum(length[j : 2 * v - j])
        done = (i + 1) * sum(forward) + released * (min(backward) + weight) + above
        head = max(heads[: v + 1]) if released else max(heads[:j])
        yield head + done + gap + (m - 1 - i) // k * round_trip
