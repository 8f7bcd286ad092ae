"""The subcommands for topologies and partitions: their output and their errors."""

from __future__ import annotations

import json

import pytest


def test_topology_as_json(run):
    status, out, err = run("topology", "--axes", "pipe=2,data=2,model=2", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["world_size"] == 8
    assert found["coordinates"][3] == {"pipe": 0, "data": 1, "model": 1}
    assert found["groups"]["pipe"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(found["groups"]) == ["pipe", "data", "model"]


def test_topology_as_text(run):
    assert run("topology", "--axes", "pipe=1,data=2") == (
        0,
        (
            "pipe=1,data=2: 2 ranks\nrank 0: pipe=0, data=0\nrank 1: pipe=0, data=1\ngroups along pipe: [0]"
            " [1]\ngroups along data: [0, 1]\n"
        ),
        "",
    )


@pytest.mark.parametrize(
    ("words", "boundaries", "loads"),
    [
        (["--weights", "1,2,3", "--stages", "2"], [0, 2, 3], [3, 3]),
        (["--weights", "3", "--stages", "1"], [0, 1], [3]),
        (["--weights", "0.5,0.25,4", "--stages", "2"], [0, 2, 3], [0.75, 4.0]),
        (["--weights", "1,1,1,1", "--stages", "2", "--input-weight", "2"], [0, 1, 4], [3, 3]),
        (["--layers", "8", "--stages", "4"], [0, 1, 4, 7, 8], [2, 3, 3, 2]),
        (
            ["--layers", "8", "--stages", "4", "--input-weight", "0", "--output-weight", "0"],
            [0, 2, 4, 6, 8],
            [2] * 4,
        ),
        (["--layers", "2", "--stages", "3", "--allow-empty"], [0, 0, 2, 2], [1, 2, 1]),
    ],
)
def test_partition(run, words, boundaries, loads):
    status, out, err = run("partition", *words, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert (found["boundaries"], found["loads"]) == (boundaries, loads)
    status, out, err = run("partition", *words)
    assert (status, err) == (0, "")
    assert out.startswith(f"boundaries: {boundaries}\nloads: {loads}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["topology", "--axes", "pipe=2,data"], "cannot read 'pipe=2,data'"),
        (["topology", "--axes", "pipe=0"], "pipe = 0, expected an integer of at least 1"),
        (["topology", "--axes", f"pipe={10**20}"], f"{10**20} ranks are too many to print"),
        (["partition", "--layers", "1000000000", "--stages", "4"], "--layers: expected a whole number up to"),
        (["partition", "--layers", "4", "--stages", "1000000000"], "--stages: expected a whole number up to"),
        (
            ["partition", "--weights", "1,x", "--stages", "2"],
            "--weights: expected a number up to 1e100, or several apart by commas, got '1,x'",
        ),
        (["partition", "--weights", "1,2"], "required: --stages"),
        (["partition", "--stages", "2"], "give either --weights or --layers"),
        (["partition", "--weights", "1", "--layers", "2", "--stages", "1"], "give either --weights or"),
        (["topology", "--axes", "pipe=2,pipe=3"], "axes: got ('pipe', 'pipe'), expected different Python"),
        (
            ["partition", "--weights", "", "--stages", "1"],
            "--weights: expected a number up to 1e100, or several apart by commas, got ''",
        ),
        (["partition", "--weights", "1,2", "--stages", "3"], "sizes [1, 1, 0]"),
        (["partition", "--layers", "0", "--stages", "1"], "stage 0 would be empty"),
        (["partition", "--layers", "3", "--stages", "0"], "stages = 0, expected an integer of at least 1"),
    ],
)
def test_errors_are_one_line(run, words, message):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith(f"ppfunc {words[0]}: error: ")
    assert message in err and err.count("\n") == 1
