"""Schedules side by side: one model in one unit, whatever the number of stages and replicas."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    ScheduleError,
    compare_schedules,
    dualpipev,
    from_csv,
    gpipe,
    lower_bound,
    one_f_one_b,
    place_communication,
    seq1f1b,
    simulate,
    to_csv,
    to_scatter,
    to_svg,
    zb_h1,
    zbv,
)
from ppfunc.schedule.instruction import SENDS
from tests.pictures import require_legible, texts

SVG = "{http://www.w3.org/2000/svg}"


def test_all_builders_with_a_backward_are_compared_or_named_with_the_reason():
    overview = compare_schedules(4, 6)
    names = [row.name for row in overview.rows]
    assert sorted([*names, *(name for name, _ in overview.refused)]) == sorted(
        name for name, build in BUILDERS.items() if not (made := build(2, 4)).forward_only and not made.slices
    )
    assert dict(overview.refused) == {
        "data_parallel": "microbatches = 6, expected a multiple of the 4 ranks",
        "dualpipe": (
            "microbatches = 6, expected an even number of at least 2 * ranks = 8: split the batch finer"
        ),
        "dualpipev": "microbatches = 6, expected at least 2 * ranks = 8: split the batch finer",
    }
    times = [row.timeline.makespan for row in overview.rows]
    assert times == sorted(times)
    assert repr(overview) == f"Overview(ranks=4, microbatches=6, schedules=14, shortest={names[0]!r})"
    assert str(overview).splitlines()[-1].startswith("left out: dualpipev: microbatches = 6")


@given(st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 4).map(lambda n: 4 * n), st.integers(1, 3))
def test_every_schedule_does_the_work_of_the_whole_model(ranks, microbatches, chunks):
    costs = Costs(forward=3, backward_input=2, backward_weight=1, activation=5)
    for row in compare_schedules(ranks, microbatches, costs=costs, chunks=chunks).rows:
        busy = sum(row.timeline.makespan - idle for idle in row.timeline.idle)
        assert busy == pytest.approx(ranks * microbatches * 6), row.name
        assert row.timeline.schedule.microbatches == microbatches * max(row.timeline.schedule.slices, 1)
        assert row.peak_activations >= 1 - 1e-9, row.name
        assert row.gap is None or row.gap >= -1e-9, row.name


def test_copies_are_accounted_for():
    rows = {row.name: row for row in compare_schedules(4, 8).rows}
    assert {name: row.parameters for name, row in rows.items() if row.parameters != 1} == {
        "dualpipe": 2,
        "chimera": 2,
        "data_parallel": 4,
    }
    assert (rows["1f1b"].timeline.makespan, rows["1f1b"].peak_activations, rows["1f1b"].messages) == (
        33,
        4,
        48,
    )
    assert (rows["zbv"].timeline.makespan, rows["zbv"].peak_activations, rows["zbv"].messages) == (
        25.5,
        4,
        96,
    )
    assert (
        rows["dualpipe"].timeline.makespan,
        rows["dualpipe"].peak_activations,
        rows["dualpipe"].messages,
    ) == (26, 5, 48)
    assert (
        rows["data_parallel"].timeline.makespan,
        rows["data_parallel"].peak_activations,
        rows["data_parallel"].messages,
    ) == (24, 4, 0)
    memory = {
        row.name: row.memory
        for row in compare_schedules(4, 8, ["1f1b", "zbv", "dualpipe"], Costs(parameters=10)).rows
    }
    assert memory == {"1f1b": 14, "zbv": 14, "dualpipe": 25}
    assert rows["gpipe"].gap == pytest.approx(33 / 27 - 1) and rows["gpipe"].bound == 27


@pytest.mark.parametrize("name", BUILDERS)
def test_messages_are_those_that_are_placed(name):
    (row,) = compare_schedules(4, 8, [name]).rows
    schedule = row.timeline.schedule
    lowered = schedule if schedule.has_messages else place_communication(schedule)
    assert row.messages == sum(i.op in SENDS for rank in range(4) for i in lowered.instructions(rank))


def test_costs_per_stage_are_those_of_the_model():
    """Schedules with another number of stages are left out, or refused where they are asked for."""
    times = {"forward": [3, 7], "backward": [6, 14], "communication": [2, 9]}
    given = Costs(**times, activation=[7, 3], weight_share=0.5, parameters=[30, 70])
    overview = compare_schedules(2, 4, costs=given)
    rows = {row.name: row for row in overview.rows}
    assert {"1f1b", "dualpipe", "chimera"} <= rows.keys()
    assert dict(overview.refused)["zbv"] == "forward has 2 numbers, expected 4, one per stage or layer"
    assert rows["1f1b"].timeline == simulate(one_f_one_b(2, 4), given)
    twice = {name: value * 2 for name, value in vars(given).items() if isinstance(value, list)}
    dualpipe = rows["dualpipe"].timeline
    assert dualpipe.ends == simulate(dualpipe.schedule, replace(given, **twice)).ends
    assert rows["1f1b"].parameters == pytest.approx(70 / 50) and rows["dualpipe"].parameters == 2
    assert rows["1f1b"].peak_activations == pytest.approx(2 * 7 / 5)


def test_schedules_themselves_are_taken_and_proved():
    overview = compare_schedules(2, 8, [zbv(2, 8), gpipe(2, 8), "1f1b"])
    assert [row.name for row in overview.rows] == ["zbv", "gpipe", "1f1b"]
    with pytest.raises(ScheduleError, match="1I2: its weight gradient W is missing"):  # which runs to its end
        compare_schedules(2, 4, [from_csv(to_csv(zb_h1(2, 4)).replace("1W2", ""))])


def test_schedules_of_one_name_are_told_apart():
    same = one_f_one_b(2, 4)
    names = [row.name for row in compare_schedules(2, 4, [same, gpipe(2, 4), same, "1f1b"]).rows]
    assert sorted(names) == ["1f1b", "1f1b #2", "1f1b #3", "gpipe"]


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_the_number_of_slices_is_taken(slices):
    (row,) = compare_schedules(2, 4, ["seq1f1b"], slices=slices, chunks=1).rows
    assert row.timeline.schedule == seq1f1b(2, 4, slices)


def test_bounds_hold_under_the_cap_and_are_left_out_where_they_do_not():
    costs = Costs(weight_share=1)
    overview = compare_schedules(4, 8, costs=costs, cap=2)
    rows = {row.name: row for row in overview.rows}
    tight, loose = (lower_bound(costs, range(4), 8, cap, "makespan").value for cap in (2, None))
    assert rows["zero_bubble"].bound == tight > loose == rows["gpipe"].bound
    assert overview.exceeds(rows["gpipe"]) and not overview.exceeds(rows["zero_bubble"])
    over = [row.name for row in overview.rows if max(row.timeline.peak_activations) > 2]
    assert [line.split()[0] for line in str(overview).splitlines() if line.endswith("over the cap")] == over
    assert rows["dualpipe"].bound is None and rows["chimera"].gap is None
    (row,) = compare_schedules(4, 8, [dualpipev(4, 8)], Costs(overlapped=1.5)).rows
    assert row.bound is None


@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 8),
)
def test_no_whole_backward_beats_the_bound(name, inputs, weights, whole):
    (row,) = compare_schedules(
        4, 8, [name], Costs(backward_input=inputs, backward_weight=weights, backward=whole)
    ).rows
    assert row.timeline.makespan >= row.bound - 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": ["nope"]}, "unknown schedule 'nope'"),
        ({"schedules": []}, "schedules: got an empty list"),
        (
            {"schedules": ["inference", "1f1b"]},
            "of 1f1b and inference one has a backward, the other has none",
        ),
        ({"schedules": [gpipe(3, 8)]}, "gpipe is for 3 ranks and 8 microbatches, expected 4 and 8"),
        ({"schedules": [gpipe(4, 7)]}, "gpipe is for 4 ranks and 7 microbatches, expected 4 and 8"),
        (
            {"costs": Costs(forward=[1] * 7), "schedules": ["1f1b"]},
            "1f1b: forward has 7 numbers, expected 4",
        ),
        ({"costs": Costs(forward=[1] * 7, backward=[1] * 9)}, "forward has 7 numbers, expected 4"),
        ({"costs": Costs(forward={9: 1})}, "forward names stage 9"),
        (
            {"schedules": ["data_parallel"], "microbatches": 7},
            "microbatches = 7, expected a multiple of the 4 ranks",
        ),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compare_schedules(**{"ranks": 4, "microbatches": 8} | options)


def test_the_picture_has_a_point_and_a_name_for_each():
    overview = compare_schedules(8, 32, cap=8)
    root = require_legible(to_scatter(overview))
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    for row in overview.rows:
        assert row.name in words
    assert "data_parallel (8 x parameters)" in words and "over the cap of 8" in words
    points = {(c.get("cx"), c.get("cy")): c.get("class") for c in root.findall(f"{SVG}circle")}
    assert len(points) == len({(row.timeline.bubble, row.peak_activations) for row in overview.rows})
    assert sorted(set(points.values())) == ["point", "point over", "twice", "twice over"]
    boxes = [(told, *box) for kind, told, *box in texts(root) if "label" in kind]
    labels = ", ".join(told.rstrip(",") for told, *_ in boxes)
    assert sorted(labels.split(", ")) == sorted(
        row.name + f" ({row.parameters:g} x parameters)" * (row.parameters > 1) for row in overview.rows
    )
    for _, left, top, right, bottom in boxes:
        assert not any(left < float(x) < right and top < float(y) < bottom for x, y in points), (
            "a label covers a point"
        )
        for lead in (e for e in root.iter(f"{SVG}line") if e.get("class") == "lead"):
            x1, x2, y1, y2 = (float(lead.get(name)) for name in ("x1", "x2", "y1", "y2"))
            dots = [(x1 + n / 50 * (x2 - x1), y1 + n / 50 * (y2 - y1)) for n in range(49)]
            assert not any(left < x < right and top < y < bottom for x, y in dots), "a line crosses a label"
    assert root.find(f"{SVG}title").text == "Schedules for 8 ranks, 32 microbatches: simulated"
    spoken = root.find(f"{SVG}desc").text
    assert "1f1b: bubble 17.9%, peak activations 8;" in spoken and spoken.count(";") + 1 == len(overview.rows)


def test_the_picture_takes_a_width_and_any_name():
    overview = compare_schedules(
        2, 2, [from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "<b>&\x1b[31m" + "x" * 500)]
    )
    root = ElementTree.fromstring(to_scatter(overview, width=1500))
    assert root.get("width") == "1500"
    assert "<b>&?[31m" in " ".join(text.text for text in root.iter(f"{SVG}text"))
    with pytest.raises(ValueError, match="width is 10, expected a number of pixels from 720"):
        to_scatter(overview, width=10)


@pytest.mark.parametrize(
    "ranks, microbatches, cap", [(1, 8, None), (2, 4, 1), (4, 8, None), (4, 8, 3), (8, 16, 100)]
)
def test_pictures_of_comparisons_are_legible(ranks, microbatches, cap):
    overview = compare_schedules(ranks, microbatches, cap=cap)
    for width in (None, 720, 2000):
        root = require_legible(to_scatter(overview, width=width))
        over = any(map(overview.exceeds, overview.rows))
        assert ("over the cap" in ElementTree.tostring(root, "unicode")) == over


def test_no_distance_is_less_than_nothing():
    for time in (0.1, 0.3, 0.7, 1e-3):
        overview = compare_schedules(4, 8, costs=Costs(time, time, time, seconds=True))
        assert "-0.0%" not in str(overview) and "-0.0%" not in to_scatter(overview)
        told = "".join(to_svg(row.timeline) + str(row.timeline) for row in overview.rows)
        assert "-0.0%" not in told and "-0%" not in told
        assert all(
            re.search(r"\d m?s ", line) for line in str(overview).splitlines()[1 : 1 + len(overview.rows)]
        )
