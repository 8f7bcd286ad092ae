"""Number the values that compute instructions consume and produce, and the messages that carry them.

The output of stage ``s`` for microbatch ``m`` is value ``2 (s M + m)``, the gradient of the loss
with respect to the stage's input is the next odd number. The message that carries a value to a stage is
``value * S + stage``. So the numbers of all microbatches follow from that of microbatch 0, which keeps walks
over a million instructions cheap. Along a carry, the value of a microbatch is consumed by the next slice of
the sequence, and its gradient by the slice before: such an input is shifted by a microbatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .instruction import AFTER, BEFORE, ELEMENTARY, KINDS, OWN, Instruction, Op, microbatch_of, parts_of
from .schedule import Schedule


class EdgeFlow(NamedTuple):
    """Describe the values that move along one edge in one direction."""

    source: int  # the stage that sends
    target: int  # the stage that consumes
    compute: Op  # kind of the producer and of the consumer, B for I too
    send: Op  # kind of the message at its source
    receive: Op  # kind of the message at its target
    far: int | None  # the peer that the send names, None along a chain
    near: int | None  # the peer that the receive names
    shift: int = 0  # 1 where the next slice of the sequence consumes them


class Input(NamedTuple):
    """Name a value that a compute instruction consumes.

    Args:
        value: number of the value of microbatch 0.
        origin: stage that makes it.
        shift: distance from the microbatch of the instruction to the microbatch of the value: -1 for the
            carry of the slice before and for what leads back from it, 1 for the gradient of the carry to the
            slice after, else 0. Only a microbatch that :meth:`Schedule.joins` its neighbour has a shifted
            input.
    """

    value: int
    origin: int
    shift: int = 0


class MessageRoute(NamedTuple):
    """Locate one end of the messages that move along an edge in one direction."""

    first: int  # number of the message of microbatch 0
    other: int  # the rank at the other end


@dataclass(frozen=True)
class Dataflow:
    """Numbers the values and messages of a schedule, and lists the edges along which they move."""

    schedule: Schedule

    @cached_property
    def microbatches(self) -> int:
        """Return M of the numbering."""
        return max(self.schedule.microbatches, 1)

    @cached_property
    def stride(self) -> int:
        """Return the distance between the numbers of the messages of neighbouring microbatches."""
        return 2 * self.schedule.stages

    def output(self, stage: int, microbatch: int) -> int:
        """Return the number of the value that ``F`` of this stage and microbatch produces."""
        return 2 * (stage * self.microbatches + microbatch)

    def message(self, value: int, target: int) -> int:
        """Return the number of the message that carries a value to a stage, the same at both ends."""
        return value * self.schedule.stages + target

    def carried(self, instruction: Instruction) -> int:
        """Return the number of the message that a SEND or RECV posts."""
        op, stage, _, peer, _, _ = instruction
        return self.routes[op, stage, peer].first + self.stride * microbatch_of(instruction)

    def place(self, value: int) -> tuple[int, int]:
        """Return the stage and the microbatch of a value."""
        return divmod(value // 2, self.microbatches)

    def name(self, value: int) -> str:
        """Return the value in words, such as ``the output of stage 2 for microbatch 0``."""
        stage, microbatch = self.place(value)
        kind = "the input gradient" if value % 2 else "the output"
        slice_of = f" (slice {self.schedule.numbered(microbatch)})" if self.schedule.slices > 1 else ""
        return f"{kind} of stage {stage} for microbatch {microbatch}{slice_of}"

    def products(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the values that a compute instruction produces: two for a pair, none for W and RECOMPUTE."""
        return tuple(
            self.output(part.stage, microbatch_of(part)) + KINDS[part.op].product
            for part in parts_of(instruction)
            if KINDS[part.op].makes
        )

    def consumed(self, instruction: Instruction) -> tuple[tuple[int, int], ...]:
        """Return the inputs of a compute instruction: value and stage of origin of each."""
        return tuple(
            (first + 2 * (microbatch + shift), origin)
            for part in parts_of(instruction)
            for microbatch in (microbatch_of(part),)
            for first, origin, shift in self.needs[part.op, part.stage]
            if not shift or self.schedule.joins(microbatch, shift)
        )

    @cached_property
    def needs(self) -> dict[tuple[Op, int], tuple[Input, ...]]:
        """Map ``(op, stage)`` to the inputs: those along the chain first, then skips, then carries."""
        stages = range(self.schedule.stages)
        makers: dict[tuple[int, int], list[tuple[int, int]]] = {
            (OWN, stage): [(stage, 0)] for stage in stages
        }
        edges = [(a, b, self.schedule.shift(a, b)) for a, b in self.schedule.edges]
        carries = [(stage, stage, 1) for stage in stages]
        for a, b, shift in (*edges, *carries):
            if shift and self.schedule.slices < 2:
                continue  # no microbatch has a neighbour
            makers.setdefault((BEFORE, b), []).append((a, -shift))
            makers.setdefault((AFTER, a), []).append((b, shift))
        return {
            (op, stage): tuple(
                Input(self.output(maker, 0) + value, maker, shift)
                for value, whose in KINDS[op].inputs
                for maker, shift in makers.get((whose, stage), ())
            )
            for stage in stages
            for op in ELEMENTARY
        }

    @cached_property
    def routes(self) -> dict[tuple[Op, int, int | None], MessageRoute]:
        """Map ``(op, stage, peer)`` of a SEND or RECV to its messages. Along a chain the peer is None."""
        routes = {}
        home = self.schedule.placement
        for source, target, op, send, receive, far, near, _ in edge_flows(self.schedule):
            if home[source] != home[target]:
                first = self.message(self.output(source, 0) + KINDS[op].product, target)
                routes[send, source, far] = MessageRoute(first, home[target])
                routes[receive, target, near] = MessageRoute(first, home[source])
        return routes


def edge_flows(schedule: Schedule) -> Iterator[EdgeFlow]:
    """Iterate over every edge in both directions: activations travel forward, gradients back."""
    skips = frozenset(schedule.skips)
    for a, b in schedule.edges:
        far, near = (b, a) if (a, b) in skips else (None, None)
        shift = schedule.shift(a, b)
        yield EdgeFlow(a, b, Op.F, Op.SEND_F, Op.RECV_F, far, near, shift)
        yield EdgeFlow(b, a, Op.B, Op.SEND_B, Op.RECV_B, near, far, shift)
