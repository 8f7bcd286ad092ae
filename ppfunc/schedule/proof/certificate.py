"""Prove that a schedule can run and computes the right thing, or say where it does not.

`structure`, `order` and `queues` refuse schedules that are wrong in one way each. Here are the proofs of the
states that the instructions of a rank pass through: live activations, residuals that are away, data,
parameters, sums and the optimizer step, slots that are overwritten.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice, zip_longest

from ppfunc._checks import naming_arguments, require_counts, show_table

from ..collector import collector_paused
from ..costs import Costs
from ..dataflow import Dataflow
from ..errors import fault_at, last_place, schedule_error
from ..instruction import (
    COMMUNICATION,
    COMPUTE,
    KINDS,
    RESIDUAL_OPS,
    SHARDING,
    TAIL,
    WHOLE_STAGE,
    Instruction,
    Op,
    parts_of,
)
from ..schedule import Program, Schedule
from .order import OrderRecord, Position, check_order, in_order, walk
from .queues import check_queues
from .structure import check_structure
from .timeline import HOLDING, earliest, held


@dataclass(frozen=True, repr=False)
class Certificate:
    """Hold the facts that ``check`` has proved, tied to one schedule by its digest.

    Args:
        digest: digest of the schedule.
        name: name of the schedule.
        ranks: number of ranks.
        stages: number of stages.
        flows: number of flows.
        microbatches: number of microbatches over all flows.
        instructions: ``(kind, how many)`` of each kind, overlapped pairs counted as pairs.
        peak_activations: largest number of live activations of each rank.
        models: the models under which it runs to its end.
        slots: number of slots of each stage, none where no slots are allocated.
        step_atomic: whether a barrier may stand between any two steps: step k of every rank needs nothing
            from a later step of another. What it consumes has been sent, together with all that moves in the
            same batch, or without communications computed, in a step <= k.
    """

    digest: str
    name: str
    ranks: int
    stages: int
    flows: int
    microbatches: int
    instructions: tuple[tuple[str, int], ...]
    peak_activations: tuple[int, ...]
    models: tuple[str, ...]
    slots: tuple[int, ...]
    step_atomic: bool

    def __repr__(self) -> str:
        return (
            f"Certificate({self.name!r}, ranks={self.ranks}, stages={self.stages},"
            f" microbatches={self.microbatches}, instructions={sum(count for _, count in self.instructions)},"
            f" digest={self.digest[:12]!r})"
        )

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.instructions)
        flows = "" if self.flows == 1 else f" in {self.flows} flows"
        lines = [
            f"{self.name}: proved",
            f"digest            {self.digest}",
            f"ranks             {self.ranks}",
            f"stages            {self.stages}{flows}",
            f"microbatches      {self.microbatches}",
            f"instructions      {counts}",
            f"peak activations  {_row(self.peak_activations, 'rank')}",
            f"no deadlock       {', '.join(self.models)}",
        ]
        if self.slots:
            lines.append(f"slots per stage   {_row(self.slots, 'stage')}")
        lines.append(f"step-atomic       {'yes' if self.step_atomic else 'no'}")
        return "\n".join(lines)

    _repr_pretty_ = show_table


@naming_arguments
@collector_paused()
def check(schedule: Schedule, *, max_activations: int | None = None) -> Certificate:
    """Prove a schedule, compute only or with communication, in one pass of linear time.

    Proved are: every stage computes every microbatch of its flows once forward and, unless the
    schedule has no backward at all, once backward (one B, or one I and then one W), in the order
    of the data; every message has one send and one receive, in one order at both ends; nothing
    waits for ever, be it in a rendezvous or with one queue in order at each end of each pair of
    ranks; no slot is overwritten while in use; what is offloaded or dropped is back before its use;
    parameters are unsharded before they are used, and resharded in the end; loads, reductions and
    optimizer steps are complete and in their place.

    Args:
        schedule: any value; one that is no schedule raises.
        max_activations: largest number of live activations that a rank may have.

    Raises:
        ScheduleError: the schedule is wrong; names rank, position and instruction.
        ValueError: ``max_activations`` is no number from 0.

    >>> from ppfunc.schedule import one_f_one_b
    >>> print(str(check(one_f_one_b(ranks=2, microbatches=4))).partition("ranks")[2])
                 2
    stages            2
    microbatches      4
    instructions      8 F, 8 B
    peak activations  2 1
    no deadlock       by data dependencies
    step-atomic       yes
    """
    if max_activations is not None:
        require_counts(0, max_activations=max_activations)
    check_structure(schedule)
    lowered = bool(schedule.ops & COMMUNICATION)
    atomic = _prove_order(schedule)
    _check_states(schedule)
    _check_tail(schedule)
    return Certificate(
        digest=schedule.digest,
        name=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        flows=len(schedule.flows),
        microbatches=schedule.microbatches,
        instructions=tuple((op.value, schedule.counts[op]) for op in Op if op in schedule.counts),
        peak_activations=_check_activations(schedule, max_activations),
        models=("rendezvous", "one queue per pair of ranks") if lowered else ("by data dependencies",),
        slots=_check_slots(schedule),
        step_atomic=atomic,
    )


def _prove_order(schedule: Schedule) -> bool:
    """Prove that all runs, in order, to its end; returns whether the schedule is step-atomic."""
    flow = Dataflow(schedule)
    record = check_order(flow)
    if not schedule.has_messages:
        earliest(schedule, Costs())
        return _values_are_atomic(flow, record)
    return check_queues(flow, record).step_atomic


def _values_are_atomic(flow: Dataflow, record: OrderRecord) -> bool:
    """Tell whether no value is made in a later step than the step that consumes it, messages left aside."""
    for value, steps in record.made.items():
        stage, _ = flow.place(value)
        for first, _, shift in flow.needs[Op.I if value % 2 else Op.F, stage]:
            if shift:  # made on the rank itself
                continue
            inputs = record.made[first]
            # Not every microbatch goes through the stage that makes it.
            if any(inputs.get(microbatch, -1) > step for microbatch, step in steps.items()):
                return False
    return True


def _row(numbers: tuple[int, ...], of: str) -> str:
    """Write numbers in a row, equal neighbours as ``8 x 3`` if shorter; only extremes if very many."""
    groups = [(value, len(list(run))) for value, run in groupby(numbers)]
    if len(groups) > 24:
        low, high = min(numbers), max(numbers)
        return f"{low} ({of} {numbers.index(low)}) to {high} ({of} {numbers.index(high)})"
    return " ".join(f"{n} x {v}" if n > 3 else " ".join([str(v)] * n) for v, n in groups)


Holder = tuple[int, int | None, int]  # stage, microbatch, how often it has been offloaded


def _check_activations(schedule: Schedule, limit: int | None) -> tuple[int, ...]:
    """Return the peak number of live activations of every rank.

    One is live per stage and microbatch from its F to the end of its B or I, except while it is offloaded, or
    dropped between its F and its RECOMPUTE; where there is no backward, during its F only.
    """
    peaks = []
    for rank, program in enumerate(schedule.programs):
        live = [whole for whole, _, _ in held(schedule, rank, range(schedule.stages))]
        peaks.append(max(live, default=0))
        if limit is not None and peaks[-1] > limit:
            above = next(n for n, number in enumerate(live) if number > limit)
            reason = f"with it {live[above]} activations are live, the limit is {limit}"
            places = (
                (step, place)
                for step, instructions in enumerate(program)
                for place, instruction in enumerate(instructions)
                for part in parts_of(instruction)
                if part.op in HOLDING
            )
            raise schedule_error(schedule, rank, next(islice(places, above, None)), reason)
    return tuple(peaks)


_CHANGED_BY = {"residuals": RESIDUAL_OPS, "data": {Op.LOAD}, "parameters": SHARDING}


def _check_states(schedule: Schedule) -> None:
    """Prove that every instruction finds residuals, data and parameters in a state that it needs.

    Residuals leave or are dropped after their forward, and are back before they are used. All first stages
    load their inputs; the last stages load their targets, all of them or none. Parameters are gathered before
    they are used, and freed in the end. A thing that no instruction of the schedule changes is always there.
    """
    things = [thing for thing, ops in _CHANGED_BY.items() if schedule.ops & ops]
    if not things:
        return
    first, last = schedule.heads, schedule.ends
    loads = {part.stage for _, i in walk(schedule) for part in parts_of(i) if part.op is Op.LOAD}
    loading = first | last if loads & (last - first) else first
    begin = {"residuals": "not computed", "parameters": "sharded"}
    states: dict[tuple[str, int, int | None], str] = {}
    changed: dict[tuple[str, int, int | None], Position] = {}
    for position, instruction in walk(schedule):
        for part in parts_of(instruction):
            for thing in things:
                needs, after = KINDS[part.op].needs.get(thing), KINDS[part.op].gives.get(thing)
                key = thing, part.stage, None if thing == "parameters" else part.microbatch
                now = (
                    states.get(key)
                    or begin.get(thing)
                    or ("missing" if part.stage in loading else "received")
                )
                if needs and now not in needs:
                    raise fault_at(schedule, position, _wrong_state(part.op, key, now, changed.get(key)))
                if after:
                    if part.op is Op.F:
                        again = part[1:3] in schedule.recomputed
                        after = (
                            "read by no backward" if schedule.forward_only else "dropped" if again else after
                        )
                    states[key], changed[key] = after, position
    for (thing, stage, _), position in changed.items():
        if states.get((thing, stage, None)) == "whole":
            reason = f"the parameters of stage {stage} stay whole: expected a RESHARD after their last use"
            raise fault_at(schedule, position, reason)


def _wrong_state(op: Op, key: tuple[str, int, int | None], now: str, changed: Position | None) -> str:
    """Say in which state a thing is, in which an instruction needs it, and by which it gets there."""
    thing, stage, microbatch = key
    needs = KINDS[op].needs[thing]
    of = f"stage {stage}" + ("" if microbatch is None else f" for microbatch {microbatch}")
    since = "" if changed is None else " since step {}, place {}".format(*changed[1:])
    ways = [o for o, k in KINDS.items() if now in k.needs.get(thing, ()) and k.gives.get(thing) in needs]
    mend = f": expected {' or '.join(ways)} before it" if ways else ""
    return f"the {thing} of {of} are {now}{since}, and {op} needs them {' or '.join(needs)}{mend}"


def _check_tail(schedule: Schedule) -> None:
    """Prove that reductions and steps come after all backwards, in order, once in each stage if in any.

    REDUCE_TIED may be missing in a stage, since a schedule does not know what is tied. A stage that has it
    has it in all of its replicas, and replicas that are stepped are summed.
    """
    present = [op for op in TAIL if op in schedule.ops]
    if not present:
        return
    tails: list[dict[Position, Op]] = [{} for _ in schedule.placement]
    for position, instruction in walk(schedule):
        if instruction.op in TAIL:
            tails[instruction.stage][position] = instruction.op
        for part in parts_of(instruction) if instruction.op in COMPUTE else ():
            if tails[part.stage]:
                place, op = next(iter(tails[part.stage].items()))
                reason = f"stage {part.stage} still computes after it, expected {op} after all backward work"
                raise fault_at(schedule, place, reason)
    for group in schedule.replicas or [(stage,) for stage in range(schedule.stages)]:
        summed = any(Op.REDUCE_TIED in tails[stage].values() for stage in group)
        wanted = [op for op in present if op is not Op.REDUCE_TIED or summed]
        for stage in group:
            rank, tail = schedule.placement[stage], tails[stage]
            if schedule.forward_only and tail:
                reason = f"the schedule has no backward, expected {tail[min(tail)]} after all backward work"
                raise fault_at(schedule, min(tail), reason)
            if (found := [*tail.values()]) != wanted:
                pairs = zip_longest(tail, found, wanted)
                wrong = next((place[1:] for place, op, right in pairs if place and op is not right), None)
                reason = (
                    f"stage {stage} ends with {' '.join(found) or 'neither sum nor step'}, expected"
                    f" {' '.join(wanted)}: once each, in this order, as in other stages"
                )
                raise schedule_error(schedule, rank, wrong or last_place(schedule, rank), reason)
        # Replicas that are all of the model are data parallel ranks.
        if (
            Op.STEP in present
            and len(group) > 1
            and not summed
            and not (len({*schedule.model_stages}) == 1 and Op.REDUCE_GRAD in present)
        ):
            reason = (
                f"stages {group} are replicas, but their gradients are never summed: expected REDUCE_TIED"
                " before STEP"
            )
            raise fault_at(schedule, next(p for p, op in tails[group[0]].items() if op is Op.STEP), reason)


def _check_slots(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of slots of every stage; nothing for a schedule without slots.

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
