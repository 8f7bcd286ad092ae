"""The command: compare."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    compare_schedules,
    place_communication,
    simulate,
    to_csv,
    to_scatter,
    to_trace,
    zbv,
)

SHAPE = ("--ranks", 4, "--microbatches", 8)
UNIT = """
Costs are those of a rank's share of the model, also where it holds several stages; `ppfunc simulate` takes those of a stage, or with --per rank these.
"""  # noqa: E501


def test_without_names_all_schedules_are_compared(run):
    code, out, err = run("compare", *SHAPE)
    assert (code, out, err) == (0, f"{compare_schedules(4, 8)}\n{UNIT}", "")
    names = [
        line.split()[0] for line in out.removesuffix(UNIT).splitlines()[1:] if not line.startswith("left out")
    ]
    assert set(names) == {name for name in BUILDERS if "inference" not in name}


def test_names_and_files_with_costs(run, tmp_path):
    (tmp_path / "mine.csv").write_text(to_csv(place_communication(zbv(4, 8))))
    (tmp_path / "trace.json").write_text(to_trace(zbv(4, 8)))
    costs = Costs(forward=1.5, communication=0.1)
    files = (tmp_path / "mine.csv", tmp_path / "trace.json")
    options = ("--forward", 1.5, "--communication", 0.1, "--cap", 6)
    code, out, err = run("compare", "ZBV", *files, *options, "--format", "json")
    found = json.loads(out)
    rows = {row["name"]: row for row in found["schedules"]}
    assert (code, err, found["ranks"], found["microbatches"], found["cap"], found["left_out"]) == (
        0,
        "",
        4,
        8,
        6,
        {},
    )
    assert rows.keys() == {"zbv", "mine.csv", "trace.json"}
    expected = simulate(zbv(4, 8), costs.per_rank(zbv(4, 8)))
    for name in ("zbv", "mine.csv", "trace.json"):
        assert rows[name]["makespan"] == expected.makespan and rows[name]["bubble"] == expected.bubble


def test_costs_of_a_file_are_those_of_the_model(run, tmp_path):
    costs = Costs(forward=(1, 2, 1, 1), backward=(2, 4, 2, 2), bytes=(5, 5, 5, 0), bandwidth=10)
    (tmp_path / "costs.json").write_text(costs.to_json())
    code, out, _ = run("compare", *SHAPE, "--costs", tmp_path / "costs.json")
    assert (code, out) == (0, f"{compare_schedules(4, 8, costs=costs)}\n{UNIT}")


def test_the_picture(run, tmp_path):
    assert run("compare", *SHAPE, "--format", "svg", "--width", 1000)[1] == to_scatter(
        compare_schedules(4, 8), width=1000
    )
    assert run("compare", *SHAPE, "--format", "svg", "--out", tmp_path / "x.svg") == (0, "", "")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().get("width") == "900"
    assert run("compare", *SHAPE, "1f1b", "--out", tmp_path / "y.svg") == (0, "", "")
    assert ElementTree.parse(tmp_path / "y.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--ranks is missing: say how many there are, or name a file"),
        (("--ranks", 4), "--microbatches is missing"),
        ((*SHAPE, "nope"), "unknown schedule 'nope': expected one of gpipe"),
        ((*SHAPE, "/nowhere/at/all"), "no such file: /nowhere/at/all"),
        ((*SHAPE, "1f1b", "inference"), "one has a backward, the other has none"),
        ((*SHAPE, "--width", 1000), "--width is for an svg: leave it out of --format table"),
        ((*SHAPE, "1f1b", "--chunks", 3), "--chunks changes nothing"),
        ((*SHAPE, "--chunks", 0), "chunks = 0, expected"),
        ((*SHAPE, "1f1b", "--forward", "1,2,3"), "costs for 3 stages are not those of the"),
        (
            ("--ranks", 0, "--microbatches", 2),
            "ranks = 0, expected an integer of at least 1: pass ranks=1 or more",
        ),
        (("--ranks", 3, "--microbatches", 3, "dualpipe"), "ranks = 3, expected an even number"),
        (("--ranks", 4, "--microbatches", 7, "1f1b", "dualpipe"), "dualpipe: microbatches = 7, expected an"),
        ((*SHAPE, "--format", "tabel"), "invalid choice: 'tabel' (choose from 'table'"),
        (
            (*SHAPE, "--format", "table", "--out", "x.svg"),
            "--out x.svg: expected a name that ends in .txt, for --format table",
        ),
    ],
)
def test_a_question_that_cannot_be_answered_exits_with_2(arguments, message, run):
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_wrong_file_exits_with_1(run, tmp_path):
    (tmp_path / "wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = run("compare", tmp_path / "wrong.csv")
    assert (code, out) == (1, "") and "1B0" in err
