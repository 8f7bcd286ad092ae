"""Configurations ranked on paper: against the whole space, against what a trainer says, and under limits."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppfunc as pp
from ppfunc.tuning import tune as tuning
from ppfunc.tuning.tune import MICROBATCHES, Pieces, batch_of, concurrency_of, rows_of, seconds_of, times_of
from tests.builders import BUILDERS
from tests.models import BatchNormed, squared
from tests.pictures import require_legible
from tests.splitter import test_encoders as captions, test_slices as causal

D, ROWS = 16, 8
SPEEDS = (1e9, 1e9)


def model_of(layers=4):
    torch.manual_seed(0)
    pairs = [(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(layers)]
    return torch.nn.Sequential(*(layer for pair in pairs for layer in pair))


def arguments(**options):
    """Of a small search that counts, in which nothing is planned."""
    x = torch.randn(ROWS, D)
    some = {"schedules": ["1f1b", "gpipe", "zbv"], "remat": ["none", "full"], "effort": 0, "speeds": SPEEDS}
    given = {"model": model_of(), "args": x, "loss_fn": squared, "targets": x, "ranks": 2}
    given |= {"microbatch": [1, 4], "optimizer": pp.optim.adamw(0.1), "latency": 1e-6, "bandwidth": 1e9}
    return given | some | options


@pytest.fixture(scope="module")
def every():
    """All configurations of the small search."""
    return pp.tune(**arguments(top=1000))


def names(rows):
    return [str(row) for row in rows]


def test_what_is_pruned_is_not_among_the_best(every):
    """The rows of a search that ends early are the first of the whole space, at any limit."""
    assert every.complete and not every.waiting and len(every.rows) > 20
    assert {(row.choice.pipe, row.choice.shard) for row in every.rows} == {
        (2, "none"), (1, "none"), (1, "optimizer"), (1, "params")
    }  # fmt: skip
    assert [row.seconds for row in every.rows] == sorted(row.seconds for row in every.rows)
    peaks = sorted(max(row.peaks) for row in every.rows)
    for limit in (float("inf"), peaks[len(peaks) // 2]):
        first = pp.tune(**arguments(top=3, memory=limit))
        fitting = [row for row in every.rows if max(row.peaks) <= limit]
        assert [r.seconds for r in first.rows if r.fits] == [r.seconds for r in fitting[:3]]
        assert all(max(row.peaks) > limit for row in first.rows if not row.fits)
        assert first.best.peaks in [r.peaks for r in fitting if r.seconds == first.best.seconds]


def test_seconds_and_peaks_are_those_of_the_trainer_that_a_row_makes(every):
    """Stages that are counted whole, in the schedule with its updates, take the seconds of the row."""
    given = arguments()
    for row in [row for row in every.rows if row.choice.pipe == 2][::5]:
        trainer = row.make()
        parts = pp.split(given["model"], given["args"], at=row.at)
        assert len(parts.stages) == len(set(row.schedule.model_stages))
        x, size = given["args"], row.choice.microbatch * MICROBATCHES
        rows = x.repeat(size // ROWS + 1, 1)[:size]
        engine = pp.engines.graph(remat=row.choice.remat)
        make = lambda pieces, schedule, e=engine: pp.Trainer(  # noqa: E731
            pieces.split, squared, schedule, given["optimizer"], engine=e
        )
        costs = times_of(make, Pieces(parts), (rows, rows), SPEEDS)
        sent = [1e-6 + costs.of("bytes", s) / 1e9 for s in range(len(parts.stages))]
        timed = pp.simulate(trainer.schedule, replace(costs, communication=sent))
        assert row.seconds == pytest.approx(timed.makespan, rel=1e-9)
        assert row.bound <= row.seconds
        memory = trainer.lower(parts.params, x, x).memory_analysis()
        assert row.peaks == tuple(memory[rank].peak for rank in range(2))


def test_ranks_that_share_cores_compute_in_turn():
    """Two ranks of which one is always at work: one core takes all of their work, without a bubble.

    With a core each they wait for none, whatever they send beside their compute. On one core what a rank
    sends beside its compute takes as long as ever.
    """
    for sent in (0, 1):  # two of the four messages go beside compute of their rank
        timeline = pp.simulate(pp.gpipe(2, 2), costs := pp.Costs(communication=sent))
        assert [seconds_of(timeline, costs, at_once) for at_once in (2, 1, 0.5)] == [
            9 + 2 * sent,
            12 + 4 * sent,
            24 + 8 * sent,
        ]
    options = {"grids": [(2, 1), (1, 2)], "shard": ["none"], "schedules": ["gpipe"], "remat": ["none"]}
    alone, shared = (pp.tune(**arguments(cores=cores, top=100, **options)) for cores in (None, 1))
    apart = {str(row): row for row in alone.rows}
    assert {str(row) for row in shared.rows} == set(apart) and "cores for 1 of 2 ranks; " in shared.best.binds
    for row in shared.rows:
        times = row.seconds / apart[str(row)].seconds
        assert times == pytest.approx(2) if row.choice.data == 2 else 1 < times < 2
        assert row.binds.startswith("cores for 1 of 2 ranks; ")


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [concurrency_of(model_of(), cores, None) for cores in (None, 5)] == [1.5, 2.5]


def test_what_does_not_fit_says_the_least_memory_that_would(every):
    some = {"grids": [(2, 1)], "microbatch": [1]}
    least = min(max(row.peaks) for row in every.rows if row.choice[:4] == (2, 1, 1, 1))
    tight = pp.tune(**arguments(**some, memory=least - 1))
    assert not any(row.fits for row in tight.rows) and f"needs {max(tight.rows[0].peaks)} bytes" in str(tight)
    needed = max(tight.rows[0].peaks)
    assert needed == least
    with pytest.raises(
        ValueError, match=rf"nothing fits; the smallest of \d rows worked out needs {needed:,} bytes, and"
    ):
        tight.best  # noqa: B018
    assert pp.tune(**arguments(**some, memory=needed)).best.fits


def test_where_nothing_fits_only_the_smallest_is_worked_out():
    options = {"schedules": ["1f1b", "gpipe"], "grids": [(2, 1)], "microbatch": [1, 2]}
    tight = pp.tune(**arguments(**options, memory=1))
    assert len(tight.rows) == 1 and not tight.rows[0].fits
    with pytest.raises(
        ValueError,
        match=f"of 1 rows worked out.* and {tight.waiting} others, not worked out, may need less: give more",
    ):
        tight.best  # noqa: B018
    assert repr(tight) == f"Tuning(rows=1, fit=0, waiting={tight.waiting}, complete=True)"
    every = pp.tune(**arguments(**options, top=1000)).rows
    assert max(tight.rows[0].peaks) < 1.1 * min(max(row.peaks) for row in every)


def test_a_stage_is_measured_once(monkeypatch):
    """Of each microbatch, rematerialisation and number of stages, whatever the grid and schedule."""
    timed = []
    monkeypatch.setattr(tuning, "times_of", lambda *args: timed.append(args) or times_of(*args))
    found = pp.tune(**arguments(top=1))
    assert len(timed) == 2 * 2 * 3 and found.waiting > 20


def test_a_plan_is_ranked_where_it_is_faster():
    options = {"schedules": ["1f1b"], "grids": [(4, 1)], "microbatch": [1], "remat": ["none"], "effort": 0.05}
    found = pp.tune(**arguments(**options, ranks=4, batch=12))
    assert [row.schedule.name for row in found.rows] == ["plan", "1f1b"]
    assert found.rows[0].seconds < found.rows[1].seconds and found.rows[0].bound <= found.rows[0].seconds
    limit = max(found.rows[1].peaks)
    assert all(
        max(row.peaks) <= limit
        for row in pp.tune(**arguments(**options, ranks=4, batch=12, memory=limit)).rows
        if row.fits
    )


def test_plans_may_compute_again_and_move_under_a_limit(monkeypatch):
    seen = []
    monkeypatch.setattr(
        tuning, "plan", lambda *args, **kw: seen.append((args[2], kw["cap"])) or pp.plan(*args, **kw)
    )
    monkeypatch.setattr(tuning, "accelerates", lambda device: True)
    options = {
        "schedules": ["gpipe"],
        "grids": [(2, 1)],
        "microbatch": [1],
        "remat": ["none"],
        "effort": 0.01,
    }
    pp.tune(**arguments(**options, host=1e6, memory=1e5))
    ((costs, cap),) = seen
    assert cap is not None and costs.recompute == costs.forward
    assert list(costs.offload) == [size / 1e6 for size in costs.activation] and min(costs.checkpoint) == D * 4


def test_measured_pieces_make_a_trainer_that_trains():
    given = arguments(speeds=None, grids=[(2, 1)], top=1, microbatch=[2], remat=["none"])
    row = pp.tune(**given).best
    parts = pp.split(given["model"], given["args"], at=row.at)
    before = [p.clone() for p in given["model"].parameters()]
    with row.make() as trainer:
        state = trainer.init(parts.params)
        _, metrics = trainer.step(state, given["args"], given["targets"])
    assert metrics.loss.item() == pytest.approx(squared(given["model"](given["args"]), given["args"]).item())
    assert all(map(torch.equal, before, given["model"].parameters())) and row.seconds > 0


def test_an_interrupt_returns_what_was_found():
    def interrupt(step, best):
        if best is not None:
            raise KeyboardInterrupt

    hook = sys.excepthook
    found = pp.tune(**arguments(schedules=["1f1b", "gpipe"], grids=[(2, 1)], progress=interrupt))
    assert not found.complete and len(found.rows) == 1 and found.waiting and "interrupted" in str(found)
    assert not dist.is_initialized() and sys.excepthook is hook


def test_a_process_that_has_a_group_is_refused_by_name():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="tune: got a process that has a process group, expected none"):
            pp.tune(**arguments())
    finally:
        dist.destroy_process_group()


def test_a_model_that_fails_with_the_most_rows_alone_is_searched_with_fewer():
    class Few(torch.nn.Linear):
        def forward(self, x):
            if len(x) > 2:
                raise ValueError(f"{len(x)} rows are too many")
            return super().forward(x)

    model = torch.nn.Sequential(Few(D, D), Few(D, D))
    found = pp.tune(**arguments(model=model, grids=[(2, 1)], schedules=["1f1b"], microbatch=[1, 2, 4]))
    assert {row.choice.microbatch for row in found.rows} == {1, 2}
    assert list(found.refused) == ["microbatches of 4 in 2 stages"] and "4 rows are too many" in str(
        found.refused
    )
    with pytest.raises((ValueError, pp.StageError), match="8 rows are too many"):
        pp.tune(**arguments(model=model, grids=[(2, 1)], schedules=["1f1b"], microbatch=[4, 8]))


def test_no_plan_is_made_where_no_order_fits():
    options = {"schedules": ["gpipe"], "grids": [(2, 1)], "microbatch": [1], "remat": ["none"]}
    tight = pp.tune(**arguments(**options, effort=0.01, memory=1))
    assert [row.schedule.name for row in tight.rows] == ["gpipe"] and not tight.refused


def test_a_table_is_also_json_and_a_picture(every):
    read = json.loads(every.to_json())
    assert [row["seconds"] for row in read["rows"]] == [row.seconds for row in every.rows]
    assert read["rows"][0]["schedule"] == every.best.schedule.name and read["rows"][0]["peaks"]
    peaks = [max(row.peaks) for row in every.frontier]
    assert every.frontier[0].seconds == every.best.seconds and peaks == sorted(peaks, reverse=True)
    assert len(str(every).splitlines()) == len(every.rows) + 2


def test_the_picture_lists_the_frontier_and_fades_what_does_not_fit(every):
    svg = "{http://www.w3.org/2000/svg}"
    sizes = sorted(max(row.peaks) for row in every.rows)
    for limit in (inf, sizes[-1], sizes[len(sizes) // 2], sizes[0] / 9, sizes[-1] * 9):
        rows = tuple(row._replace(fits=max(row.peaks) <= limit) for row in every.rows)
        tuning = replace(every, rows=rows, memory=limit)
        for width in (None, 720, 3000):
            root = require_legible(tuning.to_svg(width=width))
        best = [row for row in tuning.frontier if row.fits]
        told = [t.text for t in root.iter(f"{svg}text")]
        labels = [t.text for t in root.iter(f"{svg}text") if "label" in t.get("class")]
        assert sorted(", ".join(labels).split(", ")) == sorted(map(str, range(1, len(best) + 1))) or not best
        assert all(str(row) in told for row in best)
        line = next((e for e in root.iter(f"{svg}line") if e.get("class") == "limit"), None)
        assert (line is None) == (limit > 1.5 * sizes[-1])
        for circle in root.findall(f"{svg}circle"):
            beyond = line is not None and float(circle.get("cx")) > float(line.get("x1")) + 0.5
            assert beyond == ("over" in circle.get("class")), limit
        assert ("over the limit" in told) == any(
            "over" in c.get("class") for c in root.findall(f"{svg}circle")
        )


def test_an_axis_fits_the_rows(every):
    rows = tuple(row._replace(seconds=1 + n / 1e2) for n, row in enumerate(every.rows))
    root = require_legible(replace(every, rows=rows).to_svg())
    places = [float(c.get("cy")) for c in root.findall("{http://www.w3.org/2000/svg}circle")]
    assert max(places) - min(places) > 300


def test_a_picture_is_described_by_its_table_and_times_have_a_unit(every):
    step, *_ = str(every).splitlines()[1].split("  ")
    assert re.fullmatch(r"[\d.,]+ (s|ms|µs)", step.strip())
    described = require_legible(every.to_svg()).find("{http://www.w3.org/2000/svg}desc")
    assert described.text == str(every)


def test_a_picture_without_rows_is_legible(every):
    assert "1 s</text>" in (picture := replace(every, rows=()).to_svg()) and require_legible(picture)


def test_of_what_does_not_fit_the_table_shows_the_smallest(every):
    over = replace(every, rows=tuple(row._replace(fits=False) for row in every.rows))
    over = replace(over, memory=12_345)
    told = f"\nnothing fits in 12.3 kB a rank; {len(over.rows) - 3} more do not fit; "
    assert len(over.rows) > 5 and told in str(over) and "nothing fits" not in str(every)
    assert len(str(over).splitlines()) == 3 + 2 and len(json.loads(over.to_json())["rows"]) == len(over.rows)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grids": [(2, 2)]}, ValueError, r"grids: got \(2, 2\).*whose product is 2"),
        (
            {"grids": [(2, 1, 2)]},
            ValueError,
            r"grids: got \(2, 1, 2\).*tensor ranks\), whose product is 2",
        ),
        (
            {"host": 1e9},
            ValueError,
            "host: got 1000000000.0, expected bytes per second of a model on an accelerator",
        ),
        ({"memory": float("nan")}, ValueError, "memory is nan, expected a finite number of at least 0"),
        ({"memory": "3"}, TypeError, "memory is '3' of type str, expected a number"),
        ({"effort": -1}, ValueError, "effort is -1, expected a finite number of at least 0"),
        ({"latency": float("inf")}, ValueError, "latency is inf, expected a finite number"),
        ({"bandwidth": 0}, ValueError, "bandwidth is 0, expected a finite number of more than 0"),
        ({"speeds": (1e9, 0)}, ValueError, r"speeds\[1\] is 0, expected a finite number of more than 0"),
        (
            {"speeds": (1e9,)},
            ValueError,
            r"speeds: got \(1000000000.0,\) of type tuple, expected two numbers",
        ),
        ({"speeds": 1e9}, TypeError, "speeds: got 1000000000.0 of type float, expected two numbers"),
        ({"microbatch": [0]}, ValueError, "microbatch = 0, expected an integer of at least 1"),
        ({"effor": 1}, TypeError, r"tune\(\) got .* 'effor'; did you mean 'effort'\?; it takes model, args,"),
        ({"tie": 1}, TypeError, r"options of Trainer; did you mean 'tied'\?; it takes stages, "),
        ({"args": 3}, ValueError, "args: got 3 of type int, expected at least one tensor with rows"),
        ({"cores": 0}, ValueError, "cores is 0, expected a finite number of more than 0"),
        (
            {"batch": 7, "microbatch": None},
            ValueError,
            "batch: got 7 rows, expected a multiple of the 2 ranks",
        ),
        ({"microbatch": [3]}, ValueError, "microbatch: got 3, expected a divisor of 8 rows"),
        ({"microbatch": [8], "grids": [(2, 1), (1, 2)]}, ValueError, "got 8, .* 8 rows over 2 pipelines"),
        (
            {"shard": ["zero3"], "grids": [(2, 1)]},
            ValueError,
            "shard: got 'zero3', expected 'none' or 'optimizer' or 'params'",
        ),
        (
            {"shard": ["params"], "grids": [(2, 1)]},
            ValueError,
            r"shard: got \['params'\], and no grid of several pipelines to cut over; leave it out",
        ),
        ({"schedules": ["1f2b"]}, ValueError, "unknown schedule '1f2b'"),
        ({"engine": pp.engines.eager}, TypeError, "engine"),
        ({"ranks": 0}, ValueError, "ranks = 0"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        pp.tune(**arguments(**options))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("schedules", []), ("microbatch", []), ("shard", []), ("microbatch", 8), ("schedules", "1f1b"),
        ("remat", "cheap"), ("shard", "none"), ("grids", (2, 2)), ("grids", "all"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_what_to_try_is_refused_by_name(name, got):
    message = f"{name}: got {got!r} of type {type(got).__name__}, expected a nonempty list of "
    with pytest.raises(ValueError, match=re.escape(message)):
        pp.tune(**arguments(**{name: got}))


def test_grids_that_a_batch_does_not_divide_over_are_left_out():
    """Seven pipelines of one rank do not take 16 rows, one pipeline of seven ranks does."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(D, D) for _ in range(7)))
    options = {"schedules": ["1f1b"], "microbatch": [2], "remat": ["none"], "effort": 0}
    found = pp.tune(**arguments(**options, model=layers, ranks=7, batch=16))
    assert {row.choice[:4] for row in found.rows} == {(7, 1, 1, 2)}
    with pytest.raises(ValueError, match="microbatch: got 2, expected a divisor of 16 rows over 7 pipelines"):
        pp.tune(**arguments(**options, model=layers, ranks=7, batch=16, grids=[(7, 1), (1, 7)]))


