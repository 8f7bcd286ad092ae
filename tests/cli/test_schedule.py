"""The command: list, show, check, simulate."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ppfunc.cli.options import COSTS
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    from_json,
    gpipe,
    one_f_one_b,
    place_communication,
    read_schedule,
    simulate,
    to_csv,
    to_grid,
    to_svg,
    to_torch_csv,
    to_trace,
    zbv,
    zero_bubble,
)
from tests.cli.test_tune import TUNED
from tests.clock import busy

NAMES = (
    "gpipe 1f1b inference data_parallel interleaved_1f1b looped_bfs zb_h1 zb_h2 interleaved_zb zero_bubble"
    " zbv zbv_greedy v_half v_min chimera dualpipe dualpipev seq1f1b seq_zb decode deepspeed_train"
    " deepspeed_inference"
).split()


def test_list_names_every_schedule_with_its_options(run):
    code, out, _ = run("list")
    assert code == 0 and [line for line in out.splitlines() if not line.startswith(" ")] == NAMES
    does, options = out.splitlines()[1::3], out.splitlines()[2::3]
    assert all(line.endswith(".") for line in does) and len(does) == len(BUILDERS)
    assert all(line.startswith(("    --ranks --microbatches", "    --ranks --sequences")) for line in options)
    assert "    --ranks --microbatches [--chunks] [--group]\n" in out


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_shown_in_every_form_and_accepted_by_check(name, run, tmp_path):
    shape = ("--ranks", 4, "--sequences" if name.startswith(("seq", "decode")) else "--microbatches", 8)
    for form in ("grid", "csv", "steps", "json", "svg", "trace"):
        for lowered in ((), ("--lowered",)) if form != "svg" else ((),):
            file = tmp_path / f"{len(lowered)}.{form}"
            code, out, err = run("show", name, *shape, "--format", form, *lowered, "--out", file)
            assert (code, out, err) == (0, "", "")
            if form in ("csv", "json", "trace"):
                code, out, err = run("check", file)
                assert (code, err) == (0, "")
                assert "digest" in out
    compute = {
        cell.strip("()")
        for row in csv.reader((tmp_path / "0.csv").read_text().splitlines())
        for cell in row
        if cell and not cell.startswith("slices=")
    }
    assert not any(
        word in cell for cell in compute for word in ("SEND", "RECV", "LOAD", "@", "STEP", "REDUCE")
    )
    assert from_json((tmp_path / "0.json").read_text()) == BUILDERS[name](4, 8)
    assert read_schedule(tmp_path / "0.trace") == BUILDERS[name](4, 8)
    assert ElementTree.parse(tmp_path / "0.svg").getroot().tag.endswith("svg")


def test_a_grid_is_refused_by_its_format(run, tmp_path):
    for form, name in (("grid", "1f1b"), ("steps", "deepspeed_train")):
        run("show", name, "--ranks", 2, "--microbatches", 2, "--format", form, "--out", tmp_path / form)
        code, _, err = run("check", tmp_path / form)
        assert code == 2 and "a grid or a list of steps, which only people read: expected CSV or JSON" in err


@pytest.mark.parametrize("name", ["1F1B", "one_f_one_b", "Schedule1F1B"])
def test_names_are_taken_in_any_spelling(name, run):
    assert run("show", name, "--ranks", 2, "--microbatches", 3) == run(
        "show", "1f1b", "--ranks", 2, "--microbatches", 3
    )


def test_the_options_of_a_schedule_reach_it(run):
    _, out, _ = run("show", "looped_bfs", "--ranks", 2, "--microbatches", 1, "--chunks", 3, "--format", "csv")
    assert out == "0F0,2F0,4F0,4B0,2B0,0B0\n1F0,3F0,5F0,5B0,3B0,1B0\n"
    _, out, _ = run(
        "show", "deepspeed_train", "--ranks", 2, "--microbatches", 1, "--order", "head", "--format", "steps"
    )
    assert out.splitlines()[:3] == [
        "rank 0",
        "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
        "SendActivation(buffer_id=0)",
    ]
    assert out.splitlines()[-1].endswith("ReduceTiedGrads() ReduceGrads() OptimizerStep()")


S, M = "--ranks 4 --microbatches 8", "--ranks 2 --microbatches 2"
REFUSED = [  # words, message
    (f"show 2f2b {M}", "unknown schedule '2f2b': expected one of gpipe, 1f1b"),
    (f"show zbh1v {M}", "did you mean 'zb_h1'?"),
    (f"show interleaved_1f {M}", "did you mean 'interleaved_1f1b'?"),
    (f"show 1f1b {S} --format sgv", "invalid choice: 'sgv' (choose from 'grid', 'csv'"),
    ("shwo 1f1b", "invalid choice: 'shwo' (choose from 'list', 'show'"),
    (f"show 1f1b {S} --loweerd", "ppfunc: error: unrecognized arguments: --loweerd"),
    (f"show gpipe {M} --chunks 2", "--chunks changes nothing here: leave it out"),
    ("show gpipe --ranks 0 --microbatches 2", "ranks = 0, expected"),
    ("show dualpipe --ranks 3 --microbatches 8", "ranks = 3"),
    ("show gpipe --ranks 2", "--microbatches"),
    (
        "show gpipe --ranks four --microbatches 2",
        "--ranks: expected a whole number up to a million, got 'four'",
    ),
    (f"show gpipe {M} --out /nowhere/at/all", "no directory /nowhere/at, make it first"),
    ("simulate gpipe --ranks 2", "gpipe needs --microbatches"),
    ("simulate nothing.csv", "no such file: nothing.csv"),
    ("simulate nothing", "unknown schedule 'nothing': expected one of gpipe, 1f1b"),
    (
        f"simulate gpipe {M} --forward nan",
        "argument --forward: expected a number up to 1e100, or several apart by commas, got 'nan'",
    ),
    (f"simulate gpipe {M} --forward -1", "forward is -1, expected"),
    (f"simulate gpipe {M} --weight-share 2", "weight_share is 2, expected at most 1"),
    (
        f"simulate gpipe {M} --forward 1.x",
        "argument --forward: expected a number up to 1e100, or several apart by commas, got '1.x'",
    ),
    (
        f"simulate gpipe {M} --backward 1 --backward-input 2",
        "--backward and --backward-input: give the whole backward, or both parts",
    ),
    ("check /nowhere/at/all", "no such file: /nowhere/at/all"),
    ("check 1f1b", "1f1b needs --ranks and --microbatches"),
    ("check x.csv y.csv", "ppfunc: error: unrecognized arguments: y.csv"),
    ("check /", "Is a directory"),
    ("", "required"),
    # Options that change nothing.
    (f"show 1f1b {S} --format json --forward 2", "--forward changes nothing here: leave it out"),
    (f"show 1f1b {S} --format csv --width 100", "--width changes nothing here"),
    (f"show 1f1b {S} --width 10", "width is 10, expected at least 28 for a grid of 4 ranks"),
    (f"show 1f1b {S} --format svg --width 10", "width is 10, expected a number of pixels from 960 to 100000"),
    (f"show 1f1b {S} --for torch --format grid", "--for torch is a csv: leave --format grid out"),
    (f"show 1f1b {S} --for torch --forward 2", "--forward changes nothing here"),
    (f"show 1f1b {S} --for jax", "invalid choice: 'jax' (choose from 'torch')"),
    (f"show 1f1b {S} --forward 1,2", "forward has 2 numbers, expected 4, one per stage or layer"),
    (f"show 1f1b {S} --forward 1,,2", "apart by commas, got '1,,2'"),
    (f"show 1f1b {S} --forward 2 --lowered", "--lowered changes nothing here"),
    (f"show 1f1b {S} --forward 0", "0F0 takes no time, so it has no place in a grid"),
    (
        f"show 1f1b {S} --forward 2 --costs x.json",
        "--costs x.json and --forward: give the costs in one place",
    ),
    (f"show 1f1b {S} --costs /nowhere/at/all", "No such file"),
    (f"show 1f1b {S} --format svg --lowered", "--lowered changes nothing here"),
    (f"show 1f1b {S} --for torch --lowered", "--lowered changes nothing here"),
    (f"show 1f1b {S} --parameters 2", "--parameters changes nothing here"),
    (f"show 1f1b {S} --activation 2", "--activation changes nothing here"),
    (
        f"show 1f1b {S} --weight-share 0.5 --format svg",
        "--weight-share changes nothing here, where is no W: leave it out",
    ),
    (f"show 1f1b {S} --overlapped 3", "--overlapped changes nothing here, where is no OVERLAP_F_B"),
    (f"show 1f1b {S} --step 3", "--step changes nothing here, where is no STEP"),
    (f"show 1f1b {S} --bytes 3", "--bytes and --bandwidth go together"),
    (f"show 1f1b {S} --per rank", "--per changes nothing here"),
    (f"show 1f1b {S} --per stage --format csv", "--per changes nothing here"),
    # Huge numbers.
    (
        "show gpipe --ranks 1000000000 --microbatches 1",
        "--ranks: expected a whole number up to a million, got '10",
    ),
    ("show gpipe --ranks 100000 --microbatches 100000", "x stages per rank = 100000 x 100000 x 1"),
    (f"show looped_bfs {M} --chunks 1000000", "= 2 x 2 x 1000000: expected at most 500000"),
    (
        f"simulate gpipe --ranks 2 --microbatches {'9' * 10**5}",
        "--microbatches: expected a whole number up to a million, got '99999",
    ),
    *(
        (f"simulate gpipe {M} --forward {n}", "expected a number up to 1e100, or several")
        for n in ("9" * 4000, "9" * 9000, "1e300")
    ),
    (f"show zero_bubble {M} --cap {'9' * 4000}", "--cap: expected a number up to 1e100, got"),
    ("compare --ranks 10000 --microbatches 10000", "ranks x microbatches x stages per rank"),
    # Comparisons.
    ("compare", "--ranks and --microbatches are missing: say how many there are, or name a file"),
    (f"compare {S} nope", "unknown schedule 'nope': expected one of gpipe"),
    (f"compare {S} dualpip", "did you mean 'dualpipe'?"),
    (f"compare {S} /nowhere/at/all", "no such file: /nowhere/at/all"),
    (f"compare {S} 1f1b inference", "one has a backward, the other has none"),
    (f"compare {S} --width 1000", "--width changes nothing here"),
    (f"compare {S} 1f1b --chunks 3", "--chunks changes nothing here"),
    (f"compare {S} --chunks 0", "chunks = 0, expected"),
    (f"compare {S} 1f1b --forward 1,2,3", "forward has 3 numbers, expected 4"),
    (
        "compare --ranks 0 --microbatches 2",
        "ranks = 0, expected an integer of at least 1: pass ranks=1 or more",
    ),
    ("compare --ranks 3 --microbatches 3 dualpipe", "ranks = 3, expected an even number"),
    ("compare --ranks 4 --microbatches 7 1f1b dualpipe", "dualpipe: microbatches = 7, expected an"),
    (f"compare {S} --format tabel", "invalid choice: 'tabel' (choose from 'table'"),
    (f"compare {S} --format table --out x.svg", "--out x.svg: expected a name that ends in .txt"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_question_that_cannot_be_answered_is_refused_at_once_in_one_line(words, message, run):
    start = time.process_time()
    code, out, err = run(*words.split())
    assert time.process_time() - start < 2 * busy()
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1 and len(err) < 700


def broken_files() -> dict[str, str]:
    """Files that are wrong, each in one way, made from files that are right."""
    compute = to_csv(BUILDERS["1f1b"](3, 4))
    lowered = to_csv(place_communication(BUILDERS["1f1b"](3, 4)))
    twice = to_csv(BUILDERS["dualpipe"](2, 4))
    chunks = to_csv(place_communication(BUILDERS["interleaved_1f1b"](2, 4)))
    return {
        "missing forward": compute.replace("1F2,", ""),
        "missing rank": "".join(compute.splitlines(keepends=True)[:2])[:-4] + "\n",
        "missing send": lowered.replace("0SEND_F1,", ""),
        "duplicated forward": compute.replace("1F2", "1F2,1F2"),
        "duplicated rank": compute + compute.splitlines()[2] + "\n",
        "swapped receives of chunks": (
            chunks.replace("1RECV_F0", "x").replace("3RECV_F0", "1RECV_F0").replace("x", "3RECV_F0")
        ),
        "swapped ranks": lowered.replace("0F1", "x").replace("1F1", "0F1").replace("x", "1F1"),
        "misplaced forward": compute.replace("1F2,", "").replace("2F0", "1F2,2F0"),
        "misplaced chain": twice.replace("0F0", "0F3"),
        "cycle": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "stage out of range": compute.replace("1F2", "7F2"),
        "stage far out of range": compute.replace("1F2", "1000000000000F2"),
        "forwards and backwards far out of range": compute.replace("1F2", "1F99").replace("1B2", "1B99"),
        "backward far out of range": compute.replace("1B2", "1B1000000000000000000"),
        "chain far out of range": twice.replace("2F3", "2F1000000"),
        "microbatch far out of range": compute.replace("1F2", "1F1000000000000000000"),
        "message of a stage out of range": lowered.replace("0SEND_F1", "1000000000000SEND_F1"),
        "peer out of range": lowered.replace("0SEND_F1", "0SEND_F1>1000000000000"),
        "empty row": compute + "\n",
        "quadratic": ",".join(f"{n}F0,0F{n}" for n in range(5000)) + "\n",
    }


@pytest.mark.parametrize("what", broken_files())
def test_check_refuses_broken_files_with_rank_position_and_instruction(what, run, tmp_path):
    (tmp_path / "broken.csv").write_text(broken_files()[what])
    start = time.process_time()
    code, out, err = run("check", tmp_path / "broken.csv")
    assert time.process_time() - start < busy()
    assert (code, out) == (1, "")
    assert "rank " in err and len(err) < 3000
    assert "step " in err


GARBLED = [
    *(b"", b"0F0,0B0junk\n", b"0F0,0SEND_X0\n", b"hello\n", b"\xef\xbb\xbf0F0,0B0\n", b"\x00" * 1000),
    *(bytes(range(256)), b"\x89PNG\r\n\x1a\n" + bytes(1000), b"9" * 10**6 + b"F0\n", b"x" * 10**6),
    *(b"0F" + b"9" * 10**6 + b"\n", b'"' * 9999, b'"0F0\n0B0', b"(" * 10**5, b"0F0 0B0\n", b"{" * 10**5),
    *(b"{", b'{"format": "ppfunc.schedule", "version": 99}', b"[" * 10**5, b" " * 10**6, b"\n" * 10**6),
    *(b"{" + b" " * 10**6, b'{"traceEvents": [' + b" " * 10**6),
]
BLANK = [b"," * 10**6, b"0F0,0B0" + b"," * 10**6]  # idle steps


@pytest.mark.parametrize("content", GARBLED + BLANK, ids=range(len(GARBLED + BLANK)))
def test_what_is_no_schedule_is_refused_in_seconds(content, run, tmp_path):
    (tmp_path / "garbled.csv").write_bytes(content)
    for command in ("check", "show", "simulate"):
        start = time.process_time()
        code, out, err = run(command, tmp_path / "garbled.csv")
        assert time.process_time() - start < busy()
        assert code == 2 or (code == 1 and content in BLANK)
        assert out == "" and len(err) < 700 and "Traceback" not in err


def test_simulate_prints_the_figures_of_the_literature(run):
    costs = "--forward 18.522 --backward-input 18.086 --backward-weight 9.337 --communication 0.601".split()
    code, out, _ = run("simulate", "1f1b", "--ranks", 8, "--microbatches", 24, *costs, "--json")
    figures = json.loads(out)
    assert code == 0
    assert list(figures) == ["makespan", "span", "bubble", "span_bubble", "idle", "peak_activations"]
    assert round(figures["span_bubble"], 4) == 0.2431
    costs = "--forward 1 --backward 2 --overlapped 3".split()
    figures = json.loads(run("simulate", "dualpipe", "--ranks", 8, "--microbatches", 20, *costs, "--json")[1])
    assert (figures["makespan"], figures["idle"], max(figures["peak_activations"])) == (66, [6] * 8, 9)


def test_simulate_of_a_file_equals_that_of_its_schedule(run, tmp_path):
    file = tmp_path / "file.csv"
    run("show", "zbv", "--ranks", 3, "--microbatches", 7, "--lowered", "--format", "csv", "--out", file)
    built = run("simulate", "zbv", "--ranks", 3, "--microbatches", 7, "--json")
    assert run("simulate", file, "--json") == built
    assert run("simulate", file, "--ranks", 3, "--json") == built
    assert run("simulate", file, "--ranks", 4)[0] == 2
    assert run("simulate", file, "--chunks", 2)[0] == 2
    assert "--offload changes nothing here, where is no OFFLOAD" in run("simulate", file, "--offload", 1)[2]
    file.write_text("0F0,0B0,0F1\n")
    assert run("simulate", file)[0] == 1


def test_simulate_in_words(run):
    shape = ("--ranks", 2, "--microbatches", 2)
    code, out, _ = run("simulate", "gpipe", *shape)
    assert code == 0
    assert out.startswith(
        f"{simulate(gpipe(2, 2))}\ntimes: in the unit of the costs per stage\nactivations: "
    )
    _, out, _ = run("simulate", "zbv", *shape, "--per", "rank")
    assert "\ntimes: in the unit of the costs per rank\n" in out


def test_no_torch_is_imported_and_a_closed_pipe_is_no_error():
    script = (
        "import sys, io\nfrom ppfunc.cli import main\n"
        "code = main('show 1f1b --ranks 4 --microbatches 4 --lowered --format csv'.split())\n"
        "main('simulate 1f1b --ranks 4 --microbatches 4'.split())\n"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0
    words = "show gpipe --ranks 64 --microbatches 256 --format csv"
    command = [sys.executable, "-m", "ppfunc", *words.split()]
    # Without a buffer Python would not notice that it wrote only a part.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


SHAPE = ("--ranks", 4, "--microbatches", 8)


def test_show_draws_names_and_files_with_costs(run, tmp_path):
    costs = Costs(
        forward=[1, 2, 1, 1],
        backward=[2, 4, 2, 2],
        backward_input=[1, 2, 1, 1],
        backward_weight=[1, 2, 1, 1],
        communication=0.5,
    )
    options = ("--forward", "1,2,1,1", "--backward", "2,4,2,2", "--communication", 0.5)
    schedule = one_f_one_b(4, 8)
    timeline = simulate(schedule, costs)
    (tmp_path / "costs.json").write_text(costs.to_json())
    run("show", "1f1b", *SHAPE, "--format", "json", "--out", tmp_path / "1f1b.json")
    for source in (("1f1b", *SHAPE), (tmp_path / "1f1b.json",)):
        for given in (options, ("--costs", tmp_path / "costs.json")):
            assert run("show", *source, *given) == (0, to_grid(timeline), "")
            assert run("show", *source, *given, "--format", "svg") == (0, to_svg(timeline), "")
            assert run("show", *source, *given, "--format", "trace", "--out", tmp_path / "t.json") == (
                0,
                "",
                "",
            )
            assert (tmp_path / "t.json").read_text() == to_trace(timeline)
            out = json.loads(run("simulate", *source, *given, "--json")[1])
            assert out["makespan"] == timeline.makespan and out["peak_activations"] == list(
                timeline.peak_activations
            )
    assert run("show", "1f1b", *SHAPE, "--width", 1100, "--format", "svg")[1] == to_svg(schedule, width=1100)


def test_a_trace_is_drawn_with_its_own_times(run, tmp_path):
    schedule = place_communication(one_f_one_b(4, 16))
    slow = simulate(schedule, Costs(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]))
    (tmp_path / "trace.json").write_text(to_trace(slow))
    width = 160  # where there is no terminal
    assert run("show", tmp_path / "trace.json") == (0, to_grid(slow, width=width), "")
    narrow = run("show", tmp_path / "trace.json", "--width", 60)[1]
    assert narrow == to_grid(slow, width=60)
    assert run("show", tmp_path / "trace.json", "--format", "svg")[1] == to_svg(slow)
    assert run("show", tmp_path / "trace.json", "--forward", 2)[1] == to_grid(
        simulate(schedule, Costs(forward=2))
    )
    assert json.loads(run("simulate", tmp_path / "trace.json", "--json")[1])["makespan"] == slow.makespan
    assert (
        json.loads(run("simulate", tmp_path / "trace.json", "--forward", 1, "--json")[1])["makespan"]
        == simulate(schedule).makespan
    )
    assert run("check", tmp_path / "trace.json")[0] == 0


def test_a_trace_has_messages_with_the_times_of_costs(run, tmp_path):
    schedule = place_communication(one_f_one_b(4, 8))
    given = ("show", "1f1b", *SHAPE, "--lowered", "--format", "trace")
    assert run(*given)[1] == to_trace(schedule)
    assert run(*given, "--forward", 2)[1] == to_trace(simulate(schedule, Costs(forward=2)))
    (tmp_path / "trace.json").write_text(to_trace(one_f_one_b(4, 8)))
    known = run("show", tmp_path / "trace.json", "--lowered", "--format", "trace")
    assert known[0] and "--lowered changes nothing here" in known[2]


def test_costs_of_the_stages_of_a_model_count_for_replicas(run):
    both = run("simulate", "dualpipe", "--ranks", 2, "--microbatches", 4, "--forward", "1,2,1,2", "--json")
    assert (
        run("simulate", "dualpipe", "--ranks", 2, "--microbatches", 4, "--forward", "1,2", "--json") == both
        and both[0] == 0
    )


def test_schedules_that_are_made_for_costs_get_them_with_their_cap(run):
    costs = Costs(forward=(1, 3, 1), weight_share=1)
    given = ("--ranks", 3, "--microbatches", 6, "--cap", 2, "--forward", "1,3,1", "--weight-share", 1)
    assert run("show", "zero_bubble", *given, "--format", "csv")[1] == to_csv(
        zero_bubble(3, 6, cap=2, costs=costs)
    )
    built = zero_bubble(3, 6)
    assert built != zero_bubble(3, 6, costs=Costs()) and run(
        "show", "zero_bubble", "--ranks", 3, "--microbatches", 6
    )[1] == to_grid(built)
    assert run("show", "zero_bubble", "--ranks", 3, "--microbatches", 6, "--forward", 1, "--format", "csv")[
        1
    ] == to_csv(zero_bubble(3, 6, costs=Costs(forward=1)))


def test_parts_of_a_backward_per_stage(run):
    def parts(*options: object) -> tuple[float, float]:
        out = run("show", "zb_h1", "--ranks", 2, "--microbatches", 1, *options, "--format", "trace")[1]
        slices = {e["name"]: e["dur"] / 1000 for e in json.loads(out)["traceEvents"] if e["ph"] == "X"}
        return slices["0I0"], slices["1I0"], slices["0W0"], slices["1W0"]

    assert parts("--backward", "4,6") == (2, 3, 2, 3)
    assert parts("--backward", 4, "--forward", "1,3") == (2, 2, 2, 2)
    assert parts("--backward-input", "1,3", "--backward-weight", 3) == (1, 3, 3, 3)
    shape = "--ranks", 2, "--microbatches", 1
    code, _, err = run("simulate", "zb_h1", *shape, "--backward", "4,6", "--backward-weight", 1)
    assert code == 2 and "--backward and --backward-weight: give the whole backward" in err


def test_a_file_for_torch(run, tmp_path):
    assert run("show", "zbv", *SHAPE, "--for", "torch")[1] == to_torch_csv(zbv(4, 8))
    run("show", "zbv", *SHAPE, "--for", "torch", "--out", tmp_path / "zbv.csv")
    assert run("show", tmp_path / "zbv.csv", "--for", "torch", "--format", "csv")[1] == to_torch_csv(
        zbv(4, 8)
    )
    code, out, err = run("show", "dualpipe", *SHAPE, "--for", "torch")
    assert (code, out, err) == (
        2,
        "",
        "ppfunc show: error: dualpipe has 2 chains of stages, torch's runtime runs one\n",
    )


def test_check_refuses_more_activations_than_are_allowed(run, tmp_path):
    run("show", "gpipe", *SHAPE, "--format", "csv", "--out", tmp_path / "gpipe.csv")
    assert run("check", tmp_path / "gpipe.csv", "--max-activations", 8)[0] == 0
    code, out, err = run("check", tmp_path / "gpipe.csv", "--max-activations", 7)
    assert (code, out) == (1, "") and "0F7" in err and "7" in err


def test_check_builds_what_it_is_given_the_name_of(run):
    code, out, _ = run("check", "zb_h1", *SHAPE, "--max-activations", 4)
    assert code == 0 and out.startswith("zb_h1: proved")
    assert run("check", "zb_h1", *SHAPE, "--max-activations", 3)[0] == 1


def test_standard_input_is_a_file(run, monkeypatch):
    text = to_csv(zbv(4, 8))
    for words in (("check", "-"), ("show", "-", "--format", "csv"), ("simulate", "-", "--json")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code, out, err = run(*words)
        assert (code, err) == (0, "") and out
    assert json.loads(out)["makespan"] == simulate(zbv(4, 8)).makespan
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert run("check", "-") == (
        2,
        "",
        "ppfunc check: error: standard input: not text: byte 0 is not UTF-8\n",
    )


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_with_nothing_in_it_is_told_as_such(content, run, tmp_path):
    for form in ("csv", "json", "trace"):
        (tmp_path / f"empty.{form}").write_text(content)
        code, out, err = run("show", tmp_path / f"empty.{form}")
        assert (code, out) == (2, "") and f"empty.{form}: nothing is in it: expected a schedule" in err


def test_a_pipe_is_not_waited_for(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    mend = "a pipe or a device, expected a file; ppfunc reads standard input where its file is called -"
    for command in ("check", "show", "simulate", "compare"):
        code, out, err = run(command, tmp_path / "pipe")
        assert (code, out) == (2, "") and mend in err
    code, _, err = run("simulate", "1f1b", *SHAPE, "--costs", tmp_path / "pipe")
    assert code == 2 and "a pipe or a device" in err
    assert run("check", "/dev/zero")[0] == 2


def test_every_cost_changes_what_simulate_prints_or_is_refused(run):
    """One number other than the default, for schedules that have all instructions of compute between them."""
    changed = set()
    for name in ("1f1b", "zb_h1", "zbv", "dualpipev", "inference"):
        plain = run("simulate", name, *SHAPE, "--json")[1]
        for option in (o.replace("_", "-") for o in COSTS):
            more = (
                ("--bandwidth", 7) if option == "bytes" else ("--bytes", 7) if option == "bandwidth" else ()
            )
            code, out, err = run("simulate", name, *SHAPE, "--json", f"--{option}", 0.75, *more)
            if code == 0:
                assert out != plain, (name, option)
                changed.add(option)
            else:
                assert code == 2 and f"--{option} changes nothing here" in err, (name, option)
    # In files, such as the schedule of a trainer, or of a plan.
    tail = {"unshard", "reduce-tied", "reduce-grad", "step", "recompute", "checkpoint", "offload", "fetch"}
    assert changed == {o.replace("_", "-") for o in COSTS} - tail


def test_simulate_adds_parameters_up(run):
    sizes = ("--parameters", "5,6,7,8.5")
    printed = json.loads(run("simulate", "1f1b", *SHAPE, *sizes, "--json")[1])
    assert printed["memory"] == [9, 9, 9, 9.5] and printed["peak_activations"] == [4, 3, 2, 1]
    assert "\nmemory of each rank: 9 9 9 9.5\n" in run("simulate", "1f1b", *SHAPE, *sizes)[1]


def test_control_characters_of_names_are_escaped(run, tmp_path):
    document = json.loads(run("show", "1f1b", *SHAPE, "--format", "json")[1])
    document["name"] = "red\x1b[31m\x07"
    named, wrong, unknown = tmp_path / "x.json", tmp_path / "\x1b[31m.json", tmp_path / "\x1b[32m.json"
    named.write_text(json.dumps(document))
    wrong.write_text(json.dumps(document | {"placement": [9, 9, 9, 9]}))
    unknown.write_text(json.dumps(document | {"\x1b[31m": 1}))
    outputs = [
        run(*words)
        for words in (
            ("check", named),
            ("show", named, "--format", "svg"),
            ("show", "\x1b[31m"),
            ("compare", named),
            ("show", "1f1b", "--\x1b[31m", *SHAPE),
            ("\x1b[31m",),
            ("check", "/\x1b[31m"),
            ("check", wrong),
            ("compare", wrong),
            ("check", unknown),
            ("show", unknown, "--for", "torch"),
        )
    ]
    assert outputs[0][1].startswith("red\\x1b[31m\\x07: proved\n")
    for code, out, err in outputs:
        assert (out + err).replace("\n", "").isprintable() and code in (0, 1, 2) and out + err
    assert "\\u001b" in run("show", named, "--format", "json")[1]
    long = document | {"name": "\x1b" + "x" * 9000}
    named.write_text(json.dumps(long))
    assert len(run("show", named, "--format", "svg")[1]) > 9000  # escaped, not cut


def test_every_help_has_an_example_that_works(run, tmp_path, monkeypatch):
    """In this process, but those with a pipe."""
    command = f"{sys.executable} -m ppfunc"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    code, out, _ = run("--help")
    commands = re.findall(r"^    ([a-z]+)\b", out, re.MULTILINE)
    assert code == 0 and commands == "list show check simulate compare plan tune topology partition".split()
    (tmp_path / "train.py").write_text(TUNED)
    monkeypatch.chdir(tmp_path)
    for name in commands:
        code, out, err = run(name, "--help")
        examples = out.partition("\nexample:\n")[2].splitlines()
        assert (code, err) == (0, "") and examples
        for example in examples:
            assert re.search(rf"\bppfunc {name}\b", example)
            if "|" in example:
                line = re.sub(r"\bppfunc\b", command, example)
                done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
                done = done.returncode, done.stdout, done.stderr
            else:
                done = run(*shlex.split(example)[1:])
            code, out, err = done
            assert (code, err) == (0, "") and (out or "--out" in example), example


def test_the_version(run):
    assert re.fullmatch(r"ppfunc \d+\.\d+\.\d+\n", run("--version")[1])


def test_a_wrong_file_is_shown_or_refused(run, tmp_path):
    for what, text in broken_files().items():
        (tmp_path / "broken.csv").write_text(text)
        for form in ("grid", "svg", "trace", "json"):
            code, out, err = run("show", tmp_path / "broken.csv", "--format", form)
            assert (
                (code, err) == (0, "") and form == "grid" and out
                if code == 0
                else code == 1 and err and not out
            ), (what, form)


def test_a_picture_is_written_as_its_suffix_says(run, tmp_path):
    shape = ("1f1b", "--ranks", 2, "--microbatches", 2)
    for suffix, begin in ((".svg", "<svg"), (".csv", "0F0"), (".txt", "rank 0"), ("", "rank 0")):
        file = tmp_path / f"picture{suffix}"
        assert run("show", *shape, "--out", file)[0] == 0
        assert file.read_text().startswith(begin)
    for words, message in (
        (("--out", "picture.png"), "--out picture.png: expected a name that ends in .txt or .csv or .json"),
        (("--format", "csv", "--out", "picture.SVG"), "expected a name that ends in .csv or .txt"),
        (("--for", "torch", "--out", "picture.svg"), "expected a name that ends in .csv or .txt"),
    ):
        code, out, err = run("show", *shape, *words)
        assert (code, out) == (2, "") and message in err and not Path(words[-1]).exists()
