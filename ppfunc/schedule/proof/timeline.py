"""Time schedules on paper, and measure their memory.

`earliest` lets each instruction begin once its rank is free and its inputs are there; `simulate` makes a
:class:`Timeline` of it. Ranks take turns (`take_turns`) such that what they touch is still in the caches.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from itertools import accumulate, chain, compress, product
from math import inf
from operator import add, itemgetter, le, sub
from typing import Any, NamedTuple

from ppfunc._checks import (
    duration,
    naming_arguments,
    naming_attributes,
    percent,
    require_type,
    show_table,
    table,
)

from ..collector import collector_paused
from ..costs import Costs, Number, require_costs
from ..dataflow import Dataflow
from ..errors import ScheduleError, circle_of, fault_at, require_schedule, schedule_error, text_of
from ..instruction import (
    BESIDE,
    COMMUNICATION,
    COMPUTE,
    KINDS,
    MOVES,
    Instruction,
    Op,
    Unit,
    elementary,
    microbatch_of,
)
from ..schedule import Program, Schedule
from .structure import check_structure

_COUNTED = frozenset(op for op, kind in KINDS.items() if kind.unit and op not in COMMUNICATION)
_BUSY = frozenset(op for op in _COUNTED if KINDS[op].unit is Unit.RANK)

Time = Any  # int, float or Fraction: whatever the costs are, nothing is converted


class EarliestTimes(NamedTuple):
    """Hold start and end of each rank's compute instructions, and of others that have a cost, in order."""

    starts: tuple[list[Time], ...]  # per rank, one time per instruction
    ends: tuple[list[Time], ...]  # likewise
    # Per line, by microbatch, end of the instruction that produced the value.
    done: dict[int, dict[int, Time]]


Line = tuple[dict[int, Time], dict[int, list[int]]]
"""The values of one stage and kind: by microbatch, when each is there, and the ranks that wait for it. The
number of a line is that of
its value for microbatch 0.
"""
Work = tuple[Any, "TimedOp"]
"""The microbatch of an instruction, None for those of a whole stage, and its kind."""


class TimedOp(NamedTuple):
    """Instructions of one op and stage, or pairs of them; distances are from the microbatch of the first."""

    op: Op
    parts: tuple[tuple[Op, int, int], ...]  # op, stage, distance of the microbatch
    length: Time
    inputs: tuple[tuple[Line, int, Time], ...]  # line, distance of the microbatch, delay
    products: tuple[tuple[Line, int], ...]  # line, distance of the microbatch


Kinds = list[dict[tuple[Any, ...], TimedOp]]
"""The kinds of instruction by op and stage, and of pairs: of each slice, or at once of all that are alike."""


class _Beside:
    """Time the work beside the compute of one rank, each unit on its own; collectives as if all ranks that
    take part were there.

    Args:
        rank: number of the rank, for errors.
        copied: time of the copy to the host of every microbatch that has an OFFLOAD, by its stage.
    """

    def __init__(self, rank: int, copied: Mapping[tuple[int, int | None], Time]) -> None:
        self.rank = rank
        self.copied = copied
        self.free: dict[Unit | None, Time] = {}  # the end of its last work
        self.left: dict[tuple[int, int | None], Time] = {}  # the end of a copy to the host
        # Of a stage, or of a stage and a microbatch: the end of what its next work on the rank waits for.
        self.ready: dict[tuple[int, int | None], Time] = {}

    def run(self, work: TimedOp, microbatch: int | None, free: Time) -> tuple[Time, Time]:
        """Return start and end of an instruction that is no compute, on a rank that is free from ``free``."""
        op, ((_, stage, _),), length = work[:3]
        unit = KINDS[op].unit
        if unit is Unit.OUT:
            if (stage, microbatch) not in self.left:
                copy = Instruction(op, stage, microbatch)
                raise ScheduleError(self.rank, None, copy, "the forward that it copies has not run before it")
            end: Time = self.left[stage, microbatch]
            return end - length, end
        if unit is Unit.RANK:
            start = max(free, self.ready.get((stage, None), 0))
            return start, start + length
        start = max(free, self.free.get(unit, 0))
        end = self.free[unit] = self.ready[stage, microbatch] = start + length
        return start, end

    def arrival(self, work: TimedOp, microbatch: int) -> Time:
        """Return when the parameters and residuals that a compute instruction needs are there."""
        keys = ((stage, m) for _, stage, distance in work.parts for m in (None, microbatch + distance))
        return max(self.ready.get(key, 0) for key in keys)

    def begin_copies(self, work: TimedOp, microbatch: int, end: Time) -> None:
        """Begin to copy the residuals of a forward that ends then, if it has an OFFLOAD."""
        for op, stage, distance in work.parts:
            key = stage, microbatch + distance
            if op is Op.F and key in self.copied:
                end = max(end, self.free.get(Unit.OUT, 0)) + self.copied[key]
                self.free[Unit.OUT] = self.left[key] = end


