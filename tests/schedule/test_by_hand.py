"""Schedules written by hand with the public letters are those of the builders, and wrong ones are refused."""

from __future__ import annotations

import pytest

import ppfunc as pp
from ppfunc.schedule import (
    B,
    Costs,
    F,
    I,
    ScheduleError,
    W,
    compare_schedules,
    gpipe,
    overlap,
    place_communication,
    simulate,
    single_chain,
    to_grid,
    to_svg,
    to_trace,
)


def eager_last(ranks, microbatches):
    """1F1B, written again."""
    programs = []
    for r in range(ranks):
        early = min(ranks - 1 - r, microbatches)
        forwards, backwards = ([op(r, m) for m in range(microbatches)] for op in (F, B))
        steady = [i for pair in zip(forwards[early:], backwards, strict=False) for i in pair]
        programs.append([*forwards[:early], *steady, *backwards[microbatches - early :]])
    return single_chain("mine", range(ranks), microbatches, programs)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (3, 5), (4, 2)])
def test_same_as_the_builder(ranks, microbatches):
    mine = eager_last(ranks, microbatches)
    assert mine.programs == pp.one_f_one_b(ranks, microbatches).programs
    assert pp.check(place_communication(mine)).instructions[0] == ("F", ranks * microbatches)


def test_backwards_in_parts_and_overlapped_pairs():
    programs = [
        [F(0, 0), F(0, 1), I(0, 0), W(0, 0), I(0, 1), W(0, 1)],
        [F(1, 0), overlap(F(1, 1), B(1, 0)), B(1, 1)],
    ]
    pp.check(single_chain("parts", [0, 1], 2, programs))
    assert [str(i) for i in (F(0, 1), B(0, 1), I(0, 1), W(0, 1), programs[1][1])] == [
        "0F1",
        "0B1",
        "0I1",
        "0W1",
        "(1F1;1B0)OVERLAP_F_B",
    ]


def test_a_wrong_one_is_refused_with_the_place():
    with pytest.raises(pp.ScheduleError, match="0B0"):
        pp.check(single_chain("wrong", [0], 1, [[B(0, 0), F(0, 0)]]))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: single_chain("mine", [0], 1, 3), "programs: got 3, expected a list per rank"),
        (
            lambda: single_chain("mine", [0], 1, [["0F0"]]),
            r"programs\[0\]: got '0F0', expected a list of instructions",
        ),
        (
            lambda: single_chain("mine", [0], 1, [F(0, 0)]),
            r"programs\[0\]: got .*, expected a list of instructions",
        ),
        (
            lambda: single_chain("mine", 0, 1, [[F(0, 0)]]),
            "placement: got 0, expected the rank of every stage",
        ),
        (
            lambda: single_chain("mine", [0], "1", [[F(0, 0)]]),
            "microbatches: got '1' .* expected their number",
        ),
        (
            lambda: simulate(gpipe(2, 2), {"forward": 2}),
            r"costs: got {'forward': 2} of type dict, expected Costs\(",
        ),
        (
            lambda: compare_schedules(4, 8, "1f1b"),
            r"schedules: got '1f1b', expected a list of names and schedules, such as \['1f1b'\]",
        ),
        (lambda: compare_schedules(4, 8, [3]), "schedules: got 3 of type int, expected a list of names"),
    ],
)
def test_what_is_given_in_another_form_is_named(call, told):
    with pytest.raises(TypeError, match=told):
        call()


@pytest.mark.parametrize("draw", [to_grid, to_svg, to_trace])
@pytest.mark.parametrize("other", ["gpipe", 3, Costs()])
def test_only_schedules_and_timelines_are_drawn(draw, other):
    with pytest.raises(ScheduleError, match=f"of type {type(other).__name__}, expected a Schedule"):
        draw(other)
