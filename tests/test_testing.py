"""The strategies for users: what is valid is proved, what is broken is refused."""

from __future__ import annotations

import sys

import pytest
from hypothesis import find, given, strategies as st

from ppfunc.schedule import BUILDERS, compute_only, place_communication, simulate
from ppfunc.schedule.proof.certificate import check
from ppfunc.testing import costs, placements, programs, schedules


@given(schedules())
def test_valid_schedules_are_proved(schedule):
    assert check(schedule).digest == schedule.digest


@given(schedules(names=["interleaved_1f1b"], max_ranks=2, max_microbatches=3, max_chunks=2, lowered=False))
def test_bounds_are_kept(schedule):
    assert schedule.ranks <= 2 and schedule.microbatches <= 3 and schedule.stages <= 4
    assert schedule.ranks == 1 or not schedule.has_messages


@given(st.data())
def test_orders_and_costs_that_are_drawn_can_be_placed_and_timed(data):
    schedule = data.draw(programs(max_ranks=3, max_microbatches=4))
    placed = place_communication(schedule)
    assert check(placed).digest == placed.digest
    assert compute_only(placed).counts == schedule.counts
    assert simulate(schedule, data.draw(costs(schedule.stages))).makespan >= 0


@given(placements(max_ranks=3, max_chunks=2))
def test_every_rank_of_a_placement_holds_a_stage(placement):
    assert set(placement) == set(range(max(placement) + 1)) and len(placement) <= 6


@pytest.mark.parametrize("backwards", [{"B"}, {"I", "W"}, {"B", "I", "W"}])
def test_orders_are_drawn_with_backwards_of_every_kind(backwards):
    assert find(
        programs(max_ranks=2), lambda schedule: {op.value for op in schedule.ops} == {"F", *backwards}
    )


def test_every_name_occurs():
    for name in BUILDERS:
        assert find(schedules([name], max_ranks=2, max_microbatches=4), lambda schedule: True) is not None


def test_impossible_wishes_are_refused():
    with pytest.raises(ValueError, match="unknown schedule 'other': expected names out of gpipe"):
        schedules(["other"])
    with pytest.raises(ValueError, match="no schedule of dualpipe has at most 2 ranks and 3 microbatches"):
        schedules(["dualpipe"], max_ranks=2, max_microbatches=3)


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match="pip install hypothesis"):
        schedules()
