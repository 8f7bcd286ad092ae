"""The proof on whole columns accepts nothing that the proof by steps refuses, and all that builders make."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Chain,
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    append_tail,
    one_f_one_b,
    place_communication,
    remove_slots,
)
from ppfunc.schedule.check import _prove_by_steps
from ppfunc.schedule.formats import compute_only
from ppfunc.schedule.instruction import COMMUNICATION
from ppfunc.schedule.proof.columns import prove_columns
from ppfunc.schedule.proof.structure import check_structure


def by_steps(schedule):
    """Whether the schedule is step-atomic, None where it is refused."""
    try:
        return _prove_by_steps(schedule, "pair")
    except ScheduleError:
        return None


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
def test_what_builders_make_is_proved_on_columns(name, schedule):
    assert prove_columns(schedule) is by_steps(schedule) is not None
    if not schedule.forward_only:
        summed = append_tail(schedule)
        assert prove_columns(summed) is by_steps(summed) is not None


def changed(schedule, rng):
    """One instruction moved, dropped, doubled or renamed, or two steps joined, or one cut."""
    programs = [[list(step) for step in program] for program in schedule.programs]
    program = rng.choice([p for p in programs if any(p)])
    step = rng.choice([s for s in program if s])
    place = rng.randrange(len(step))
    kind = rng.choice(["move", "swap", "drop", "double", "rename", "renumber", "join", "cut"])
    if kind == "swap":
        other = rng.choice([s for s in program if s])
        at = rng.randrange(len(other))
        step[place], other[at] = other[at], step[place]
    elif kind == "join":
        at = rng.randrange(len(program))
        program[at : at + 2] = [sum(program[at : at + 2], [])]
    elif kind == "cut":
        at = next(k for k, s in enumerate(program) if s is step)
        program[at : at + 1] = [step[:place], step[place:]]
    else:
        instruction = step[place] if kind == "double" else step.pop(place)
        if kind == "rename" and not instruction.parts:
            instruction = instruction._replace(op=rng.choice([*COMMUNICATION, Op.F, Op.B, Op.I, Op.W]))
        if kind == "renumber" and not instruction.parts:
            instruction = instruction._replace(microbatch=rng.randrange(schedule.microbatches))
        if kind != "drop":
            target = rng.choice(program)
            target.insert(rng.randrange(len(target) + 1), instruction)
    return replace(schedule, programs=tuple(tuple(map(tuple, p)) for p in programs))


@given(st.sampled_from(LOWERED), st.booleans(), st.integers(0, 2**32), st.integers(1, 3))
def test_nothing_is_accepted_that_the_proof_by_steps_refuses(case, tail, seed, changes):
    schedule, rng = case[1], random.Random(seed)
    if tail and not schedule.forward_only:
        schedule = append_tail(schedule)
    for _ in range(changes):
        schedule = changed(schedule, rng)
        try:
            check_structure(schedule)
        except ScheduleError:
            return
        if (found := prove_columns(schedule)) is not None:
            assert found is by_steps(schedule)


@given(st.integers(0, 2**32))
def test_the_same_verdict_on_random_orders_of_messages(seed):
    """Two or three stages, each rank's messages in any order and any steps: the two proofs agree both ways."""
    rng = random.Random(seed)
    schedule = place_communication(one_f_one_b(rng.choice((2, 3)), 2))
    programs = []
    for program in schedule.programs:
        items = [i for step in program for i in step]
        for _ in range(rng.randrange(5)):
            at = rng.randrange(len(items) - 1)
            items[at : at + 2] = items[at + 1], items[at]
        steps = [[items[0]]]
        for before, item in zip(items, items[1:], strict=False):
            if rng.random() < 0.5 or before.op not in COMMUNICATION:
                steps.append([])
            steps[-1].append(item)
        programs.append(tuple(map(tuple, steps)))
    schedule = replace(schedule, programs=tuple(programs))
    assert prove_columns(schedule) is by_steps(schedule)


def test_slots_are_left_to_the_other_proof():
    schedule = place_communication(one_f_one_b(2, 2))
    slotted = replace(schedule, programs=tuple(tuple(tuple(i._replace(slot=0) for i in s) for s in p) for p in schedule.programs))
    assert prove_columns(slotted) is None
    assert prove_columns(remove_slots(slotted)) is False


def test_a_sum_over_copies_before_the_end_is_left_to_the_other_proof():
    schedule = append_tail(place_communication(BUILDERS["dualpipe"](2, 4)), step=False)
    early = ((Instruction(Op.REDUCE_TIED, 0),), *schedule.programs[0])
    assert prove_columns(replace(schedule, programs=(early, *schedule.programs[1:]))) is None


def test_a_huge_range_takes_no_time():
    chain = Chain((0, 1), range(10**15))
    schedule = Schedule("x", (0, 1), (chain,), (((Instruction(Op.F, 0, 0), Instruction(Op.SEND_F, 0, 0)),), ((Instruction(Op.F, 1, 0),),)))
    assert prove_columns(schedule) is None


