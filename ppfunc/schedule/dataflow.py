"""Number the values that compute instructions consume and produce, and the messages that carry them.

The output of stage ``s`` for microbatch ``m`` is value ``2 (s M + m)``, the gradient of the loss
with respect to the stage's input is the next odd number. What an instruction consumes then lies
at fixed distances from its own stage's output, which keeps walks over a million instructions cheap.
"""

from __future__ import annotations

from typing import NamedTuple

from .instruction import Instruction, Op, microbatch_of, parts_of
from .schedule import Schedule

# Distance from a stage's output to what an instruction produces; W produces nothing that others consume.
PRODUCT = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: None}


class Dataflow(NamedTuple):
    """The edges of a schedule, by stage.

    Args:
        microbatches: M of the numbering.
        needs: ``needs[op][stage]`` lists ``(distance, stage of origin)`` of the values consumed.
    """

    microbatches: int
    needs: dict[Op, tuple[tuple[tuple[int, int], ...], ...]]

    def output(self, stage: int, microbatch: int) -> int:
        """Return the number of the value that ``F`` of this stage and microbatch produces."""
        return 2 * (stage * self.microbatches + microbatch)

    def name(self, value: int) -> str:
        """Return the value in words, such as ``the output of stage 2 for microbatch 0``."""
        stage, microbatch = divmod(value // 2, self.microbatches)
        kind = "the input gradient" if value % 2 else "the output"
        return f"{kind} of stage {stage} for microbatch {microbatch}"


def dataflow(schedule: Schedule) -> Dataflow:
    """Return the edges of ``schedule``: those along its chains first, then its skip connections."""
    m, stages = max(schedule.microbatches, 1), range(schedule.stages)
    forward: list[tuple[tuple[int, int], ...]] = [() for _ in stages]
    backward: list[tuple[tuple[int, int], ...]] = [((0, s),) for s in stages]
    for a, b in schedule.edges:
        forward[b] += ((2 * m * (a - b), a),)
        backward[a] += ((2 * m * (b - a) + 1, b),)
    weight = tuple(((1, s),) for s in stages)
    return Dataflow(m, {Op.F: tuple(forward), Op.B: tuple(backward), Op.I: tuple(backward), Op.W: weight})


def products(flow: Dataflow, instruction: Instruction) -> tuple[int, ...]:
    """Return the values that a compute instruction produces: none for W, two for an overlapped pair."""
    return tuple(
        flow.output(part.stage, microbatch_of(part)) + product
        for part in parts_of(instruction)
        if (product := PRODUCT[part.op]) is not None
    )


def consumed(flow: Dataflow, instruction: Instruction) -> tuple[tuple[int, int, int], ...]:
    """Return the inputs of a compute instruction: ``(value, stage of origin, consuming stage)`` of each."""
    return tuple(
        (flow.output(part.stage, microbatch_of(part)) + distance, origin, part.stage)
        for part in parts_of(instruction)
        for distance, origin in flow.needs[part.op][part.stage]
    )


class MessageRoute(NamedTuple):
    """One end of the messages of one edge in one direction.

    Args:
        distance: from the output of the stage that performs it to the value that is carried.
        target: the stage that consumes it.
        other: the rank at the other end.
    """

    distance: int
    target: int
    other: int


Routes = dict[tuple[Op, int, int | None], MessageRoute]


def find_routes(schedule: Schedule, flow: Dataflow) -> Routes:
    """Return both ends of every message, by op, stage that performs it, and peer."""
    found: Routes = {}
    home, skips = schedule.placement, frozenset(schedule.skips)
    for a, b in schedule.crossing_edges:
        far, near = (b, a) if (a, b) in skips else (None, None)
        back = 2 * flow.microbatches * (a - b)
        found[Op.SEND_F, a, far] = MessageRoute(0, b, home[b])
        found[Op.RECV_F, b, near] = MessageRoute(back, b, home[a])
        found[Op.SEND_B, b, near] = MessageRoute(1, a, home[a])
        found[Op.RECV_B, a, far] = MessageRoute(1 - back, a, home[b])
    return found


def message_number(schedule: Schedule, flow: Dataflow, route: MessageRoute, instruction: Instruction) -> int:
    """Return the number of a message, the same at both ends: ``value * S + stage that consumes it``."""
    value = flow.output(instruction[1], microbatch_of(instruction)) + route[0]
    return value * len(schedule.placement) + route[1]
