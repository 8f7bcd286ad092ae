"""Messages come to an end, and a barrier may stand between steps, where the slow model says so."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Flow,
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    append_tail,
    compute_only,
    one_f_one_b,
    place_communication,
)
from ppfunc.schedule.instruction import COMMUNICATION, parse_instruction
from ppfunc.schedule.proof.certificate import check
from tests.schedule.reference import Model
from tests.schedule.test_certificate_reference import mutate
from tests.schedule.written import is_accepted, made_from


def verdicts(schedule):
    """Whether the schedule is step-atomic, by the proof and by the slow model; None where it has no end."""
    slow = Model(schedule, barrier=True).accepts() if Model(schedule).accepts() else None
    try:
        return check(schedule).step_atomic, slow
    except ScheduleError:
        return None, slow


def lowered():
    for name, build in BUILDERS.items():
        for p, m in ((2, 2), (2, 4), (3, 6), (4, 8)):
            try:
                bare = compute_only(build(p, m))
            except ValueError:
                continue
            for lookahead in (0, 1, 2):
                yield name, place_communication(bare, lookahead=lookahead)
    yield "skips", place_communication(replace(one_f_one_b(3, 4), skips=((0, 2),)))


LOWERED = [(name, schedule) for name, schedule in lowered() if schedule.ops & COMMUNICATION]


@pytest.mark.parametrize(("name", "schedule"), LOWERED)
def test_what_builders_make_is_proved(name, schedule):
    proved, slow = verdicts(schedule)
    assert proved is slow is not None


@given(st.sampled_from(LOWERED), st.integers(0, 2**32), st.integers(1, 3))
def test_the_same_verdict_on_changed_schedules(case, seed, changes):
    schedule, rng = case[1], random.Random(seed)
    for _ in range(changes):
        schedule = mutate(schedule, rng)
        proved, slow = verdicts(schedule)
        assert proved is slow


@given(st.integers(0, 2**32))
def test_the_same_verdict_on_random_orders_of_messages(seed):
    """Two or three stages, each rank's messages in any order and any steps."""
    rng = random.Random(seed)
    schedule = place_communication(one_f_one_b(rng.choice((2, 3)), 2))
    programs = []
    for program in schedule.programs:
        items = [i for step in program for i in step]
        for _ in range(rng.randrange(5)):
            at = rng.randrange(len(items) - 1)
            items[at : at + 2] = items[at + 1], items[at]
        steps = [[items[0]]]
        for before, item in pairwise(items):
            if rng.random() < 0.5 or before.op not in COMMUNICATION:
                steps.append([])
            steps[-1].append(item)
        programs.append(tuple(map(tuple, steps)))
    schedule = replace(schedule, programs=tuple(programs))
    proved, slow = verdicts(schedule)
    assert proved is slow


