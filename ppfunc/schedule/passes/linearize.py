"""Put all steps of all ranks in one order."""

from collections import deque

from ..dataflow import Dataflow
from ..errors import ScheduleError, cycle_text, schedule_error
from ..instruction import COMPUTE
from ..proof.structure import check_structure
from ..schedule import Schedule, Step


def linearize(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return all steps as ``((rank, step index), ...)``, each after those that it consumes from.

    Equivalent to: in turn, every rank runs its next step if it can, until all have ended. Ranks
    advance evenly, so few values wait between them. Communications are not looked at: in one
    process a value is there once it has been computed.

    Raises:
        ScheduleError: a value that is no schedule, or steps that wait for each other for ever, or for a value
            that no rank computes.
    """
    check_structure(schedule)
    flow = Dataflow(schedule)
    there: set[int] = set()
    waiting: dict[int, list[int]] = {}
    order: list[tuple[int, int]] = []
    at = [0] * schedule.ranks
    ready = deque(rank for rank, program in enumerate(schedule.programs) if program)
    while ready:
        rank = ready.popleft()
        program = schedule.programs[rank]
        missing, products = _try(program[at[rank]], flow, there)
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
            continue
        order.append((rank, at[rank]))
        at[rank] += 1
        if at[rank] < len(program):
            ready.append(rank)
        there.update(products)
        for value in products:
            ready += waiting.pop(value, ())
    if waiting:
        raise _stuck(schedule, flow, at, {r: v for v, ranks in waiting.items() for r in ranks})
    return tuple(order)


def _try(step: Step, flow: Dataflow, there: set[int]) -> tuple[int | None, set[int]]:
    """Return the value that a step waits for, or None, and the values that it computes."""
    products: set[int] = set()
    for instruction in step:
        if instruction.op in COMPUTE:
            for value, _ in flow.consumed(instruction):
                if value not in there and value not in products:
                    return value, products
            products.update(flow.products(instruction))
    return None, products


def _stuck(schedule: Schedule, flow: Dataflow, at: list[int], missing: dict[int, int]) -> ScheduleError:
    """Make the error for steps that wait for ever; ``missing`` gives the value per blocked rank."""
    sentences = [
        f"rank {rank} waits at step {at[rank]} for {flow.name(value)}"
        for rank, value in sorted(missing.items())
    ]
    rank = min(missing)
    return schedule_error(
        schedule, rank, (at[rank], 0), "no order of the steps exists: " + cycle_text(sentences)
    )
