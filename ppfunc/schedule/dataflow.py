"""Number the values that compute instructions consume and produce, and the messages that carry them.

The output of stage ``s`` for microbatch ``m`` is value ``2 (s M + m)``, the gradient of the loss
with respect to the stage's input is the next odd number. A value goes to another rank once, whatever
the number of stages that consume it there: the message is ``value * R + rank``. So the numbers of all
microbatches follow from that of microbatch 0, which keeps walks over a million instructions cheap. Along
a carry, the value of a microbatch is consumed by the next slice of the sequence, and its gradient by the
slice before: such an input is shifted by a microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .instruction import AFTER, BEFORE, ELEMENTARY, KINDS, OWN, Instruction, Op, microbatch_of, parts_of
from .schedule import Schedule, merged

Targets = tuple[tuple[int, int], ...]


class Link(NamedTuple):
    """Describe the messages that carry the values of a stage to another rank.

    Args:
        source: the stage that sends.
        targets: the stages of the other rank that consume the value, each with its shift, 1 where the next
            slice of the sequence does; the first names the message.
        compute: kind of the producer and of the consumers, B for I too.
        send, receive: kinds of the message at its two ends.
        far: the stage that the send names as its peer, None along the only edge.
        near: likewise the stage that the receive names.
        microbatches: the microbatches that have these targets.
    """

    source: int
    targets: Targets
    compute: Op
    send: Op
    receive: Op
    far: int | None
    near: int | None
    microbatches: range | tuple[int, ...]


class Input(NamedTuple):
    """Name a value that a compute instruction consumes.

    Args:
        value: number of the value of microbatch 0.
        origin: stage that makes it.
        shift: distance from the microbatch of the instruction to the microbatch of the value: -1 for the
            carry of the slice before and for what leads back from it, 1 for the gradient of the carry to the
            slice after, else 0. See :meth:`Dataflow.takes`.
    """

    value: int
    origin: int
    shift: int = 0


class MessageRoute(NamedTuple):
    """Locate one end of the messages that move along an edge in one direction."""

    first: int  # number of the message of microbatch 0
    other: int  # the rank at the other end
    links: tuple[Link, ...]  # those of several flows differ in their targets


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
        return 2 * self.schedule.ranks

    def output(self, stage: int, microbatch: int) -> int:
        """Return the number of the value that ``F`` of this stage and microbatch produces."""
        return 2 * (stage * self.microbatches + microbatch)

    def message(self, value: int, rank: int) -> int:
        """Return the number of the message that carries a value to a rank, the same at both ends."""
        return value * self.schedule.ranks + rank

    def content(self, message: int) -> tuple[int, int]:
        """Return the value of a message, and the rank that receives it."""
        return divmod(message, self.schedule.ranks)

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
            if self.takes(microbatch, origin, shift)
        )

    def takes(self, microbatch: int, origin: int, shift: int = 0) -> bool:
        """Tell whether a microbatch has the input that a stage shares with the stage ``origin``.

        The first and last slices of a sequence lack a neighbour, and a microbatch may go through some stages
        only.
        """
        return (not shift or self.schedule.joins(microbatch, shift)) and (
            len(self.schedule.flows) == 1 or microbatch in self.schedule.walked[origin]
        )

    def always(self, stage: int, origin: int, shift: int = 0) -> bool:
        """Tell whether every microbatch of a stage has the input that it shares with the stage ``origin``."""
        here, there = self.schedule.numbers[stage], self.schedule.walked[origin]
        return not shift and (here is self.schedule.numbers[origin] or all(m in there for m in here))

    def sent(self, link: Link) -> Sequence[int]:
        """List the microbatches of a link that have a message: a stage of the other rank takes the value."""
        if any(self.always(link.source, *target) for target in link.targets):
            return link.microbatches
        return [m for m in link.microbatches if any(self.takes(m, *target) for target in link.targets)]

    @cached_property
    def needs(self) -> dict[tuple[Op, int], tuple[Input, ...]]:
        """Map ``(op, stage)`` to the inputs: along edges first, then skips, then carries."""
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
        """Map ``(op, stage, peer)`` of a SEND or RECV to its messages. The peer of an only edge is None."""
        routes: dict[tuple[Op, int, int | None], MessageRoute] = {}
        home = self.schedule.placement
        for link in links(self.schedule):
            (target, _), *_ = link.targets
            first = self.message(self.output(link.source, 0) + KINDS[link.compute].product, home[target])
            for end, other in (
                ((link.send, link.source, link.far), home[target]),
                ((link.receive, target, link.near), home[link.source]),
            ):
                known = routes[end].links if end in routes else ()
                routes[end] = MessageRoute(first, other, (*known, link))
        return routes


def links(schedule: Schedule) -> tuple[Link, ...]:
    """List the messages between ranks in both directions: activations travel forward, gradients back."""
    home = schedule.placement
    found: dict[tuple[int, Targets, bool], list[range | tuple[int, ...]]] = {}
    for flow in schedule.flows:
        stages = {*flow.stages}
        edges = [(a, b) for a, b in schedule.edges if a in stages and b in stages]
        for forward in (True, False):
            order = flow.stages if forward else flow.stages[::-1]
            place = {stage: number for number, stage in enumerate(order)}
            ends = [(*(edge if forward else edge[::-1]), schedule.shift(*edge)) for edge in edges]
            targets: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for source, target, shift in sorted(ends, key=lambda end: place[end[1]]):
                if home[source] != home[target]:
                    targets.setdefault((source, home[target]), []).append((target, shift))
            for (source, _), consumers in targets.items():
                found.setdefault((source, tuple(consumers), forward), []).append(flow.microbatches)
    return tuple(_link(schedule, *key, merged(sets)) for key, sets in found.items())


def _link(
    schedule: Schedule, source: int, targets: Targets, forward: bool, microbatches: range | tuple[int, ...]
) -> Link:
    target = targets[0][0]
    after, before = (schedule.successor, schedule.predecessor)[:: 1 if forward else -1]
    far, near = (None if after(source) == target else target), (None if before(target) == source else source)
    ops = (Op.F, Op.SEND_F, Op.RECV_F) if forward else (Op.B, Op.SEND_B, Op.RECV_B)
    return Link(source, targets, *ops, far, near, microbatches)
