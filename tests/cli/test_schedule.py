"""The command: list, show, check, simulate."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

from ppfunc.cli import main
from ppfunc.schedule import BUILDERS, from_json, place_communication, to_csv

NAMES = (
    "gpipe 1f1b inference data_parallel interleaved_1f1b looped_bfs zb_h1 zb_h2 interleaved_zb zero_bubble zbv zbv_greedy v_half v_min "
    "dualpipe dualpipev deepspeed_train deepspeed_inference"
).split()


@pytest.fixture
def run(capsys):
    """Run the command: exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return call


def test_list_names_every_schedule_with_its_options_and_constraints(run):
    code, out, _ = run("list")
    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith(" ")] == NAMES
    assert "[--chunks V, else 2]  stages per rank v; rank r holds stages r, r + p, ...\n    [--group N] " in out
    assert "--microbatches M      number of microbatches of both directions together, even, at least 2p." in out
    assert "[--order source|head, else source]  source or head." in out.replace('"', "")
    assert "refused: an argument below 1, or a group with which the pipeline would stall." in out


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_shown_in_every_form_and_accepted_by_check(name, run, tmp_path):
    shape = ("--ranks", 4, "--microbatches", 8)
    for form in ("grid", "csv", "steps", "json", "svg", "trace"):
        for lowered in ((), ("--lowered",)):
            file = tmp_path / f"{len(lowered)}.{form}"
            code, out, err = run("show", name, *shape, "--format", form, *lowered, "--out", file)
            assert (code, out, err) == (0, "", "")
            if form in ("csv", "json"):
                code, out, err = run("check", file)
                assert (code, err) == (0, "")
                assert "digest" in out
    compute = {cell.strip("()") for row in csv.reader((tmp_path / "0.csv").read_text().splitlines()) for cell in row if cell}
    assert not any(word in cell for cell in compute for word in ("SEND", "RECV", "LOAD", "@", "STEP", "REDUCE"))
    assert from_json((tmp_path / "0.json").read_text()) == BUILDERS[name](4, 8)
    assert json.loads((tmp_path / "0.trace").read_text())["traceEvents"]
    assert ElementTree.parse(tmp_path / "0.svg").getroot().tag.endswith("svg")


def test_a_grid_is_refused_by_its_format(run, tmp_path):
    for form, name in (("grid", "1f1b"), ("steps", "deepspeed_train")):
        run("show", name, "--ranks", 2, "--microbatches", 2, "--format", form, "--out", tmp_path / form)
        code, _, err = run("check", tmp_path / form)
        assert code == 2 and "a grid or a list of steps, which only people read: expected CSV or JSON" in err


@pytest.mark.parametrize("name", ["1F1B", "one_f_one_b", "Schedule1F1B"])
def test_names_are_taken_in_any_spelling(name, run):
    assert run("show", name, "--ranks", 2, "--microbatches", 3) == run("show", "1f1b", "--ranks", 2, "--microbatches", 3)


