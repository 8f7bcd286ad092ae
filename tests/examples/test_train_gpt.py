"""The example trains: alone, under every kind of launch, with one loss curve for all of them."""

import importlib
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.forks import forked
from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--width 16 --heads 2 --layers 4 --context 16 --batch 8 --microbatches 4 --steps 6".split()


@pytest.fixture
def example(monkeypatch):
    """Modules of the examples by name, as a script beside them would import them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("RANK", raising=False)
    return importlib.import_module


@pytest.fixture
def environment():
    """The environment of a process that is nobody's rank."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(EXAMPLES.parent), inherited.get("PYTHONPATH", "")]
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def command_of(*options):
    """The command of a small run, of which a later option counts."""
    return [sys.executable, EXAMPLES / "train_gpt.py", *SMALL, *options]


def finished(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def trained(example, monkeypatch, tmp_path):
    """A function from options to the result of a small run in this process."""
    train_gpt, launch, pp = example("train_gpt"), example("launch"), example("ppfunc")
    monkeypatch.setattr(train_gpt, "VALIDATION_BATCHES", 2)
    monkeypatch.setattr(train_gpt, "SAMPLE", 2)

    def run(*more):
        options = train_gpt.parse_options([*SMALL, "--out", str(tmp_path), *more])
        return train_gpt.train(options, launch.Place(pp.InProcess(), torch.device("cpu")))

    threads = torch.get_num_threads()
    launch.one_thread()
    yield run
    torch.set_num_threads(threads)


def test_same_curve_whatever_the_schedule_and_the_stages(trained):
    expected = trained("--stages", "1")
    for more in (
        "--stages 2",
        "--stages 4 --schedule gpipe --engine functional",
        "--stages 3 --schedule zb_h1 --partition uniform",
        "--stages 4 --schedule interleaved_1f1b --chunks 2",
        "--stages 2 --schedule looped_bfs",
        "--stages 2 --schedule dualpipe",
        "--stages 4 --schedule deepspeed_train",
        "--schedule data_parallel --stages 1",
        "--stages 2 --microbatches 2",
    ):
        got = trained(*more.split())
        assert got.losses == pytest.approx(expected.losses, rel=1e-6), more
        assert got.validation == pytest.approx(expected.validation, rel=1e-6), more


def test_precisions_and_clipping_train_too(trained):
    tied = trained("--stages", "1", "--tied")
    assert trained("--stages", "3", "--tied").losses == pytest.approx(tied.losses, rel=1e-6)
    for precision in ("bfloat16", "float16"):
        got = trained("--stages", "3", "--tied", "--precision", precision)
        late = [tied.losses[0], *tied.losses]  # a scale that is too large for this text skips an update
        for loss, *wanted in zip(got.losses, tied.losses, late, strict=False):
            near = [loss == pytest.approx(want, rel=2e-2) for want in wanted]
            assert near[0] or (precision == "float16" and near[1]), (precision, got.losses)
        assert got.losses != pytest.approx(tied.losses, rel=1e-6)
    clipped = trained("--stages", "2", "--tied", "--clip", "1e-6")
    assert clipped.losses[0] == pytest.approx(tied.losses[0], rel=1e-6)
    assert clipped.losses[-1] != pytest.approx(tied.losses[-1], rel=1e-2)


def test_a_grid_of_processes_has_the_curve_of_one(trained, environment, tmp_path, request):
    """Of four, or of eight: those of one data rank are cut in another test."""
    options = "--tied --clip 0.5 --microbatches 2".split()
    expected = trained("--stages", "1", *options)
    grid = "--stages 2 --tensor 2".split()
    grid += "--replicas 2 --shard params".split() if request.config.getoption("--large") else []
    done = finished(command_of(*options, *grid, "--out", tmp_path), environment)
    assert done.returncode == 0, done.stderr[-2000:]
    written = losses_in(tmp_path)
    assert written == pytest.approx(expected.losses, rel=1e-5)
    first, last = (float(x) for x in done.stdout.split("loss: ")[1].split(" at last")[0].split(" at first, "))
    assert (written[0], written[-1]) == pytest.approx((first, last), abs=1e-3)
    assert first == pytest.approx(5.5, abs=0.2) and last < first - 0.1
    for picture in ("schedule.svg", "measured.svg"):
        assert "rank 1" in (tmp_path / picture).read_text()
    assert "measured and on paper" in done.stdout and "\nrank " in done.stdout
    assert "A sample" in done.stdout and "polyline" in (tmp_path / "loss.svg").read_text()


def losses_in(folder):
    return [float(line.split(",")[1]) for line in (folder / "loss.csv").read_text().splitlines()]


def test_a_run_goes_on_from_a_checkpoint_on_another_grid(trained, fresh, store_port, tmp_path):
    expected = trained("--stages", "1", "--steps", "8")
    saving = ["--steps", "8", "--save", str(tmp_path / "runs"), "--every", "2"]
    assert trained("--stages", "2", *saving).losses == pytest.approx(expected.losses, rel=1e-6)
    for step in (8, 6):
        shutil.rmtree(tmp_path / "runs" / f"step-{step}")
    again = trained("--stages", "2", *saving, "--resume")
    assert again == trained("--stages", "2", "--steps", "8")  # to the bit
    shutil.rmtree(tmp_path / "runs" / "step-8")
    shutil.rmtree(tmp_path / "runs" / "step-6")
    grid = "--resume --stages 2 --replicas 2 --shard params".split()
    options = *SMALL, *saving, *grid, "--out", str(tmp_path)
    fresh(4)(run_script, store_port, EXAMPLES / "train_gpt.py", *options, timeout=200)
    assert losses_in(tmp_path) == pytest.approx(expected.losses, rel=1e-5)
    assert losses_in(tmp_path)[:4] == again.losses[:4]
    assert trained("--stages", "4", *saving, "--resume").losses == losses_in(tmp_path)


def killed_once(seen, checkpoint, *options):
    """A rank as torchrun starts it; the second of the first two is killed once there is a checkpoint."""
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    (seen / f"{rank} {restarts}").touch()
    if (rank, restarts) == ("1", "0"):
        threading.Thread(target=kill_at, args=(checkpoint,), daemon=True).start()
    sys.argv, sys.path[:0] = ["train_gpt.py", *options], [str(EXAMPLES)]
    runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")


def kill_at(path):
    while not path.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_torchrun_goes_on_after_a_rank_was_killed(trained, tmp_path):
    """In processes of a server, which have imported torch."""
    steps, seen = ["--steps", "40", "--every", "2"], tmp_path / "seen"
    seen.mkdir()
    expected, runs = trained("--stages", "2", *steps), str(tmp_path / "runs")
    options = *SMALL, *steps, "--save", runs, "--resume", "--out", str(tmp_path)
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1, monitor_interval=0.1,
        start_method=forked()._name,
    )  # fmt: skip
    names = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
    handlers = [signal.getsignal(name) for name in names]
    try:
        elastic_launch(config, killed_once)(seen, tmp_path / "runs" / "step-2", *options)
    finally:
        for name, handler in zip(names, handlers, strict=True):
            signal.signal(name, handler)
    assert {path.name for path in seen.iterdir()} == {"0 0", "1 0", "0 1", "1 1"}
    assert losses_in(tmp_path) == expected.losses  # to the bit


