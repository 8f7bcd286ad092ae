"""Run instructions as early as possible: each starts once its rank is free and its inputs are there.

Ranks take turns (`take_turns`) such that what they touch is still in the caches.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any, NamedTuple

from ..dataflow import PRODUCT, Dataflow
from ..errors import ScheduleError, cycle_text, schedule_error, text_of
from ..instruction import COMPUTE, WITHOUT_VALUE, Instruction, Op, microbatch_of
from ..schedule import Program, Schedule
from .structure import check_structure

Time = Any  # int, float or Fraction: whatever the durations are, nothing is converted
Duration = Callable[[Op, int], Time]
PairDuration = Callable[[Instruction, Instruction], Time]
BESIDE = frozenset({Op.UNSHARD, Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.FETCH})
"""Collectives and copies from the host, which run beside compute, each kind one after the other."""


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


class _Engines:
    """What runs beside the compute of one rank: collectives, as if all that take part were there, and copies
    to the host and from it, each of the three one after the other.

    Args:
        copied: the time of the copy to the host of every microbatch that has an OFFLOAD, by its stage.
    """

    def __init__(self, copied: Mapping[tuple[int, int | None], Time]) -> None:
        self.free: dict[Op, Time] = {}  # by engine, the end of its last work
        self.ready: dict[tuple[Op, int, int | None], Time] = {}  # by engine or UNSHARD, stage and microbatch
        self.copied = copied

    def run(self, work: TimedOp, microbatch: int | None, free: Time) -> tuple[Time, Time]:
        """Return start and end of an instruction that is no compute, on a rank that is free from ``free``."""
        op, ((_, stage, _),), length = work[:3]
        if op is Op.OFFLOAD:
            end: Time = self.ready[op, stage, microbatch]
            return end - length, end
        if op is Op.STEP:
            start = max(free, self.ready.get((Op.REDUCE_GRAD, stage, None), 0))
            return start, start + length
        engine = op if op is Op.FETCH else Op.REDUCE_GRAD
        start = max(free, self.free.get(engine, 0))
        end = self.free[engine] = self.ready[op if op is Op.UNSHARD else engine, stage, microbatch] = (
            start + length
        )
        return start, end

    def arrival(self, work: TimedOp, microbatch: int) -> Time:
        """Return when the parameters and residuals that a compute instruction needs are there."""
        needs = ((Op.UNSHARD, s, None) for _, s, _ in work.parts)
        back = ((Op.FETCH, s, microbatch + distance) for _, s, distance in work.parts)
        return max(self.ready.get(key, 0) for key in (*needs, *back))

    def begin_copies(self, work: TimedOp, microbatch: int, end: Time) -> None:
        """Begin to copy what a forward that ends then has kept, if it has an OFFLOAD."""
        for op, stage, distance in work.parts:
            key = stage, microbatch + distance
            if op is Op.F and key in self.copied:
                end = max(end, self.free.get(Op.OFFLOAD, 0)) + self.copied[key]
                self.free[Op.OFFLOAD] = self.ready[Op.OFFLOAD, *key] = end


def earliest(
    schedule: Schedule,
    duration: Duration,
    pair: PairDuration,
    delay: Callable[[int, int], Time],
    whole: Mapping[Op, Callable[[int], Time]] | None = None,
) -> EarliestTimes:
    """Run ``schedule`` as soon as possible: its compute, and whole-stage instructions that have a cost.

    Communications are skipped. Equivalent to, for each instruction in an order that respects its inputs::

        start = max(end of the rank's previous instruction, *(done[i] + delay for i in inputs))
        end = start + duration

    The previous instruction is one that occupies the rank: compute or STEP. Collectives, and the copies of
    each direction, occupy engines of their own, see :class:`_Engines`.

    Args:
        schedule: compute only or lowered.
        duration: time of an instruction, from its op and stage.
        pair: time of an overlapped pair, from its forward and its backward, whatever their microbatches.
        delay: time of a message, from its stage of origin and the stage that consumes it.
        whole: time of a collective, a copy or STEP, from the stage; by default they are skipped.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
    """
    check_structure(schedule)
    flow = Dataflow(schedule)
    whole = whole or {}
    timed = COMPUTE.union(whole)
    lines: dict[int, Line] = defaultdict(lambda: ({}, {}))
    kinds = _kinds(schedule, flow, lines, duration, delay, whole)
    times = EarliestTimes(tuple([] for _ in schedule.programs), tuple([] for _ in schedule.programs), {})
    ready = list(range(schedule.ranks - 1, -1, -1))
    runs = [
        _run(
            rank,
            _work(program, timed, kinds, pair),
            _engines(program, whole),
            times.starts[rank],
            times.ends[rank],
            ready,
        )
        for rank, program in enumerate(schedule.programs)
    ]
    take_turns(lambda rank: next(runs[rank], None), ready, times.starts)
    times.done.update((first, done) for first, (done, _) in lines.items())
    waits = (
        (first + flow.output(0, m), ranks)
        for first, (_, waiting) in lines.items()
        for m, ranks in waiting.items()
    )
    if missing := {rank: value for value, ranks in waits for rank in ranks}:
        raise _stuck(schedule, flow, times, timed, missing)
    return times


def _engines(program: Program, whole: Mapping[Op, Callable[[int], Time]]) -> _Engines | None:
    """Return what runs beside the compute of a rank; None if nothing does."""
    if not whole:
        return None
    moved = (i for step in program for i in step if i.op is Op.OFFLOAD)
    return _Engines({(i.stage, i.microbatch): whole[i.op](i.stage) for i in moved if i.op in whole})


def _run(
    rank: int,
    work: Sequence[Work],
    engines: _Engines | None,
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
        if engines:
            if timed.op not in COMPUTE:
                start, end = engines.run(timed, microbatch, free)
                note_start(start)
                note_end(end)
                if timed.op not in BESIDE:
                    free = max(free, end)
                continue
            start = max(free, engines.arrival(timed, microbatch))
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
        if engines and engines.copied:
            engines.begin_copies(timed, microbatch, free)
        for (done, waiting), distance in outputs:
            number = microbatch + distance if distance else microbatch
            done[number] = free
            if number in waiting:
                ready += waiting.pop(number)


def _kinds(
    schedule: Schedule,
    flow: Dataflow,
    lines: Mapping[int, Line],
    duration: Duration,
    delay: Callable[[int, int], Time],
    whole: Mapping[Op, Callable[[int], Time]],
) -> dict[tuple[Any, ...], TimedOp]:
    """Time the kinds of instruction that occur, by op and stage, pairs excepted."""
    home, kinds = schedule.placement, {}
    for stage in range(schedule.stages):
        first = flow.output(stage, 0)
        for op in whole:
            kinds[op, stage] = TimedOp(op, ((op, stage, 0),), whole[op](stage), (), ())
        for op in schedule.ops & {*PRODUCT}:
            inputs = (
                (value, delay(origin, stage) if home[origin] != home[stage] else 0)
                for value, origin in flow.needs[op, stage]
            )
            products = ((lines[first + PRODUCT[op]], 0),) if op not in WITHOUT_VALUE else ()
            reads = tuple((lines[n], 0, late) for n, late in inputs)
            kinds[op, stage] = TimedOp(op, ((op, stage, 0),), duration(op, stage), reads, products)
    return kinds


def _work(
    program: Program, timed: Set[Op], kinds: dict[tuple[Any, ...], TimedOp], pair: PairDuration
) -> list[Work]:
    """List the instructions of a rank that have a cost, adding kinds of pairs as they are met."""

    def of_pair(forward: Instruction, backward: Instruction) -> TimedOp:
        distance = microbatch_of(backward) - microbatch_of(forward)
        key = (*forward[:2], *backward[:2], distance)
        if key not in kinds:
            one, other = kinds[forward[:2]], kinds[backward[:2]]
            inputs = (*one.inputs, *((line, distance, late) for line, _, late in other.inputs))
            products = (*one.products, *((line, distance) for line, _ in other.products))
            parts = (*one.parts, (*other.parts[0][:2], distance))
            kinds[key] = TimedOp(Op.OVERLAP_F_B, parts, pair(forward, backward), inputs, products)
        return kinds[key]

    return [
        (i[2], of_pair(*i[5]) if i[5] else kinds[i[:2]]) for step in program for i in step if i[0] in timed
    ]


def _stuck(
    schedule: Schedule, flow: Dataflow, times: EarliestTimes, timed: Set[Op], missing: dict[int, int]
) -> ScheduleError:
    """Make the error for ranks that wait for ever; follow who waits for whom until the circle closes."""
    makers: dict[int, tuple[int, int, int]] = {}
    places = []
    for rank, program in enumerate(schedule.programs):
        steps = enumerate(program)
        places.append(
            [
                (step, place)
                for step, instructions in steps
                for place, i in enumerate(instructions)
                if i.op in timed
            ]
        )
        for step, place in places[rank]:
            for value in flow.products(program[step][place]) if program[step][place].op in COMPUTE else ():
                makers.setdefault(value, (rank, step, place))
    rank = min(missing)
    seen: dict[int, str] = {}
    while rank not in seen:
        step, place = places[rank][len(times.ends[rank])]
        name = flow.name(missing[rank])
        if missing[rank] not in makers:
            return schedule_error(
                schedule, rank, (step, place), f"it waits for {name}, which no rank computes"
            )
        maker, at, beside = makers[missing[rank]]
        here, there = (
            text_of(schedule.programs[r][s][p]) for r, s, p in ((rank, step, place), (maker, at, beside))
        )
        seen[rank] = (
            f"rank {rank} waits at step {step}, place {place} ({here}) for {name}, "
            f"which rank {maker} computes only at step {at}, place {beside} ({there})"
        )
        rank = maker
    cycle = list(seen.values())[list(seen).index(rank) :]
    return schedule_error(
        schedule, rank, places[rank][len(times.ends[rank])], "deadlock: " + cycle_text(cycle)
    )


_WINDOW = 32  # steps by which a rank may be ahead: what some 32 ranks touch meanwhile fits into the caches


def take_turns(resume: Callable[[int], None], ready: list[int], past: Sequence[Sized]) -> None:
    """Resume the ranks in ``ready``, the last first, until there are none.

    A rank that is resumed runs until it has to wait, and adds to ``ready`` those that waited for it. Any
    order gives the same result. But a rank can be only a microbatch or so ahead of its neighbour, so without
    a window every microbatch goes through all ranks; more of them than the caches hold take twice the time.

    Args:
        resume: runs a rank.
        ready: the ranks that can run; empty at the end.
        past: what each rank has done so far. One that is ahead of the window waits for it to move on.
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
