"""Write loads and offloads into a schedule."""

from collections.abc import Iterable
from dataclasses import replace

from ppfunc.parallel.counts import require_counts

from ..arguments import require_stages
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, parts_of
from ..proof.structure import require_schedule
from ..schedule import Program, Schedule, Step
from .remove import remove_slots


def insert_loads(schedule: Schedule, *, targets: bool | None = None) -> Schedule:
    """Put a LOAD into the step of every forward that takes data: inputs first, targets last.

    Equivalent to: before each F of the first stage of a chain, and of the last one where targets
    are wanted, and after the communications of the step, write the LOAD of the same microbatch, unless it is
    loaded anywhere already.

    Args:
        targets: whether last stages load; by default where there is a backward.

    >>> from ppfunc.schedule import inference
    >>> print(*insert_loads(inference(ranks=1, microbatches=2)).instructions(0))
    0LOAD0 0F0 0LOAD1 0F1
    """
    require_schedule(schedule)
    targets = not schedule.forward_only if targets is None else targets
    loading = {c.stages[0] for c in schedule.chains} | {c.stages[-1] for c in schedule.chains if targets}
    bare = remove_slots(schedule)
    parts = (part for p in bare.programs for step in p for i in step for part in parts_of(i))
    there = frozenset((p.stage, p.microbatch) for p in parts if p.op is Op.LOAD)
    programs = tuple(
        tuple(_with_loads(step, loading, there) for step in program) for program in bare.programs
    )
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


Moves = dict[int, list[Instruction]]


def insert_offloads(
    schedule: Schedule, stages: Iterable[int] | None = None, *, lookahead: int = 1
) -> Schedule:
    """Move residuals away after their forward and back before the backward that uses them first.

    Equivalent to: after each F of the chosen stages write OFFLOAD; before the compute instruction
    that comes ``lookahead`` compute instructions before its B or I, write FETCH. Residuals that
    would not be away during any compute instruction stay where they are, and so do those that
    move already.

    Args:
        stages: the stages whose residuals move; all of them by default.
        lookahead: compute instructions of the rank that hide the way back.

    Raises:
        ValueError: a negative lookahead, or a stage that does not exist.
    """
    require_schedule(schedule)
    chosen = require_stages("stages", range(schedule.stages) if stages is None else stages, schedule.stages)
    require_counts(0, lookahead=lookahead)
    programs = tuple(_move(program, chosen, lookahead) for program in remove_slots(schedule).programs)
    return replace(schedule, programs=programs)


def _move(program: Program, chosen: set[int], lookahead: int) -> Program:
    """One program with its moves; compute instructions are known by their number."""
    leave, back = _moves(program, chosen, lookahead)
    steps: list[Step] = []
    number = 0
    for step in program:
        messages = [i for i in step if i.op in COMMUNICATION]
        rest: list[Instruction] = []
        for instruction in (i for i in step if i.op not in COMMUNICATION):
            if instruction.op not in COMPUTE:
                rest.append(instruction)
                continue
            rest += [*back.get(number, ()), instruction, *leave.get(number, ())]
            number += 1
        steps.append((*messages, *rest))
    return tuple(steps)


def _moves(program: Program, chosen: set[int], lookahead: int) -> tuple[Moves, Moves]:
    """List the residuals to offload after, and to fetch before, each compute instruction."""
    moved = {(i.stage, i.microbatch) for step in program for i in step if i.op in (Op.OFFLOAD, Op.FETCH)}
    made: dict[tuple[int, int | None], int] = {}
    leave: Moves = {}
    back: Moves = {}
    compute = (i for step in program for i in step if i.op in COMPUTE)
    for number, instruction in enumerate(compute):
        for op, stage, microbatch, *_ in parts_of(instruction):
            key = (stage, microbatch)
            if key in moved:
                continue
            if op is Op.F:
                made[key] = number
            elif (
                op in (Op.B, Op.I) and stage in chosen and key in made and number - lookahead > made[key] + 1
            ):
                leave.setdefault(made[key], []).append(Instruction(Op.OFFLOAD, stage, microbatch))
                back.setdefault(number - lookahead, []).append(Instruction(Op.FETCH, stage, microbatch))
    return leave, back
