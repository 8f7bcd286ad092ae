"""``check`` against a slow model of the same promises that shares no code and no idea with it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Instruction,
    Op,
    ScheduleError,
    allocate_slots,
    append_tail,
    insert_loads,
    insert_offloads,
    merge_backward,
    one_f_one_b,
    place_communication,
    remove_communication,
    remove_slots,
    simulate,
    split_backward,
)
from ppfunc.schedule.passes.running import linearize
from tests.graphs import random_graph
from tests.schedule.reference import COMPUTING, SENDING, Model
from tests.schedule.written import is_accepted


def flat(schedule):
    return [
        (r, k, j)
        for r, p in enumerate(schedule.programs)
        for k, step in enumerate(p)
        for j in range(len(step))
    ]


def with_steps(schedule, rank, change):
    program = [list(step) for step in schedule.programs[rank]]
    change(program)
    programs = list(schedule.programs)
    programs[rank] = tuple(map(tuple, program))
    return replace(schedule, programs=tuple(programs))


def mutate(schedule, rng):
    """One random change: of any kind, harmless ones too."""
    rank, step, place = rng.choice(flat(schedule))
    instruction = schedule.programs[rank][step][place]
    kind = rng.choice(["drop", "double", "move", "swap", "retarget", "rename", "rank", "split", "join"])
    if kind == "drop":
        return with_steps(schedule, rank, lambda p: p[step].pop(place))
    if kind == "double":
        return with_steps(schedule, rank, lambda p: p.insert(rng.randrange(len(p) + 1), [instruction]))
    if kind == "swap":
        _, other, at = rng.choice([f for f in flat(schedule) if f[0] == rank])

        def swap(p):
            p[step][place], p[other][at] = p[other][at], p[step][place]

        return with_steps(schedule, rank, swap)
    if kind == "retarget":
        new = rng.choice(
            [{"stage": rng.randrange(schedule.stages)}, {"microbatch": rng.randrange(schedule.microbatches)}]
        )
        new = instruction._replace(parts=(), op=Op.F if instruction.parts else instruction.op, **new)
        return with_steps(schedule, rank, lambda p: p[step].__setitem__(place, new))
    if kind == "rename":
        new = Instruction(rng.choice(list(Op)[:4] + list(Op)[5:9]), instruction.stage, instruction.microbatch)
        return with_steps(schedule, rank, lambda p: p[step].__setitem__(place, new))
    if kind == "rank":
        without = with_steps(schedule, rank, lambda p: p[step].pop(place))
        return with_steps(without, rng.randrange(schedule.ranks), lambda p: p.append([instruction]))
    if kind == "split":
        return with_steps(
            schedule, rank, lambda p: p.__setitem__(slice(step, step + 1), [p[step][:place], p[step][place:]])
        )
    if kind == "join":
        return with_steps(
            schedule,
            rank,
            lambda p: p.__setitem__(slice(step, step + 2), [list(chain.from_iterable(p[step : step + 2]))]),
        )

    def move(p):
        target = rng.randrange(len(p))
        p[target].insert(rng.randrange(len(p[target]) + 1), p[step].pop(place))

    return with_steps(schedule, rank, move)


def small_schedules():
    """A few of every kind: bare, lowered, with skip connections, graphs."""
    skips = remove_slots(one_f_one_b(ranks=3, microbatches=2))
    yield place_communication(replace(skips, skips=((0, 2),)))
    for seed in range(12):
        graph = random_graph(random.Random(seed), most=4)
        yield graph
        yield place_communication(graph)
    for name, build in BUILDERS.items():
        for p, m in ((2, 2), (2, 4), (3, 3)):
            try:
                schedule = remove_communication(remove_slots(build(p, m)))
            except ValueError:
                continue
            programs = tuple(
                tuple(tuple(i for i in step if i.op in (*COMPUTING, "OVERLAP_F_B")) for step in q)
                for q in schedule.programs
            )
            bare = replace(schedule, programs=programs, name=name)
            yield bare
            yield place_communication(bare)


SMALL = tuple(small_schedules())


@pytest.mark.parametrize(
    "schedule", SMALL, ids=lambda s: f"{s.name}-{s.ranks}-{'lowered' if s.has_messages else 'bare'}"
)
def test_both_accept_what_builders_make(schedule):
    assert Model(schedule).accepts()
    assert is_accepted(schedule)


@given(st.sampled_from(SMALL), st.integers(0, 2**32), st.integers(1, 4))
def test_the_same_verdict_on_changed_schedules(schedule, seed, changes):
    rng = random.Random(seed)
    for _ in range(changes):
        if flat(schedule):
            schedule = mutate(schedule, rng)
            assert is_accepted(schedule) == Model(schedule).accepts(), schedule


def test_changes_are_of_both_kinds():
    rng = random.Random(1)
    verdicts = Counter()
    for _ in range(400):
        schedule = mutate(rng.choice(SMALL), rng)
        verdict = is_accepted(schedule)
        assert verdict == Model(schedule).accepts(), schedule
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 20, verdicts


def complete_schedules():
    """With everything that a schedule can hold: loads, offloads, messages, reductions, slots."""
    for schedule in SMALL:
        if not schedule.ops & set(SENDING) and not schedule.forward_only:
            whole = append_tail(place_communication(insert_loads(insert_offloads(schedule))), tied=True)
            yield whole if schedule.slices else allocate_slots(whole)


COMPLETE = tuple(complete_schedules())


@given(st.sampled_from(COMPLETE), st.integers(0, 2**32))
def test_changes_of_complete_schedules_end_in_a_verdict(schedule, seed):
    rng = random.Random(seed)
    assert is_accepted(schedule)
    for _ in range(3):
        schedule = mutate(schedule, rng)
        is_accepted(schedule)


PASSES = (
    split_backward,
    merge_backward,
    insert_loads,
    insert_offloads,
    place_communication,
    allocate_slots,
    remove_communication,
)


@given(st.sampled_from(SMALL + COMPLETE), st.integers(0, 2**32), st.integers(0, 2), st.sampled_from(PASSES))
def test_passes_keep_what_is_right_and_raise_nothing_else(schedule, seed, changes, change):
    rng = random.Random(seed)
    for _ in range(changes):
        schedule = mutate(schedule, rng)
    try:
        changed = schedule if schedule.slices and change is allocate_slots else change(schedule)
        simulate(schedule)
    except ScheduleError:
        assert not is_accepted(schedule)
        return
    try:
        linearize(schedule)
    except ScheduleError:
        # Steps that compute several things may wait for each other where single instructions do not.
        several = any(
            sum(i.op in (*COMPUTING, "OVERLAP_F_B") for i in step) > 1
            for p in schedule.programs
            for step in p
        )
        assert several or not is_accepted(schedule)
    assert is_accepted(changed) or not is_accepted(schedule)


@given(st.sampled_from(COMPLETE), st.data())
def test_no_instruction_of_a_complete_schedule_can_be_left_out(schedule, data):
    rank, step, place = data.draw(st.sampled_from(flat(schedule)))
    op = schedule.programs[rank][step][place].op
    assume(
        op is not Op.REDUCE_TIED or schedule.replicas
    )  # in which stages something is tied, no schedule says
    without = with_steps(schedule, rank, lambda p: p[step].pop(place))
    assert not is_accepted(without), op
