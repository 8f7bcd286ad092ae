"""Prove the use of memory: live activations, residuals that are away, slots that are overwritten."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, islice, repeat
from operator import itemgetter

from ..errors import fault_at, schedule_error
from ..instruction import COMPUTE, RESIDUAL_OPS, WHOLE_STAGE, Instruction, Op, parts_of
from ..schedule import Program, Schedule
from .order import in_order, walk

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
