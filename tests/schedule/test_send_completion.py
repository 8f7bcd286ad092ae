"""When a rank may wait for its sends."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ppfunc.schedule import BUILDERS, Op, compute_only, one_f_one_b, place_communication
from ppfunc.schedule.instruction import COMMUNICATION, SENDS
from ppfunc.schedule.passes.running import send_completion
from tests.clock import busy


def lowered():
    for name, build in BUILDERS.items():
        for p, m in ((2, 4), (3, 6), (4, 8)):
            try:
                bare = compute_only(build(p, m))
            except ValueError:
                continue
            for lookahead in (0, 1):
                yield name, place_communication(bare, lookahead=lookahead)
    yield "skips", place_communication(replace(one_f_one_b(3, 4), skips=((0, 2),)))


LOWERED = list(lowered())


def messages(schedule, rank):
    """Step, instruction, rank at the other end, and what both ends have in common."""
    for step, instructions in enumerate(schedule.programs[rank]):
        for i in instructions:
            if i.op in COMMUNICATION:
                other = schedule.other_end(i)
                yield (
                    step,
                    i,
                    schedule.placement[other],
                    (i.op.value[-1], *sorted((i.stage, other)), i.microbatch),
                )


def consumer(schedule, rank, receive):
    ops = (Op.F,) if receive.op is Op.RECV_F else (Op.B, Op.I)
    steps = enumerate(schedule.programs[rank])
    return next(
        k
        for k, step in steps
        for i in step
        for p in (i.parts or (i,))
        if p.op in ops and p[1:3] == receive[1:3]
    )


def first_proof(schedule, rank, posted, peer, message):
    """The first step after ``posted`` by whose end the rank has consumed what the peer sent no earlier than
    it posted the receive.
    """
    there = next(step for step, _, _, m in messages(schedule, peer) if m == message)
    sent = {m: step for step, _, _, m in messages(schedule, peer)}
    answers = [
        i for _, i, q, m in messages(schedule, rank) if q == peer and i.op not in SENDS and sent[m] >= there
    ]
    last = len(schedule.programs[rank]) - 1
    return min(max(min((consumer(schedule, rank, i) for i in answers), default=last), posted + 1), last)


@pytest.mark.parametrize(("name", "schedule"), LOWERED)
def test_a_send_is_waited_for_as_soon_as_the_peer_has_shown_that_it_received_it(name, schedule):
    for rank in range(schedule.ranks):
        wanted = {
            i: first_proof(schedule, rank, step, q, m)
            for step, i, q, m in messages(schedule, rank)
            if i.op in SENDS
        }
        found = [(i, step) for step, sends in send_completion(schedule, rank).items() for i in sends]
        assert len(found) == len(wanted)
        assert dict(found) == wanted


def test_only_the_programs_of_its_peers_are_read():
    schedule = place_communication(one_f_one_b(5, 4))
    others = replace(
        schedule, programs=tuple(p if abs(r - 2) < 2 else None for r, p in enumerate(schedule.programs))
    )
    assert send_completion(others, 2) == send_completion(schedule, 2)


def test_one_rank_of_many_takes_milliseconds():
    schedule = place_communication(one_f_one_b(64, 1024), lookahead=1)
    seconds = []
    for _ in range(5):  # one of them may be that in which the collector runs
        begin = time.process_time()
        send_completion(schedule, 30)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.3 * busy()