def test_the_options_of_a_schedule_reach_it(run):
    _, out, _ = run("show", "looped_bfs", "--ranks", 2, "--microbatches", 1, "--chunks", 3, "--format", "csv")
    assert out == "0F0,2F0,4F0,4B0,2B0,0B0\n1F0,3F0,5F0,5B0,3B0,1B0\n"
    _, out, _ = run("show", "deepspeed_train", "--ranks", 2, "--microbatches", 1, "--order", "head", "--format", "steps")
    assert out.splitlines()[:3] == ["rank 0", "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)", "SendActivation(buffer_id=0)"]
    assert out.splitlines()[-1].endswith("ReduceTiedGrads() ReduceGrads() OptimizerStep()")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "2f2b", "--ranks", 2, "--microbatches", 2), "unknown schedule '2f2b': expected one of gpipe, 1f1b"),
        (("show", "zbh1v", "--ranks", 2, "--microbatches", 2), "did you mean 'zb_h1'?"),
        (("show", "gpipe", "--ranks", 2, "--microbatches", 2, "--chunks", 2), "gpipe takes no --chunks: its options are --ranks"),
        (("show", "gpipe", "--ranks", 0, "--microbatches", 2), "ranks = 0, expected"),
        (("show", "dualpipe", "--ranks", 3, "--microbatches", 8), "ranks = 3"),
        (("show", "gpipe", "--ranks", 2), "--microbatches"),
        (("show", "gpipe", "--ranks", 2, "--microbatches", 2, "--format", "png"), "invalid choice"),
        (("show", "gpipe", "--ranks", 2, "--microbatches", 2, "--out", "/nowhere/at/all"), "No such file"),
        (("simulate", "gpipe", "--ranks", 2), "gpipe needs --microbatches"),
        (("simulate", "nothing.csv"), "neither a file nor a schedule"),
        (("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--forward", "nan"), "forward is nan, expected"),
        (("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--forward", "-1"), "forward is -1, expected"),
        (("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--forward", "x"), "--forward"),
        (("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--weight-share", 2), "weight_share is 2, expected at most 1"),
        (("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--forward", "1.x"), "invalid number value: '1.x'"),
        (
            ("simulate", "gpipe", "--ranks", 2, "--microbatches", 2, "--backward", 1, "--backward-input", 2),
            "--backward-input 2 is a part of --backward 1: expected at most that",
        ),
        (("check", "/nowhere/at/all"), "No such file"),
        (("check", "/"), "Is a directory"),
        ((), "required"),
    ],
)
def test_a_question_that_cannot_be_answered_exits_with_2(arguments, message, run):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err and "Traceback" not in err


def broken_files() -> dict[str, str]:
    """Files that are wrong, each in one way, made from files that are right."""
    compute = to_csv(BUILDERS["1f1b"](3, 4))
    lowered = to_csv(place_communication(BUILDERS["1f1b"](3, 4)))
    twice = to_csv(BUILDERS["dualpipe"](2, 4))
    apart = to_csv(BUILDERS["zb_h1"](3, 4))
    chunks = to_csv(place_communication(BUILDERS["interleaved_1f1b"](2, 4)))
    return {
        "missing forward": compute.replace("1F2,", ""),
        "missing backward": compute.replace(",1B3", ""),
        "missing weight gradient": apart.replace("1W2", ""),
        "missing rank": "".join(compute.splitlines(keepends=True)[:2])[:-4] + "\n",
        "missing middle rank": "".join(compute.splitlines(keepends=True)[::2]),
        "missing send": lowered.replace("0SEND_F1,", ""),
        "missing receive": lowered.replace("1RECV_F1,", ""),
        "duplicated forward": compute.replace("1F2", "1F2,1F2"),
        "duplicated weight gradient": apart.replace("1W2", "1W2,1W2"),
        "duplicated send": lowered.replace("0SEND_F1", "0SEND_F1,0SEND_F1"),
        "duplicated receive": lowered.replace("1RECV_F1", "1RECV_F1,1RECV_F1"),
        "duplicated rank": compute + compute.splitlines()[2] + "\n",
        "swapped forward and backward": compute.replace("2F0,2B0", "2B0,2F0"),
        "swapped parts": apart.replace("1I0", "x").replace("1W0", "1I0").replace("x", "1W0"),
        "swapped sends": lowered.replace("0SEND_F0", "x").replace("0SEND_F1", "0SEND_F0").replace("x", "0SEND_F1"),
        "swapped receives": lowered.replace("1RECV_F0", "x").replace("1RECV_F1", "1RECV_F0").replace("x", "1RECV_F1"),
        "swapped receives of chunks": chunks.replace("1RECV_F0", "x").replace("3RECV_F0", "1RECV_F0").replace("x", "3RECV_F0"),
        "send before its forward": lowered.replace("0F0,0SEND_F0", "0SEND_F0,0F0"),
        "receive after its forward": lowered.replace("1RECV_F0,1F0", "1F0,1RECV_F0"),
        "swapped ranks": lowered.replace("0F1", "x").replace("1F1", "0F1").replace("x", "1F1"),
        "misplaced forward": compute.replace("1F2,", "").replace("2F0", "1F2,2F0"),
        "misplaced send": lowered.replace("0SEND_F1,", "").replace("2F0", "0SEND_F1,2F0"),
        "misplaced chain": twice.replace("0F0", "0F3"),
        "cycle": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "cycle of messages": "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
        "stage out of range": compute.replace("1F2", "7F2"),
        "stage far out of range": compute.replace("1F2", "1000000000000F2"),
        "microbatch out of range": compute.replace("1F2", "1F4"),
        "forwards and backwards far out of range": compute.replace("1F2", "1F99").replace("1B2", "1B99"),
        "backward far out of range": compute.replace("1B2", "1B1000000000000000000"),
        "chain far out of range": twice.replace("2F3", "2F1000000"),
        "microbatch far out of range": compute.replace("1F2", "1F1000000000000000000"),
        "message out of range": lowered.replace("0SEND_F1", "0SEND_F9"),
        "message of a stage out of range": lowered.replace("0SEND_F1", "1000000000000SEND_F1"),
        "message over the end": lowered.replace("2F0", "2SEND_F0,2F0"),
        "peer out of range": lowered.replace("0SEND_F1", "0SEND_F1>1000000000000"),
        "reduction twice": compute.replace("2B3", "2B3,2STEP,2STEP"),
        "empty row": compute + "\n",
        "quadratic": ",".join(f"{n}F0,0F{n}" for n in range(5000)) + "\n",
    }


