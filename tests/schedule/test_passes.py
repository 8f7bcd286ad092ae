"""The passes that are not the placing of communication."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Instruction,
    Op,
    ScheduleError,
    allocate_slots,
    append_tail,
    check,
    data_parallel,
    deepspeed_train,
    dualpipe,
    gpipe,
    inference,
    insert_loads,
    insert_offloads,
    insert_unshards,
    looped_bfs,
    merge_backward,
    one_f_one_b,
    place_communication,
    reduce_early,
    remove_communication,
    remove_slots,
    single_chain,
    split_backward,
    zb_h1,
    zbv,
)
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE
from ppfunc.schedule.passes.running import linearize
from tests.graphs import random_graph


def bare_schedules():
    for name, build in BUILDERS.items():
        for p, m in ((1, 3), (2, 4), (3, 5), (4, 9), (6, 12)):
            try:
                schedule = build(p, m)
            except ValueError:
                continue
            programs = tuple(
                tuple(tuple(i for i in step if i.op in COMPUTE) for step in q) for q in schedule.programs
            )
            yield remove_slots(replace(schedule, name=name, programs=programs))


BARE = tuple(bare_schedules())
any_schedule = pytest.mark.parametrize("schedule", BARE, ids=lambda s: f"{s.name}-{s.ranks}-{s.microbatches}")


def row(schedule, rank):
    return " ".join(map(str, schedule.instructions(rank)))


@any_schedule
def test_a_line_of_steps_computes_before_it_consumes(schedule):
    flow = Dataflow(schedule)
    for s in (schedule, place_communication(schedule)):
        order = linearize(s)
        assert sorted(order) == [(r, k) for r in range(s.ranks) for k in range(len(s.programs[r]))]
        there = set()
        for rank, step in order:
            for instruction in (i for i in s.programs[rank][step] if i.op in COMPUTE):
                assert {v for v, _ in flow.consumed(instruction)} <= there
                there |= set(flow.products(instruction))


def test_a_line_of_steps_advances_evenly():
    order = linearize(inference(ranks=3, microbatches=6))
    computed, used = order.index((0, 5)), order.index((1, 0))
    assert used < computed


def test_no_line_exists_for_a_circle():
    schedule = gpipe(2, 2)
    wrong = replace(schedule, programs=(schedule.programs[0][::-1], schedule.programs[1]))
    with pytest.raises(ScheduleError, match="no order of the steps exists: rank 0 waits at step 0") as caught:
        linearize(wrong)
    assert caught.value.rank == 0


@any_schedule
def test_splitting_and_merging(schedule):
    parted = split_backward(schedule, overlapped=True)
    assert Op.B not in parted.ops
    check(parted)
    whole = merge_backward(parted)
    for rank in range(schedule.ranks):
        assert row(whole, rank) == row(merge_backward(schedule), rank)
    assert merge_backward(whole) == whole


def test_overlapped_pairs_stay_whole_unless_asked():
    schedule = dualpipe(4, 8)
    assert Op.OVERLAP_F_B in split_backward(schedule).ops
    backwards = {i.parts[1].op for p in split_backward(schedule).programs for s in p for i in s if i.parts}
    assert backwards == {Op.B}
    backwards = {
        i.parts[1].op
        for p in split_backward(schedule, overlapped=True).programs
        for s in p
        for i in s
        if i.parts
    }
    assert backwards == {Op.I}


def test_only_neighbours_are_merged():
    rows = "0F0 0I0 0W0 0F1 0I1 0F2 0W1 0I2 0W2".split()
    schedule = single_chain("x", (0,), 3, [[Instruction(Op(t[1]), 0, int(t[2])) for t in rows]])
    assert row(merge_backward(schedule), 0) == "0F0 0B0 0F1 0I1 0F2 0W1 0B2"
    assert row(merge_backward(place_communication(zb_h1(2, 3))), 1) == row(
        place_communication(zb_h1(2, 3)), 1
    )


@any_schedule
def test_removing_what_was_placed(schedule):
    without_idle = replace(schedule, programs=tuple(tuple(filter(None, p)) for p in schedule.programs))
    assert remove_communication(place_communication(schedule)) == without_idle


@any_schedule
def test_a_lowered_schedule_is_proved_as_a_list_of_single_instructions(schedule):
    # As it is after a round trip through a table, where a cell holds one instruction.
    lowered = place_communication(schedule)
    check(replace(lowered, programs=tuple(tuple((i,) for step in p for i in step) for p in lowered.programs)))


@any_schedule
def test_slots_are_proved_and_few(schedule):
    if schedule.slices:
        with pytest.raises(ValueError, match="has slices, whose carries outlive the slot"):
            allocate_slots(schedule)
        return
    assert check(allocate_slots(schedule)).slots == tuple(_most_at_once(schedule))
    lowered = place_communication(schedule)
    slotted = allocate_slots(lowered)
    certificate = check(slotted)
    assert remove_slots(slotted) == lowered
    assert allocate_slots(slotted) == slotted
    # What is sent holds its slot until it is gone, which is not long.
    assert all(a <= b <= a + 1 for a, b in zip(_most_at_once(lowered), certificate.slots, strict=True))


def _most_at_once(schedule):
    """Per stage, the largest number of microbatches between their first and last instruction."""
    for stage, rank in enumerate(schedule.placement):
        uses = [
            p.microbatch for i in schedule.instructions(rank) for p in i.parts or (i,) if p.stage == stage
        ]
        first = {m: uses.index(m) for m in uses}
        last = {m: len(uses) - 1 - uses[::-1].index(m) for m in uses}
        yield max(sum(first[m] <= k <= last[m] for m in first) for k in range(len(uses)))


def test_as_many_slots_as_deepspeed_has_or_fewer():
    for p, m in ((2, 3), (4, 8), (6, 9)):
        for order in ("source", "head"):
            schedule = deepspeed_train(p, m, order=order)
            found = check(allocate_slots(schedule)).slots
            assert all(a <= b for a, b in zip(found, check(schedule).slots, strict=True))


def test_an_offloaded_microbatch_frees_its_slot():
    schedule = place_communication(insert_offloads(gpipe(ranks=1, microbatches=6)))
    assert check(allocate_slots(schedule)).slots == (3,)


@any_schedule
def test_offloads_are_proved(schedule):
    for lookahead in (0, 1, 3):
        moved = insert_offloads(schedule, lookahead=lookahead)
        certificate = check(moved)
        check(place_communication(moved))
        assert insert_offloads(schedule, stages=()) == schedule
        before = check(schedule).peak_activations
        assert all(a <= b for a, b in zip(certificate.peak_activations, before, strict=True))


def test_the_picture_of_offloads():
    moved = insert_offloads(gpipe(ranks=1, microbatches=4), lookahead=1)
    out, back = "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0FETCH0 0F3 0OFFLOAD2 0FETCH1", "0FETCH2 0B1 0FETCH3 0B2 0B3"
    assert row(moved, 0) == f"{out} 0B0 0OFFLOAD3 {back}"


def test_offloads_of_some_stages():
    moved = insert_offloads(zbv(ranks=2, microbatches=4), stages=[0])
    assert {i.stage for p in moved.programs for s in p for i in s if i.op is Op.OFFLOAD} == {0}
    for options, words in (({"stages": [9]}, "from 0 to 3"), ({"lookahead": -1}, "at least 0")):
        with pytest.raises(ValueError, match=words):
            insert_offloads(zbv(2, 4), **options)


@any_schedule
def test_loads_are_proved(schedule):
    loaded = insert_loads(schedule)
    check(loaded)
    check(place_communication(loaded))
    assert insert_loads(loaded) == loaded
    counts = Counter(i.stage for p in loaded.programs for s in p for i in s if i.op is Op.LOAD)
    ends = {c.stages[0] for c in schedule.flows} | {
        c.stages[-1] for c in schedule.flows if not schedule.forward_only
    }
    assert set(counts) == ends


@any_schedule
def test_the_tail_is_proved(schedule):
    if schedule.forward_only:
        return
    for tied in (None, True):
        ended = append_tail(schedule, tied=tied)
        check(ended)
        check(place_communication(ended))
        check(append_tail(place_communication(schedule), tied=tied))


def test_the_tail_sums_copies_in_one_order():
    ended = append_tail(dualpipe(2, 4))
    assert " ".join(map(str, ended.programs[0][-1][:2])) == "0REDUCE_TIED 3REDUCE_TIED"
    assert " ".join(map(str, ended.programs[1][-1][:2])) == "2REDUCE_TIED 1REDUCE_TIED"
    assert Op.REDUCE_TIED not in append_tail(one_f_one_b(2, 4)).ops
    assert [str(i) for i in append_tail(gpipe(1, 1), reduce_grad=False).programs[0][-1]] == ["0STEP"]
    assert append_tail(gpipe(1, 1), tied=False, reduce_grad=False, step=False) == gpipe(1, 1)


def test_the_picture_of_early_reductions():
    schedule = reduce_early(append_tail(looped_bfs(ranks=1, microbatches=1, chunks=2), tied=[0]))
    assert str(schedule) == "0F0 1F0 1B0+1REDUCE_GRAD 0B0 0REDUCE_TIED+0REDUCE_GRAD+0STEP+1STEP"
    assert str(reduce_early(gpipe(1, 1))) == "0F0 0B0+0REDUCE_GRAD"
    assert str(append_tail(reduce_early(gpipe(1, 1)))) == "0F0 0B0+0REDUCE_GRAD 0STEP"
    assert str(append_tail(reduce_early(gpipe(1, 1)), tied=True)) == "0F0 0B0 0REDUCE_TIED+0REDUCE_GRAD+0STEP"
    moved = append_tail(reduce_early(gpipe(1, 1)), tied=True, reduce_grad=False, step=False)
    assert str(moved) == "0F0 0B0 0REDUCE_TIED+0REDUCE_GRAD"  # which stays behind what it sums
    assert reduce_early(inference(2, 2)) == inference(2, 2)


@given(st.integers(0, 2**32))
def test_copies_of_a_stage_end_on_any_ranks(seed):
    """Several copies on a rank wait for each other's sum."""
    schedule = place_communication(random_graph(random.Random(seed)))
    for complete in (insert_unshards, lambda schedule: schedule):
        tail = append_tail(complete(schedule))
        check(tail)
        check(reduce_early(tail))


