"""The garbage collector is as it was before."""

from __future__ import annotations

import gc

import pytest

from ppfunc.schedule import check, one_f_one_b, place_communication
from ppfunc.schedule.collector import collector_paused


def test_the_collector_works_again_after_the_outer_pause():
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        check(place_communication(one_f_one_b(2, 2)))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_sets_it_going_again():
    with pytest.raises(ValueError, match="max_activations"):
        check(one_f_one_b(2, 2), max_activations=-1)
    assert gc.isenabled()