@pytest.mark.parametrize("what", broken_files())
def test_check_refuses_broken_files_with_rank_position_and_instruction(what, run, tmp_path):
    (tmp_path / "broken.csv").write_text(broken_files()[what])
    start = time.perf_counter()
    code, out, err = run("check", tmp_path / "broken.csv")
    assert time.perf_counter() - start < 1
    assert (code, out) == (1, "")
    assert "rank " in err and len(err) < 3000
    assert "step " in err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"0F0,0B0junk\n",
        b"0F0,0SEND_X0\n",
        b"hello\n",
        b"\xef\xbb\xbf0F0,0B0\n",
        b"\x00" * 1000,
        bytes(range(256)),
        b"\x89PNG\r\n\x1a\n" + bytes(1000),
        b"9" * 10**6 + b"F0\n",
        b"0F" + b"9" * 10**6 + b"\n",
        b"x" * 10**6,
        b'"' * 9999,
        b'"0F0\n0B0',
        b"(" * 10**5,
        b"0F0 0B0\n",
        b"{",
        b'{"format": "ppfunc.schedule", "version": 99}',
        b"{" * 10**5,
        b"[" * 10**5,
    ],
)
def test_check_of_what_is_no_schedule_exits_with_2(content, run, tmp_path):
    (tmp_path / "garbled.csv").write_bytes(content)
    start = time.perf_counter()
    code, out, err = run("check", tmp_path / "garbled.csv")
    assert time.perf_counter() - start < 1
    assert (code, out) == (2, "")
    assert len(err) < 700 and "Traceback" not in err


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
    file.write_text("0F0,0B0,0F1\n")
    assert run("simulate", file)[0] == 1


def test_simulate_in_words(run):
    code, out, _ = run("simulate", "gpipe", "--ranks", 2, "--microbatches", 2)
    assert code == 0
    assert "makespan          9" in out and "peak activations  2 2" in out


def test_no_torch_is_imported_and_a_closed_pipe_is_no_error():
    script = (
        "import sys, io\nfrom ppfunc.cli import main\n"
        "code = main('show 1f1b --ranks 4 --microbatches 4 --lowered --format csv'.split())\n"
        "main('simulate 1f1b --ranks 4 --microbatches 4'.split())\n"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0
    command = [sys.executable, "-m", "ppfunc", "show", "gpipe", "--ranks", "64", "--microbatches", "256", "--format", "csv"]
    # Without a buffer Python would not notice that it wrote only a part.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_whole_pipeline_of_text_is_one_csv_row_per_rank(run):
    _, out, _ = run("show", "gpipe", "--ranks", 2, "--microbatches", 2, "--lowered", "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert [cell for cell in rows[1] if "RECV_F" in cell] == ["1RECV_F0", "1RECV_F1"]