def earliest(schedule: Schedule, costs: Costs, ops: Set[Op] = COMPUTE) -> EarliestTimes:
    """Run some operations of ``schedule`` as soon as possible, and skip the rest.

    Equivalent to, for each instruction in an order that respects its inputs::

        start = max(end of the rank's previous instruction, *(done[i] + delay for i in inputs))
        end = start + duration

    The previous instruction is one that occupies the rank: compute or STEP. Other units run beside it, see
    :class:`_Beside`.

    Args:
        schedule: compute only or lowered.
        costs: times of instructions and messages, per stage of the schedule.
        ops: operations that run: compute, and others that have a unit and are no message.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
    """
    check_structure(schedule)
    flow = Dataflow(schedule)
    lines: dict[int, Line] = defaultdict(lambda: ({}, {}))
    # What another slice has made has the number of the slice that consumes it; what a microbatch does not
    # have was there before all time.
    for (_, stage), inputs in flow.needs.items():
        for value, origin, shift in inputs:
            if not flow.always(stage, origin, shift):
                without = (m for m in schedule.numbers[stage] if not flow.takes(m, origin, shift))
                lines[value + 2 * shift][0].update(dict.fromkeys(without, -inf))
    unlike = _unlike(schedule, costs)
    kinds = _kinds(schedule, flow, lines, costs, unlike, ops)
    times = EarliestTimes(tuple([] for _ in schedule.programs), tuple([] for _ in schedule.programs), {})
    ready = list(range(schedule.ranks - 1, -1, -1))
    runs = []
    for rank, program in enumerate(schedule.programs):
        work = _work(program, ops, kinds, unlike)
        copied = {(parts[0][1], m): length for m, (op, parts, length, *_) in work if op is Op.OFFLOAD}
        beside = None if ops <= COMPUTE else _Beside(rank, copied)
        runs.append(_run(rank, work, beside, times.starts[rank], times.ends[rank], ready))
    take_turns(lambda rank: next(runs[rank], None), ready, times.starts)
    times.done.update((first, done) for first, (done, _) in lines.items())
    waits = (
        (first + flow.output(0, m), ranks)
        for first, (_, waiting) in lines.items()
        for m, ranks in waiting.items()
    )
    if missing := {rank: value for value, ranks in waits for rank in ranks}:
        raise _stuck(schedule, flow, times, ops, missing)
    return times


def _run(
    rank: int,
    work: Sequence[Work],
    beside: _Beside | None,
    starts: list[Time],
    ends: list[Time],
    ready: list[int],
) -> Iterator[None]:
    """Run the instructions of one rank; pause at each missing value until ``ready`` names the rank again."""
    free: Time = 0
    note_start, note_end = starts.append, ends.append
    for microbatch, timed in work:
        _, _, length, inputs, outputs = timed
        start = free
        if beside:
            if timed.op not in COMPUTE:
                start, end = beside.run(timed, microbatch, free)
                note_start(start)
                note_end(end)
                if timed.op not in BESIDE:
                    free = max(free, end)
                continue
            start = max(free, beside.arrival(timed, microbatch))
        for (done, waiting), distance, late in inputs:
            number = microbatch + distance if distance else microbatch  # a sum would be a new object
            while number not in done:
                waiting.setdefault(number, []).append(rank)
                yield
            arrival = done[number] + late if late else done[number]
            if arrival > start:
                start = arrival
        free = start + length
        note_start(start)
        note_end(free)
        if beside and beside.copied:
            beside.begin_copies(timed, microbatch, free)
        for (done, waiting), distance in outputs:
            number = microbatch + distance if distance else microbatch
            done[number] = free
            if number in waiting:
                ready += waiting.pop(number)


