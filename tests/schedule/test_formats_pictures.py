"""Grid, instruction streams, SVG and Chrome trace."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

import ppfunc.schedule as schedules
from ppfunc.schedule import (
    BUILDERS,
    FormatError,
    ScheduleError,
    allocate_slots,
    append_tail,
    deepspeed_inference,
    dualpipe,
    dualpipev,
    from_csv,
    from_trace,
    gpipe,
    insert_unshards,
    interleaved_1f1b,
    one_f_one_b,
    place_communication,
    reduce_early,
    remove_tail,
    to_grid,
    to_steps,
    to_svg,
    to_trace,
    zbv,
)
from ppfunc.schedule.costs import Costs
from ppfunc.schedule.formats.trace import _microseconds
from ppfunc.schedule.instruction import COMPUTE, Op, parts_of
from ppfunc.schedule.proof.certificate import check
from ppfunc.schedule.proof.timeline import simulate, timeline_of
from tests.graphs import DEALT
from tests.pictures import require_legible

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [build(4, 8) for build in BUILDERS.values()]


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The bars of instructions: those with a title, and a half of a pair each."""
    return [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_svg_has_one_bar_per_compute_instruction_to_scale(schedule):
    timeline = simulate(schedule, Costs(forward=1.5, backward=2.25, communication=0.125))
    root = ElementTree.fromstring(to_svg(timeline))
    found = bars(root)
    times = {}
    for rank in range(schedule.ranks):
        for i, start, end in zip(
            schedule.instructions(rank), timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            if i.op in COMPUTE:
                times[f"{i} on rank {rank}"] = (len(parts_of(i)), start, end)
    assert Counter(bar.find(f"{SVG}title").text.split(",")[0] for bar in found) == {
        k: v[0] for k, v in times.items()
    }
    track = next(r for r in root.iter(f"{SVG}rect") if r.get("class") == "track")
    scale = float(track.get("width")) / float(timeline.makespan)
    for bar in found:
        _, start, end = times[bar.find(f"{SVG}title").text.split(",")[0]]
        assert float(bar.get("x")) == pytest.approx(float(track.get("x")) + start * scale, abs=0.01)
        assert float(bar.get("width")) == pytest.approx((end - start) * scale - 0.8, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 16, 64])
@pytest.mark.parametrize("build", [one_f_one_b, interleaved_1f1b, dualpipe])
def test_svg_is_readable_from_2_to_64_ranks(build, ranks):
    schedule = build(ranks, 2 * ranks)
    root = ElementTree.fromstring(to_svg(schedule, width=400 * ranks + 1000))
    numbers = Counter(t.text for t in root.iter(f"{SVG}text") if t.get("class").split()[0] == "n")
    assert numbers == Counter(
        str(p.microbatch) for r in range(ranks) for i in schedule.instructions(r) for p in parts_of(i)
    )
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text"):
            right = float(element.get("x", 0)) + float(element.get("width", 0))
            lower = float(element.get("y", 0)) + float(element.get("height", 0))
            assert 0 <= right <= width and 0 <= lower <= height
    rows = sorted({float(r.get("y")) for r in root.iter(f"{SVG}rect") if r.get("class") == "track"})
    assert len(rows) == ranks
    assert min(b - a for a, b in pairwise(rows)) >= 20


def test_svg_says_what_it_shows():
    text = to_svg(dualpipe(8, 20))
    for words in (
        "8 ranks",
        "16 stages",
        "20 microbatches",
        "makespan 66",
        "bubble 9.1%",
        "peak activations 9",
    ):
        assert words in text
    for label in (
        "forward",
        "backward",
        "input gradient",
        "weight gradient",
        "overlapped pair",
        "the 2 stages of a rank",
    ):
        assert f">{label}" in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "weight gradient" not in to_svg(gpipe(2, 2))


def test_svg_without_a_timeline_says_what_its_units_are():
    assert "<title>gpipe: simulated, F, I and W take 1 each</title>" in to_svg(gpipe(2, 2))


def test_svg_shows_measured_times_and_any_name():
    schedule = replace(gpipe(1, 2), name='<b> & "c"\x00\x1b')
    times = [[0.0, 0.011, 0.03, 0.05]], [[0.01, 0.02, 0.05, 0.08]]
    for measured, costs, told, tick in (
        (True, None, "measured, seconds", "20 ms"),
        (False, Costs(seconds=True), "predicted, seconds", "20 ms"),
        (False, None, "simulated, units of its costs", "0.02"),
    ):
        timeline = timeline_of(schedule, *times, costs, measured=measured)
        root = ElementTree.fromstring(to_svg(timeline))
        assert len(bars(root)) == 4
        texts = [t.text for t in root.iter(f"{SVG}text")]
        assert root.find(f"{SVG}title").text == texts[0] == f'<b> & "c"??: {told}'
        assert tick in texts and "time" in texts
        assert from_trace(to_trace(timeline)) == timeline
        first = next(e for e in json.loads(to_trace(timeline))["traceEvents"] if e["ph"] == "X")
        assert first["dur"] == 0.01 * (1e6 if "seconds" in told else 1000)


def test_svg_says_in_words_what_it_shows():
    root = ElementTree.fromstring(to_svg(one_f_one_b(2, 4)))
    assert root.get("role") == "img"
    assert root.find(f"{SVG}desc").text == (
        "A row per rank, time to the right. 2 ranks, 2 stages, 4 microbatches, makespan 15, bubble 20.0%,"
        " bubble of the span 20.0%, peak activations 2. rank 0: idle 20%, peak activations 2; rank 1: idle"
        " 20%, peak activations 1."
    )


@pytest.mark.parametrize("schedule", [one_f_one_b(16, 64), dualpipev(8, 20), interleaved_1f1b(4, 8, 4)])
def test_svg_fits_a_screen_and_numbers_all_bars_of_a_colour_or_none(schedule):
    costs = Costs(forward=[1.5 - s / schedule.stages for s in range(schedule.stages)])
    for timeline in (simulate(schedule), simulate(schedule, costs)):
        root = ElementTree.fromstring(to_svg(timeline))
        assert float(root.get("width")) <= 1600
        numbers = Counter(t.text for t in root.iter(f"{SVG}text") if t.get("class").split()[0] == "n")
        kinds: dict[tuple[Op, int], Counter] = {}
        for rank in range(schedule.ranks):
            order = list(schedule.stages_of(rank))
            for i in schedule.instructions(rank):
                numbers_of = (str(part.microbatch) for part in parts_of(i))
                kinds.setdefault((i.op, order.index(i.stage)), Counter()).update(numbers_of)
        for n in range(2 ** len(kinds)):
            some = [kind for k, kind in enumerate(kinds.values()) if n >> k & 1]
            if sum(some, Counter()) == numbers:
                break
        else:
            raise AssertionError(f"numbers on some bars of a colour: {numbers}")
        assert not (schedule.ranks == 16 and numbers), "bars of 6 pixels have no room for two digits"


def test_a_legend_takes_as_many_lines_as_it_needs():
    schedule = reduce_early(append_tail(insert_unshards(dualpipev(4, 12))))
    timeline = simulate(schedule, Costs(unshard=0.5, reduce_grad=2, step=1))
    for width, lines in ((960, 2), (1600, 1)):
        root = ElementTree.fromstring(to_svg(timeline, width=width))
        entries = {}
        for group in root.iter(f"{SVG}g"):
            x, y = map(float, re.findall(r"[\d.]+", group.get("transform")))
            label = group.find(f"{SVG}text")
            assert x + float(label.get("x")) + 6 * len(label.text) <= width
            entries.setdefault(y, []).append(x)
        assert len(entries) == lines
        assert min(float(t.get("y")) for t in root.iter(f"{SVG}rect") if t.get("class") == "track") > max(
            entries
        )


def test_svg_of_a_timeline_without_time():
    ElementTree.fromstring(to_svg(simulate(gpipe(2, 2), Costs(forward=0, backward=0))))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_trace_has_a_slice_per_instruction_and_an_arrow_per_message(schedule):
    timeline = simulate(schedule, Costs(forward=1.5, communication=0.125))
    events = json.loads(to_trace(timeline))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(
        i.op in COMPUTE for r in range(schedule.ranks) for i in schedule.instructions(r)
    )
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    lowered = schedule if schedule.has_messages else place_communication(schedule)
    sends = [
        str(i)
        for r in range(schedule.ranks)
        for i in lowered.instructions(r)
        if i.op.value.startswith("SEND")
    ]
    assert starts.keys() == ends.keys() and len(starts) == len(sends)
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e" and (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] < end["ts"] and start["tid"] != end["tid"]
        for event in (start, end):
            around = [
                s for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
            ]
            assert len(around) == 1
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        f"rank {r}" for r in range(schedule.ranks)
    }


