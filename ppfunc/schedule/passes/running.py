"""Prepare a schedule to run: slots for its values, an order of its steps, the ends of its sends."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ppfunc._checks import naming_arguments, require_index

from ..dataflow import Dataflow
from ..errors import ScheduleError, cycle_text, require_schedule, schedule_error
from ..instruction import COMMUNICATION, COMPUTE, SENDS, WHOLE_STAGE, Instruction, Op, parts_of
from ..proof.certificate import Holder, uses
from ..proof.order import check_order
from ..proof.queues import check_queues
from ..proof.structure import check_structure
from ..schedule import Program, Schedule, Step
from .rewrite import remove_slots


@naming_arguments
def allocate_slots(schedule: Schedule) -> Schedule:
    """Set the slot of every instruction that works on a microbatch.

    A slot is a place for all that one stage keeps of one microbatch: input, output, residuals,
    gradients. Stages differ in shape, so each has slots of its own, numbered from 0. Equivalent to::

        for holder in order of first use:
            slot = the lowest slot of its stage whose holder is done and whose messages are gone
            for instruction in uses of holder: instruction.slot = slot

    which is interval colouring of the live ranges: with few in flight it needs few slots. A
    slot is given on only if in one run of the schedule the messages that read it have gone by then
    anyway, so that waiting for them cannot hold anything up. What is offloaded frees its slot and
    comes back to any other. Slots that are there already are replaced. Allocate after placing
    communication: passes that add instructions take slots away.

    Raises:
        ScheduleError: a value that is no schedule, or messages that do not come to an end.
        ValueError: a schedule of slices.

    >>> from ppfunc.schedule import gpipe
    >>> print(*allocate_slots(gpipe(ranks=1, microbatches=2)).instructions(0))
    0F0@0 0F1@1 0B0@0 0B1@1
    """
    check_structure(schedule)
    if schedule.slices:
        raise ValueError(
            f"{schedule.name} has slices, whose carries outlive the slot of a microbatch: leave slots out"
        )
    bare = remove_slots(schedule)
    gone = _sends_gone(bare) if bare.ops & COMMUNICATION else lambda rank, holder, step: True
    programs = tuple(_with_slots(program, partial(gone, rank)) for rank, program in enumerate(bare.programs))
    return replace(bare, programs=programs)


def _with_slots(program: Program, gone: Callable[[Holder, int], bool]) -> Program:
    """Write the slots of one rank; ``gone`` tells if the sends of a holder are over when a step begins."""
    last = {holder: number for number, (*_, holder) in enumerate(uses(program))}
    slots: dict[Holder, int] = {}
    by_stage: dict[int, list[Holder]] = defaultdict(list)  # who has each slot
    parts: dict[tuple[int, int], list[Instruction]] = defaultdict(list)  # by step and place
    for number, (step, place, part, holder) in enumerate(uses(program)):
        if holder not in slots:
            mine = by_stage[part.stage]
            free = (n for n, before in enumerate(mine) if last[before] < number and gone(before, step))
            slots[holder] = slot = next(free, len(mine))
            mine[slot : slot + 1] = [holder]
        parts[step, place].append(part._replace(slot=slots[holder]))
    return tuple(
        tuple(
            i if i.op in WHOLE_STAGE else i._replace(parts=tuple(parts[s, p])) if i.parts else parts[s, p][0]
            for p, i in enumerate(step)
        )
        for s, step in enumerate(program)
    )


def _sends_gone(schedule: Schedule) -> Callable[[int, Holder, int], bool]:
    """Return a function that tells if the sends of a holder are over when a step of its rank begins.

    It speaks of one run. Sends of that step itself have to be over when it ends.
    """
    flow = Dataflow(schedule)
    run = check_queues(flow, check_order(flow))
    sends: dict[Holder, list[tuple[int, float]]] = defaultdict(list)  # step and completion
    for rank, program in enumerate(schedule.programs):
        for step, _, part, holder in uses(program):
            if part.op in SENDS:
                other = flow.routes[part.op, part.stage, part.peer].other
                sends[holder].append((step, run.completion(rank, other, step)))

    def gone(rank: int, holder: Holder, step: int) -> bool:
        return all(
            end < run.begin(rank, run.first[rank][step + (sent == step)]) for sent, end in sends[holder]
        )

    return gone


def linearize(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return all steps as ``((rank, step index), ...)``, each after the steps that it consumes from.

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
    """Return the missing value that a step waits for, if any, and the values that it computes."""
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


def send_completion(schedule: Schedule, rank: int) -> dict[int, list[Instruction]]:
    """Return, for each step of ``rank``, the sends to wait for at its end.

    A rank knows that a message was taken when it consumes another one that the same peer sent no earlier than
    it posted the receive of the first. Waiting then cannot block on anything but the wire, so the tensors are
    let go early and no deadlock is added, whatever the schedule.

    Every send of the rank occurs once. Those that nothing follows are waited for in the last step.
    Only the programs of ``rank`` and of those that it sends to or receives from are read.

    Args:
        schedule: schedule that ``check`` accepts, with communication.
        rank: the rank that sends.

    >>> from ppfunc.schedule import one_f_one_b, place_communication
    >>> schedule = place_communication(one_f_one_b(ranks=2, microbatches=2))
    >>> print(schedule)
    0F0 0SEND_F0+0F1 0SEND_F1+0RECV_B0+0B0 0RECV_B1+0B1
    1RECV_F0+1F0 1B0 1RECV_F1+1SEND_B0+1F1 1B1 1SEND_B1
    >>> {step: [str(i) for i in sends] for step, sends in send_completion(schedule, 0).items()}
    {2: ['0SEND_F0'], 3: ['0SEND_F1']}
    """
    require_schedule(schedule)
    require_index("rank", rank, schedule.ranks)
    last = len(schedule.programs[rank]) - 1
    flow = Dataflow(schedule)
    posted: dict[int, list[tuple[int, Instruction, int]]] = {}  # by peer: own step, send, message
    answers: dict[int, list[tuple[int, int]]] = {}  # by peer: message, own step that consumes it
    consumed = {  # step by: is forward, stage, microbatch
        (part[0] is Op.F, part[1], part[2]): step
        for step, instructions in enumerate(schedule.programs[rank])
        for instruction in instructions
        for part in parts_of(instruction)
        if part[0] in (Op.F, Op.B, Op.I)
    }
    for step, instruction, peer, message in _messages(flow, rank):
        if instruction[0] in SENDS:
            posted.setdefault(peer, []).append((step, instruction, message))
        else:
            answers.setdefault(peer, []).append(
                (message, consumed[instruction[0] is Op.RECV_F, instruction[1], instruction[2]])
            )
    points: dict[int, list[Instruction]] = {}
    for peer, sends in posted.items():
        there = {message: step for step, _, other, message in _messages(flow, peer) if other == rank}
        known = sorted((there[message], step) for message, step in answers.get(peer, ()))
        earliest = [last] * (len(known) + 1)
        for n in range(len(known) - 1, -1, -1):
            earliest[n] = min(earliest[n + 1], known[n][1])
        for step, send, message in sends:
            point = earliest[bisect_left(known, (there[message], -1))]
            points.setdefault(min(max(point, step + 1), last), []).append(send)
    return points


def _messages(flow: Dataflow, rank: int) -> Iterator[tuple[int, Instruction, int, int]]:
    """Iterate over the communications of a rank: step, instruction, rank at the other end, message."""
    for step, instructions in enumerate(flow.schedule.programs[rank]):
        for instruction in instructions:
            op, stage, _, peer, _, _ = instruction
            if op in COMMUNICATION:
                yield step, instruction, flow.routes[op, stage, peer].other, flow.carried(instruction)
