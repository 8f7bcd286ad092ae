"""Number the values that compute instructions consume and produce, and the messages that carry them.

The output of stage ``s`` for microbatch ``m`` is value ``2 (s M + m)``, the gradient of the loss
with respect to the stage's input is the next odd number. What an instruction consumes then lies
at fixed distances from its own stage's output, which keeps walks over a million instructions cheap.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .instruction import Instruction, Op, microbatch_of, parts_of
from .schedule import Schedule

# Distance from a stage's output to what an instruction produces; W is not here, which produces nothing that others consume.
PRODUCT = {Op.F: 0, Op.B: 1, Op.I: 1}


class Dataflow(NamedTuple):
    """The edges of a schedule, by stage."""

    microbatches: int  # M of the numbering
    needs: dict[Op, tuple[tuple[tuple[int, int], ...], ...]]  # by op and stage: (distance, stage of origin) of each input

    def output(self, stage: int, microbatch: int) -> int:
        """Return the number of the value that ``F`` of this stage and microbatch produces."""
        return 2 * (stage * self.microbatches + microbatch)

    def place(self, value: int) -> tuple[int, int]:
        """Return the stage and the microbatch of a value."""
        return divmod(value // 2, self.microbatches)

    def name(self, value: int) -> str:
        """Return the value in words, such as ``the output of stage 2 for microbatch 0``."""
        stage, microbatch = self.place(value)
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
        if (product := PRODUCT.get(part.op)) is not None
    )


def consumed(flow: Dataflow, instruction: Instruction) -> tuple[tuple[int, int, int], ...]:
    """Return the inputs of a compute instruction: ``(value, stage of origin, consuming stage)`` of each."""
    return tuple(
        (flow.output(part.stage, microbatch_of(part)) + distance, origin, part.stage)
        for part in parts_of(instruction)
        for distance, origin in flow.needs[part.op][part.stage]
    )


class EdgeFlow(NamedTuple):
    """The values that move along one edge in one direction."""

    source: int  # the stage that sends
    target: int  # the stage that consumes
    compute: Op  # the kind of what makes the value there and uses it here, B for I too
    send: Op  # the kind of the message at its source
    receive: Op  # likewise at its target
    far: int | None  # the peer that the send names, None along a chain
    near: int | None  # the peer that the receive names


def edge_flows(schedule: Schedule) -> Iterator[EdgeFlow]:
    """Iterate over every edge there, with activations, and back, with gradients."""
    skips = frozenset(schedule.skips)
    for a, b in schedule.edges:
        far, near = (b, a) if (a, b) in skips else (None, None)
        yield EdgeFlow(a, b, Op.F, Op.SEND_F, Op.RECV_F, far, near)
        yield EdgeFlow(b, a, Op.B, Op.SEND_B, Op.RECV_B, near, far)


class MessageRoute(NamedTuple):
    """One end of the messages of one edge in one direction."""

    distance: int  # from the output of the stage that performs it to the value that is carried
    target: int  # the stage that consumes it
    other: int  # the rank at the other end


Routes = dict[tuple[Op, int, int | None], MessageRoute]


def find_routes(schedule: Schedule, flow: Dataflow) -> Routes:
    """Return both ends of every message between ranks, by op, stage that performs it, and peer."""
    found: Routes = {}
    home = schedule.placement
    for a, b, op, send, receive, far, near in edge_flows(schedule):
        if home[a] != home[b]:
            product = PRODUCT[op]
            found[send, a, far] = MessageRoute(product, b, home[b])
            found[receive, b, near] = MessageRoute(flow.output(a - b, 0) + product, b, home[a])
    return found


def message_number(schedule: Schedule, flow: Dataflow, instruction: Instruction, distance: int, target: int) -> int:
    """Return the number of the message, the same at both ends, that carries a value to the stage that consumes it.

    Args:
        instruction: of one end, or the consumer.
        distance: from the output of its stage and microbatch to the value.
    """
    return (flow.output(instruction[1], microbatch_of(instruction)) + distance) * len(schedule.placement) + target


def message_numbers(schedule: Schedule, first: int, target: int, microbatches: Iterable[int]) -> list[int]:
    """Return the numbers of the messages that carry values like ``first``, that of microbatch 0, to the stage that consumes them."""
    stages = len(schedule.placement)
    return [(first + 2 * m) * stages + target for m in microbatches]