def test_a_failing_rank_fails_the_run_and_alone_tells_why(environment, tmp_path):
    (tmp_path / "fail.py").write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\nimport launch, torch\nimport ppfunc as pp\ndef"
        " job(options, place):\n    def stage(w, x):\n        if place.rank == 1: raise LookupError('no such"
        " thing')\n        return w * x\n    step = pp.value_and_grad([stage] * 2, torch.sub, pp.gpipe(2,"
        " 2), place.transport, engine=pp.engines.functional)\n    step({place.rank: torch.ones(())},"
        " torch.ones(2), torch.ones(2))\nif __name__ == '__main__': launch.run(job, None, (2, 1, 1),"
        " False)\n"
    )
    done = finished([sys.executable, tmp_path / "fail.py"], environment)
    assert done.returncode == 1
    assert "LookupError: no such thing" in done.stderr
    assert "Process 1 terminated" in done.stderr
    assert "Process 0" not in done.stderr


def running(group):
    """The processes of a process group that still run; one that ended may wait to be reaped."""
    lines = subprocess.run(
        ["ps", "-A", "-o", "pgid=,stat=,pid="], capture_output=True, text=True, check=True
    ).stdout
    return [
        pid
        for pgid, state, pid in map(str.split, lines.splitlines())
        if pgid == str(group) and state[0] != "Z"
    ]


