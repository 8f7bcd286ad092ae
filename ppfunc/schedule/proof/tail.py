"""Prove the frame of the compute: loads and gathers before it, reductions and the optimizer step after it."""

from ..errors import fault_at, last_place, schedule_error
from ..instruction import COMPUTE, SHARDING, TAIL, Op, parts_of
from ..schedule import Schedule
from .order import Position, walk


def check_loads(schedule: Schedule) -> None:
    """Prove that if anything is loaded, each microbatch is, once, before its forward, where data enters.

    All first stages load their inputs; the last stages load their targets, all of them or none.

    Raises:
        ScheduleError: a load that is missing, late, done twice, or in another stage.
    """
    if Op.LOAD not in schedule.ops:
        return
    first, last = ({c.stages[end] for c in schedule.chains} for end in (0, -1))
    parts = [(position, part) for position, instruction in walk(schedule) for part in parts_of(instruction)]
    targets = any(part.op is Op.LOAD and part.stage in last - first for _, part in parts)
    loading = first | last if targets else first
    loads: set[tuple[int, int | None]] = set()
    for position, part in parts:
        key = (part.stage, part.microbatch)
        if part.op is Op.LOAD:
            if part.stage not in loading:
                raise fault_at(
                    schedule,
                    position,
                    "this stage loads, expected it of the first and the last stage of a chain only",
                )
            if key in loads:
                raise fault_at(schedule, position, "this microbatch is loaded twice, expected one LOAD")
            loads.add(key)
        elif part.op is Op.F and part.stage in loading and key not in loads:
            raise fault_at(
                schedule, position, "its LOAD is missing or comes later, but other microbatches are loaded"
            )


def check_tail(schedule: Schedule) -> None:
    """Prove that reductions and steps come once in all stages or in none, in order, after all backwards.

    REDUCE_TIED may be missing in a stage, since a schedule does not know what is tied. A stage that has it
    has it in all of its replicas.

    Raises:
        ScheduleError: one that is missing, doubled, early or out of order, or without a backward
            to follow; replicas of a stage that are stepped but never summed.
    """
    present = [op for op in TAIL if op in schedule.ops]
    if not present:
        return
    positions: dict[tuple[Op, int], Position] = {}
    last: dict[int, Position] = {}
    for position, instruction in walk(schedule):
        op, stage = instruction.op, instruction.stage
        if op in COMPUTE:
            last |= dict.fromkeys((part.stage for part in parts_of(instruction)), position)
        elif op in TAIL:
            if (op, stage) in positions:
                raise fault_at(schedule, position, f"stage {stage} has {op} twice, expected it once")
            for later in TAIL[TAIL.index(op) + 1 :]:
                if (later, stage) in positions:
                    raise fault_at(schedule, position, f"{op} comes after {later}, expected it before")
            positions[op, stage] = position
    _check_all_stages(schedule, present, positions)
    for (op, stage), position in positions.items():
        if schedule.forward_only or last[stage] > position:
            reason = (
                "the schedule has no backward"
                if schedule.forward_only
                else f"stage {stage} still computes after it"
            )
            raise fault_at(schedule, position, f"{reason}, expected {op} after all backward work")


def _check_all_stages(
    schedule: Schedule, present: list[Op], positions: dict[tuple[Op, int], Position]
) -> None:
    for op in present:
        for stage, rank in enumerate(schedule.placement):
            if op is not Op.REDUCE_TIED and (op, stage) not in positions:
                reason = f"stage {stage} has no {op}, but other stages have: expected it in all or none"
                raise schedule_error(schedule, rank, last_place(schedule, rank), reason)
    for group in schedule.replicas:
        summed = [stage for stage in group if (Op.REDUCE_TIED, stage) in positions]
        for stage in group if summed else ():
            if stage not in summed:
                rank = schedule.placement[stage]
                reason = (
                    f"stage {stage} has no REDUCE_TIED, but its replica {summed[0]} has: expected it in all"
                    " replicas or none"
                )
                raise schedule_error(schedule, rank, last_place(schedule, rank), reason)
        # Replicas that are all of the model are data parallel ranks.
        if (
            Op.STEP in present
            and not summed
            and not (len(schedule.replicas) == 1 and Op.REDUCE_GRAD in present)
        ):
            reason = (
                f"stages {group} are replicas, but their gradients are never summed: expected REDUCE_TIED"
                " before STEP"
            )
            raise fault_at(schedule, positions[Op.STEP, group[0]], reason)


def check_unshards(schedule: Schedule) -> None:
    """Prove that if parameters are gathered, they are there for every compute and gone at STEP.

    Raises:
        ScheduleError: an UNSHARD of what is there, a RESHARD of what is not, a use or an optimizer step in
            the wrong state, parameters that are never freed.
    """
    if not schedule.ops & SHARDING:
        return
    there: dict[int, Position] = {}
    for position, instruction in walk(schedule):
        op, stage = instruction.op, instruction.stage
        if op is Op.UNSHARD:
            if stage in there:
                _, step, place = there[stage]
                fault = f"stage {stage} is unsharded already since step {step}, place {place}"
                raise fault_at(schedule, position, f"{fault}: expected a RESHARD between")
            there[stage] = position
        elif op is Op.RESHARD:
            if there.pop(stage, None) is None:
                raise fault_at(
                    schedule, position, f"stage {stage} is sharded here, expected an UNSHARD before"
                )
        elif op is Op.STEP and stage in there:
            raise fault_at(
                schedule,
                position,
                f"STEP changes the shard while stage {stage} is unsharded: expected its RESHARD before",
            )
        elif op in COMPUTE and (sharded := [p.stage for p in parts_of(instruction) if p.stage not in there]):
            raise fault_at(
                schedule,
                position,
                f"the parameters of stage {sharded[0]} are sharded here, expected its UNSHARD before",
            )
    for stage, position in there.items():
        raise fault_at(
            schedule, position, f"stage {stage} stays unsharded: expected a RESHARD after its last use"
        )
