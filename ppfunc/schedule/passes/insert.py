"""Write loads and offloads into a schedule."""

from collections.abc import Iterable

from ppfunc.parallel.counts import require_counts

from ..arguments import require_stages
from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, parts_of
from ..proof.structure import require_schedule
from ..schedule import Program, Schedule, Step
from .remove import remove_slots
from .rewrite import Place, insert, rewrite


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
    return rewrite(bare, lambda program: (_with_loads(step, loading, there) for step in program))


def _with_loads(step: Step, loading: set[int], there: frozenset[tuple[int, int | None]]) -> Step:
    loads = tuple(
        Instruction(Op.LOAD, p.stage, p.microbatch)
        for i in step
        for p in parts_of(i)
        if p.op is Op.F and p.stage in loading and (p.stage, p.microbatch) not in there
    )
    if not loads:
        return step
    step = _messages_first(step)
    messages = sum(i.op in COMMUNICATION for i in step)
    return (*step[:messages], *loads, *step[messages:])


def _messages_first(step: Step) -> Step:
    return tuple(sorted(step, key=lambda i: i.op not in COMMUNICATION))


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
    return rewrite(remove_slots(schedule), lambda program: _moved(program, chosen, lookahead))


def _moved(program: Program, chosen: set[int], lookahead: int) -> Program:
    """Write OFFLOAD behind the forwards, and FETCH before the backwards, of residuals that move."""
    program = tuple(map(_messages_first, program))
    away = {(i.stage, i.microbatch) for step in program for i in step if i.op in (Op.OFFLOAD, Op.FETCH)}
    places = [(s, p) for s, step in enumerate(program) for p, i in enumerate(step) if i.op in COMPUTE]
    forwards: dict[tuple[int, int | None], int] = {}  # the number of the compute instruction
    leave: dict[Place, list[Instruction]] = {}
    back: dict[Place, list[Instruction]] = {}
    for number, (at, place) in enumerate(places):
        for op, stage, microbatch, *_ in parts_of(program[at][place]):
            residuals = (stage, microbatch)
            if stage not in chosen or residuals in away:
                continue
            if op is Op.F:
                forwards[residuals] = number
            elif op is not Op.W and number - lookahead > forwards.get(residuals, number) + 1:
                leave.setdefault(places[forwards[residuals]], []).append(Instruction(Op.OFFLOAD, *residuals))
                back.setdefault(places[number - lookahead], []).append(Instruction(Op.FETCH, *residuals))
    return insert(program, back, leave)