# rows, microbatches, placement
WRONG = {
    "W after one B of many I": (("0F0 | 0F1 | 0I0 | 0W0 | 0B1 | 0W1",), 2, (0,)),
    "W of another microbatch": (("0F0 | 0F1 | 0I0 | 0B1 | 0W1",), 2, (0,)),
    "B beside I": (("0F0 | 0F1 | 0I0 | 0W0 | 0B0 | 0B1",), 2, (0,)),
    "a stage before the one before it": (("1F0 | 0F0 | 1B0 | 0B0",), 1, (0, 0)),
    "gradients in the order of the forward": (("0F0 | 1F0 | 0B0 | 1B0",), 1, (0, 0)),
    "each waits for a later step of the other": (
        (
            "0F0 | 0SEND_F0 0RECV_B0 0B0 | 0F1 | 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1F0 | 1RECV_F1 1F1 | 1B0 | 1SEND_B0 1B1 | 1SEND_B1",
        ), 2, (0, 1),
    ),
    "each waits for the next step of the other": (
        ("0F0 | 0SEND_F0 0F1 | 0RECV_B0 0B0 | 0SEND_F1 0RECV_B1 0B1", "1RECV_F0 1F0 | 1RECV_F1 1F1 | 1B0 | 1SEND_B0 | 1B1 | 1SEND_B1"),  # noqa: E501
        2, (0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_schedules_are_refused(case):
    rows, microbatches, placement = WRONG[case]
    assert not is_accepted(made_from(*rows, microbatches=microbatches, placement=placement))


def test_a_weight_gradient_after_an_overlapped_full_backward_is_refused():
    """The pair's op was looked at, which is no B, and the W was taken for that of an I."""
    rows = ("0F0 | 0F1 | 0B0 | (0F2;0B1)OVERLAP_F_B | 0W1 | 0B2",)
    with pytest.raises(ScheduleError, match="the full backward at step 3, place 0 has computed the weight"):
        check(made_from(*rows, microbatches=3, placement=(0,)))


def test_a_batch_that_holds_up_another_rank_is_refused():
    schedule = place_communication(BUILDERS["interleaved_zb"](3, 4))
    program = schedule.programs[0]
    at = program.index((Instruction(Op.RECV_F, 3, 3),))
    joined = (*program[:at], program[at] + program[at + 1], *program[at + 2 :])
    assert not is_accepted(replace(schedule, programs=(joined, *schedule.programs[1:])))


def with_last_steps(schedule, *texts):
    """The schedule with these last steps."""
    last = (tuple(map(parse_instruction, text.split())) for text in texts)
    return replace(
        schedule, programs=tuple((*p, step) for p, step in zip(schedule.programs, last, strict=True))
    )


def test_sums_over_replicas_that_wait_for_each_other_are_refused():
    schedule = place_communication(compute_only(BUILDERS["dualpipe"](2, 4)))
    assert schedule.placement == (0, 1, 1, 0)
    assert is_accepted(with_last_steps(schedule, "0REDUCE_TIED 3REDUCE_TIED", "2REDUCE_TIED 1REDUCE_TIED"))
    tails = "0REDUCE_TIED 0REDUCE_GRAD 3REDUCE_TIED", "1REDUCE_TIED 1REDUCE_GRAD 2REDUCE_TIED"
    assert not is_accepted(with_last_steps(schedule, *tails))


def test_a_barrier_needs_the_sums_over_replicas_in_steps_of_one_number():
    schedule = append_tail(compute_only(BUILDERS["data_parallel"](2, 3)))
    assert check(schedule).step_atomic
    idle = replace(schedule, programs=(((), *schedule.programs[0]), schedule.programs[1]))
    assert not check(idle).step_atomic


def test_a_huge_range_takes_no_time():
    chain = Flow((0, 1), range(10**15))
    programs = (((Instruction(Op.F, 0, 0), Instruction(Op.SEND_F, 0, 0)),), ((Instruction(Op.F, 1, 0),),))
    assert not is_accepted(Schedule("x", (0, 1), (chain,), programs))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_is_taken_only_when_the_sends_that_read_it_are_over(slot):
    """Rank 0 waits for rank 1 to receive, rank 1 for rank 2, and rank 2 for rank 0, which wants the slot."""
    rows = (
        f"0F0@0 | 0SEND_F0@0 | 0F1@{slot} | 3F2@0 | 3SEND_F2@0 | 0SEND_F1@{slot}",
        "5RECV_F2@0 5F2@0 | 1RECV_F0@0 1F0@0 | 1SEND_F0@0 | 1RECV_F1@1 1F1@1 | 1SEND_F1@1",
        "4RECV_F2@0 4F2@0 | 4SEND_F2@0 | 2RECV_F0@0 2F0@0 | 2RECV_F1@1 2F1@1",
    )
    schedule = made_from(*rows, microbatches=2, placement=(0, 1, 2, 0, 2, 1))
    schedule = replace(schedule, flows=(Flow((0, 1, 2), range(2)), Flow((3, 4, 5), range(2, 3))))
    if slot:
        assert check(schedule).slots == (2, 2, 2, 1, 1, 1)
    else:
        with pytest.raises(
            ScheduleError, match=r"step 2, place 0, 0F1@0: deadlock: .* \(0F1@0\) waits for the out"
        ):
            check(schedule)