def nested(slices: list[dict]) -> bool:
    """Whether the slices of a track lie beside or inside each other, in the whole nanoseconds that viewers
    keep.
    """
    ends: list[int] = []
    for start, length in sorted((int(s["ts"] * 1000), int(s["dur"] * 1000)) for s in slices):
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and start + length > ends[-1]:
            return False
        ends.append(start + length)
    return True


METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
FIELDS = {
    "M": {"name", "ph", "pid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"},
    "s": {"name", "ph", "pid", "tid", "ts", "cat", "id"},
    "f": {"name", "ph", "pid", "tid", "ts", "cat", "id", "bp"},
}


@given(
    st.sampled_from(SCHEDULES),
    st.floats(1e-6, 3.7),
    st.floats(0, 0.31),
    st.booleans(),
    st.booleans(),
)
def test_a_trace_keeps_the_rules_of_the_format(schedule, forward, communication, measured, tail):
    """Those of the Trace Event Format, and what its viewers take for granted: phases, fields, ids, nesting,
    metadata.
    """
    costs = Costs(forward=forward, backward=2.3 * forward, communication=communication)
    tail = tail and not schedule.forward_only
    if tail:
        schedule = reduce_early(append_tail(insert_unshards(remove_tail(schedule))))
        costs = replace(costs, unshard=0.37 * forward, reduce_grad=1.9 * forward, step=0.21 * forward)
    timeline = simulate(schedule, costs)
    trace = json.loads(to_trace(replace(timeline, measured=measured)))
    assert trace["displayTimeUnit"] in ("ms", "ns") and isinstance(trace["traceEvents"], list)
    events = trace["traceEvents"]
    for event in events:
        assert FIELDS[event["ph"]] <= event.keys() <= FIELDS[event["ph"]] | {"tid"}, event
        assert isinstance(event["name"], str) and type(event["pid"]) is int
        if event["ph"] == "M":
            assert {key: type(value) for key, value in event["args"].items()} == METADATA[event["name"]]
        else:
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0 and type(event["tid"]) is int
    tracks = {(e["name"], e.get("tid")) for e in events if e["ph"] == "M"}
    count = schedule.ranks * (2 if tail else 1)
    wanted = {(name, track) for name in METADATA for track in range(count) if name != "process_name"}
    assert tracks == wanted | {("process_name", None)} and len(tracks) == sum(e["ph"] == "M" for e in events)
    assert {("thread_name", e["tid"]) for e in events if e["ph"] != "M"} <= tracks
    slices = [e for e in events if e["ph"] == "X"]
    for track in {e["tid"] for e in slices}:
        assert nested([e for e in slices if e["tid"] == track])
    for name, op in (("UNSHARD", Op.UNSHARD), ("REDUCE_GRAD", Op.REDUCE_GRAD), ("STEP", Op.STEP)):
        assert sum(e["cat"] == name for e in slices) == (schedule.counts.get(op, 0) if tail else 0)
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    keys = [[(e["cat"], e["name"], e["id"]) for e in side] for side in (starts, ends)]
    assert sorted(keys[0]) == sorted(keys[1]) and len({key[2] for key in keys[0]}) == len(starts)
    ended = {e["id"]: e for e in ends}
    assert all(e["ts"] <= ended[e["id"]]["ts"] and ended[e["id"]]["bp"] == "e" for e in starts)