def _kinds(
    schedule: Schedule, flow: Dataflow, lines: Mapping[int, Line], costs: Costs, unlike: Sequence[Costs],
    ops: Set[Op],
) -> Kinds:  # fmt: skip
    """Time the kinds of instruction that occur, by op and stage, pairs excepted."""
    home, every = schedule.placement, schedule.ops & ops - {Op.OVERLAP_F_B}
    kinds: Kinds = [{} for _ in unlike]
    for stage, op, (n, each) in product(range(schedule.stages), every, enumerate(unlike)):
        of = each if KINDS[op].microbatch else costs
        made = flow.output(stage, 0) + KINDS[op].product
        reads = tuple(
            (lines[value + 2 * shift], 0, of.message_of(origin) if home[origin] != home[stage] else 0)
            for value, origin, shift in flow.needs.get((op, stage), ())
        )
        products: tuple[tuple[Line, int], ...] = ((lines[made], 0),) if KINDS[op].makes else ()
        if products and schedule.slices > 1:
            shift = 1 if op is Op.F else -1
            products += ((lines[made - 2 * shift], shift),)
        kinds[n][op, stage] = TimedOp(op, ((op, stage, 0),), of.time_of(op, stage), reads, products)
    return kinds


def _unlike(schedule: Schedule, costs: Costs) -> Sequence[Costs]:
    """Return the costs of every slice of a sequence; a single entry where slices are alike."""
    own = costs.fitting(slices=schedule.slices).slices if schedule.slices else ()
    return own or [costs]


def _work(program: Program, ops: Set[Op], kinds: Kinds, unlike: Sequence[Costs]) -> list[Work]:
    """List the instructions of a rank that have a cost, adding kinds of pairs as they are met."""
    slices, alike = len(kinds), kinds[0]

    def of_pair(forward: Instruction, backward: Instruction) -> TimedOp:
        m, distance = microbatch_of(forward), microbatch_of(backward) - microbatch_of(forward)
        key, mine = (*forward[:2], *backward[:2], distance), kinds[m % slices]
        if key not in mine:
            one, other = mine[forward[:2]], kinds[(m + distance) % slices][backward[:2]]
            inputs = (*one.inputs, *((line, distance, late) for line, _, late in other.inputs))
            products = (*one.products, *((line, distance + shift) for line, shift in other.products))
            parts = (*one.parts, (*other.parts[0][:2], distance))
            own = unlike[m % slices].of("overlapped", forward.stage)
            length = one.length + other.length if own is None else own
            mine[key] = TimedOp(Op.OVERLAP_F_B, parts, length, inputs, products)
        return mine[key]

    timed = [i for step in program for i in step if i[0] in ops]
    if slices == 1:
        return [(i[2], of_pair(*i[5]) if i[5] else alike[i[:2]]) for i in timed]
    return [(i[2], of_pair(*i[5]) if i[5] else kinds[(i[2] or 0) % slices][i[:2]]) for i in timed]


def _stuck(
    schedule: Schedule, flow: Dataflow, times: EarliestTimes, timed: Set[Op], missing: dict[int, int]
) -> ScheduleError:
    """Make the error for ranks that wait for ever; follow who waits for whom until the circle closes."""
    makers: dict[int, tuple[int, int, int]] = {}
    places = []
    for rank, program in enumerate(schedule.programs):
        steps = enumerate(program)
        places.append([(rank, s, p) for s, step in steps for p, i in enumerate(step) if i.op in timed])
        for position in places[rank]:
            instruction = program[position[1]][position[2]]
            for value in flow.products(instruction) if instruction.op in COMPUTE else ():
                makers.setdefault(value, position)

    def text(rank: int, step: int, place: int) -> str:
        return f"step {step}, place {place} ({text_of(schedule.programs[rank][step][place])})"

    def sentence(rank: int) -> tuple[str, int]:
        at, value = places[rank][len(times.ends[rank])], flow.name(missing[rank])
        if missing[rank] not in makers:
            raise fault_at(schedule, at, f"it waits for {value}, which no rank computes")
        maker = makers[missing[rank]]
        there = f"which rank {maker[0]} computes only at {text(*maker)}"
        return f"rank {rank} waits at {text(*at)} for {value}, {there}", maker[0]

    rank, cycle = circle_of(min(missing), sentence)
    return fault_at(schedule, places[rank][len(times.ends[rank])], "deadlock: " + cycle)


