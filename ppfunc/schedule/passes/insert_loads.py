"""Write the loading of inputs and targets into a schedule."""

from __future__ import annotations

from dataclasses import replace

from ..instruction import COMMUNICATION, Instruction, Op, parts_of
from ..schedule import Schedule, Step
from .remove_slots import remove_slots


def insert_loads(schedule: Schedule, *, targets: bool | None = None) -> Schedule:
    """Put a LOAD into the step of every forward that takes data: inputs in first stages, targets in last ones.

    Equivalent to: before each F of the first stage of a chain, and of the last one where targets
    are wanted, and after the communications of the step, write the LOAD of the same microbatch, unless it is loaded anywhere already.

    Args:
        targets: whether last stages load; by default where there is a backward.

    >>> from ppfunc.schedule import inference
    >>> print(*insert_loads(inference(ranks=1, microbatches=2)).instructions(0))
    0LOAD0 0F0 0LOAD1 0F1
    """
    targets = not schedule.forward_only if targets is None else targets
    loading = {c.stages[0] for c in schedule.chains} | {c.stages[-1] for c in schedule.chains if targets}
    bare = remove_slots(schedule)
    parts = (part for p in bare.programs for step in p for i in step for part in parts_of(i))
    there = frozenset((p.stage, p.microbatch) for p in parts if p.op is Op.LOAD)
    programs = tuple(tuple(_with_loads(step, loading, there) for step in program) for program in bare.programs)
    return replace(bare, programs=programs)


def _with_loads(step: Step, loading: set[int], there: frozenset[tuple[int, int | None]]) -> Step:
    loads = tuple(
        Instruction(Op.LOAD, p.stage, p.microbatch)
        for i in step
        for p in parts_of(i)
        if p.op is Op.F and p.stage in loading and (p.stage, p.microbatch) not in there
    )
    if not loads:
        return step
    messages = tuple(i for i in step if i.op in COMMUNICATION)
    return (*messages, *loads, *(i for i in step if i.op not in COMMUNICATION))