@given(st.integers(0, 10**15))
def test_microseconds_are_cut_off_to_the_nanosecond_that_is_meant(nanoseconds):
    assert int(_microseconds(nanoseconds) * 1000) == nanoseconds


@given(st.sampled_from(SCHEDULES), st.floats(0.1, 3.7), st.booleans())
def test_a_trace_is_read_again(schedule, forward, lowered):
    if lowered and not schedule.has_messages:
        schedule = place_communication(schedule)
    timeline = simulate(schedule, Costs(forward=forward, communication=0.1, activation=3.5))
    assert from_trace(to_trace(timeline)) == timeline
    timeline = simulate(schedule)
    assert from_trace(to_trace(schedule)) == timeline


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("ppfunc"), r"^\$\.ppfunc: missing: only a trace that ppfunc has written"),
        (lambda d: d.update(ppfunc=[]), r"^\$\.ppfunc: missing"),
        (lambda d: d["ppfunc"].pop("schedule"), r"^\$\.ppfunc\.schedule: missing: expected the keys"),
        (lambda d: d["ppfunc"]["schedule"].update(version=2), r"^\$\.ppfunc\.schedule\.version: expected 1"),
        (
            lambda d: d["ppfunc"]["schedule"]["programs"][0][0].append("x"),
            r"^\$\.ppfunc\.schedule\.programs\[0\]\[0\]\[1\]: 'x' is not",
        ),
        (lambda d: d["ppfunc"].pop("starts"), r"^\$\.ppfunc\.starts: missing"),
        (lambda d: d["ppfunc"]["starts"].pop(), r"^\$\.ppfunc: starts: got 1 rows of times, expected 2"),
        (lambda d: d["ppfunc"]["starts"][0].pop(), r"^\$\.ppfunc: rank 0 has 4 instructions, got 3 starts"),
        (
            lambda d: d["ppfunc"]["ends"][1].__setitem__(2, -1),
            r"^\$\.ppfunc\.ends\[1\]\[2\]: expected a time",
        ),
        (
            lambda d: d["ppfunc"]["ends"][1].__setitem__(2, float("nan")),
            r"^\$\.ppfunc\.ends\[1\]\[2\]: expected a time",
        ),
        (
            lambda d: d["ppfunc"]["ends"][1].__setitem__(2, True),
            r"^\$\.ppfunc\.ends\[1\]\[2\]: expected a time",
        ),
        (
            lambda d: d["ppfunc"]["ends"][1].__setitem__(2, 10**400),
            r"^\$\.ppfunc\.ends\[1\]\[2\]: expected a time",
        ),
        (lambda d: d["ppfunc"].update(measured=1), r"^\$\.ppfunc\.measured: expected true or false, got 1"),
        (
            lambda d: d["ppfunc"]["peak_activations"].pop(),
            r"^\$\.ppfunc\.peak_activations: expected 2 numbers",
        ),
    ],
)
def test_a_trace_that_is_not_ours_is_refused_with_its_place(change, message):
    document = json.loads(to_trace(gpipe(2, 2)))
    change(document)
    with pytest.raises(FormatError, match=message):
        from_trace(json.dumps(document))


