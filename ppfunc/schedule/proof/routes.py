"""Find the two ends of every message."""

from __future__ import annotations

from typing import NamedTuple

from ..dataflow import Dataflow
from ..instruction import Instruction, Op, microbatch_of
from ..schedule import Schedule


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
    """Return the routes of ``schedule``, by op, stage that performs it, and peer."""
    found: Routes = {}
    home, skips = schedule.placement, frozenset(schedule.skips)
    for a, b in schedule.edges:
        if home[a] == home[b]:
            continue
        skip = (a, b) in skips
        far, near = (b, a) if skip else (None, None)
        back = 2 * flow.microbatches * (a - b)
        found[Op.SEND_F, a, far] = MessageRoute(0, b, home[b])
        found[Op.RECV_F, b, near] = MessageRoute(back, b, home[a])
        found[Op.SEND_B, b, near] = MessageRoute(1, a, home[a])
        found[Op.RECV_B, a, far] = MessageRoute(1 - back, a, home[b])
    return found


def message_number(schedule: Schedule, flow: Dataflow, route: MessageRoute, instruction: Instruction) -> int:
    """Return the number of a message, the same at both ends: ``value * S + stage that consumes it``."""
    value = 2 * (instruction[1] * flow.microbatches + microbatch_of(instruction)) + route[0]
    return value * len(schedule.placement) + route[1]


def no_route(schedule: Schedule, instruction: Instruction) -> str:
    """Say why a message that has no route cannot exist."""
    stage, other = instruction.stage, schedule.other_end(instruction)
    if instruction.peer is None and other is None:
        end = "last" if instruction.op in (Op.SEND_F, Op.RECV_B) else "first"
        return f"stage {stage} is the {end} of its chain, so there is no stage for the other end of this message"
    if instruction.peer is None:
        return f"stages {stage} and {other} are both on rank {schedule.placement[stage]}: no message passes between them"
    return f"no skip connection that leaves the rank joins stages {stage} and {instruction.peer!r:.40} in this direction"