def test_a_row_of_several_pipelines_needs_its_transport(every):
    row = next(row for row in every.rows if row.choice.shard == "params")
    with pytest.raises(ValueError, match=r"transport: got None.*shard='params'\) of a mesh of 1 x 2 ranks"):
        row.make()
    whole = next(row for row in every.rows if row.choice.pipe == 2)
    assert whole.make(pp.InProcess()).schedule.ranks == 2


def test_every_schedule_that_trains_has_its_seconds_and_bytes():
    """Also those with replicas, loads and overlapped pairs; none whose microbatches are others."""
    names = [name for name, build in BUILDERS.items() if not build(2, 4).forward_only]
    options = {"grids": [(2, 1)], "microbatch": [2], "remat": ["none"], "top": 1000}
    found = pp.tune(**arguments(schedules=names, **options))
    assert list(found.refused) == ["data_parallel of 2 ranks"] and len(found.rows) >= len(names) - 4
    assert {row.schedule.microbatches for row in found.rows} == {4}


def test_rows_are_repeated_and_flags_stay():
    few = torch.arange(6).view(3, 2)
    taken = rows_of({"ids": few, "flag": False}, 5)
    assert torch.equal(taken["ids"], few[[0, 1, 2, 0, 1]]) and taken["flag"] is False