def test_the_schedule_of_a_trace_has_to_be_one():
    document = json.loads(to_trace(gpipe(2, 2)))
    document["ppfunc"]["schedule"]["placement"] = [0, 7]
    with pytest.raises(ScheduleError):
        from_trace(document)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_grid_has_one_row_per_rank_and_every_instruction(schedule):
    for form in (schedule, schedule if schedule.has_messages else place_communication(schedule)):
        lines = to_grid(form).splitlines()
        assert len(lines) == form.ranks
        for rank, line in enumerate(lines):
            assert line.startswith(f"rank {rank} ")
            words = [
                word for word in re.split(r"[ +;()-]+", line)[2:] if word not in ("", ".", "OVERLAP_F_B")
            ]
            assert words == [str(part) for i in form.instructions(rank) for part in parts_of(i)]


def test_grid_columns_are_moments_in_time():
    assert (
        to_grid(one_f_one_b(3, 3)) == "rank 0  0F0 0F1 0F2  .   .  0B0  .  0B1  .  0B2\n"
        "rank 1   .  1F0 1F1  .  1B0 1F2 1B1  .  1B2  .\n"
        "rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2  .   .\n"
    )


def test_grid_fills_what_takes_more_than_one_unit():
    assert (
        to_grid(dualpipe(2, 4)).splitlines()[0] == "rank 0  0F0 3F2 0F1 3B2---- 3F3;0B0---- 3B3---- 0I1 0W1"
    )


