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


@pytest.mark.parametrize(("count", "old"), [(1000, False), (200_000, True)])
def test_what_is_alive_in_the_end_is_old_where_many_were_made(count, old):
    gc.unfreeze()  # what was there before the tests
    gc.collect()
    with collector_paused():
        kept = [[] for _ in range(count)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    gc.freeze()
    assert young.isdisjoint(map(id, kept)) is old


def test_cycles_that_end_between_pauses_are_collected():
    class Node: ...

    def make():
        node = Node()
        node.itself = node

    gc.collect()
    for _ in range(2000):
        for _ in range(100):
            make()
        check(one_f_one_b(1, 1))
    assert sum(type(thing) is Node for thing in gc.get_objects()) < 50_000


def test_what_the_caller_has_frozen_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        _ = [[] for _ in range(200_000)]
    assert gc.get_freeze_count() >= frozen - 100 > 0  # counted references may have ended some


def test_an_error_sets_it_going_again():
    with pytest.raises(ValueError, match="max_activations"):
        check(one_f_one_b(2, 2), max_activations=-1)
    assert gc.isenabled()