_WINDOW = 32  # steps by which a rank may be ahead: what some 32 ranks touch meanwhile fits into the caches


def take_turns(resume: Callable[[int], None], ready: list[int], past: Sequence[Sized]) -> None:
    """Resume the ranks in ``ready``, the last first, until no rank is ready.

    A rank that is resumed runs until it has to wait, and adds to ``ready`` those that waited for it. Any
    order gives the same result. But a rank can be only a microbatch or so ahead of its neighbour, so without
    a window every microbatch goes through all ranks; more of them than the caches hold take twice the time.

    Args:
        resume: runs a rank.
        ready: the ranks that can run; empty at the end.
        past: work that each rank has done so far. A rank that is ahead of the window waits for it to move on.
    """
    ahead: list[int] = []
    end = _WINDOW
    while ready:
        rank = ready.pop()
        if len(past[rank]) > end:
            ahead.append(rank)
        else:
            resume(rank)
        if not ready:
            ready += reversed(ahead)
            ahead.clear()
            end += _WINDOW


@naming_attributes
@dataclass(frozen=True, repr=False)
class Timeline:
    """Start and end of every instruction, and the figures that follow from them.

    Args:
        schedule: the one that ran, or would run.
        makespan: time from 0 to the last end of compute, a reduction or an optimizer step.
        span: largest over the ranks of that end minus the first start of compute.
        bubble: share of the makespan in which ranks neither compute nor step their optimizers, on average.
        span_bubble: the same share of the span.
        idle: time of the makespan in which a rank does neither, per rank.
        peak_activations: largest memory held for backwards, per rank, in the unit of the costs.
        starts: start of every instruction in the order of its program, per rank.
        ends: end of every instruction, per rank. A message lasts from the end of its producer
            until it is there, at both ends, an OFFLOAD until its copy ends, for which compute waits. Loads
            and RESHARD take no time.
        measured: whether the step ran; else its times are simulated, in the unit of the costs.
        origin: nanoseconds from 1970 to time 0 of a step that ran, by the clock of rank 0; else 0.
        seconds: whether the times are seconds.
        share: size of the activations of one microbatch in a rank's share of the model, in the unit of the
            costs.
    """

    schedule: Schedule
    makespan: Time
    span: Time
    bubble: Time
    span_bubble: Time
    idle: tuple[Time, ...]
    peak_activations: tuple[Number, ...]
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]
    measured: bool = False
    origin: int = 0
    seconds: bool = False
    share: Number = 1

    @property
    def peaks(self) -> tuple[float, ...]:
        """Return the peak of each rank, in activations of one microbatch in one rank's share of the model."""
        return tuple(float(peak / (self.share or 1)) for peak in self.peak_activations)

    @property
    def sized(self) -> bool:
        """Tell whether the costs have sizes of activations, other than 1 each on average."""
        count = len(set(self.schedule.model_stages)) * self.schedule.per_sequence
        return self.share != count / self.schedule.ranks

    def time(self, time: Time) -> str:
        """Write a time: with the unit that fits the makespan, or without any where the costs have no unit."""
        return duration(time, self.makespan) if self.seconds else f"{float(time):.6g}"

    def __repr__(self) -> str:
        return (
            f"Timeline(ranks={len(self.starts)}, makespan={self.makespan!r}, span={self.span!r},"
            f" bubble={float(self.bubble):.4g}, peak_activations={max(self.peak_activations, default=0)!r})"
        )

    def __str__(self) -> str:
        """Write the figures of the whole, and a line per rank."""
        whole = f"makespan {self.time(self.makespan)}, bubble {percent(self.bubble)}"
        whole += f"; span {self.time(self.span)}, bubble of the span {percent(self.span_bubble)}"
        head = ["rank", "computes", "idle", "peak activations", *["their size"] * self.sized]
        rows = [
            [r, self.time(self.makespan - idle), self.time(idle), peak, *[size] * self.sized]
            for r, (idle, peak, size) in enumerate(
                zip(self.idle, self.peaks, self.peak_activations, strict=True)
            )
        ]
        return f"{self.schedule.name}: {whole}\n{table(head, rows)}"

    _repr_pretty_ = show_table

    def _repr_svg_(self) -> str | None:
        return Schedule._repr_svg_(self)

    def rows(self) -> Iterator[Iterator[tuple[Instruction, Time, Time]]]:
        """Iterate over the ranks, and the instructions of each with their start and end."""
        for rank, times in enumerate(zip(self.starts, self.ends, strict=True)):
            yield zip(self.schedule.instructions(rank), *times, strict=True)

    def costs(self) -> Costs:
        """Return the median time of each kind per stage, and the shortest message that each stage sends.

        A message lasts until its receiver has waited for it, so the shortest is the nearest to its latency.
        Where a schedule has no I and W apart, each is half of B; memory is that of the default costs. What a
        measured OFFLOAD or FETCH takes is not known: the copies run beside compute, and only waits are seen.
        Slices have costs of their own, and whole sequences their sums.
        """
        whole, slices = self._costs(None), range(self.schedule.slices)
        return whole.in_slices([self._costs(n) for n in slices]) if slices else whole

    def _costs(self, of_slice: int | None) -> Costs:
        from statistics import median  # here, because it loads slowly

        k, whole = self.schedule.slices, of_slice is None
        times: dict[tuple[Op, int], list[Time]] = {}
        for row in self.rows():
            for instruction, start, end in row:
                m = instruction.microbatch
                if whole or (m is not None and m % k == of_slice):
                    times.setdefault((instruction.op, instruction.stage), []).append(end - start)

        def of(op: Op) -> tuple[Time, ...]:
            return tuple(median(times.get((op, stage), [0])) for stage in range(self.schedule.stages))

        both, halves = of(Op.B), [of(Op.I), of(Op.W)]
        for stage, time in enumerate(both):
            if time and not halves[0][stage]:
                halves = [(*half[:stage], time / 2, *half[stage + 1 :]) for half in halves]
        sent = tuple(
            min(times.get((Op.SEND_F, s), []) + times.get((Op.SEND_B, s), []), default=0)
            for s in range(self.schedule.stages)
        )
        overlapped = of(Op.OVERLAP_F_B) if Op.OVERLAP_F_B in self.schedule.ops else None
        together = [i + w for i, w in zip(*halves, strict=True)]
        backward = tuple(b or parts for b, parts in zip(both, together, strict=True))
        inputs, weights = halves
        seen = {op for op in _COUNTED & self.schedule.ops if whole or KINDS[op].microbatch}
        seen -= MOVES if self.measured else set()
        rest = {op.lower(): of(op) for op in seen if not KINDS[op].cost}
        whole_apart = None if list(backward) == together else backward
        return Costs(
            of(Op.F),
            inputs,
            weights,
            whole_apart,
            overlapped,
            communication=sent,
            seconds=self.seconds,
            **rest,
        )


