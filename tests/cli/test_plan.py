"""The command: plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ppfunc.schedule import check, read_schedule, simulate

SMALL = "--ranks 4 --microbatches 8 --effort 0.05".split()


def test_one_line_says_value_bound_gap_and_what_binds(run):
    code, out, err = run(
        "plan", *SMALL, "--cap", 4, "--weight-share", 1, "--placement", "loop", "--objective", "span"
    )
    assert (code, err) == (0, "")
    figures = "span 27, bound 27 (work, rank 0), optimal, bubble 11.1%, memory 4"
    assert out == f"loop of 1: {figures}; zb_h1; in the units of the costs, per stage\n"


def test_json_has_all_figures(run):
    _, out, _ = run(
        "plan", *SMALL, "--cap", 4, "--placement", "any", "--chunks", "1..2", "--forward", 1.5, "--json"
    )
    figures = json.loads(out)
    names = "objective value bound gap binds span makespan bubble span_bubble peak_activations placement"
    assert list(figures) == [*names.split(), "found", "costs"]
    assert figures["objective"] == "makespan" and figures["value"] == figures["makespan"] >= figures["bound"]
    assert max(figures["peak_activations"]) <= 4 and len(figures["placement"]) in (4, 8)


@pytest.mark.parametrize("suffix", ["csv", "json", "svg"])
def test_the_schedule_is_written_as_its_suffix_says(suffix, run, tmp_path):
    file = tmp_path / f"plan.{suffix}"
    options = ("--cap", 6, "--placement", "v", "--chunks", 3, "--forward", "1,2,1,1,1,1,1,1,1,1,1,3")
    code, out, _ = run("plan", *SMALL, *options, "--out", file, "--json")
    assert code == 0
    if suffix == "svg":
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    else:
        schedule = read_schedule(file)
        check(schedule)
        assert schedule.placement == tuple(json.loads(out)["placement"]) and simulate(schedule).makespan > 0


def test_costs_come_from_a_file_or_from_options(run, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text('{"forward": [1, 1, 2, 1], "activation": 100, "parameters": 50}')
    code, out, _ = run("plan", *SMALL, "--costs", file, "--cap", 450, "--json")
    assert code == 0 and max(json.loads(out)["peak_activations"]) <= 400
    assert "give the costs in one place" in run("plan", *SMALL, "--costs", file, "--forward", 2)[2]
    plan = json.loads(out)
    file.write_text(out)  # the costs of a plan are among what it prints
    again = json.loads(run("plan", *SMALL, "--costs", file, "--cap", 450, "--json")[1])
    assert again["costs"] == plan["costs"]
    file.write_text('{"forwards": 1}')
    assert f"{file}: got {{'forwards': 1}}, expected" in run("plan", *SMALL, "--costs", file)[2]


@pytest.mark.parametrize(
    ("options", "per"),
    [
        ((), ("--per", "rank")),
        (("--cap", 3, "--chunks", "2..3"), ("--per", "rank")),
        (("--cap", 12, "--placement", "v"), ("--per", "stage")),
        (("--cap", 12, "--placement", "v", "--per", "rank"), ("--per", "rank")),
    ],
)
def test_what_a_plan_takes_is_what_its_file_takes_by_the_same_costs(options, per, run, tmp_path):
    """Also where costs are of a rank, and where the plan recomputes nothing."""
    file, costs = tmp_path / "plan.csv", ["--forward", 3, "--backward", 5, "--communication", 0.25]
    costs += ["--recompute", 3, "--checkpoint", 0.125] if options else []
    figures = json.loads(run("plan", *SMALL, *options, *costs, "--json", "--out", file)[1])
    for command in ("simulate", *(("compare",) if "rank" in per else ())):
        given = (*per, *costs, "--json") if command == "simulate" else (*costs, "--format", "json")
        code, out, err = run(command, file, *given)
        assert (code, err) == (0, "")
        timed = json.loads(out)
        assert (timed if command == "simulate" else timed["schedules"][0])["makespan"] == figures["makespan"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--forward", "1,2,1,1", "--chunks", 2, "--per", "rank"), "forward is (1, 2, 1, 1), expected one"),
        (("--cap", 4, "--fetch", 1), "--fetch changes nothing without --offload: give that too"),
        (("--cap", 4, "--checkpoint", 0.1), "--checkpoint changes nothing without --recompute"),
        (("--recompute", 1), "--recompute changes nothing without --cap"),
        (("--cap", 0.5), "one microbatch and the parameters of rank 0 take 1"),
        (("--out", "plan.png"), "--out plan.png: expected a name that ends in .csv or .json or .svg"),
        (("--out", "/nowhere/at/all.csv"), "no directory /nowhere/at, make it first"),
        (("--chunks", "two"), "expected a whole number or a range such as 1..4, got 'two'"),
        (("--chunks", "1.."), "expected a whole number or a range such as 1..4, got '1..'"),
        (("--forward", "1,,2"), "apart by commas, got '1,,2'"),
        (("--costs", "/nowhere/at/all"), "No such file"),
    ],
)
def test_a_question_that_cannot_be_answered_exits_with_2(options, message, run):
    code, out, err = run("plan", *SMALL, *options)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def cpu_seconds(process: int) -> float:
    """Return the seconds that a process has computed."""
    text = Path(f"/proc/{process}/stat").read_text()
    return sum(map(int, text.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_returns_the_best_so_far():
    command = (
        "plan --ranks 8 --microbatches 24 --cap 8 --placement v --weight-share 1 --backward-weight 0.5"
        " --effort 1000 --json".split()
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-m", "ppfunc", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        while cpu_seconds(process.pid) < 2:  # to import and to find a first plan takes a third of it
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["gap"] > 0
