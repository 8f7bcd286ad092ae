"""Residuals that move to the host and back, or are computed again: proofs, times and memory on paper."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Op,
    ScheduleError,
    check,
    compare_schedules,
    compute_only,
    from_csv,
    gpipe,
    insert_offloads,
    insert_recomputes,
    one_f_one_b,
    place_communication,
    simulate,
    split_backward,
    to_csv,
    to_svg,
    to_trace,
)
from tests.schedule.test_timeline import any_schedule


def times(text, costs):
    """Start and end of each instruction of a schedule of one rank."""
    timeline = simulate(from_csv(text), costs)
    return {str(i): (start, end) for row in timeline.rows() for i, start, end in row}, timeline


def test_a_copy_begins_with_the_end_of_its_forward_and_offload_waits_for_it():
    costs = Costs(2, 2, 2, offload=3, fetch=5)
    found, timeline = times("0F0,0F1,0OFFLOAD0,0OFFLOAD1,0FETCH0,0FETCH1,0B0,0B1\n", costs)
    assert found["0OFFLOAD0"] == (2, 5)
    assert found["0OFFLOAD1"] == (5, 8)  # one after the other
    assert found["0FETCH0"] == (8, 13)  # not before the rank is there
    assert found["0FETCH1"] == (13, 18)
    assert found["0B0"] == (13, 17) and found["0B1"] == (18, 22)
    assert timeline.makespan == 22 and timeline.idle == (10,) and timeline.peak_activations == (2,)


def test_copies_of_both_directions_run_at_the_same_time_beside_compute():
    found, timeline = times(
        "0F0,0F1,0OFFLOAD0,0F2,0FETCH0,0OFFLOAD2,0B1,0B0,0FETCH2,0B2\n", Costs(4, 2, 2, offload=4)
    )
    assert found["0FETCH0"] == (12, 16) == found["0OFFLOAD2"]  # by default as fast
    assert found["0B1"] == (16, 20) and found["0B0"] == (20, 24)  # what comes after an OFFLOAD waits for it
    assert timeline.makespan == 32


def test_a_forward_that_runs_again_takes_its_time_and_holds_a_checkpoint_in_between():
    text = "0F0,0F1,0RECOMPUTE0,0I0,0W0,0I1,0W1\n"
    found, timeline = times(text, Costs(4, 2, 1, checkpoint=Fraction(1, 4)))
    assert found["0RECOMPUTE0"] == (8, 12)  # by default as long as F
    assert timeline.makespan == 18 and timeline.peak_activations == (2,)
    assert times(text, Costs(4, 2, 1, recompute=3))[1].makespan == 17
    all_again = insert_recomputes(gpipe(1, 4))
    assert simulate(all_again, Costs(checkpoint=Fraction(1, 4))).peak_activations == (Fraction(7, 4),)
    assert check(all_again).peak_activations == (1,)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "0F0,0B0,0RECOMPUTE0",
            "are dropped since step 0, place 0, and . needs them here or back: expected RECOMPUTE",
        ),
        ("0F0,0RECOMPUTE0,0RECOMPUTE0,0B0", "it is there twice"),
        ("0RECOMPUTE0,0F0,0B0", "it needs the output of stage 0"),
        (
            "0F0,0I0,0RECOMPUTE0,0W0",
            "are dropped since step 0, place 0, and . needs them here or back: expected RECOMPUTE",
        ),
        ("0F0,0OFFLOAD0,0RECOMPUTE0,0B0", "are dropped since .* OFFLOAD needs them here"),
        ("0F0,0OFFLOAD0,0FETCH0,0OFFLOAD0,0FETCH0,0B0", "are back since .* OFFLOAD needs them here"),
        ("0F0,0RECOMPUTE0,0OFFLOAD0,0FETCH0,0B0", "are back since .* OFFLOAD needs them here"),
        ("0F0,0RECOMPUTE0", "are read by no backward"),
        ("0F0,0OFFLOAD0", "are read by no backward"),
    ],
)
def test_what_comes_too_early_twice_or_mixed_is_refused(program, words):
    with pytest.raises(ScheduleError, match=words):
        check(from_csv(program + "\n"))


@given(any_schedule, st.integers(0, 2), st.booleans(), st.data())
def test_moves_and_recomputes_never_change_the_order_and_their_times_are_the_rule(
    schedule, lookahead, again, data
):
    """Against the rule, instruction by instruction, with exact times."""
    if schedule.forward_only:
        return
    numbers = st.fractions(0, 4, max_denominator=3)
    moved = insert_offloads(schedule, stages=range(0, schedule.stages, 2), lookahead=lookahead)
    moved = insert_recomputes(moved) if again else moved
    check(moved)
    check(place_communication(moved))
    assert compute_only(moved) == compute_only(schedule)
    costs = Costs(
        *(data.draw(numbers) for _ in range(3)), offload=data.draw(numbers), fetch=data.draw(numbers)
    )
    timeline = simulate(moved, costs)
    for row in timeline.rows():
        free, out, back, ready = 0, 0, 0, {}
        kept = list(row)
        away = {i[1:3] for i, _, _ in kept if i.op is Op.OFFLOAD}
        for i, start, end in kept:
            if i.op is Op.OFFLOAD:
                assert end == ready[i[1:3]]
                free = max(free, end)
            elif i.op is Op.FETCH:
                assert start == max(free, back) and end == start + costs.fetch
                back = ready[i[1:3]] = end
            else:
                parts = i.parts or (i,)
                late = [ready[p[1:3]] for p in parts if p.op in (Op.B, Op.I) and p[1:3] in away]
                assert start >= max([free, *late])
                assert end - start == costs.forward or i.op is not Op.RECOMPUTE
                free = end
                for p in parts:
                    if p.op is Op.F and p[1:3] in away:
                        out = ready[p[1:3]] = max(out, end) + costs.offload
    assert timeline.makespan >= simulate(schedule, costs).makespan


def test_pictures_and_files_have_them():
    schedule = insert_recomputes(insert_offloads(split_backward(gpipe(2, 4)), stages=[0]))
    assert {Op.OFFLOAD, Op.FETCH, Op.RECOMPUTE} <= schedule.ops
    assert [*from_csv(to_csv(schedule)).instructions(1)] == [*schedule.instructions(1)]
    timeline = simulate(schedule, Costs(offload=1))
    drawn, trace = to_svg(timeline), to_trace(timeline)
    for words in ("copy to the host", "copy from the host", "forward again"):
        assert words in drawn
    for words in ("copies to the host", "copies from the host", "1RECOMPUTE3"):
        assert words in trace


def test_times_of_a_timeline_are_those_of_its_costs():
    costs = Costs((2, 3), (1, 2), (1, 1), recompute=(4, 5), offload=(3, 1), fetch=(2, 2))
    schedule = insert_recomputes(insert_offloads(split_backward(gpipe(2, 6)), stages=[0]))
    again = simulate(schedule, costs).costs()
    assert (again.offload, again.fetch, again.recompute) == ((3, 0), (2, 0), (0, 5))


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_what_moves_is_as_long_with_a_link_without_limit(name):
    schedule = BUILDERS[name](2, 4)
    assert simulate(insert_offloads(schedule)).makespan == simulate(schedule).makespan


def test_a_cap_that_is_kept_by_moving_does_not_raise_the_bound():
    moved = insert_offloads(gpipe(2, 6), lookahead=0)
    (row,) = compare_schedules(2, 6, [moved], cap=1).rows
    assert row.memory == 1 and row.bound <= simulate(gpipe(2, 6)).makespan == row.timeline.makespan


def test_costs_of_a_share_are_shared_but_for_checkpoints():
    share = Costs(offload=4, recompute=2, checkpoint=3).per_rank(BUILDERS["zbv"](2, 4))
    assert (share.offload, share.recompute, share.checkpoint) == (2, 1, 3)
    assert one_f_one_b(2, 4).ops == {Op.F, Op.B}