@given(st.sampled_from(SCHEDULES), st.floats(0.2, 3), st.floats(0.2, 3), st.floats(0.2, 3), st.floats(0, 1))
def test_a_grid_of_any_costs_keeps_order_and_scale(schedule, forward, inputs, weights, communication):
    timeline = simulate(schedule, Costs(forward, inputs, weights, communication=communication))
    columns = {}
    for rank, line in enumerate(to_grid(timeline).splitlines()):
        words = [word for word in re.split(r"[ ;-]+", line)[2:] if word not in ("", ".")]
        compute = [i for i in schedule.instructions(rank) if i.op in COMPUTE]
        assert words == [str(part) for i in compute for part in parts_of(i)]
        times = (
            t
            for i, t in zip(schedule.instructions(rank), timeline.starts[rank], strict=True)
            if i.op in COMPUTE
        )
        names = (re.escape(";".join(map(str, parts_of(i)))) for i in compute)
        at = [next(re.finditer(rf" {name}(?!\d)", line)).start() + 1 for name in names]
        columns |= {
            (rank, n): (float(t), column) for n, (t, column) in enumerate(zip(times, at, strict=True))
        }
    moments = sorted(columns.values())
    assert all(a <= b for (_, a), (_, b) in pairwise(moments)), "later begins further left"
    (zero, left), (last, right) = moments[0], moments[-1]
    assert all(
        abs((column - left) - (t - zero) * (right - left) / (last - zero)) <= 1 for t, column in moments
    )


def test_grid_of_times_that_are_no_multiples():
    timeline = simulate(one_f_one_b(2, 2), Costs(forward=[1, 1.5], backward=2))
    assert to_grid(timeline).splitlines() == [
        "rank 0  0F0- 0F1-  .    .     0B0------     .   0B1------",
        "rank 1   .   1F0--- 1B0------ 1F1---- 1B1------  .    .",
    ]


def test_a_grid_refuses_what_it_has_no_place_for():
    schedule = gpipe(2, 2)
    with pytest.raises(ValueError, match="0B0 takes no time, so it has no place in a grid"):
        to_grid(simulate(schedule, Costs(backward=0)))
    with pytest.raises(ValueError, match="0F0 takes no time, so it has no place in a grid"):
        to_grid(simulate(schedule, Costs(0, 0, 0)), width=100)
    with pytest.raises(ValueError, match="the shortest instruction is too short"):
        to_grid(simulate(schedule, Costs(backward=1e-9)))
    with pytest.raises(ValueError, match="width is 27, expected at least 28 for a grid of 2 ranks"):
        to_grid(schedule, width=27)
    with pytest.raises(
        ValueError, match="the grid has .* columns, expected at most width = 30; an SVG has any width"
    ):
        to_grid(place_communication(schedule), width=30)


def test_a_grid_that_would_be_wider_is_drawn_smaller():
    schedule = gpipe(2, 2)
    assert max(map(len, to_grid(schedule, width=31).splitlines())) == 31
    assert to_grid(simulate(schedule, Costs(backward=[4, 1])), width=36).splitlines() == [
        "rank 0  FFFF.....0B0----- 0B1------",
        "rank 1  ..FFFFFBBBB.................",
    ]
    paired = dualpipev(2, 4)
    assert (
        to_grid(simulate(paired), width=50).splitlines()[1]
        == "rank 1  .FFFFFFFFBBBOOOOOOOOOOOOOOOBBBBBB..IIIWWWW"
    )


def test_svg_takes_a_width():
    root = ElementTree.fromstring(to_svg(dualpipe(4, 8), width=1234))
    assert root.get("width") == "1234"
    right = max(float(r.get("x", 0)) + float(r.get("width")) for r in root.iter(f"{SVG}rect"))
    assert right <= 1234
    for width in (959, 1e6, float("nan")):
        with pytest.raises(ValueError, match="expected a number of pixels from 960 to 100000"):
            to_svg(gpipe(2, 2), width=width)


def test_a_schedule_that_cannot_run_has_a_grid_too():
    schedule = from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert to_grid(schedule) == "rank 0  0F0  0B0  0F1  0B1\nrank 1  1F1  1F0  1B0  1B1\n"


def test_a_schedule_is_printed_as_one_line_of_tokens_per_rank():
    assert str(place_communication(gpipe(2, 1))) == "0F0 0SEND_F0+0RECV_B0+0B0\n1RECV_F0+1F0 1B0 1SEND_B0"
    assert str(from_csv("0F0,,0B0\n")) == "0F0 . 0B0"