def test_a_split_keeps_its_cuts():
    parts = pp.split(model_of(), torch.randn(2, D), at=["4"])
    found = pp.tune(**arguments(model=parts, top=1000))
    assert {row.at for row in found.rows} == {("4",)}
    assert found.refused == {
        "1f1b of 1 x 2 ranks": "1 stages, and the model was split into 2",
        "zbv of 2 ranks": "4 stages, and the model was split into 2",
    }


def test_what_batch_norms_refuse_is_refused_by_name():
    """One row has no variance, and data ranks would each have a running mean; all else is tried."""
    model, x = torch.nn.Sequential(*(BatchNormed(D) for _ in range(2))), torch.randn(ROWS, D)
    given = arguments(model=model, args=x[:1], targets=x[:1], schedules=["1f1b"], microbatch=[1, 2])
    some = pp.tune(**given, batch=ROWS, top=1000)
    assert {row.choice[:4] for row in some.rows} == {(2, 1, 1, 2)}
    one_row = {f"microbatches of 1 in {stages} stages" for stages in (1, 2)}
    rows = some.refused.keys() - one_row
    assert rows and all(
        re.match("1f1b, ranks 1 x 2, shard .*, microbatches of 2, remat ", row) for row in rows
    )
    assert all("Expected more than 1 value per channel" in some.refused[one] for one in one_row)
    assert all("reduce_state={'*': 'mean'}" in some.refused[row] for row in rows)
    mean = pp.tune(**given, batch=ROWS, top=1000, reduce_state={"*": "mean"})
    assert {row.choice[:4] for row in mean.rows} == {(2, 1, 1, 2), (1, 2, 1, 2)}
    for options, message in (
        ({"microbatch": [1]}, "more than 1 value"),
        ({"grids": [(1, 2)]}, "reduce_state"),
    ):
        with pytest.raises((ValueError, pp.StageError), match=message):
            pp.tune(**given | options, batch=ROWS)