def test_the_picture_of_gathers():
    schedule = looped_bfs(ranks=1, microbatches=1, chunks=3)
    assert (
        str(insert_unshards(schedule, most=1))
        == "0UNSHARD+0F0+0RESHARD+1UNSHARD 1F0+1RESHARD+2UNSHARD 2F0 2B0+2RESHARD+1UNSHARD"
        " 1B0+1RESHARD+0UNSHARD 0B0+0RESHARD"
    )
    assert (
        str(insert_unshards(schedule))
        == "0UNSHARD+1UNSHARD+0F0+0RESHARD+2UNSHARD 1F0 2F0 2B0+2RESHARD+0UNSHARD 1B0+1RESHARD 0B0+0RESHARD"
    )
    assert (
        str(insert_unshards(schedule, most=3))
        == "0UNSHARD+1UNSHARD+0F0+2UNSHARD 1F0 2F0 2B0+2RESHARD 1B0+1RESHARD 0B0+0RESHARD"
    )
    with pytest.raises(ValueError, match="most = 0, expected an integer of at least 1"):
        insert_unshards(schedule, most=0)
    with pytest.raises(ValueError, match="most is 1, but an overlapped pair uses stages 3 and 0 at once"):
        insert_unshards(dualpipe(2, 4), most=1)


@any_schedule
def test_passes_leave_their_argument_alone(schedule):
    before = (hash(schedule), schedule.digest)
    changes = (
        split_backward,
        merge_backward,
        place_communication,
        allocate_slots,
        insert_loads,
        insert_offloads,
    )
    for change in (*changes, append_tail, reduce_early, insert_unshards):
        if not schedule.slices or change is not allocate_slots:
            change(schedule)
    assert (hash(schedule), schedule.digest) == before


@given(
    st.sampled_from(BARE),
    st.permutations([split_backward, insert_loads, insert_offloads, insert_unshards, place_communication]),
)
def test_passes_compose_in_any_order(schedule, changes):
    for change in changes:
        schedule = change(schedule)
        check(schedule)
    check(allocate_slots(schedule))


def test_several_microbatches_of_data_parallel_share_one_slot():
    assert check(allocate_slots(remove_slots(data_parallel(2, 3)))).slots == (1, 1)


def test_messages_keep_their_slots_apart_from_compute():
    slotted = allocate_slots(place_communication(one_f_one_b(2, 3)))
    assert all(
        i.slot is not None
        for r in range(2)
        for i in slotted.instructions(r)
        if i.op in COMMUNICATION | COMPUTE
    )
