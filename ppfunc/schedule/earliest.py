"""Run instructions as early as possible: each starts once its rank is free and its inputs are there."""

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from .dataflow import PRODUCT, Dataflow, dataflow, products
from .errors import ScheduleError, cycle_text, schedule_error, text_of
from .instruction import COMPUTE, Instruction, Op
from .proof.structure import check_structure
from .schedule import Schedule

Time = Any  # int, float or Fraction: whatever the durations are, nothing is converted
Duration = Callable[[Op, int], Time]
PairDuration = Callable[[Instruction, Instruction], Time]
BESIDE = frozenset({Op.UNSHARD, Op.REDUCE_TIED, Op.REDUCE_GRAD})
"""Collectives, which run beside compute, one after the other."""


class EarliestTimes(NamedTuple):
    """Start and end of every compute instruction, and of every other that has a cost, in the order of each rank."""

    starts: tuple[list[Time], ...]  # per rank, one time per instruction
    ends: tuple[list[Time], ...]  # likewise
    done: dict[int, Time]  # end of the instruction that produced each value of the data flow


class _Lane:
    """The collectives of one rank, and its optimizer steps, which wait for them."""

    def __init__(self) -> None:
        self.free: Time = 0  # end of the last collective
        self.unsharded: dict[int, Time] = {}  # by stage, when its parameters are there
        self.reduced: dict[int, Time] = {}  # by stage, when its gradients are

    def run(self, op: Op, stage: int, free: Time, length: Time) -> Time:
        """The start of an instruction of a whole stage on a rank that is free from ``free`` on."""
        if op is Op.STEP:
            return max(free, self.reduced.get(stage, 0))
        start: Time = max(free, self.free)
        self.free = (self.unsharded if op is Op.UNSHARD else self.reduced)[stage] = start + length
        return start


def earliest(
    schedule: Schedule,
    duration: Duration,
    pair: PairDuration,
    delay: Callable[[int, int], Time],
    whole: Mapping[Op, Callable[[int], Time]] | None = None,
) -> EarliestTimes:
    """Run the compute instructions of ``schedule`` as soon as possible, and those of whole stages that have a cost.

    Communications are skipped. Equivalent to, for each instruction in an order that respects its inputs::

        start = max(end of the rank's previous instruction, *(done[i] + delay for i in inputs))
        end = start + duration

    The previous instruction is one that occupies the rank: compute or STEP. Collectives occupy their own lane of the rank,
    one after the other, as if all that take part were there; the compute of a stage waits for its UNSHARD, its STEP for
    its reductions.

    Args:
        schedule: compute only or lowered.
        duration: time of an instruction, from its op and stage.
        pair: time of an overlapped pair, from its forward and its backward.
        delay: time of a message, from its stage of origin and the stage that consumes it.
        whole: time of UNSHARD, REDUCE_TIED, REDUCE_GRAD or STEP, from the stage; by default they are skipped.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
    """
    check_structure(schedule)
    flow = dataflow(schedule)
    whole = whole or {}
    timed = COMPUTE.union(whole)
    sequences = [[i for step in p for i in step if i[0] in timed] for p in schedule.programs]
    lanes = [_Lane() for _ in sequences]
    free_at: list[Time] = [0] * len(sequences)
    rows, microbatches = _rows(schedule, flow, duration, delay), flow.microbatches
    done: dict[int, Time] = {}
    times = EarliestTimes(tuple([] for _ in sequences), tuple([] for _ in sequences), done)
    ready = list(range(len(sequences) - 1, -1, -1))
    waiting: dict[int, list[int]] = {}

    def missing(rank: int) -> int | None:
        """Run one rank until it ends, or return the value that it waits for."""
        sequence, starts, ends, free = sequences[rank], times.starts[rank], times.ends[rank], free_at[rank]
        unsharded = lanes[rank].unsharded
        for at in range(len(ends), len(sequence)):
            instruction = sequence[at]
            parts = instruction[5]
            start: Time = free
            if instruction[0] in whole:
                op, stage, *_ = instruction
                length = whole[op](stage)
                start = lanes[rank].run(op, stage, free, length)
                starts.append(start)
                ends.append(start + length)
                if op not in BESIDE:
                    free_at[rank] = free = start + length
                continue
            made = []
            for op, stage, microbatch, _, _, _ in parts or (instruction,):
                length, product, inputs = rows[op][stage]
                output = 2 * (stage * microbatches + microbatch)  # type: ignore[operator]  # computes have one
                for distance, late in inputs:
                    arrival = done.get(output + distance)
                    if arrival is None:
                        return output + distance
                    if late:
                        arrival += late
                    if arrival > start:
                        start = arrival
                if stage in unsharded and unsharded[stage] > start:
                    start = unsharded[stage]
                if product is not None:
                    made.append(output + product)
            free_at[rank] = free = start + (pair(*parts) if parts else length)
            starts.append(start)
            ends.append(free)
            for value in made:
                done[value] = free
                if value in waiting:
                    ready.extend(waiting.pop(value))
        return None

    while ready:
        rank = ready.pop()
        value = missing(rank)
        if value is not None:
            waiting.setdefault(value, []).append(rank)
    if waiting:
        raise _stuck(schedule, flow, times, timed, {rank: value for value, ranks in waiting.items() for rank in ranks})
    return times


def _rows(schedule: Schedule, flow: Dataflow, duration: Duration, delay: Callable[[int, int], Time]) -> dict[Op, list[tuple]]:
    """``rows[op][stage]``: duration, distance of the product, and the inputs with their delays."""
    home = schedule.placement

    def inputs(op: Op, stage: int) -> tuple:
        return tuple((distance, delay(origin, stage) if home[origin] != home[stage] else 0) for distance, origin in flow.needs[op][stage])

    used = schedule.ops
    return {op: [(duration(op, s), PRODUCT[op], inputs(op, s)) for s in range(schedule.stages)] for op in flow.needs if op in used}


def _stuck(schedule: Schedule, flow: Dataflow, times: EarliestTimes, timed: Set[Op], missing: dict[int, int]) -> ScheduleError:
    """The error for ranks that wait for ever, each for a value; it follows who waits for whom until the circle closes."""
    makers: dict[int, tuple[int, int, int]] = {}
    places = []
    for rank, program in enumerate(schedule.programs):
        steps = enumerate(program)
        places.append([(step, place) for step, instructions in steps for place, i in enumerate(instructions) if i.op in timed])
        for step, place in places[rank]:
            for value in products(flow, program[step][place]) if program[step][place].op in COMPUTE else ():
                makers.setdefault(value, (rank, step, place))
    rank = min(missing)
    seen: dict[int, str] = {}
    while rank not in seen:
        step, place = places[rank][len(times.ends[rank])]
        name = flow.name(missing[rank])
        if missing[rank] not in makers:
            return schedule_error(schedule, rank, (step, place), f"it waits for {name}, which no rank computes")
        maker, at, beside = makers[missing[rank]]
        here, there = (text_of(schedule.programs[r][s][p]) for r, s, p in ((rank, step, place), (maker, at, beside)))
        seen[rank] = (
            f"rank {rank} waits at step {step}, place {place} ({here}) for {name}, "
            f"which rank {maker} computes only at step {at}, place {beside} ({there})"
        )
        rank = maker
    cycle = list(seen.values())[list(seen).index(rank) :]
    return schedule_error(schedule, rank, places[rank][len(times.ends[rank])], "deadlock: " + cycle_text(cycle))