def on_all_ranks(**options):
    """Arguments of a search of a captioner, with its output layer in parts and its encoder spread, or not."""
    x, labels = captions.batch(8)
    given = {"model": captions.Captioner().double(), "args": x, "targets": labels, "top": 1000}
    given |= {"loss_fn": pp.vocabulary_cross_entropy(z_loss=0.1), "grids": [(2, 1)], "remat": ["none"]}
    given |= {"parts": (None, "lm_head"), "spread": (None, "tower"), "schedules": ["1f1b", "zbv"]}
    return arguments(**given | {"microbatch": [2]} | options)


def test_output_layers_in_parts_and_encoders_on_all_ranks_are_tried():
    """Each row is a trainer with the bytes that it says, and the loss and gradients of the model."""
    given = on_all_ranks()
    found = pp.tune(**given)
    assert not found.refused and not found.waiting
    modules = {(parts, spread) for parts in given["parts"] for spread in given["spread"]}
    assert {(row.schedule.name.split()[0], row.choice[-2:]) for row in found.rows} == {
        (name, names) for name in ("1f1b", "zbv") for names in modules
    }
    model, x, labels = given["model"], given["args"], given["targets"]
    loss, later = given["loss_fn"](model(**x), labels).detach(), None
    for row in found.rows:
        parts, spread = row.choice.parts, row.choice.spread
        assert (" (parts)" in row.schedule.name, " (spread)" in row.schedule.name) == (
            parts is not None,
            spread is not None,
        )
        assert [f"{parts} in parts" in str(row), f"{spread} spread" in str(row)] == [
            bool(parts),
            bool(spread),
        ]
        split = pp.split(model, x, at=row.at, output=parts, encoder=spread)
        params = split.params
        if parts:
            params = pp.vocabulary_parallel(split, row.choice.pipe, given["loss_fn"]).cut(params)
        if row.schedule.name.startswith("zbv") and None in (parts, spread):
            continue
        trainer = row.make()
        memory = trainer.lower(params, x, labels).memory_analysis()
        assert row.peaks == tuple(memory[rank].peak for rank in range(2))
        state, metrics = trainer.step(trainer.init(params), x, labels)
        torch.testing.assert_close(metrics.loss, loss, rtol=0, atol=1e-12)
        _, metrics = trainer.step(state, x, labels)
        later = metrics.loss if later is None else later
        torch.testing.assert_close(metrics.loss, later, rtol=0, atol=1e-9)
    assert abs(later - loss) > 0.1


