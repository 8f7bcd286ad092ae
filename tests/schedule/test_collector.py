"""The garbage collector is as it was before."""

from __future__ import annotations

import gc

import pytest

from ppfunc.schedule import check, one_f_one_b, place_communication
from ppfunc.schedule.collector import collector_paused


def test_the_collector_works_again_after_the_last_has_left():
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        check(place_communication(one_f_one_b(2, 2)))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_sets_it_going_again():
    with pytest.raises(ValueError, match="queue"):
        check(one_f_one_b(2, 2), queue="edge")
    assert gc.isenabled()
