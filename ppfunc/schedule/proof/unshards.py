"""Prove that the parameters of a stage are gathered before they are used, and freed in the end."""

from collections.abc import Iterator

from ..errors import fault_at
from ..instruction import COMPUTE, SHARDING, Op, parts_of
from ..schedule import Schedule
from .order import Position, walk


def check_unshards(schedule: Schedule) -> None:
    """Prove that if parameters are gathered, they are there for every compute and gone at STEP.

    Raises:
        ScheduleError: an UNSHARD of what is there, a RESHARD of what is not, a use or an optimizer step in
            the wrong state, parameters that are never freed.
    """
    for position, fault in _faults(schedule):
        raise fault_at(schedule, position, fault)


def _faults(schedule: Schedule) -> Iterator[tuple[Position, str]]:
    if not schedule.ops & SHARDING:
        return
    there: dict[int, Position] = {}
    for position, instruction in walk(schedule):
        op, stage = instruction.op, instruction.stage
        if op is Op.UNSHARD:
            if stage in there:
                _, step, place = there[stage]
                yield (
                    position,
                    (
                        f"stage {stage} is unsharded already since step {step}, place {place}: expected a"
                        " RESHARD between"
                    ),
                )
            there[stage] = position
        elif op is Op.RESHARD:
            if there.pop(stage, None) is None:
                yield position, f"stage {stage} is sharded here, expected an UNSHARD before"
        elif op is Op.STEP:
            if stage in there:
                yield (
                    position,
                    f"STEP changes the shard while stage {stage} is unsharded: expected its RESHARD before",
                )
        elif op in COMPUTE:
            for part in parts_of(instruction):
                if part.stage not in there:
                    yield (
                        position,
                        f"the parameters of stage {part.stage} are sharded here, expected its UNSHARD before",
                    )
    for stage, position in there.items():
        yield position, f"stage {stage} stays unsharded: expected a RESHARD after its last use"
