"""Timelines beside each other, and the costs that they tell."""

import pytest

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    compare,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    place_communication,
    simulate,
    zb_h1,
)

COSTS = {"forward": [1, 2, 1, 3], "backward_input": [2, 1, 1, 2], "backward_weight": [1, 1, 2, 1]}


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b, zb_h1])
def test_the_costs_of_a_timeline_give_that_timeline_again(builder):
    schedule = place_communication(builder(4, 6))
    costs = Costs(**COSTS, backward=[4, 2, 3, 3], communication=1)
    timeline = simulate(schedule, costs)
    again = simulate(schedule, timeline.costs())
    assert (again.starts, again.ends) == (timeline.starts, timeline.ends)


def test_one_stage_that_is_slow_is_named_with_those_who_wait_for_it():
    schedule = place_communication(one_f_one_b(4, 16))
    slow = simulate(schedule, Costs(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]))
    found = compare(slow, simulate(schedule))
    assert found.stages == (1, 1, 2, 1)
    assert found.summary.startswith("rank 0 waits ") and found.summary.endswith(
        "for rank 1 (0RECV_B); stage 2 is 2 times as long as the others"
    )
    assert found.waits[3]["3RECV_F"] == pytest.approx(slow.idle[3] / slow.makespan, abs=0.2)
    assert all(sum(mine for mine, _ in row.values()) == pytest.approx(1) for row in found.shares)
    assert all(sum(paper for _, paper in row.values()) == pytest.approx(1) for row in found.shares)
    table = str(found).splitlines()
    assert len(table) == 2 + 4 + 1 and table[0].split() == ["rank", "F", "B", "idle"]


def test_a_rank_all_of_whose_stages_are_slow_is_named():
    schedule = place_communication(interleaved_1f1b(2, 4, 2))
    slow = simulate(schedule, Costs(forward=[1, 2, 1, 3], backward=[2, 4, 2, 6]))
    assert compare(slow, simulate(schedule)).summary.endswith(
        "; rank 1 is at least 2 times as slow as the others"
    )
    assert (
        " waits " in compare(slow, simulate(schedule)).summary
        and " for rank 1 (" in compare(slow, simulate(schedule)).summary
    )


def test_units_do_not_matter():
    schedule = one_f_one_b(2, 4)
    seconds = simulate(schedule, Costs(forward=0.001, backward=0.002))
    found = compare(seconds, simulate(schedule, Costs(forward=1, backward=2)))
    for row in found.shares:
        for mine, paper in row.values():
            assert mine == pytest.approx(paper)
    assert "no rank waits for a message and no stage stands out" in found.summary


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_can_be_compared(name):
    ranks, m = 4, 8
    schedule = (
        BUILDERS[name](ranks, m, 2)
        if name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb")
        else BUILDERS[name](ranks, m)
    )
    timeline = simulate(schedule)
    found = compare(timeline, timeline)
    assert str(found).endswith(found.summary) and repr(found).startswith("Comparison(")
    assert timeline.costs().fitting(schedule.stages)


def test_timelines_of_two_schedules_are_refused():
    one, other = simulate(one_f_one_b(2, 4)), simulate(gpipe(2, 4))
    with pytest.raises(ValueError, match="expected those of one schedule"):
        compare(one, other)
    with pytest.raises(ValueError, match="expected those of one schedule"):
        compare(simulate(interleaved_1f1b(2, 4, 2)), one)
