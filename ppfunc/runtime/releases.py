"""When a rank may wait for its sends: as soon as it knows that they have been received.

A rank knows that a message was taken when it consumes another one that the same peer sent no
earlier than it posted the receive of the first. Waiting then cannot block on anything but the
wire, so the tensors are let go early and no deadlock is added, whatever the schedule.
"""

from __future__ import annotations

from bisect import bisect_left

from ppfunc.schedule import Instruction, Op, Schedule
from ppfunc.schedule.instruction import COMMUNICATION, SENDS, parts_of


def release_points(schedule: Schedule, rank: int) -> dict[int, list[Instruction]]:
    """For each step of ``rank``, the sends to wait for at its end.

    Every send of the rank occurs once; those that nothing follows are waited for in the last step.
    """
    program = schedule.programs[rank]
    consumed = _consumption(schedule, rank)
    sends: dict[int, list[tuple[int, Instruction, int]]] = {}  # by peer: own step, send, the peer's step that receives
    heard: dict[int, list[tuple[int, int]]] = {}  # by peer: the peer's step that sends, own step that consumes
    abroad = _counterparts(schedule, rank)
    for position, step in enumerate(program):
        for i in step:
            if i.op in COMMUNICATION:
                peer = schedule.placement[schedule.other_end(i)]
                there = abroad[_message(schedule, i)]
                if i.op in SENDS:
                    sends.setdefault(peer, []).append((position, i, there))
                else:
                    heard.setdefault(peer, []).append((there, consumed[i.op in (Op.RECV_F,), i.stage, i.microbatch]))
    points: dict[int, list[Instruction]] = {}
    last = len(program) - 1
    for peer, messages in sends.items():
        answers = sorted(heard.get(peer, ()))
        earliest = [last] * (len(answers) + 1)
        for n in range(len(answers) - 1, -1, -1):
            earliest[n] = min(earliest[n + 1], answers[n][1])
        for position, i, there in messages:
            known = earliest[bisect_left(answers, (there, -1))]
            points.setdefault(min(max(known, position + 1), last), []).append(i)
    return points


def _consumption(schedule: Schedule, rank: int) -> dict[tuple[bool, int, int], int]:
    """The step of ``rank`` that runs the forward (True) or the backward of each (stage, microbatch)."""
    found: dict[tuple[bool, int, int], int] = {}
    for position, step in enumerate(schedule.programs[rank]):
        for i in step:
            for part in parts_of(i):
                if part.op in (Op.F, Op.B, Op.I):
                    found[part.op is Op.F, part.stage, part.microbatch] = position
    return found


def _counterparts(schedule: Schedule, rank: int) -> dict[tuple[str, int, int, int], int]:
    """For every message of ``rank``, the step of the peer that performs its other end."""
    return {
        _message(schedule, i): position
        for peer, program in enumerate(schedule.programs)
        if peer != rank
        for position, step in enumerate(program)
        for i in step
        if i.op in COMMUNICATION and schedule.placement[schedule.other_end(i)] == rank
    }


def _message(schedule: Schedule, i: Instruction) -> tuple[str, int, int, int]:
    """What a send and its receive have in common."""
    other = schedule.other_end(i)
    ends = (i.stage, other) if i.op in SENDS else (other, i.stage)
    return ("F" if i.op in (Op.SEND_F, Op.RECV_F) else "B", *ends, i.microbatch)
