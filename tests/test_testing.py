"""The strategies for users: what is valid is proved, what is broken is refused."""

from __future__ import annotations

import sys

import pytest
from hypothesis import find, given

from ppfunc.schedule import BUILDERS
from ppfunc.schedule.certificate import check
from ppfunc.schedule.errors import ScheduleError
from ppfunc.testing import schedules
from tests.schedule.mutated import mutated_schedules


@given(schedules())
def test_valid_schedules_are_proved(schedule):
    assert check(schedule).digest == schedule.digest


@given(mutated_schedules())
def test_broken_schedules_are_refused(schedule):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert caught.value.rank is not None


@given(schedules(names=["interleaved_1f1b"], max_ranks=2, max_microbatches=3, max_chunks=2, lowered=False))
def test_bounds_are_kept(schedule):
    assert schedule.ranks <= 2 and schedule.microbatches <= 3 and schedule.stages <= 4
    assert schedule.ranks == 1 or not schedule.has_messages


@pytest.mark.parametrize("what", ["missing", "twice", "became", "is on rank", "is before", "waits for"])
def test_every_way_to_break_one_is_found(what):
    assert what in find(mutated_schedules(schedules(["1f1b"])), lambda schedule: what in schedule.name).name


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