@pytest.mark.skipif(shutil.which("ps") is None, reason="looks at the processes with ps")
def test_interrupt_ends_all_processes(environment, tmp_path, soon):
    options = "--stages 2 --steps 100000 --every 1".split()
    command = command_of(*options, "--out", tmp_path, "--save", tmp_path / "runs")
    hears = partial(
        signal.signal, signal.SIGINT, signal.default_int_handler
    )  # what runs in the background may ignore it
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hears
    ) as process:
        seen = told = b""
        while b"loss" not in seen or not (tmp_path / "runs" / "step-2").exists():
            seen = process.stderr.read1()
            told += seen
            assert seen or process.poll() is None, f"it has ended by itself: {told.decode()}"
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=5 * soon) == 130
        while running(process.pid):
            assert time.monotonic() - start < 5 * soon
        told = process.stderr.read().decode()
    assert "Traceback" not in told
    last = told.splitlines()[-1]
    shown = shlex.join(map(str, command))
    assert re.fullmatch(
        rf"Interrupted. The last checkpoint is \S*/runs/step-\d+. Go on with: {re.escape(shown)} --resume",
        last,
    ), told


def test_many_skipped_steps_in_a_row_are_told_once(trained, capsys):
    trained("--stages", "2", "--lr", "1e30", "--steps", "14")
    assert capsys.readouterr().err.count("not finite in 10 steps in a row") == 1


def test_options_that_do_not_fit_are_refused_at_once(example, capsys, tmp_path):
    train_gpt = example("train_gpt")
    (tmp_path / "runs" / "step-8").mkdir(parents=True)
    (tmp_path / "runs" / "step-10").mkdir()
    (tmp_path / "runs" / "step-9" / "manifest.json").mkdir(parents=True)
    (tmp_path / "file").touch()
    for wrong, told in [
        ("--schedule dualpipe --stages 3", "no dualpipe schedule has 3 stages"),
        ("--schedule inference", "forward only"),
        ("--batch 10 --microbatches 4", "not divisible"),
        ("--width 30 --heads 4", "multiple of heads"),
        (
            "--stages 9 --layers 4",
            "the model has 6 layers, too few for 9 stages; take fewer --stages, or more --layers",
        ),
        ("--lr nan", "--lr: got nan, expected a finite number"),
        (f"--out {__file__}", "is a file, expected a folder"),
        ("--steps 0", "--steps: got 0, expected at least 1"),
        ("--stages 0", "--stages: got 0"),
        ("--heads 0", "--heads: got 0"),
        ("--batch -16", "--batch: got -16"),
        ("--context 0", "--context: got 0"),
        ("--context 100000000", "expected at most 8192"),
        ("--chunks 2", "no choice of chunks"),
        ("--replicas 0", "--replicas: got 0"),
        ("--replicas 4", "16 is not divisible by 4 pipelines and 8 microbatches"),
        ("--tensor 3", "4 heads are not divisible by --tensor 3"),
        ("--tensor 2 --in-process", "--in-process runs one pipeline"),
        ("--clip -1", "--clip: got -1.0, expected a norm, at least 0"),
        ("--resume", "--resume goes on from the checkpoints of --save; give their folder"),
        ("--every 0", "--every: got 0"),
        (
            f"--save {tmp_path}/runs",
            "runs has checkpoints, the last of step 10; go on with --resume, or give another folder",
        ),
        (
            f"--save {tmp_path}/runs/step-9 --resume",
            "step-9 is a checkpoint itself; give the folder that it is in",
        ),
        (f"--save {tmp_path}/file", "file is a file, expected a folder"),
        ("--data 4", "--data: no such file: 4; pipelines beside each other are --replicas"),
        (f"--data {tmp_path}/file", "has 0 bytes, expected more than 10 times --context 64"),
        ("--validate 0", "--validate: got 0"),
        (f"--log {tmp_path}/none/log", "none, make it first"),
        ("--peak 3", "--peak: got 3.0, expected a number above 0, and --log or --tensorboard"),
    ]:
        with pytest.raises(SystemExit) as caught:
            train_gpt.parse_options(wrong.split())
        assert caught.value.code == 2
        assert told in capsys.readouterr().err
    assert train_gpt.parse_options(f"--save {tmp_path}/runs --resume".split()).resume


