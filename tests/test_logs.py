"""Logs: rooms that are silent by default, with the rank in each record, and files of failures."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppfunc as pp
from ppfunc import _logs
from tests.models import dense, problem, squared

ROOT = Path(__file__).parents[1]
SCRIPT = """
import tempfile, torch, ppfunc as pp
from tests.models import dense, problem, squared
params, inputs, targets = problem(2, 4, b=2)
def fragile(params, x):
    if x.isnan().any():
        raise ValueError("not a number")
    return dense(params, x)
step = pp.value_and_grad([dense, fragile], squared, pp.gpipe(2, 4), engine=pp.engines.functional)
step(params, inputs, targets)
print("warm")
step(params, inputs, targets)
print("cold")
step(params, torch.cat([inputs] * 2), torch.cat([targets] * 2))
pp.plan(2, 4)
with tempfile.TemporaryDirectory() as folder:
    for n in range(3):
        pp.checkpoint.save(folder, {"w": torch.ones(2)}, keep=2, step=n)
    pp.checkpoint.load(folder, {"w": torch.ones(2)})
try:
    step(params, inputs * torch.nan, targets)
except pp.PipelineError:
    pass
"""


def output(code, **environment):
    """Return what a script writes to both streams."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("PPFUNC_")}
    process = subprocess.run(
        [sys.executable, "-u", "-c", code],
        env=here | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process.stdout


def test_nothing_is_shown_unless_asked():
    assert output(SCRIPT) == "warm\ncold\n"
    root = "import logging\nlogging.basicConfig(level=logging.WARNING)\n"
    assert output(root + SCRIPT) == "warm\ncold\n"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    flight = tmp_path_factory.mktemp("logs") / "failures.log"
    text = output(SCRIPT, PPFUNC_LOGS="all,+lowering,+control", PPFUNC_FLIGHT=str(flight), RANK="3")
    return text, flight.read_text()


@pytest.mark.parametrize(
    "record",
    [
        r"lowering: value_and_grad of Schedule\('gpipe', .*, stages \(0, 1\) here: the first call",
        r"lowering: lowered value_and_grad in \d+\.\d{3} s",
        r"lowering: compiled value_and_grad in \d+\.\d{3} s",
        r"lowering: calls of value_and_grad: \['0F0', '0F1', '1F0'",
        r"lowering: value_and_grad of .*: inputs is now float64\[4,4\], it was float64\[2,4\]",
        r"tracing: stage 1: made into programs in \d+\.\d{3} s",
        r"planning: searched for a plan of 2 ranks and 4 microbatches in ",
        r"planning: took Plan\(",
        r"checkpoint: wrote .*/step-2",
        r"checkpoint: removed .*/step-0, since the last 2 stay",
        r"checkpoint: read .*/step-2",
        r"control: value_and_grad has failed: rank 1 failed at 1F0, .*not a number",
        r"control: last instructions of ranks 0, 1: .*1F0, where it was at 1F0",
    ],
)
def test_rooms_tell_what_was_done_with_the_rank(shown, record):
    assert re.search(rf"^\[rank3\] \d\d:\d\d:\d\d ppfunc\.{record}", shown[0], re.MULTILINE), shown[0]


def test_a_warm_step_logs_nothing(shown):
    assert "\nwarm\ncold\n" in shown[0]


def test_failures_are_in_the_file_that_the_environment_names(shown):
    lines = shown[1].splitlines()
    assert len(lines) == 2 and all(line in shown[0] for line in lines)
    assert "failed at 1F0" in lines[0] and "last instructions" in lines[1]


def test_a_file_of_failures_shows_nothing_elsewhere(tmp_path):
    """Neither to handlers of the user, nor to those of the rooms that are asked for."""
    flight = tmp_path / "failures.log"
    root = "import logging\nlogging.basicConfig(level=logging.WARNING)\n"
    assert output(root + SCRIPT, PPFUNC_FLIGHT=str(flight)) == "warm\ncold\n"
    assert len(flight.read_text().splitlines()) == 2
    told = output(SCRIPT, PPFUNC_FLIGHT=str(flight), PPFUNC_LOGS="planning")
    assert "ppfunc.planning" in told and "ppfunc.control" not in told
    assert len(flight.read_text().splitlines()) == 4


@pytest.mark.parametrize("rank", ["", "first"])
def test_a_rank_that_is_no_number_does_not_stop_the_log(rank):
    told = output("import ppfunc as pp; pp.plan(2, 4)", PPFUNC_LOGS="planning", RANK=rank)
    assert re.findall(r"^\[rank0\] .* ppfunc.planning: (\w+)", told, re.MULTILINE) == ["searched", "took"]


def test_a_room_that_does_not_exist_is_refused_by_name():
    told = output("import ppfunc as pp; pp.plan(2, 4)", PPFUNC_LOGS="lowering,+plannin")
    assert "ValueError: PPFUNC_LOGS: got 'plannin', expected 'lowering' or" in told
    assert "did you mean 'planning'?" in told


def test_a_file_of_failures_that_cannot_be_written_is_refused_by_name(tmp_path):
    told = output("import ppfunc as pp; pp.plan(2, 4)", PPFUNC_FLIGHT=str(tmp_path / "none" / "failures.log"))
    assert "ValueError: PPFUNC_FLIGHT: got '/" in told and "file to write: No such file" in told


def test_a_room_shows_what_it_is_asked_for_alone():
    told = output("import ppfunc as pp; pp.plan(2, 4)", PPFUNC_LOGS="planning")
    assert [line.split()[2] for line in told.splitlines()] == ["ppfunc.planning:"] * 2
    assert output("import ppfunc as pp; pp.plan(2, 4)", PPFUNC_LOGS="lowering, control") == ""


def test_every_room_is_used_and_every_logger_is_a_room():
    used = re.findall(r'_logs\.room\("(\w+)"\)', "".join(p.read_text() for p in ROOT.glob("ppfunc/**/*.py")))
    assert {*used} == {*_logs.ROOMS}


def test_handlers_of_the_user_get_records_with_the_rank(caplog):
    params, inputs, targets = problem(2, 4, b=2)
    with caplog.at_level(logging.INFO, "ppfunc"):
        pp.value_and_grad([dense] * 2, squared, pp.gpipe(2, 4))(params, inputs, targets)
    assert {record.name for record in caplog.records} == {"ppfunc.lowering", "ppfunc.tracing"}
    assert all(record.rank == 0 for record in caplog.records)


def failing(rank, size, file):
    """Fail on rank 1, at its second forward, with a log of failures."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(rank)s %(message)s"))
    logger, opened = logging.getLogger("ppfunc.control"), []
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    transport_log = logging.getLogger("ppfunc.transport")
    listener = logging.Handler()
    listener.emit = lambda record: opened.append(record.getMessage())
    transport_log.addHandler(listener)
    transport_log.setLevel(logging.INFO)
    params, inputs, targets = problem(2, 4, b=2)

    def fragile(weights, x):
        if rank == 1 and x.isnan().any():
            raise ValueError("not a number")
        return dense(weights, x)

    try:
        with pp.P2P(timeout=60) as transport:
            step = pp.value_and_grad(
                [fragile] * 2, squared, pp.one_f_one_b(2, 4), transport, engine=pp.engines.functional
            )
            step({rank: params[rank]}, inputs, targets)
            broken = inputs.clone()
            broken[2:4] = torch.nan
            with pytest.raises(pp.PipelineError):
                step({rank: params[rank]}, broken, targets)
    finally:
        for each in (logger, transport_log):
            each.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        transport_log.removeHandler(listener)
    return opened


def test_every_rank_says_where_it_was_when_one_failed(two, tmp_path):
    opened = two(failing, tmp_path / "failures.log")
    lines = (tmp_path / "failures.log").read_text().splitlines()
    assert sorted(line.split()[0] for line in lines) == ["0", "0", "1", "1"]
    assert sum("rank 1 failed at 1F" in line for line in lines) == 2
    last = {int(line[0]): line for line in lines if "last instructions" in line}
    assert (
        last[1].startswith("1 last instructions of rank 1: 1RECV_F0+1F0 ") and "where it was at 1F" in last[1]
    )
    assert last[0].startswith("0 last instructions of rank 0: 0F0 0SEND_F0+0F1")
    for rank, texts in enumerate(opened):
        assert any(re.match(r"opened F/0-1 among ranks \[0, 1\]: ", text) for text in texts), (rank, texts)
        assert texts[-1].startswith("ended ")
