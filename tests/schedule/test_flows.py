"""What flows may be, and what they may not: each fault is refused by name before anything runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ppfunc.schedule import (
    B,
    F,
    Flow,
    ScheduleError,
    check,
    dualpipe,
    from_json,
    place_communication,
    to_csv,
    to_json,
    to_torch_csv,
)
from tests.graphs import DEALT, DIAMOND, diamond, in_order, random_graph


def test_what_a_schedule_says_of_its_stages():
    assert (DEALT.heads, DEALT.ends, DEALT.model_stages) == ({0, 2, 3}, {1}, (0, 1, 2, 2))
    assert DEALT.numbers == ((0, 1, 2, 3), (0, 1, 2, 3), (0, 3), range(1, 2))
    assert DEALT.model_stages_of(1) == (1, 2)
    assert (diamond().heads, diamond().ends) == ({0}, {3})
    assert diamond().successor(0) is None and diamond().predecessor(1) == 0
    assert dualpipe(2, 4).replicas == ((0, 2), (1, 3))


def test_graphs_are_proved_and_written():
    for schedule in (DEALT, diamond()):
        placed = place_communication(schedule)
        assert check(placed).flows == len(schedule.flows)
        assert from_json(to_json(placed)) == placed


@pytest.mark.parametrize("schedule", [DEALT, diamond()], ids=["dealt", "diamond"])
@pytest.mark.parametrize("write", [to_csv, to_torch_csv])
def test_csv_refuses_what_it_cannot_say(schedule, write):
    with pytest.raises(ValueError, match=r"graph of stages|chains of stages"):
        write(schedule)


def test_the_digest_tells_edges_and_replicas_apart():
    joined = diamond(edges=((0, 1), (1, 2), (1, 3), (2, 3)))
    digests = {s.digest for s in (diamond(), joined, DEALT, replace(DEALT, replicas=()))}
    assert len(digests) == 4


FAULTS = {
    "flow 0 has the edge (1, 0) against the order": diamond(edges=((1, 0), *DIAMOND)),
    "flow 0 has the edge (0, 9), expected a pair of its stages": diamond(edges=((0, 9), *DIAMOND)),
    "flow 0 has an edge twice": diamond(edges=(*DIAMOND, (0, 1))),
    "flow 0 has the edges of a chain: expected None": diamond(edges=((0, 1), (1, 2), (2, 3))),
    "flow 0 has edges [(0, 1)], expected a tuple of pairs, or None": diamond(edges=[(0, 1)]),
    "flow 0 has microbatches (0, 1), expected a range": diamond(microbatches=(0, 1)),
    "flow 0 has microbatches (3, 1), expected a range": diamond(microbatches=(3, 1)),
    "flow 0 has microbatches (), expected a range": diamond(microbatches=()),
    "stage 1 occurs twice in flow 0": diamond(stages=(0, 1, 1, 2, 3)),
    "stage 3 is in no flow": diamond(stages=(0, 1, 2), edges=((0, 1), (0, 2))),
    "microbatch 1 is in no flow, expected it in one": diamond(microbatches=(0, 2)),
    "microbatch 0 is in no flow, expected it in one": diamond(microbatches=range(1, 3)),
    "microbatch 1 is in two flows": replace(DEALT, flows=(*DEALT.flows[:2], Flow((0, 1), range(1, 3)))),
    "flow 0 has the edge (0, 1), and flow 2, with both stages, has not": replace(
        DEALT, flows=(*DEALT.flows[:2], Flow((0, 1), range(2, 3), ()))
    ),
    "1 edges lead to stage 0 in flow 0, and 0 in flow 2": replace(
        DEALT,
        flows=(*(f._replace(edges=None) for f in DEALT.flows[:2]), DEALT.flows[2]),
        skips=(),
    ),
    "flow 2 ends in stage 0, and flow 0 goes on: expected it last in both": replace(
        DEALT, flows=(*DEALT.flows[:2], Flow((0,), range(2, 3)))
    ),
    "in different orders": replace(
        DEALT,
        flows=(
            Flow((2, 3, 0, 1), range(1), ((0, 1),)),
            Flow((3, 2, 0, 1), range(1, 2), ((0, 1),)),
        ),
    ),
    "replicas are ((2, 7),), expected a tuple of groups of stages": replace(DEALT, replicas=((2, 7),)),
    "expected each stage in one group at most": replace(DEALT, replicas=((2, 3), (3, 0))),
    "skip (2, 3): expected two stages of one flow": replace(DEALT, skips=((2, 3),)),
    "skip (3, 0) leads back, to the next slice": replace(
        diamond(edges=((0, 1), (0, 2), (1, 2), (2, 3))), skips=((3, 0),)
    ),
    "skip (0, 3) leads out of the flow": in_order(
        (0, 0, 0, 0),
        (Flow((0, 1, 3, 2), range(1), ((0, 1), (1, 2))), Flow((0, 1, 2), range(1, 2))),
        skips=((0, 3),),
    ),
    "skips (0, 3) and (1, 3) of one flow have copies of one stage": in_order(
        (0, 0, 0, 0), (Flow((0, 1, 2, 3), range(1)),), ((0, 3), (1, 3)), ((0, 1),)
    ),
    "skips (0, 2) and (0, 3) of one flow have copies of one stage": in_order(
        (0, 0, 0, 0), (Flow((0, 1, 2, 3), range(1)),), ((0, 2), (0, 3)), ((2, 3),)
    ),
    "flow 2 has microbatches up to 999999999999999, and there are fewer": replace(
        DEALT, flows=(*DEALT.flows[:2], Flow((0, 1), range(4, 10**15)))
    ),
}


@pytest.mark.parametrize("text", FAULTS)
def test_faults_are_named(text):
    with pytest.raises(ScheduleError) as raised:
        check(FAULTS[text])
    assert text in raised.value.reason


def test_a_message_goes_by_the_name_of_the_stage_that_takes_it_first():
    text = to_json(place_communication(diamond()))
    with pytest.raises(ScheduleError, match="there are several edges from stage 0"):
        check(from_json(text.replace("0SEND_F0>2", "0SEND_F0")))
    # Both 1 and 2 on the other rank: one message, and no second.
    fan = in_order((0, 1, 1, 0), (Flow((0, 1, 2, 3), range(1), DIAMOND),))
    placed = place_communication(fan)
    assert str(placed).count("SEND_F") == 3  # one output of 0, the outputs of 1 and 2
    with pytest.raises(ScheduleError, match="under the name of the stage that needs it first"):
        check(from_json(to_json(placed).replace("0SEND_F0>1", "0SEND_F0>2")))


def test_a_value_that_is_needed_and_not_sent_is_named():
    for seed in range(30):
        placed = place_communication(random_graph(random.Random(seed), ranks=2))
        sends = [
            (rank, step, i)
            for rank, program in enumerate(placed.programs)
            for step, row in enumerate(program)
            for i in row
            if "SEND" in i.op
        ]
        for rank, step, i in sends[:3]:
            programs = [[list(row) for row in program] for program in placed.programs]
            programs[rank][step].remove(i)
            lacking = replace(placed, programs=tuple(tuple(map(tuple, p)) for p in programs))
            with pytest.raises(ScheduleError, match=r"never sends this message|receive"):
                check(lacking)


def test_a_copy_without_its_microbatch_is_named():
    programs = tuple(
        tuple(row for row in program if row != (F(3, 1),) and row != (B(3, 1),)) for program in DEALT.programs
    )
    with pytest.raises(ScheduleError, match="the output of stage 3 for microbatch 1|forward F of stage 3"):
        check(replace(DEALT, programs=programs))
