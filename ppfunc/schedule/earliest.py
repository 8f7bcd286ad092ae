"""Run compute instructions as early as possible: each starts once its rank is free and its inputs are there."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .dataflow import PRODUCT, Dataflow, dataflow, products
from .errors import ScheduleError, cycle_text, schedule_error, text_of
from .instruction import COMPUTE, Instruction, Op
from .proof.structure import check_structure
from .schedule import Schedule

Time = Any  # int, float or Fraction: whatever the durations are, nothing is converted
Duration = Callable[[Op, int], Time]
PairDuration = Callable[[Instruction, Instruction], Time]


class EarliestTimes(NamedTuple):
    """Start and end of every compute instruction, in the order of each rank."""

    starts: tuple[list[Time], ...]  # per rank, one time per compute instruction
    ends: tuple[list[Time], ...]  # likewise
    done: dict[int, Time]  # end of the instruction that produced each value of the data flow


def earliest(schedule: Schedule, duration: Duration, pair: PairDuration, delay: Callable[[int, int], Time]) -> EarliestTimes:
    """Run the compute instructions of ``schedule`` as soon as possible; communications are skipped.

    Equivalent to, for each instruction in an order that respects its inputs::

        start = max(end of the rank's previous instruction, *(done[i] + delay for i in inputs))
        end = start + duration

    Args:
        schedule: compute only or lowered.
        duration: time of an instruction, from its op and stage.
        pair: time of an overlapped pair, from its forward and its backward.
        delay: time of a message, from its stage of origin and the stage that consumes it.

    Raises:
        ScheduleError: a value that is no schedule, or an instruction that waits for something
            that can never come.
    """
    check_structure(schedule)
    flow = dataflow(schedule)
    sequences = [[i for step in p for i in step if i[0] in COMPUTE] for p in schedule.programs]
    rows, microbatches = _rows(schedule, flow, duration, delay), flow.microbatches
    done: dict[int, Time] = {}
    times = EarliestTimes(tuple([] for _ in sequences), tuple([] for _ in sequences), done)
    ready = list(range(len(sequences) - 1, -1, -1))
    waiting: dict[int, list[int]] = {}

    def missing(rank: int) -> int | None:
        """Run one rank until it ends, or return the value that it waits for."""
        sequence, starts, ends = sequences[rank], times.starts[rank], times.ends[rank]
        free = ends[-1] if ends else 0
        for at in range(len(ends), len(sequence)):
            instruction = sequence[at]
            parts = instruction[5]
            start: Time = free
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
                if product is not None:
                    made.append(output + product)
            free = start + (pair(*parts) if parts else length)
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
        raise _stuck(schedule, flow, times, {rank: value for value, ranks in waiting.items() for rank in ranks})
    return times


def _rows(schedule: Schedule, flow: Dataflow, duration: Duration, delay: Callable[[int, int], Time]) -> dict[Op, list[tuple]]:
    """``rows[op][stage]``: duration, distance of the product, and the inputs with their delays."""
    home = schedule.placement

    def inputs(op: Op, stage: int) -> tuple:
        return tuple((distance, delay(origin, stage) if home[origin] != home[stage] else 0) for distance, origin in flow.needs[op][stage])

    used = schedule.ops
    return {op: [(duration(op, s), PRODUCT[op], inputs(op, s)) for s in range(schedule.stages)] for op in flow.needs if op in used}


def _stuck(schedule: Schedule, flow: Dataflow, times: EarliestTimes, missing: dict[int, int]) -> ScheduleError:
    """The error for ranks that wait for ever, each for a value; it follows who waits for whom until the circle closes."""
    makers: dict[int, tuple[int, int, int]] = {}
    places = []
    for rank, program in enumerate(schedule.programs):
        steps = enumerate(program)
        places.append([(step, place) for step, instructions in steps for place, i in enumerate(instructions) if i.op in COMPUTE])
        for step, place in places[rank]:
            for value in products(flow, program[step][place]):
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
