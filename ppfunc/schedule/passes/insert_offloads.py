"""Write the moves of residuals to host memory and back into a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..instruction import COMMUNICATION, COMPUTE, Instruction, Op, parts_of
from ..schedule import Program, Schedule, Step
from .remove_slots import remove_slots

Moves = dict[int, list[Instruction]]


def insert_offloads(schedule: Schedule, stages: Iterable[int] | None = None, *, lookahead: int = 1) -> Schedule:
    """Move residuals away after their forward and back before the backward that uses them first.

    Equivalent to: after each F of the chosen stages write OFFLOAD; before the compute instruction
    that comes ``lookahead`` compute instructions before its B or I, write FETCH. Residuals that
    would not be away during any compute instruction stay where they are, and so do those that
    move already.

    Args:
        stages: the stages whose residuals move; all of them by default.
        lookahead: compute instructions of the rank that hide the way back.

    Raises:
        ValueError: a negative lookahead, or a stage that does not exist.
    """
    chosen = set(range(schedule.stages) if stages is None else stages)
    if lookahead < 0:
        raise ValueError(f"lookahead is {lookahead}, expected at least 0")
    if not chosen <= set(range(schedule.stages)):
        raise ValueError(f"stages are {sorted(chosen)}, expected stages from 0 to {schedule.stages - 1}")
    programs = tuple(_move(program, chosen, lookahead) for program in remove_slots(schedule).programs)
    return replace(schedule, programs=programs)


def _move(program: Program, chosen: set[int], lookahead: int) -> Program:
    """One program with its moves; compute instructions are known by their number."""
    leave, back = _moves(program, chosen, lookahead)
    steps: list[Step] = []
    number = 0
    for step in program:
        messages = [i for i in step if i.op in COMMUNICATION]
        rest: list[Instruction] = []
        for instruction in (i for i in step if i.op not in COMMUNICATION):
            if instruction.op not in COMPUTE:
                rest.append(instruction)
                continue
            rest += [*back.get(number, ()), instruction, *leave.get(number, ())]
            number += 1
        steps.append((*messages, *rest))
    return tuple(steps)


def _moves(program: Program, chosen: set[int], lookahead: int) -> tuple[Moves, Moves]:
    """The residuals that leave after, and that come back before, each compute instruction."""
    moved = {(i.stage, i.microbatch) for step in program for i in step if i.op in (Op.OFFLOAD, Op.FETCH)}
    made: dict[tuple[int, int | None], int] = {}
    leave: Moves = {}
    back: Moves = {}
    compute = (i for step in program for i in step if i.op in COMPUTE)
    for number, instruction in enumerate(compute):
        for op, stage, microbatch, *_ in parts_of(instruction):
            key = (stage, microbatch)
            if key in moved:
                continue
            if op is Op.F:
                made[key] = number
            elif op in (Op.B, Op.I) and stage in chosen and key in made and number - lookahead > made[key] + 1:
                leave.setdefault(made[key], []).append(Instruction(Op.OFFLOAD, stage, microbatch))
                back.setdefault(number - lookahead, []).append(Instruction(Op.FETCH, stage, microbatch))
    return leave, back
