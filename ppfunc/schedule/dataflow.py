"""Number the values that compute instructions consume and produce.

The output of stage ``s`` for microbatch ``m`` is value ``2 (s M + m)``, the gradient of the loss
with respect to the stage's input is the next odd number. What an instruction consumes then lies
at fixed distances from its own stage's output, which keeps walks over a million instructions cheap.
"""

from __future__ import annotations

from typing import NamedTuple

from .instruction import Instruction, Op, microbatch_of
from .schedule import Schedule

# Distance from a stage's output to what an instruction produces; W produces nothing that others consume.
PRODUCT = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: None}


class Dataflow(NamedTuple):
    """The edges of a schedule, by stage.

    Args:
        microbatches: M of the numbering.
        sources: for every stage, the stages whose outputs its forward consumes.
        targets: for every stage, the stages whose input gradients its backward consumes.
        needs: ``needs[op][stage]`` lists ``(distance, stage of origin)`` of the values consumed.
    """

    microbatches: int
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
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
    m = max(schedule.microbatches, 1)
    sources: list[list[int]] = [[] for _ in schedule.placement]
    targets: list[list[int]] = [[] for _ in schedule.placement]
    for source, target in schedule.edges:
        sources[target].append(source)
        targets[source].append(target)
    stages = range(schedule.stages)
    forward = tuple(tuple((2 * m * (a - s), a) for a in sources[s]) for s in stages)
    backward = tuple(((0, s), *((2 * m * (b - s) + 1, b) for b in targets[s])) for s in stages)
    weight = tuple(((1, s),) for s in stages)
    return Dataflow(
        m,
        tuple(map(tuple, sources)),
        tuple(map(tuple, targets)),
        {Op.F: forward, Op.B: backward, Op.I: backward, Op.W: weight},
    )


def products(flow: Dataflow, instruction: Instruction) -> tuple[int, ...]:
    """Return the values that a compute instruction produces: none for W, two for an overlapped pair."""
    return tuple(
        flow.output(part.stage, microbatch_of(part)) + product
        for part in instruction.parts or (instruction,)
        if (product := PRODUCT[part.op]) is not None
    )


def consumed(flow: Dataflow, instruction: Instruction) -> tuple[tuple[int, int, int], ...]:
    """Return the inputs of a compute instruction: ``(value, stage of origin, consuming stage)`` of each."""
    return tuple(
        (flow.output(part.stage, microbatch_of(part)) + distance, origin, part.stage)
        for part in instruction.parts or (instruction,)
        for distance, origin in flow.needs[part.op][part.stage]
    )
