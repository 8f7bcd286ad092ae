"""Rewrite the programs of a schedule, one rank at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..instruction import Instruction
from ..proof.structure import require_schedule
from ..schedule import Program, Schedule, Step

Place = tuple[int, int]
"""Step, and place in the step."""
Insertions = Mapping[Place, Sequence[Instruction]]


def rewrite(schedule: Schedule, program_of: Callable[[Program], Iterable[Step]]) -> Schedule:
    """Return the schedule with each program replaced by ``program_of(program)``.

    Raises:
        ScheduleError: a value that is no schedule.
    """
    require_schedule(schedule)
    return replace(schedule, programs=tuple(tuple(program_of(program)) for program in schedule.programs))


def cross_out(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """Return the schedule without some instructions; a step that held nothing else is dropped."""

    def program_of(program: Program) -> Iterable[Step]:
        steps = ((step, tuple(i for i in step if not unwanted(i))) for step in program)
        return (new for old, new in steps if new or not old)

    return rewrite(schedule, program_of)


def insert(program: Program, before: Insertions, behind: Insertions) -> Program:
    """Write instructions around those at some places."""
    return tuple(
        tuple(
            new
            for place, i in enumerate(step)
            for new in (*before.get((number, place), ()), i, *behind.get((number, place), ()))
        )
        for number, step in enumerate(program)
    )
