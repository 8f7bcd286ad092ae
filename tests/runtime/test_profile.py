"""Profiled steps: every instruction is a range of torch's profiler, with its operators under it."""

from __future__ import annotations

import json
import sys
from statistics import median

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ppfunc as pp
from ppfunc.schedule.instruction import COMMUNICATION, COMPUTE
from tests.models import dense, problem, same_bits, squared

SCHEDULES = {
    "1f1b": lambda: pp.one_f_one_b(2, 4),
    "zbv": lambda: pp.zbv(2, 4),
    "dualpipev": lambda: pp.dualpipev(2, 4),
    "dualpipe": lambda: pp.dualpipe(2, 4),
    "forwards": lambda: pp.schedule.inference(2, 4),
}


def profiled(call, path):
    """Return the result of a call, and the events of its trace in order, outer ones first."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        result = call()
    profiler.export_chrome_trace(str(path))
    document = json.loads(path.read_text())
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and e["cat"] != "Trace"]
    return result, sorted(events, key=lambda e: (e["ts"], -e["dur"])), document


def ranges(events):
    """Return the instructions of the ranges, without waits, and the operators under each."""
    found = []
    for event in events:
        words = event["name"].split(" ")
        if words[0] == "ppfunc" and words[1] != "wait":
            end = event["ts"] + event["dur"]
            under = {
                e["name"]
                for e in events
                if e["tid"] == event["tid"] and event["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= end
            }
            found.append((words[1], {name for name in under if name.startswith("aten::")}))
    return found


def made(kind, schedule, transport):
    """Make a warm step, its arguments, and the schedule that it runs, with its messages."""
    stages = max(schedule.model_stages) + 1
    params, inputs, targets = problem(stages, schedule.microbatches, b=2)
    here = {s for rank in transport.local_ranks(2) for s in schedule.model_stages_of(rank)}
    params = {s: params[s] for s in here}
    if kind == "train":
        trainer = pp.Trainer([dense] * stages, squared, schedule, pp.optim.adamw(0.1), transport)
        arguments = trainer.init(params), inputs, targets
        return trainer.step, arguments, trainer.record(*arguments)[1].schedule
    make = pp.evaluate if schedule.forward_only else pp.value_and_grad
    step = make([dense] * stages, squared, schedule, transport)
    step(params, inputs, targets)
    return step, (params, inputs, targets), step.schedule


def in_processes(rank, size, name, kind, folder):
    with pp.P2P(timeout=60) as transport:
        step, arguments, schedule = made(kind, SCHEDULES[name](), transport)
        plain = step(*arguments)
        result, events, _ = profiled(lambda: step(*arguments), folder / f"{rank}.json")
        assert same_bits(result, plain)
    found = ranges(events)
    whole = [
        row
        for row in found
        if "OVERLAP" in row[0] or all(row[0] not in pair for pair, _ in found if "OVERLAP" in pair)
    ]
    instructions = [*schedule.instructions(rank)]
    tail = [i for i in instructions if i.microbatch is None]
    before = [str(i) for i in instructions if i.microbatch is not None]
    if not any(i.op is pp.schedule.Op.REDUCE_TIED for i in tail):
        assert [text for text, _ in whole] == [*map(str, instructions)]
    else:  # sums over places end the program
        assert [text for text, _ in whole][: len(before)] == before
        assert sorted(text for text, _ in whole) == sorted(map(str, instructions))
    under = dict(found)
    for instruction in instructions:
        for part in instruction.parts or (instruction,):
            empty = part.op is pp.schedule.Op.I and part.stage in schedule.heads
            if (part.op in COMPUTE and not empty) or part.op is pp.schedule.Op.STEP:
                assert under[str(part)], f"no operators under {part}"
    waits = [e["name"] for e in events if e["name"].startswith("ppfunc wait ")]
    received = [i for i in instructions if i.op in COMMUNICATION and "RECV" in i.op]
    for i in received:
        other = schedule.placement[schedule.other_end(i)]
        assert waits.count(f"ppfunc wait {i} from rank {other}") == 1


CASES = [
    (name, "forward" if name == "forwards" else kind) for name in SCHEDULES for kind in ("grad", "train")
]


@pytest.mark.parametrize(("name", "kind"), dict.fromkeys(CASES))
def test_every_instruction_is_a_range_in_its_order_with_operators_under_it(two, tmp_path, name, kind):
    two(in_processes, name, kind, tmp_path)


def test_waits_lie_outside_of_work(two, tmp_path):
    two(waits_outside, tmp_path)


def waits_outside(rank, size, folder):
    with pp.P2P(timeout=60) as transport:
        step, arguments, _ = made("grad", pp.one_f_one_b(2, 4), transport)
        _, events, _ = profiled(lambda: step(*arguments), folder / f"{rank}.json")
    rows = [e for e in events if e["name"].startswith("ppfunc")]
    work = [e for e in rows if e["name"].split()[1][1:2] in ("F", "B")]
    waits = [e for e in rows if e["name"].split()[1] == "wait"]
    assert work and waits
    for wait in waits:
        assert all(wait["ts"] + wait["dur"] <= e["ts"] or e["ts"] + e["dur"] <= wait["ts"] for e in work)


@pytest.mark.parametrize("kind", ["grad", "train"])
def test_in_one_process_what_computes_is_a_range(tmp_path, kind):
    step, arguments, schedule = made(kind, pp.zbv(2, 4), pp.InProcess())
    _, events, _ = profiled(lambda: step(*arguments), tmp_path / "trace.json")
    found = [text for text, _ in ranges(events)]
    expected = [str(i) for rank in range(2) for i in schedule.instructions(rank) if i.op not in COMMUNICATION]
    assert sorted(found) == sorted(expected)


def test_an_evaluation_has_no_range_of_an_instruction_that_its_schedule_lacks(tmp_path):
    """Neither where it joins losses, as a step does, nor where it compares parameters that are tied."""
    schedule = pp.one_f_one_b(2, 2)
    params, inputs, targets = problem(2, 2, b=2)
    trainer = pp.Trainer([dense] * 2, squared, schedule, pp.optim.sgd(0.1), pp.InProcess())
    arguments = trainer.init(params), inputs, targets
    _, events, _ = profiled(lambda: trainer.evaluate(*arguments), tmp_path / "a.json")
    assert [text for text, _ in ranges(events)] == ["0F0", "0F1", "1F0", "1F1", "join"]
    tied = {0: params[0], 1: params[0]}
    step = pp.evaluate([dense] * 2, squared, schedule, tied={"w": [(0, "w"), (1, "w")]})
    _, events, _ = profiled(lambda: step(tied, inputs, targets), tmp_path / "b.json")
    assert [text for text, _ in ranges(events)] == ["0F0", "0F1", "1F0", "1F1", "compare"]


def test_a_profiled_step_can_be_recorded_and_transformed(tmp_path):
    step, arguments, _ = made("grad", pp.zbv(2, 4), pp.InProcess())
    plain = step(*arguments)
    (result, timeline), events, _ = profiled(lambda: step.record(*arguments), tmp_path / "a.json")
    assert same_bits(result, plain) and timeline.makespan > 0 and ranges(events)
    params, inputs, targets = arguments
    twice = torch.stack([inputs, 2 * inputs])
    mapped = torch.func.vmap(lambda x: step(params, x, targets)[0])
    result, events, _ = profiled(lambda: mapped(twice), tmp_path / "b.json")
    assert result.shape == (2,) and ranges(events)


@pytest.mark.parametrize(
    ("schedule", "place"), [(pp.gpipe(2, 4), "1F3"), (pp.dualpipev(2, 4), "OVERLAP_F_B")]
)
def test_a_failure_in_a_profiled_step_has_its_place(schedule, place):
    """Of the parts of a pair, which are one range, it is the pair."""

    def fragile(params, x):
        if x.isnan().any():
            raise ValueError("not a number")
        return dense(params, x)

    params, inputs, targets = problem(schedule.stages, 4, b=2)
    stages = [dense] * (schedule.stages - 2) + [fragile, dense]
    if schedule.stages == 2:
        stages = [dense, fragile]
    step = pp.value_and_grad(stages, squared, schedule, engine=pp.engines.functional)
    step(params, inputs, targets)
    broken = inputs.clone()
    broken[6:] = torch.nan
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.raises(pp.PipelineError) as raised,
    ):
        step(params, broken, targets)
    assert place in str(raised.value.instruction)


@pytest.mark.parametrize("kind", ["grad", "train"])
def test_without_a_profiler_a_step_calls_nothing_of_it(monkeypatch, kind):
    step, arguments, _ = made(kind, pp.one_f_one_b(2, 4), pp.InProcess())
    asked, called = [], []

    def watch(frame, event, function):
        name = getattr(function, "__qualname__", "") if event == "c_call" else frame.f_code.co_qualname
        where = getattr(function, "__module__", "") if event == "c_call" else frame.f_globals.get("__name__")
        if event in ("call", "c_call"):
            asked.append(name == "profiled")
            called.append("profile" in str(where) or "record_function" in name or "in_ranges" in name)

    sys.setprofile(watch)
    try:
        step(*arguments)
    finally:
        sys.setprofile(None)
    assert len(called) > 100 and not any(called) and sum(asked) == 1


def test_a_profile_and_a_timeline_have_one_axis(tmp_path):
    step, arguments, schedule = made("grad", pp.zbv(2, 4), pp.InProcess())
    (_, timeline), _, document = profiled(lambda: step.record(*arguments), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    for profiles in ([document], [text], [text, document]):
        both = pp.schedule.to_trace(timeline, profiles=profiles)
        assert pp.schedule.from_trace(both) == timeline
        events = json.loads(both)["traceEvents"]
        assert len(events) == len(json.loads(pp.schedule.to_trace(timeline))["traceEvents"]) + sum(
            len(document["traceEvents"]) for _ in profiles
        )
        assert min(event["ts"] for event in events if "ts" in event) >= 0
        slices = [event for event in events if event["ph"] == "X"]
        ours = {e["name"]: e for e in slices if e["pid"] == 0}
        theirs = {e["name"].removeprefix("ppfunc "): e for e in slices if e["name"].startswith("ppfunc ")}
        assert (
            len(ours)
            == len(theirs)
            == sum(i.op in COMPUTE for r in range(2) for i in schedule.instructions(r))
        )
        # Between two marks a process may be held up, and a first range takes milliseconds: not so most.
        assert abs(median(theirs[name]["ts"] - event["ts"] for name, event in ours.items())) < 1000
    with pytest.raises(ValueError, match="does not say when it began; give the timeline that step"):
        pp.schedule.to_trace(pp.simulate(schedule), profiles=[document])
    with pytest.raises(
        pp.schedule.FormatError, match=r"profiles\[0\]: got .*, expected the text of a trace of torch"
    ):
        pp.schedule.to_trace(timeline, profiles=[pp.schedule.to_trace(timeline)])
    for profiles in ({}, b"{}", None, document):
        with pytest.raises(
            TypeError, match="profiles: got .*, expected a list of profiles, of one rank each"
        ):
            pp.schedule.to_trace(timeline, profiles=profiles)
    event = {"ph": "X", "name": "of another program"}
    for malformed in (
        {"baseTimeNanoseconds": "today"},
        {"traceEvents": None},
        {"traceEvents": ["an event"]},
        {"traceEvents": [event | {"ts": "12"}]},
        {"traceEvents": [event | {"ts": float("nan")}]},
        {"baseTimeNanoseconds": float("inf")},
    ):
        with pytest.raises(
            pp.schedule.FormatError, match=r"profiles\[1\]: got .*, expected the text of a tr"
        ):
            pp.schedule.to_trace(timeline, profiles=[document, document | malformed])
