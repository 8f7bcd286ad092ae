"""Prove the states that the instructions of a rank pass through, in order.

Of memory: live activations, residuals that are away, slots that are overwritten. Of the frame of the compute:
loads and gathers before it, reductions and the optimizer step after it.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, islice, repeat
from operator import itemgetter

from ..errors import fault_at, last_place, schedule_error
from ..instruction import COMPUTE, RESIDUAL_OPS, SHARDING, TAIL, WHOLE_STAGE, Instruction, Op, parts_of
from ..schedule import Program, Schedule
from .order import Position, in_order, walk

Holder = tuple[int, int | None, int]  # stage, microbatch, how often it has been offloaded

# The change of the number of whole activations, and of those of which only the share for W is held.
HELD = {Op.F: (1, 0), Op.B: (-1, 0), Op.I: (-1, 1), Op.W: (0, -1)}
HELD |= {Op.OFFLOAD: (-1, 0), Op.FETCH: (1, 0), Op.RECOMPUTE: (1, 0)}
_LIVE = {op: whole for op, (whole, _) in HELD.items()}


def check_activations(schedule: Schedule, limit: int | None) -> tuple[int, ...]:
    """Return the peak number of live activations of every rank.

    One is live per stage and microbatch from its F to the end of its B or I, except while it is offloaded, or
    dropped between its F and its RECOMPUTE; where there is no backward, during its F only.

    Args:
        limit: the largest peak that is accepted, None for any.

    Raises:
        ScheduleError: at the first F, FETCH or RECOMPUTE that goes beyond the limit.
    """
    peaks, dropped = [], schedule.recomputed
    for rank, program in enumerate(schedule.programs):
        parts = elementary(program)
        changes = list(map(_LIVE.get, map(itemgetter(0), parts), repeat(0)))
        live = list(changes if schedule.forward_only else accumulate(changes))
        if dropped:
            lasting = [
                c * (p[0] is not Op.F or p[1:3] not in dropped) for c, p in zip(changes, parts, strict=True)
            ]
            live = [
                now + change for now, change in zip(accumulate(lasting, initial=0), changes, strict=False)
            ]
        peaks.append(max(0, max(live, default=0)))
        if limit is not None and peaks[-1] > limit:
            above = next(n for n, number in enumerate(live) if number > limit)
            reason = f"with it {live[above]} activations are live, the limit is {limit}"
            # Parts of pairs count apart.
            places = (
                (s, p) for s, step in enumerate(program) for p, i in enumerate(step) for _ in parts_of(i)
            )
            raise schedule_error(schedule, rank, next(islice(places, above, None)), reason)
    return tuple(peaks)


def elementary(program: Program) -> list[Instruction]:
    """List the instructions of a program in order, the parts of overlapped pairs apart."""
    parts = list(chain.from_iterable(program))
    return list(chain.from_iterable(map(parts_of, parts))) if any(map(itemgetter(5), parts)) else parts


def check_offloads(schedule: Schedule) -> None:
    """Prove that residuals leave or are dropped after their forward, and are back before they are used.

    Raises:
        ScheduleError: at the first OFFLOAD, FETCH, RECOMPUTE or backward for which this does not hold.
    """
    if not schedule.ops & RESIDUAL_OPS:
        return
    state: dict[tuple[int, int | None], str] = {}
    dropped, unread = schedule.recomputed, "read by no backward" if schedule.forward_only else ""
    for position, instruction in walk(schedule):
        for part in parts_of(instruction):
            if fault := _move(state, part, dropped, unread):
                raise fault_at(schedule, position, fault)


def _move(
    state: dict[tuple[int, int | None], str],
    part: Instruction,
    dropped: frozenset[tuple[int, int | None]],
    unread: str,
) -> str:
    op, key = part.op, (part.stage, part.microbatch)
    now = state.get(key, "not computed yet")
    if op is Op.F:
        state[key] = unread or ("dropped" if key in dropped else "here")
    elif op is Op.OFFLOAD:
        if now != "here":
            return f"the residuals to offload are {now}, expected them as their forward left them"
        state[key] = "away"
    elif op is Op.FETCH:
        if now != "away":
            return f"the residuals to fetch are {now}, expected them to be offloaded before"
        state[key] = "back"
    elif op is Op.RECOMPUTE:
        if now != "dropped":
            return f"the residuals to compute again are {now}, expected one RECOMPUTE between F and backward"
        state[key] = "back"
    elif op in COMPUTE:
        if now in ("away", "dropped"):
            return f"its residuals are {now}, expected a {'FETCH' if now == 'away' else 'RECOMPUTE'} before"
        if op in (Op.B, Op.W):
            state[key] = "used up"
    return ""


def check_slots(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of slots of every stage, none where no slots have been allocated.

    A slot belongs to its stage and holds all of one microbatch: input, output, residuals and
    gradients, from the first instruction that names it to the last, or until it is offloaded.

    Raises:
        ScheduleError: an instruction without a slot among others that have one, a microbatch that
            changes its slot, or a slot that is taken while its holder still needs it.
    """
    if not schedule.has_slots:
        return ()
    sizes = [0] * schedule.stages
    for rank, program in enumerate(schedule.programs):
        left = Counter(key for *_, key in uses(program))
        slot_of: dict[Holder, int] = {}
        holder: dict[tuple[int, int], Holder] = {}
        for step, place, part, key in uses(program):
            stage, slot = part.stage, part.slot
            if slot is None:
                reason = "it has no slot, but other instructions have: expected a slot on all or none"
                raise schedule_error(schedule, rank, (step, place), reason)
            fault = _take(slot_of, holder, left, stage, slot, key)
            if fault:
                raise schedule_error(schedule, rank, (step, place), fault)
            sizes[stage] = max(sizes[stage], slot + 1)
    return tuple(sizes)


def uses(program: Program) -> Iterator[tuple[int, int, Instruction, Holder]]:
    """Iterate over uses of slots: step, place, instruction, holder (stage, microbatch, times offloaded)."""
    moved: Counter[tuple[int, int | None]] = Counter()
    for step, instructions in enumerate(program):
        for place, instruction in in_order(instructions):
            if instruction.op not in WHOLE_STAGE:
                for part in parts_of(instruction):
                    pair = (part.stage, part.microbatch)
                    # An output on its way stays where it was computed.
                    yield step, place, part, (*pair, 0 if part.op is Op.SEND_F else moved[pair])
                    if part.op is Op.OFFLOAD:
                        moved[pair] += 1


def _take(
    slot_of: dict[Holder, int],
    holder: dict[tuple[int, int], Holder],
    left: Counter[Holder],
    stage: int,
    slot: int,
    key: Holder,
) -> str:
    if slot_of.setdefault(key, slot) != slot:
        return f"its microbatch is in slot {slot_of[key]} of stage {stage}, got slot {slot}"
    other = holder.get((stage, slot), key)
    if other != key and left[other]:
        return f"slot {slot} of stage {stage} still holds microbatch {other[1]}, which is used again later"
    holder[stage, slot] = key
    left[key] -= 1
    return ""


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
