"""A schedule of ppfunc in the trainer of torchtitan: its losses, optimizers, validation and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.integrations.torchtitan import TitanPipeline, pipelined

HERE = Path(__file__).parent
V, TURNS = "ZBVZeroBubble", "Interleaved1F1B"


def train(folder: Path, ranks: int, *options: str, processes: int = 0) -> dict[str, Any]:
    """Train in processes; return steps with loss and norm, validated losses, and sums of parameters."""
    pytest.importorskip("torchtitan")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes or ranks), str(HERE / "titan.py"), "--ranks", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--folder", str(folder), *options],
        capture_output=True, text=True, env=environment, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"last"')]
    last, *others = [row for row in rows if row["last"]]
    assert all(row["logged"] == last["logged"] for row in others)  # of other data ranks
    return last | {"sums": {name: n for row in rows for name, n in row["sums"].items()}}


def agree(one: dict[str, Any], other: dict[str, Any], steps: int) -> None:
    logged, expected = (torch.tensor(run["logged"][-steps:], dtype=torch.float64) for run in (one, other))
    torch.testing.assert_close(logged, expected, rtol=0, atol=2e-6)
    losses = (torch.tensor(run["validated"], dtype=torch.float64) for run in (one, other))
    torch.testing.assert_close(*losses, rtol=0, atol=2e-6)
    assert one["sums"] == pytest.approx(other["sums"], abs=2e-4)


WHOLE = "--steps", "6", "--accumulate", "2", "--validate", "--save"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """20 steps by torchtitan's own pipeline."""
    return train(tmp_path_factory.mktemp("own"), 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """6 steps by its own pipeline with everything else, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder, 2, *WHOLE), folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "cut"), [("zbv", V), ("planned", V), ("interleaved_1f1b", TURNS)])
def test_twenty_steps_have_the_losses_of_its_own_pipeline(own, schedule, cut, ranks, tmp_path):
    run = train(tmp_path, ranks, "--schedule", schedule, "--cut", cut)
    assert len(run["logged"]) == 20
    agree(run, own, 20)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_accumulation_validation_and_recomputation(whole, recompute, tmp_path):
    run = train(tmp_path, 2, *WHOLE, "--schedule", "zbv", "--cut", V, "--recompute", recompute)
    run["sums"] = {name.replace("_checkpoint_wrapped_module.", ""): n for name, n in run["sums"].items()}
    assert len(run["validated"]) == 2
    agree(run, whole[0], 6)


@pytest.mark.slow
def test_a_checkpoint_of_its_own_pipeline_is_resumed(whole, tmp_path):
    """Parameters, moments, rates and data of step 3 go on in stages that are cut and placed otherwise."""
    shutil.copytree(whole[1] / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    run = train(tmp_path, 2, *WHOLE, "--schedule", "zbv", "--cut", V)
    assert [step for step, *_ in run["logged"]] == [4, 5, 6]
    agree(run | {"validated": []}, whole[0] | {"validated": []}, 3)
    assert (tmp_path / "checkpoint" / "step-6").exists()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["shard", "replicate"])
def test_data_parallel_ranks(data, tmp_path):
    """Two pipelines, whose parameters are cut as FSDP cuts them, or whole, on both."""
    options = *WHOLE, f"--{data}", "2"
    expected = train(tmp_path / "own", 2, *options, processes=4)
    run = train(tmp_path / "run", 2, *options, "--schedule", "zbv", "--cut", V, processes=4)
    agree(run, expected, 6)


# -- without torchtitan


Spec = make_dataclass("Spec", ["pipelining_fn"])


def options(**changed: Any) -> dict[str, Any]:
    """What the trainer of torchtitan passes, beside the model."""
    parallelism = Of(
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_microbatch_size=1,
        fsdp_reshard_after_forward="default",
        enable_fsdp_symm_mem=False,
        spmd_backend="spmd_types",
    )
    given = {
        "parallel_dims": Of(pp=2, dp_replicate=1, dp_shard=1, tp=1, cp=1, ep=1),
        "training": Of(enable_cpu_offload=False, local_batch_size=4, mixed_precision_param="float32"),
        "parallelism": parallelism,
        "compile_config": Of(enable=False),
        "ac_config": None,
        "dump_folder": "",
        "parallelize_fn": None,
        "loss_fn": lambda y, labels: (y.sum(), {}),
    }
    for name, value in changed.items():
        where, _, field = name.partition("__")
        if field:
            setattr(given[where], field, value)
        else:
            given[where] = value
    return given


REFUSED = {
    "fsdp_reshard_after_forward: got 'always'": {"parallelism__fsdp_reshard_after_forward": "always"},
    "spmd_backend: got 'full_dtensor'": {"parallelism__spmd_backend": "full_dtensor"},
    "tensor_parallel_degree: got 2": {
        "parallelism__tensor_parallel_degree": 2,
        "parallel_dims__tp": 2,
    },
    "context_parallel_degree: got 2": {
        "parallelism__context_parallel_degree": 2,
        "parallel_dims__cp": 2,
    },
    "pipeline_parallel_schedule_csv: got 'a.csv'": {"parallelism__pipeline_parallel_schedule_csv": "a.csv"},
    r"compile.enable.*engine=ppfunc.engines.graph\(compile=True\)": {"compile_config__enable": True},
    "enable_cpu_offload": {"training__enable_cpu_offload": True},
    "config.loss = config.loss.loss_fn": {"loss_fn": Of(set_lm_head=None)},
    "4 microbatches, expected .* and 8 microbatches": {"training__local_batch_size": 8},
    r"2 ranks .* pipeline_parallel_degree=4": {"parallel_dims__pp": 4},
    r"on ranks \[0, 1\]; torchtitan cuts .* \[0, 0\]": {
        "parallelism__pipeline_parallel_schedule": V,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_honoured_is_refused_before_the_model_is_cut(message):
    def cut(*args, **kwargs):
        raise AssertionError("cut")

    spec = pipelined(Spec(cut), pp.one_f_one_b(ranks=2, microbatches=4))
    with pytest.raises(ValueError, match=message):
        spec.pipelining_fn(nn.Identity(), **options(**REFUSED[message]))
    with pytest.raises(AssertionError, match="cut"):
        spec.pipelining_fn(nn.Identity(), **options())


def test_a_schedule_with_replicas_is_refused():
    spec = pipelined(Spec(print), pp.dualpipe(ranks=2, microbatches=4))
    with pytest.raises(ValueError, match="dualpipe"):
        spec.pipelining_fn(nn.Identity(), **options(parallelism__pipeline_parallel_schedule=V))


def test_a_model_without_a_pipeline_and_no_schedule_are_refused():
    with pytest.raises(TypeError, match="spec: got"):
        pipelined(Spec(None), pp.gpipe(ranks=2, microbatches=4))
    with pytest.raises(pp.ScheduleError, match="schedule: got 'zbv'"):
        pipelined(Spec(print), "zbv")


def one_process(rank: int, size: int) -> list[torch.Tensor]:
    """Run two steps and an evaluation of one stage; return gradients and losses."""
    torch.manual_seed(1)
    part = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    part[0].bias.requires_grad_(False)

    def loss_fn(y: torch.Tensor, labels: torch.Tensor, n: Any = 1) -> tuple[torch.Tensor, dict[str, Any]]:
        return (y - labels).square().sum() / n, {}

    group = torch.distributed.group.WORLD
    stages = {0: pp.stage_from_module(part).fn}
    pipeline = TitanPipeline(
        {0: part}, stages, loss_fn, pp.gpipe(1, 2), group, pp.engines.graph, torch.float64
    )
    x, labels = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 2).double()
    batch = {"arg_mbs": [(x[0],), (x[1],)], "kwarg_mbs": [{}, {}], "target_mbs": list(labels)}
    losses: list[torch.Tensor] = []
    for n in (2, 4):
        pipeline.step(**batch, losses=losses, loss_kwargs={"n": torch.tensor(float(n))})
    with pytest.raises(ValueError, match="return_outputs"):
        pipeline.step(**batch, return_outputs=True)
    part.eval()
    with torch.no_grad():
        pipeline.eval(**batch, losses=losses)
    expected = [(part(x[n]) - labels[n]).square().sum() for n in range(2)]
    weights = [p for p in part.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(sum(expected) * 0.75, weights)
    torch.testing.assert_close([p.grad for p in weights], list(gradients))
    assert part[0].bias.grad is None
    scaled = [e.detach() / n for n in (2, 4, 1) for e in expected]
    torch.testing.assert_close([loss.double() for loss in losses], scaled)
    return losses


def test_a_step_adds_gradients_and_appends_losses(fresh):
    assert len(fresh(1)(one_process)[0]) == 6
