"""Files that ppfunc writes run in torch's own pipeline runtime and give the right gradients.

The file is its own worker: run with a rank, it opens the process group and runs every schedule.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import BUILDERS, place_communication, read_csv, write_csv
from ppfunc.schedule.instruction import Instruction, Op

RANKS, MICROBATCHES, WIDTH = 2, 6, 5
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "interleaved_zb", "zbv", "dualpipev")


def layers(stages: int) -> list[torch.nn.Module]:
    """The same model in every process: its parameters come from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(stages)]
    for parameter in (p for layer in made for p in layer.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def with_reduction(schedule):
    """torch takes the mean over microbatches where a REDUCE_GRAD stands, and nowhere else."""
    tails = [tuple((Instruction(Op.REDUCE_GRAD, s),) for s in schedule.stages_of(r)) for r in range(schedule.ranks)]
    return replace(schedule, programs=tuple(p + tail for p, tail in zip(schedule.programs, tails, strict=True)))


def run(rank: int, folder: Path, name: str) -> None:
    """Run one file in torch's runtime and save the gradients of this rank's stages."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = read_csv(folder / f"{name}.csv")
    model = layers(schedule.stages)
    held = schedule.stages_of(rank)
    stages = [PipelineStage(model[s], s, schedule.stages, torch.device("cpu")) for s in held]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=name.endswith("mean"))
    runtime._load_csv(str(folder / f"{name}.csv"), format="compute_comms")
    inputs, targets = batch()
    runtime.step(*[inputs] * (0 in held), target=targets)
    torch.save({s: [p.grad for p in model[s].parameters()] for s in held}, folder / f"{name}.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file of every schedule, and the gradients that torch's runtime found for it."""
    path = tmp_path_factory.mktemp("exchange")
    for name in NAMES:
        schedule = place_communication(BUILDERS[name](RANKS, MICROBATCHES))
        write_csv(schedule, path / f"{name}.csv")
        write_csv(with_reduction(schedule), path / f"{name}-mean.csv")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__, str(path)]
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(RANKS)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * RANKS, "\n".join(outputs)
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["", "-mean"])
def test_torch_finds_the_gradients_of_the_whole_model(name, form, folder):
    found = {}
    for rank in range(RANKS):
        found |= torch.load(folder / f"{name}{form}.{rank}.pt")
    model = layers(len(found))
    inputs, targets = batch()
    losses = [
        loss_of(torch.nn.Sequential(*model)(x), y) for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    ]
    (sum(losses) / (MICROBATCHES if form else 1)).backward()
    for stage, gradients in found.items():
        for gradient, parameter in zip(gradients, model[stage].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_torch_finds_the_gradients_that_ppfunc_finds(name, folder):
    schedule = read_csv(folder / f"{name}.csv")
    model = layers(schedule.stages)
    functions = [lambda params, x, layer=layer: torch.func.functional_call(layer, params, (x,)) for layer in model]
    params = {stage: dict(layer.named_parameters()) for stage, layer in enumerate(model)}
    inputs, targets = (pp.microbatch(part, MICROBATCHES) for part in batch())
    _, gradients = pp.value_and_grad(functions, loss_of, schedule)(params, inputs, targets)
    for rank in range(RANKS):
        for stage, found in torch.load(folder / f"{name}-mean.{rank}.pt").items():
            for ours, theirs in zip(gradients[stage].values(), found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=RANKS)
    for name in NAMES:
        for form in ("", "-mean"):
            run(rank, path, name + form)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
