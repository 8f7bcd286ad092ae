"""Make the bars of a picture: every compute instruction with its start and end, rank by rank."""

from __future__ import annotations

from typing import NamedTuple

from ..instruction import COMPUTE, Instruction
from ..schedule import Schedule
from ..simulate import Timeline


class Bar(NamedTuple):
    """One instruction in time."""

    instruction: Instruction
    start: float
    end: float


def compute_bars(schedule: Schedule, timeline: Timeline) -> list[list[Bar]]:
    """Return the compute instructions of every rank, in order, as ``timeline`` places them."""
    return [
        [
            Bar(instruction, float(start), float(end))
            for instruction, start, end in zip(schedule.instructions(rank), starts, ends, strict=True)
            if instruction.op in COMPUTE
        ]
        for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True))
    ]