def test_values_have_short_forms():
    schedule = one_f_one_b(8, 32)
    assert (
        repr(schedule) == "Schedule('1f1b', ranks=8, stages=8, microbatches=32, instructions=512,"
        f" digest='{schedule.digest[:12]}')"
    )
    assert repr(check(schedule)) == repr(schedule).replace("Schedule", "Certificate")
    assert (
        repr(simulate(schedule))
        == "Timeline(ranks=8, makespan=117, span=117, bubble=0.1795, peak_activations=8)"
    )
    assert repr(Costs()) == "Costs()"
    assert (
        repr(Costs(2, backward=[1] * 8, bandwidth=3))
        == "Costs(forward=2, backward=[1, 1, 1, 1, 1, 1, ...], bandwidth=3)"
    )


def test_the_formats_are_found_where_the_schedules_are():
    assert set(schedules.__all__) >= {"to_csv", "to_svg", "read_schedule"}
    assert all(getattr(schedules, name) is not None for name in schedules.__all__)
    with pytest.raises(AttributeError, match="'ppfunc.schedule' has no attribute 'to_png'"):
        _ = schedules.to_png


def test_steps_are_deepspeeds_words():
    assert (
        to_steps(deepspeed_inference(2, 2)) == "rank 0\n"
        "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)\n"
        "LoadMicroBatch(buffer_id=1) SendActivation(buffer_id=0) ForwardPass(buffer_id=1)\n"
        "SendActivation(buffer_id=1)\n"
        "rank 1\n"
        "-\n"
        "LoadMicroBatch(buffer_id=0) RecvActivation(buffer_id=0) ForwardPass(buffer_id=0)\n"
        "LoadMicroBatch(buffer_id=1) RecvActivation(buffer_id=1) ForwardPass(buffer_id=1)\n"
    )


def test_steps_name_the_stage_where_a_rank_holds_several():
    assert (
        to_steps(append_tail(interleaved_1f1b(1, 1), tied=False))
        == "rank 0\nForwardPass(stage_id=0, micro_batch_id=0)\nForwardPass(stage_id=1,"
        " micro_batch_id=0)\nBackwardPass(stage_id=1, micro_batch_id=0)\nBackwardPass(stage_id=0,"
        " micro_batch_id=0)\nReduceGrads(stage_id=0) ReduceGrads(stage_id=1) OptimizerStep(stage_id=0)"
        " OptimizerStep(stage_id=1)\n"
    )
    lowered = to_steps(allocate_slots(place_communication(zbv(2, 2))))
    assert "SendActivation(stage_id=0, buffer_id=0)" in lowered and not re.search(
        r"[a-z]\((?!stage_id)", lowered
    )


def test_steps_keep_what_deepspeed_has_no_word_for():
    assert to_steps(BUILDERS["zb_h1"](1, 1)) == "rank 0\nForwardPass(micro_batch_id=0)\n0I0\n0W0\n"


def test_rules_of_a_picture_reach_no_other():
    (style,) = re.findall(r"<style>(.*)</style>", to_svg(gpipe(2, 2)), re.DOTALL)
    selectors = [s.strip() for s in re.findall(r"([^{}]+)\{", style) if "@media" not in s]
    assert len(selectors) > 20 and all(s.split("{")[-1].startswith(".ppfunc") for s in selectors)


@pytest.mark.parametrize(
    ("size", "told"),
    [(1, ""), (2500, " (10 k)"), (123456789, " (494 M)"), (1e15, " (4e+03 T)"), (0.125, " (0.5)")],
)
def test_memory_in_bytes_has_room(size, told):
    root = ElementTree.fromstring(to_svg(simulate(gpipe(2, 4), Costs(activation=size))))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "4" in texts and any(t.endswith(f"peak activations 4{told}") for t in texts)


def test_svg_shows_collectives_and_optimizer_steps_that_take_time():
    schedule = reduce_early(append_tail(insert_unshards(interleaved_1f1b(2, 4), most=1)))
    drawn = Counter(bar.get("class") for bar in bars(ElementTree.fromstring(to_svg(simulate(schedule)))))
    assert not drawn.keys() & {"UNSHARD", "REDUCE_GRAD", "STEP"}
    root = ElementTree.fromstring(to_svg(simulate(schedule, Costs(unshard=0.5, reduce_grad=2, step=1))))
    drawn = Counter(bar.get("class") for bar in bars(root))
    for op in ("UNSHARD", "REDUCE_GRAD", "STEP"):
        assert drawn[op] == schedule.counts[Op(op)]
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"gather of parameters", "sum over data ranks", "optimizer step"} <= set(texts)
    heights = {bar.get("class"): float(bar.get("height")) for bar in bars(root)}
    assert heights["UNSHARD"] == heights["REDUCE_GRAD"] < heights["STEP"] == heights["F"]


