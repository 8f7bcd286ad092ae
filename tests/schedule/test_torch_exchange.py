"""Files that ppfunc writes run in torch's own pipeline runtime and give the right gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules

import ppfunc as pp
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    compute_only,
    place_communication,
    plan,
    read_schedule,
    to_csv,
    to_torch_csv,
)
from tests.models import squared
from tests.simulated.cases import cases

RANKS, MICROBATCHES, WIDTH = 3, 6, 5
OPTIONS = {
    "interleaved_1f1b": {"chunks": 3},
    "looped_bfs": {"chunks": 4},
    "interleaved_zb": {"chunks": 2},
    "zero_bubble": {"cap": 4},
}
WAITS = hasattr(torch_schedules, "WAIT_SEND_F")  # from torch 2.15 on
REFUSED = (
    "inference",
    "data_parallel",
    "dualpipe",
    "chimera",
    "deepspeed_train",
    "deepspeed_inference",
    "seq1f1b",
    "seq_zb",
    "decode",
)
WITHIN_RANKS = (
    "zbv",
    "zbv_greedy",
    "v_half",
    "v_min",
    "dualpipev",
    "wave",
)  # before 2.12, torch sends what a rank has for itself over gloo
NAMES = tuple(
    name
    for name in (
        *(name for name in BUILDERS if name not in REFUSED),
        "wave",
        "deepspeed_train",
    )  # of the last its compute
    if torch.__version__ >= "2.12" or name not in WITHIN_RANKS
)
# What is sharded runs the files of what is not, with more to do in them.
FORMS = {"sum": NAMES, "mean": ("1f1b", *NAMES[-2:]), "sharded": NAMES}
CASES = [(form, name) for form, names in FORMS.items() for name in names]


def built(name: str) -> pp.Schedule:
    if name == "wave":
        costs = Costs(forward=[1, 2, 1] * RANKS)
        return plan(RANKS, MICROBATCHES, costs, placement="v", chunks=3, cap=9, effort=0.01).schedule
    return compute_only(BUILDERS[name](RANKS, MICROBATCHES, **OPTIONS.get(name, {})))


def layers(stages: int) -> list[torch.nn.Module]:
    """The same model in every process: its parameters come from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(stages)
    ]
    for parameter in (p for layer in made for p in layer.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )


def run(rank: int, folder: Path, name: str, form: str) -> None:
    """Run one file in torch's runtime and save the gradients of this rank's stages."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    file = folder / f"{name}-{'sum' if form == 'sum' else 'torch'}.csv"
    schedule = read_schedule(file)
    model = layers(schedule.stages)
    held = schedule.stages_of(rank)
    if (
        form == "sharded"
    ):  # each stage over one process: what is placed for FSDP has to be there, and in its order
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pipe", "data"))
        for stage in held:
            fully_shard(model[stage], mesh=mesh["data"])
    stages = [PipelineStage(model[s], s, schedule.stages, torch.device("cpu")) for s in held]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=squared)
    runtime._load_csv(str(file), format="compute_comms")
    inputs, targets = batch()
    runtime.step(*[inputs] * (0 in held), target=targets)
    whole = torch.distributed.tensor.DTensor.full_tensor if form == "sharded" else torch.Tensor.clone
    torch.save(
        {s: [whole(p.grad) for p in model[s].parameters()] for s in held}, folder / f"{name}-{form}.{rank}.pt"
    )


def run_all(rank: int, size: int, folder: Path) -> None:
    for form, name in CASES:
        run(rank, folder, name, form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, three):
    """A folder with the files of every schedule, and the gradients that torch's runtime found for them."""
    path = tmp_path_factory.mktemp("exchange")
    for name in NAMES:
        (path / f"{name}-sum.csv").write_text(to_csv(place_communication(built(name)), waits=WAITS))
        (path / f"{name}-torch.csv").write_text(to_torch_csv(built(name)))
    three(run_all, path, timeout=600)
    return path


@pytest.mark.parametrize(("form", "name"), CASES)
def test_torch_finds_the_gradients_of_the_whole_model(name, form, folder):
    found = {}
    for rank in range(RANKS):
        found |= torch.load(folder / f"{name}-{form}.{rank}.pt")
    model = layers(len(found))
    inputs, targets = batch()
    losses = [
        squared(torch.nn.Sequential(*model)(x), y)
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    ]
    # A file without REDUCE_GRAD gives torch the sum over the microbatches.
    (sum(losses) / (1 if form == "sum" else MICROBATCHES)).backward()
    for stage, gradients in found.items():
        for gradient, parameter in zip(gradients, model[stage].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


# Those that builders make are compared with the model: see ``test_universal_gradients.py``.
@pytest.mark.parametrize("name", cases(NAMES, NAMES[-2:]))
def test_torch_finds_the_gradients_that_ppfunc_finds(name, folder):
    schedule = read_schedule(folder / f"{name}-sum.csv")
    model = layers(schedule.stages)
    functions = [
        lambda params, x, layer=layer: torch.func.functional_call(layer, params, (x,)) for layer in model
    ]
    params = {stage: dict(layer.named_parameters()) for stage, layer in enumerate(model)}
    inputs, targets = (pp.microbatch(part, MICROBATCHES) for part in batch())
    _, gradients = pp.value_and_grad(functions, squared, schedule)(params, inputs, targets)
    for rank in range(RANKS):
        for stage, found in torch.load(folder / f"{name}-sharded.{rank}.pt").items():
            for ours, theirs in zip(gradients[stage].values(), found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} has .*torch's runtime"):
        to_torch_csv(BUILDERS[name](4, 8))