@naming_arguments
@collector_paused()
def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run ``schedule`` on paper: each instruction starts once its rank is free and its inputs are there.

    A message delays its consumer on another rank and occupies no rank, so the times of a schedule
    are the same with and without its communications. Nor does a collective: those of a rank run beside its
    compute, one after the other, as if all that take part were there; the compute of a stage waits for its
    UNSHARD, and STEP for the reductions of its stage. Copies of residuals run beside compute, one after the
    other in each direction. One to the host begins with the end of its forward, and its OFFLOAD, after which
    the memory is free, waits for its end; one from the host begins at its FETCH, and the backward waits.

    Args:
        schedule: schedule that ``check`` accepts.
        costs: times and sizes; by default F = I = W = 1, B = 2, and all else takes no time.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
        ValueError, TypeError: costs for another number of stages, or no costs.

    >>> from ppfunc.schedule import one_f_one_b
    >>> timeline = simulate(one_f_one_b(ranks=4, microbatches=8), Costs(forward=1, backward=2))
    >>> timeline.makespan, timeline.idle, timeline.peak_activations
    (33, (9, 9, 9, 9), (4, 3, 2, 1))
    """
    require_schedule(schedule)
    costs = require_costs(costs).fitting(schedule.stages, schedule.slices)
    times = earliest(schedule, costs, _COUNTED & schedule.ops)
    return timeline_of(schedule, *_all_instructions(schedule, costs, times), costs)


def timeline_of(
    schedule: Schedule,
    starts: Sequence[Sequence[Time]],
    ends: Sequence[Sequence[Time]],
    costs: Costs | None = None,
    *,
    measured: bool = False,
    origin: int = 0,
) -> Timeline:
    """Make the timeline of given times: per rank, one per instruction of its program.

    Args:
        schedule: the one that ran, or would run.
        starts: when each instruction starts.
        ends: when it ends.
        costs: sizes of activations, by default 1 each, and whether times are seconds.
        measured: the times are seconds of a step that ran.
        origin: nanoseconds from 1970 to time 0.

    Raises:
        TypeError: not a row of times per rank.
        ValueError: the number of times is not that of the instructions, or one ends before it starts.
    """
    require_schedule(schedule)
    costs = require_costs(costs).fitting(schedule.stages, schedule.slices)
    for name, rows in (("starts", starts), ("ends", ends)):
        require_type(name, rows, Sequence, f"{schedule.ranks} rows of times, one per rank")
        if len(rows) != schedule.ranks:
            raise ValueError(
                f"{name}: got {len(rows)} rows of times, expected {schedule.ranks}, one per rank"
            )
        for rank, row in enumerate(rows):
            require_type(f"{name}[{rank}]", row, Sequence, "a row of times, one per instruction")
    busy, spans, makespan = [], [], 0
    for rank in range(schedule.ranks):
        ops = list(map(itemgetter(0), chain.from_iterable(schedule.programs[rank])))
        if not len(ops) == len(starts[rank]) == len(ends[rank]):
            raise ValueError(
                f"rank {rank} has {len(ops)} instructions, got {len(starts[rank])} starts and"
                f" {len(ends[rank])} ends"
            )
        if not all(after := list(map(le, starts[rank], ends[rank]))):
            n = after.index(False)
            raise ValueError(
                f"ends[{rank}][{n}]: got {ends[rank][n]}, expected at least the start of the instruction,"
                f" {starts[rank][n]}"
            )
        compute = list(map(_BUSY.__contains__, ops))
        begins, stops = (list(compress(times[rank], compute)) for times in (starts, ends))
        last = max(compress(ends[rank], map(_COUNTED.__contains__, ops)), default=0)
        makespan = max(makespan, last)
        busy.append(sum(map(sub, stops, begins)))
        spans.append(last - min(begins, default=0))
    span = max(spans)
    model = dict(zip(schedule.model_stages, range(schedule.stages), strict=True)).values()
    parts = [costs.of_slice(n) for n in range(schedule.slices)] or [costs]
    return Timeline(
        schedule=schedule,
        makespan=makespan,
        span=span,
        bubble=_share_idle(busy, makespan),
        span_bubble=_share_idle(busy, span),
        idle=tuple(makespan - b for b in busy),
        peak_activations=peak_activations(schedule, costs),
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        measured=measured,
        origin=origin,
        seconds=measured or costs.seconds,
        share=sum(of.of("activation", s) for of in parts for s in model) / schedule.ranks,
    )


@naming_arguments
def peak_activations(schedule: Schedule, costs: Costs | None = None) -> tuple[Number, ...]:
    """Return the largest memory that each rank holds for its backwards.

    An activation is held from the start of its F to the end of its B, or of its I, after which
    its weight share is held until the end of its W; not while it is offloaded. One that is computed again is
    held during its F and from the start of its RECOMPUTE, its checkpoint in between.
    """
    require_schedule(schedule)
    unlike = _unlike(schedule, require_costs(costs))
    names = ("activation", "weight_share", "checkpoint")
    peaks = []
    for rank in range(schedule.ranks):
        # Equal sizes are counted together and only then multiplied, so that floats do not drift.
        sizes: dict[tuple[Number, ...], set[Any]] = {}
        for stage, (n, of) in product(schedule.stages_of(rank), enumerate(unlike)):
            place = stage if len(unlike) == 1 else (stage, n)
            sizes.setdefault(tuple(of.of(name, stage) for name in names), set()).add(place)
        counts = (held(schedule, rank, places, len(unlike)) for places in sizes.values())
        states = set(zip(*counts, strict=True))
        memory = (
            sum(
                size * (whole + share * shares) + checkpoint * checkpoints
                for (size, share, checkpoint), (whole, shares, checkpoints) in zip(sizes, state, strict=True)
            )
            for state in states
        )
        peaks.append(max(memory, default=0))
    return tuple(peaks)


HOLDING = frozenset(op for op, kind in KINDS.items() if kind.held != (0, 0))


def held(
    schedule: Schedule, rank: int, places: Container[Any], slices: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Count the activations held for backwards of some stages, while each instruction runs that changes them.

    Args:
        places: numbers of stages; or pairs of stages and slices, where slices are told apart.
        slices: number of slices of a sequence that are told apart.

    Yields:
        The numbers of whole activations, of shares that wait for W, and of checkpoints.
    """
    keep = 0 if schedule.forward_only else 1
    # Of each number: the change while an instruction runs, and the one that stays.
    changes = {}
    for op, dropped in product(HOLDING, (False, True)):
        whole, share = KINDS[op].held
        stub = dropped if op is Op.F else -1 if op is Op.RECOMPUTE else 0
        stays = 0 if op is Op.F and dropped else whole
        changes[op, dropped] = (
            tuple(keep * n for n in (stays, share, stub)),
            (max(whole, 0), 0, keep * min(stub, 0)),
        )
    again = schedule.recomputed
    nothing = (0, 0, 0), (0, 0, 0)
    parts = (part for part in elementary(schedule.programs[rank]) if part[0] in HOLDING)
    if slices == 1:
        rows = [changes[p[0], p[1:3] in again] if p[1] in places else nothing for p in parts]
    else:
        pairs = ((p, (p[1], microbatch_of(p) % slices)) for p in parts)
        rows = [changes[p[0], p[1:3] in again] if pair in places else nothing for p, pair in pairs]
    columns = zip(*(zip(*column, strict=True) for column in zip(*rows, strict=True)), strict=True)
    return zip(
        *(map(add, accumulate(lasting, initial=0), during) for lasting, during in columns), strict=False
    )