def test_edges_of_microbatches_are_drawn_on_request():
    plain, drawn = to_svg(DEALT), to_svg(DEALT, edges=[1])
    assert "edge" not in plain
    # Microbatch 1 goes through a copy of the encoder and two stages, and back.
    assert drawn.count('<line class="edge"') == 4 + 1 and ">values of microbatch 1<" in drawn  # in the legend
    assert drawn.rindex("<line") < drawn.index('<text class="n')  # no line over a number
    with pytest.raises(ValueError, match="edges"):
        to_svg(DEALT, edges=[4])


LONG = replace(one_f_one_b(2, 4), name="a name that is longer than any page is wide, and says it " * 9)
SLICED = Costs(activation=1234567.8, slices=[Costs(forward=3), Costs(forward=2), Costs(forward=1)])


@pytest.mark.parametrize(
    "shown",
    [
        *SCHEDULES,
        LONG,
        gpipe(1, 1),
        one_f_one_b(64, 256),
        simulate(LONG, Costs(seconds=True)),
        simulate(schedules.seq1f1b(4, 128, 3), SLICED),
        simulate(one_f_one_b(2, 4), Costs(forward=[1, 1000], backward=[1e-3, 1], seconds=True)),
        simulate(schedules.with_parts(one_f_one_b(4, 8)), Costs(seconds=True, forward=1e-6)),
        simulate(reduce_early(append_tail(insert_unshards(dualpipev(4, 12)))), Costs(unshard=1, step=1)),
        append_tail(gpipe(2, 2)),
    ],
    ids=lambda shown: repr(shown)[:50],
)
def test_pictures_are_legible(shown):
    for width in (None, 960, 3000):
        require_legible(to_svg(shown, width=width))
    require_legible(to_svg(shown, edges=[0]))


@pytest.mark.parametrize("seconds", [3e-7, 4.2e-5, 0.999, 0.0271949, 61.0, 123456.0])
def test_every_time_of_a_picture_has_its_unit(seconds):
    timeline = simulate(gpipe(2, 2), Costs(*[seconds] * 3, seconds=True))
    root = require_legible(to_svg(timeline))
    told = [t.text for t in root.iter(f"{SVG}text")] + [bar.find(f"{SVG}title").text for bar in bars(root)]
    ticks = {t.get("y"): t.text for t in root.iter(f"{SVG}text") if t.get("class") == "soft mid"}
    unit = next(iter(ticks.values())).split()[-1]
    assert unit in ("s", "ms", "µs") and all(t.endswith(unit) for t in ticks.values())
    assert f"makespan {timeline.time(timeline.makespan)}" in told[1] and told[1].count(f" {unit} ") == 1
    assert all(bar.find(f"{SVG}title").text.count(f" {unit}") == 2 for bar in bars(root))
    assert all(f" {unit}" in line for line in str(timeline).splitlines()[:1] + str(timeline).splitlines()[2:])


def test_peaks_are_in_shares_of_a_rank():
    for build in (one_f_one_b, interleaved_1f1b, zbv, dualpipe):
        timeline = simulate(build(4, 8))
        (row,) = schedules.compare_schedules(4, 8, [build(4, 8)]).rows
        assert max(timeline.peaks) == row.peak_activations
    told = to_svg(interleaved_1f1b(4, 8))
    assert "peak activations 5.5<" in told and ">5.5</text>" in told
    assert "5.5" in str(simulate(interleaved_1f1b(4, 8))) and "their size" not in str(timeline)
    assert "their size" in str(simulate(gpipe(2, 2), Costs(activation=8)))


def test_a_stage_of_one_place_has_one_colour_on_every_rank():
    """The parts of a head are the second stage of each rank, whatever else the last one holds."""
    root = ElementTree.fromstring(to_svg(schedules.with_parts(one_f_one_b(4, 8))))
    strengths = {
        bar.get("fill-opacity")
        for bar in bars(root)
        if bar.find(f"{SVG}title").text[:2] in ("4F", "5F", "7F")
    }
    assert len(strengths) == 1
