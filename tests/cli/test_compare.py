"""The command: compare."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    compare_schedules,
    one_f_one_b,
    place_communication,
    simulate,
    spread,
    to_csv,
    to_json,
    to_scatter,
    to_trace,
    with_parts,
    zb_h1,
    zbv,
)

SHAPE = ("--ranks", 4, "--microbatches", 8)
UNIT = """
Columns: time of a step; share that ranks wait, of it and of their span from first to last instruction; most activations of a
rank, in microbatches of its share; messages; copies of parameters; distance to the lower bound of the placement.
Costs are those of a rank's share of the model, also where it holds several stages; `ppfunc simulate` takes those of a stage, or with --per rank these.
"""  # noqa: E501


def test_without_names_all_schedules_are_compared(run):
    code, out, err = run("compare", *SHAPE)
    assert (code, out, err) == (0, f"{compare_schedules(4, 8)}\n{UNIT}", "")
    names = [
        line.split()[0] for line in out.removesuffix(UNIT).splitlines()[1:] if not line.startswith("left out")
    ]
    left_out = ("inference", "seq", "decode")  # without backward, and with a carry
    assert set(names) == {name for name in BUILDERS if not any(word in name for word in left_out)}


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


def test_graphs_from_files_with_costs_per_stage(run, tmp_path):
    """Output layers in parts of two builders, and an encoder spread, with costs of all stages."""
    times = (2, 2, 2, 2, 1, 1, 1, 1, 0.5)
    costs = Costs(forward=times, backward=times, activation=times)
    (tmp_path / "costs.json").write_text(costs.to_json())
    made = {f"{build.__name__}.json": with_parts(build(4, 8), costs=costs) for build in (one_f_one_b, zb_h1)}
    five = Costs(forward=(1, 1, 1, 1, 2), backward=(2, 2, 2, 2, 4))
    (tmp_path / "five.json").write_text(five.to_json())
    images = spread(one_f_one_b(4, 8), costs=five)
    for name, schedule in {**made, "images.json": images}.items():
        (tmp_path / name).write_text(to_json(schedule))
    files = [tmp_path / name for name in made]
    code, out, err = run("compare", *files, "--costs", tmp_path / "costs.json", "--format", "json")
    rows = {row["name"]: row for row in json.loads(out)["schedules"]}
    assert (code, err) == (0, "") and rows.keys() == made.keys()
    for name, schedule in made.items():
        assert rows[name]["makespan"] == simulate(schedule, costs).makespan and rows[name]["bound"] is None
        code, out, err = run("simulate", tmp_path / name, "--costs", tmp_path / "costs.json", "--json")
        assert (code, err, json.loads(out)["makespan"]) == (0, "", rows[name]["makespan"])
    code, out, _ = run(
        "compare", tmp_path / "images.json", "--costs", tmp_path / "five.json", "--format", "json"
    )
    time = simulate(images, five.of_stages(images.model_stages)).makespan
    assert code == 0 and json.loads(out)["schedules"][0]["makespan"] == time
    code, _, err = run("compare", *files, "1f1b", "--costs", tmp_path / "costs.json")
    assert code == 2 and "forward has 9 numbers, expected 4" in err


def test_the_picture(run, tmp_path):
    assert run("compare", *SHAPE, "--format", "svg", "--width", 1000)[1] == to_scatter(
        compare_schedules(4, 8), width=1000
    )
    assert run("compare", *SHAPE, "--format", "svg", "--out", tmp_path / "x.svg") == (0, "", "")
    assert ElementTree.parse(tmp_path / "x.svg").getroot().get("width") == "900"
    assert run("compare", *SHAPE, "1f1b", "--out", tmp_path / "y.svg") == (0, "", "")
    assert ElementTree.parse(tmp_path / "y.svg").getroot().tag.endswith("svg")


def test_a_wrong_file_exits_with_1(run, tmp_path):
    (tmp_path / "wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = run("compare", tmp_path / "wrong.csv")
    assert (code, out) == (1, "") and "1B0" in err


def test_schedules_of_slices_are_compared(run):
    code, out, _ = run("compare", *SHAPE, "--slices", 4, "1f1b", "seq1f1b")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:3]] == ["seq1f1b", "1f1b"]
    for names in ([], ["1f1b", "zbv"]):
        code, _, err = run("compare", *SHAPE, "--slices", 4, *names)
        assert code and "--slices changes nothing here" in err