def test_a_heavy_layer_is_best_in_parts():
    """A whole layer takes one rank most of the step, and most of its bytes."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(512, D), *model_of(8), torch.nn.Linear(D, 512))
    ids = torch.randint(512, (16, 4))
    given = {"model": layers, "args": ids, "targets": ids, "loss_fn": pp.vocabulary_cross_entropy()}
    given |= {"parts": (None, "17"), "ranks": 4, "grids": [(4, 1)], "latency": 0, "bandwidth": 1e12}
    found = pp.tune(**arguments(**given, schedules=["1f1b"], remat=["none"], microbatch=[2], top=1000))
    assert [row.choice.parts for row in found.rows] == ["17", None] and found.rows[0].at[-1] != "17"
    inparts, whole = found.rows
    assert inparts.seconds < 0.5 * whole.seconds and inparts.peaks[-1] < 0.4 * whole.peaks[-1]
    assert "1f1b (parts), ranks 4, microbatches of 2, 17 in parts, remat none" in str(found)
    read = json.loads(found.to_json())["rows"]
    assert [row["parts"] for row in read] == ["17", None] and inparts.bound is None


def test_stages_on_all_ranks_are_measured_too():
    given = on_all_ranks(speeds=None, schedules=["1f1b"], parts=("lm_head",), spread=("tower",), top=1)
    row = pp.tune(**given).best
    assert row.seconds > 0 and row.choice[-2:] == ("lm_head", "tower")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parts": "lm_head"}, ValueError, "parts: got 'lm_head'.*expected a nonempty list of names of modu"),
        ({"spread": []}, ValueError, "spread: got .*expected a nonempty list of names of modules, or None"),
        ({"parts": ["head"]}, ValueError, "parts: got 'head', which is no module of the model; the nearest "),
        ({"spread": [None, ""]}, ValueError, "spread: got '', which is no module of the model"),
        ({"loss_fn": captions.loss_of}, TypeError, "loss_fn: got .*, expected a loss of logits whole or in"),
        ({"spread": ["tower"], "grids": [(1, 2)]}, ValueError, "spread: got .*, and no grid with several ra"),
        ({"model": "split"}, ValueError, "model: got a split and parts=.*, expected a module: cuts stay"),
        ({"parts": ["layers.3"], "spread": [None]}, pp.StageError, "the last stage, at layers.3: it calls"),
        ({"schedules": ["dualpipe"], "parts": ["lm_head"]}, ValueError, "dualpipe with OVERLAP_F_B"),
        ({"schedules": ["seq1f1b"], "slices": [2], "spread": ["tower"]}, ValueError, "encoder: got a name"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_on_all_ranks_are_refused_by_name(options, error, message):
    if options.get("model"):
        x, _ = captions.batch(2)
        options = {"model": pp.split(captions.Captioner().double(), x, at=2)}
    with pytest.raises(error, match=message):
        pp.tune(**on_all_ranks(**options))


def sliced(**options):
    """Arguments of a search of a causal model, whose cache is the carry of slices."""
    ids, targets = causal.batch()
    given = {
        "model": causal.Causal(),
        "args": ids,
        "targets": targets,
        "loss_fn": causal.loss_fn,
        "top": 1000,
    }
    given |= {"schedules": ["1f1b", "seq1f1b", "seq_zb"], "slices": [0, 1, 4], "grids": [(2, 1), (1, 2)]}
    return arguments(**given | {"microbatch": [1], "remat": ["none"], "shard": ["none"]} | options)


def test_slices_are_tried_as_trainers_run_them():
    found = pp.tune(**sliced(effort=0.01, bandwidth=1e12))
    assert not found.refused
    names = {(row.schedule.name, row.choice.pipe, row.choice.slices) for row in found.rows}
    assert names - {("plan", 2, k) for k in (0, 1, 4)} == (
        {("1f1b", p, 0) for p in (1, 2)}
        | {("seq1f1b", p, k) for p in (1, 2) for k in (1, 4)}
        | {("seq_zb", 2, k) for k in (1, 4)}
    )
    ids, targets = causal.batch()
    for row in found.rows:
        _, d, _, b, _, _, k, *_ = row.choice
        if d == 1 and k:
            assert f"microbatches of {b} in {k} slices" in str(row)
            trainer, n = row.make(), row.schedule.sequences
            batch = [pp.microbatch(part, n, slices=k) for part in (ids, targets)]
            parts = pp.split(causal.Causal(), ids[:b], at=row.at, slices=k)
            memory = trainer.lower(parts.params, *batch).memory_analysis()
            assert row.peaks == tuple(memory[rank].peak for rank in range(2))
            _, metrics = trainer.step(trainer.init(parts.params), *batch)
            torch.testing.assert_close(metrics.loss, causal.loss_fn(causal.Causal()(ids), targets).detach())
    peak = {name: min(max(r.peaks) for r in found.rows if r.schedule.name == name) for name, *_ in names}
    assert peak["seq1f1b"] < peak["1f1b"]


def test_messages_of_slices_take_time():
    found = pp.tune(**sliced(latency=1.0, slices=[4], schedules=["seq1f1b"], grids=[(2, 1)]))
    assert found.rows and all(row.seconds > 2 for row in found.rows)  # there and back


def test_costs_of_slices_add_up_to_the_microbatch():
    ids, targets = (rows_of(part, MICROBATCHES) for part in causal.batch())

    def costs(slices, speeds):
        parts = pp.split(causal.Causal(), ids[:1], at=2, slices=slices or None)
        batch = [batch_of(part, MICROBATCHES, MICROBATCHES, slices) for part in (ids, targets)]
        return times_of(
            lambda pieces, schedule: pp.Trainer(pieces.split, causal.loss_fn, schedule, pp.optim.adamw(0.1)),
            Pieces(parts), batch, speeds, slices=slices,
        )  # fmt: skip

    whole, quarter = (costs(k, (1e9, inf)) for k in (0, 4))  # operations alone
    for name in ("forward", "backward"):
        for stage in range(2):
            assert quarter.of(name, stage) == pytest.approx(whole.of(name, stage), rel=0.35)
            assert quarter.of(name, stage) == sum(each.of(name, stage) for each in quarter.slices)
    measured = costs(4, None)
    assert len(measured.slices) == 4 and min(measured.slices[3].forward) > 0
    assert max(measured.slices[3].forward) < min(measured.forward)


def test_slices_that_cannot_be_are_refused_by_name():
    found = pp.tune(**sliced(slices=[0, 5], schedules=["1f1b", "seq1f1b"]))
    assert {row.choice.slices for row in found.rows} == {0}
    assert list(found.refused) == ["seq1f1b of 2 ranks, 5 slices", "seq1f1b of 1 x 2 ranks, 5 slices"]
    assert "slices: got 5 and 12 tokens" in found.refused["seq1f1b of 2 ranks, 5 slices"]
    for options, told in (
        (
            {"slices": [2], "schedules": ["1f1b"]},
            r"slices: got 2, and schedules \['1f1b'\], none of which has",
        ),
        ({"slices": [0], "schedules": ["seq_zb"]}, r"slices: got 0, and schedules \['seq_zb'\], none of"),
        ({"slices": 2}, "slices: got 2 of type int, expected a nonempty list of numbers of slices"),
        ({"slices": [-1]}, "slices = -1, expected an integer of at least 0"),
        ({"slices": [2], "model": model_of(), "args": torch.randn(4, D)}, "whose forward takes none of"),
    ):
        with pytest.raises((ValueError, TypeError, pp.StageError), match=told):
            pp.tune(**sliced(**options))
