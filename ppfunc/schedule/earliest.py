"""Run compute instructions as early as possible: each starts once its rank is free and its inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .dataflow import PRODUCT, Dataflow, consumed, dataflow
from .errors import ScheduleError, cycle_text, schedule_error, text_of
from .instruction import COMPUTE, Instruction, Op, microbatch_of
from .proof.structure import check_structure
from .schedule import Schedule

Time = Any  # int, float or Fraction: whatever the durations are, nothing is converted
Duration = Callable[[Op, int], Time]
PairDuration = Callable[[Instruction, Instruction], Time]


class EarliestTimes(NamedTuple):
    """Start and end of every compute instruction, in the order of each rank.

    Args:
        starts: per rank, one time per compute instruction.
        ends: likewise.
        done: end of the instruction that produced each value of the data flow.
    """

    starts: tuple[list[Time], ...]
    ends: tuple[list[Time], ...]
    done: dict[int, Time]


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
    rows = _rows(schedule, flow, duration, delay)
    times = EarliestTimes(tuple([] for _ in sequences), tuple([] for _ in sequences), {})
    ready = list(range(len(sequences) - 1, -1, -1))
    waiting: dict[int, list[int]] = {}
    while ready:
        rank = ready.pop()
        missing = _advance(sequences[rank], rank, rows, flow.microbatches, pair, times, waiting, ready)
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
    if waiting:
        raise stuck(schedule, flow, {r: len(times.ends[r]) for ranks in waiting.values() for r in ranks})
    return times


def _rows(schedule: Schedule, flow: Dataflow, duration: Duration, delay: Callable[[int, int], Time]) -> dict[Op, list[tuple]]:
    """``rows[op][stage]``: duration, distance of the product, and the inputs with their delays."""
    home = schedule.placement

    def inputs(op: Op, stage: int) -> tuple:
        return tuple((distance, delay(origin, stage) if home[origin] != home[stage] else 0) for distance, origin in flow.needs[op][stage])

    used = schedule.ops
    return {op: [(duration(op, s), PRODUCT[op], inputs(op, s)) for s in range(schedule.stages)] for op in flow.needs if op in used}


def _advance(
    sequence: Sequence[Instruction],
    rank: int,
    rows: dict[Op, list[tuple]],
    microbatches: int,
    pair: PairDuration,
    times: EarliestTimes,
    waiting: dict[int, list[int]],
    ready: list[int],
) -> int | None:
    """Run one rank until it ends, or return the value that it waits for."""
    starts, ends, done = times.starts[rank], times.ends[rank], times.done
    free = ends[-1] if ends else 0
    for at in range(len(ends), len(sequence)):
        instruction = sequence[at]
        parts = instruction[5]
        start: Time = free
        made: tuple[int, ...] = ()
        for part in parts or (instruction,):
            op, stage, microbatch, _, _, _ = part
            assert microbatch is not None
            length, product, inputs = rows[op][stage]
            output = 2 * (stage * microbatches + microbatch)
            for distance, late in inputs:
                arrival = done.get(output + distance)
                if arrival is None:
                    return output + distance
                if late:
                    arrival += late
                if arrival > start:
                    start = arrival
            if product is not None:
                made = (*made, output + product) if made else (output + product,)
        free = start + (pair(*parts) if parts else length)
        starts.append(start)
        ends.append(free)
        for value in made:
            done[value] = free
            if value in waiting:
                ready += waiting.pop(value)
    return None


def stuck(schedule: Schedule, flow: Dataflow, blocked: dict[int, int]) -> ScheduleError:
    """The error for ranks that wait for ever; ``blocked`` gives each one's compute instruction by index."""
    makers = _makers(schedule, flow)
    at = {rank: _nth_compute(schedule, rank, index) for rank, index in blocked.items()}
    reached = {rank: (step, place) for rank, (step, place, _) in at.items()}
    rank = min(blocked)
    seen: dict[int, str] = {}
    while rank not in seen:
        step, place, instruction = at[rank]
        value = next(v for v, *_ in consumed(flow, instruction) if not _is_made(makers, v, reached))
        sentence = f"rank {rank} waits at step {step}, place {place} ({text_of(instruction)}) for {flow.name(value)}"
        maker = makers.get(value)
        if maker is None:
            return schedule_error(schedule, rank, (step, place), f"it waits for {flow.name(value)}, which no rank computes")
        other, (other_step, other_place) = maker
        producer = text_of(schedule.programs[other][other_step][other_place])
        seen[rank] = f"{sentence}, which rank {other} computes only at step {other_step}, place {other_place} ({producer})"
        rank = other
    cycle = list(seen)[list(seen).index(rank) :]
    step, place, _ = at[rank]
    return schedule_error(schedule, rank, (step, place), "deadlock: " + cycle_text([seen[r] for r in cycle]))


def _makers(schedule: Schedule, flow: Dataflow) -> dict[int, tuple[int, tuple[int, int]]]:
    makers: dict[int, tuple[int, tuple[int, int]]] = {}
    for rank, program in enumerate(schedule.programs):
        for step, place, instruction in _computes(program):
            for part in instruction.parts or (instruction,):
                product = PRODUCT[part.op]
                if product is not None:
                    value = flow.output(part.stage, microbatch_of(part)) + product
                    makers.setdefault(value, (rank, (step, place)))
    return makers


def _is_made(makers: dict, value: int, reached: dict[int, tuple[int, int]]) -> bool:
    """Whether the instruction that makes ``value`` has run when every blocked rank stands where it does."""
    if value not in makers:
        return False
    rank, position = makers[value]
    return rank not in reached or position < reached[rank]


def _computes(program: Sequence[Sequence[Instruction]]) -> Iterable[tuple[int, int, Instruction]]:
    for step, instructions in enumerate(program):
        for place, instruction in enumerate(instructions):
            if instruction.op in COMPUTE:
                yield step, place, instruction


def _nth_compute(schedule: Schedule, rank: int, index: int) -> tuple[int, int, Instruction]:
    found = _computes(schedule.programs[rank])
    return next(item for number, item in enumerate(found) if number == index)