def _share_idle(busy: Sequence[Time], time: Time) -> Time:
    return (len(busy) * time - sum(busy)) / (len(busy) * time) if time else 0


def _all_instructions(schedule: Schedule, costs: Costs, times: EarliestTimes) -> tuple[Sequence, Sequence]:
    """Extend the times of instructions that have a cost to all instructions."""
    if schedule.ops <= COMPUTE:
        return times.starts, times.ends
    flow = Dataflow(schedule)
    unlike = _unlike(schedule, costs)
    slices = len(unlike)
    # Per end of a message: by microbatch, when its value is there; how long it takes, or that by slice.
    carried: dict[object, tuple[Mapping[Any, Time], Any]] = {}
    nothing: tuple[Mapping[Any, Time], Any] = {}, 0
    for end, route in flow.routes.items():
        value, _ = flow.content(route.first)
        latencies = [each.message_of(flow.place(value)[0]) for each in unlike]
        carried[end] = times.done.get(value, {}), latencies[0] if slices == 1 else latencies
    starts: list[list[Time]] = [[] for _ in schedule.programs]
    ends: list[list[Time]] = [[] for _ in schedule.programs]
    for rank, program in enumerate(schedule.programs):
        note_start, note_end = starts[rank].append, ends[rank].append
        timed = zip(times.starts[rank], times.ends[rank], strict=True)
        now: Time = 0
        for step, instructions in enumerate(program):
            for place, instruction in enumerate(instructions):
                op, stage, microbatch, peer, _, _ = instruction
                if op in _COUNTED:
                    first, last = next(timed)
                    now = now if op in BESIDE else max(now, last)
                elif op in COMMUNICATION:
                    made, delay = carried.get((op, stage, peer), nothing)
                    if microbatch not in made:
                        raise schedule_error(
                            schedule, rank, (step, place), "nothing computes what this message carries"
                        )
                    first = made[microbatch]
                    last = first + (delay if slices == 1 else delay[microbatch_of(instruction) % slices])
                else:
                    first = last = now
                note_start(first)
                note_end(last)
    return starts, ends