def test_a_log_has_a_line_per_step_as_it_goes(trained, tmp_path):
    file, text = tmp_path / "run.jsonl", tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    saving = ["--save", str(tmp_path / "runs"), "--every", "2", "--validate", "4", "--data", str(text)]
    trained("--stages", "2", "--log", str(file), "--peak", "0.001", *saving)

    def read():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [e for e in lines if "loss" in e], [e for e in lines if "validation" in e]

    steps, validations = read()
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in validations] == [4, 6]
    rates = [entry["learning_rate"] for entry in steps]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3]) and rates[3:] == sorted(rates[3:], reverse=True)
    for entry in steps:
        assert entry["grad_norm"] > 0 and entry["memory"] > 1e7 and entry["skipped"] == 0
        # 4 layers of 12 d^2 multiplications and a head of 256 d: three times, twice. Attention is counted
        # where torch's counter knows its kernel: 2 d t in each layer forward, 5 d t backward, of which d t
        # computes its scores again.
        least, most = (6 * (4 * (12 * 16**2 + attention) + 256 * 16) for attention in (0, 7 * 16 * 16 / 3))
        speed = entry["tokens_per_second"] / 1e9
        assert 0.99 * least * speed < entry["mfu"] < 1.01 * most * speed
    shutil.rmtree(tmp_path / "runs" / "step-6")
    trained("--stages", "2", "--log", str(file), "--resume", *saving)
    again, validated = read()
    assert [(e["step"], e["loss"]) for e in again] == [(e["step"], e["loss"]) for e in steps]
    assert validated == validations


def test_tensorboard_is_refused_where_it_is_not_installed(example, capsys, monkeypatch):
    train_gpt = example("train_gpt")
    monkeypatch.setattr(example("options").importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_gpt.parse_options(["--tensorboard", "runs"])
    assert "pip install tensorboard" in capsys.readouterr().err


def test_a_loss_curve_fits_its_data(example):
    curve = example("curve").loss_curve
    root = ElementTree.fromstring(curve([2.061, 2.03, math.nan, 2.018], [(4, 2.021)], "A curve"))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"2.01", "2.07", "validation 2.021"} <= set(texts) and not {"0", "1", "6"} & set(texts[2:-9])
    assert root.find("{http://www.w3.org/2000/svg}desc").text == (
        "Training loss: 2.061 at step 1 to 2.018 at step 4. Validation loss: 2.021 at step 4."
    )
    ElementTree.fromstring(curve([], [], "none"))
    root = ElementTree.fromstring(curve([2.0] * 6, [], "of six steps"))
    places = {t.text: float(t.get("x")) for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert places["2"] - places["0"] == places["6"] - places["4"] == (places["6"] - places["0"]) / 3


def test_layers_start_the_same_wherever_they_are_held(example):
    gpt = example("gpt")
    model = gpt.layers(gpt.Config(width=8, layers=3, heads=2, context=4))
    whole = gpt.initialise(model, range(5), seed=3)
    alone = [gpt.initialise(model, [k], seed=3)[0] for k in range(5)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, alone, strict=True) for name in a)
    other = gpt.initialise(model, range(5), seed=4)
    assert not torch.equal(whole[1]["qkv"], other[1]["qkv"])
    assert not torch.equal(whole[1]["qkv"], whole[2]["qkv"])


def test_model_cannot_see_the_future(example):
    gpt = example("gpt")
    model = gpt.layers(gpt.Config(width=8, layers=2, heads=2, context=6))
    whole, params = gpt.stage(model), gpt.initialise(model, range(4), seed=0)
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 99
    before, after = whole(params, tokens), whole(params, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_corpus_is_text_cut_in_two(example):
    corpus = example("corpus")
    text = corpus.load()
    assert len(text.validation) == corpus.HELD_OUT
    assert len(text.train) > 500_000
    batch = corpus.training_batch(text.train, 3, 5, seed=0, step=1)
    assert batch.inputs.shape == batch.targets.shape == (3, 5)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.inputs, corpus.training_batch(text.train, 3, 5, seed=0, step=1).inputs)
    assert not torch.equal(batch.inputs, corpus.training_batch(text.train, 3, 5, seed=0, step=2).inputs)
    windows = [corpus.validation_batch(text.validation, 2, 4, number) for number in range(2)]
    joined = torch.cat([w.inputs for w in windows]).flatten()
    assert torch.equal(joined, text.validation[:16].long())


def test_corpus_without_sources_says_where_it_looked(example, monkeypatch, tmp_path):
    corpus = example("corpus")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"found 0 bytes of Python sources in .*expected at least"):
        corpus.load()
