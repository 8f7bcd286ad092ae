"""What the example is asked for: its options, and the plan that they make."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import corpus
import gpt
import launch
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ppfunc as pp
from ppfunc.cli.options import CommandParser
from ppfunc.parallel import Partition, partition_balanced, partition_uniform
from ppfunc.schedule import BUILDERS, Schedule

ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
PRECISIONS = {
    name: pp.Precision(compute=getattr(torch, name), master=torch.float32, scale=scale)
    for name, scale in (("float32", None), ("bfloat16", None), ("float16", pp.dynamic_scale()))
}
MOST_CONTEXT = 8192


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description="Train a byte-level GPT through a pipeline.")
    add = parser.add_argument
    add(
        "--schedule",
        type=str.lower,
        choices=BUILDERS,
        default="1f1b",
        help="as `ppfunc list` names them (default: %(default)s)",
    )
    add(
        "--stages",
        type=int,
        help="parts that the model is cut into (default: 4, or what torchrun's processes hold)",
    )
    add("--chunks", type=int, help="stages of a rank, for the schedules that have that choice")
    add("--microbatches", type=int, default=8, help="(default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences in a batch (default: %(default)s)")
    add("--context", type=int, default=64, help="bytes in a sequence (default: %(default)s)")
    add("--width", type=int, default=64, help="(default: %(default)s)")
    add("--layers", type=int, default=8, help="transformer blocks (default: %(default)s)")
    add("--heads", type=int, default=4, help="(default: %(default)s)")
    add("--partition", choices=("balanced", "uniform"), default="balanced", help="(default: %(default)s)")
    add(
        "--engine",
        choices=ENGINES,
        default="graph",
        help="how stages are differentiated (default: %(default)s)",
    )
    add("--data", type=Path, help="file to train on (default: sources of Python's standard library)")
    add(
        "--replicas",
        type=int,
        default=1,
        help="pipelines beside each other, each with a part of the batch (default: %(default)s)",
    )
    add(
        "--tensor",
        type=int,
        default=1,
        help="ranks that divide the matrices of a stage (default: %(default)s)",
    )
    add("--tied", action="store_true", help="the head has the vectors of the embedding")
    add(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of what stages compute; parameters are float32 (default: %(default)s)",
    )
    add(
        "--shard",
        choices=("none", "optimizer", "params"),
        default="none",
        help="what pipelines keep in parts (default: %(default)s)",
    )
    add("--clip", type=float, help="largest norm of the gradients (default: any)")
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--in-process", action="store_true", help="all ranks in this process")
    add("--save", type=Path, help="folder for checkpoints (default: none are saved)")
    add(
        "--every",
        type=int,
        default=50,
        help="steps from one checkpoint to the next; the last is saved, too (default: %(default)s)",
    )
    add("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
    add(
        "--validate",
        type=int,
        default=100,
        help="steps from one validation to the next; the last one counts, too (default: %(default)s)",
    )
    add("--log", type=Path, help="file for a line of JSON per step, as it goes")
    add("--tensorboard", type=Path, help="folder for TensorBoard, where that is installed")
    add(
        "--peak",
        type=float,
        help="TFLOP/s of a device, which MFU is a share of (default: what a product of matrices reaches)",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for the loss and the pictures (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        plan(options)
        if options.save is not None:
            require_usable(options.save, options.resume)
    except ValueError as error:
        parser.error(str(error))
    return options


def require_usable(folder: Path, resume: bool) -> None:
    """Raise ValueError where the first checkpoint could not be saved there."""
    if (folder / "manifest.json").exists():
        raise ValueError(f"--save: {folder} is a checkpoint itself; give the folder that it is in")
    steps = [
        int(path.name.removeprefix("step-"))
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    if steps and not resume:
        raise ValueError(
            f"--save: {folder} has checkpoints, the last of step {max(steps)}; go on with --resume, or give"
            " another folder"
        )


class Plan(NamedTuple):
    """What is trained: the schedule, and the model cut into its stages.

    Args:
        model: all layers in order.
        partition: which layers make up each stage of the model.
        tensor: the ranks that divide the matrices of a stage.
    """

    schedule: Schedule
    config: gpt.Config
    model: list[gpt.Layer]
    partition: Partition
    tensor: DeviceMesh | None

    @property
    def stages(self) -> list[Callable[..., Tensor]]:
        """One pure function per stage of the model."""
        return pp.stages_from_layers([layer.apply for layer in self.model], self.partition)

    @property
    def tied(self) -> dict[str, list[tuple[int, str]]]:
        """The places of the vectors of the bytes, where the head has them too."""
        last = len(self.partition.sizes) - 1
        return (
            {"byte": [(0, "0.byte"), (last, f"{self.partition.sizes[last] - 1}.out")]}
            if self.config.tied
            else {}
        )

    def name(self, stage: int, leaf: str) -> str:
        """The name of a parameter in the model, whatever the stages."""
        layer, _, key = leaf.partition(".")
        return f"layers.{self.partition.layers_of(stage)[int(layer)]}.{key}"

    def initialise(self, stage: int, seed: int, device: torch.device) -> list[gpt.Params]:
        """The first parameters of a stage of the model, this rank's part of them."""
        params = gpt.initialise(self.model, self.partition.layers_of(stage), seed, device)
        if self.config.tied and stage == len(self.partition.sizes) - 1:
            params[-1]["out"] = gpt.initialise(self.model, [0], seed, device)[0]["byte"]
        return params if self.tensor is None else pp.stage.shard(params, self.tensor, gpt.placement)


def plan(options: argparse.Namespace, mesh: DeviceMesh | None = None) -> Plan:
    """The plan that the options ask for, the same in every process.

    Raises:
        ValueError: options that do not fit together.
    """
    for name in (
        "steps",
        "stages",
        "microbatches",
        "batch",
        "context",
        "width",
        "layers",
        "heads",
        "replicas",
        "tensor",
        "every",
        "validate",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: got {value}, expected at least 1")
    if options.data is not None:
        corpus.require_usable(options.data, options.context)
    if options.peak is not None and not (options.peak > 0 and (options.log or options.tensorboard)):
        raise ValueError(f"--peak: got {options.peak}, expected a number above 0, and --log or --tensorboard")
    if options.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard: it is not installed; pip install tensorboard")
    if options.log is not None and not options.log.parent.is_dir():
        raise ValueError(f"--log: no folder {options.log.parent}, make it first")
    if options.resume and options.save is None:
        raise ValueError("--resume goes on from the checkpoints of --save; give their folder")
    if options.clip is not None and not options.clip >= 0:
        raise ValueError(f"--clip: got {options.clip}, expected a norm, at least 0")
    if not 0 <= options.lr < math.inf:
        raise ValueError(f"--lr: got {options.lr}, expected a finite number, at least 0")
    if (
        file := next((folder for folder in (options.save, options.out) if folder and folder.is_file()), None)
    ) is not None:
        raise ValueError(f"{file} is a file, expected a folder")
    if options.context > MOST_CONTEXT:
        raise ValueError(f"--context: got {options.context} bytes, expected at most {MOST_CONTEXT}")
    schedule = schedule_of(options)
    if schedule.forward_only:
        raise ValueError(f"{options.schedule} runs forward only; choose a schedule for training")
    if options.batch % (options.replicas * schedule.microbatches):
        raise ValueError(
            f"a batch of {options.batch} is not divisible by {options.replicas} pipelines and "
            f"{schedule.microbatches} microbatches"
        )
    if options.heads % options.tensor:
        raise ValueError(f"{options.heads} heads are not divisible by --tensor {options.tensor}")
    if options.in_process and options.replicas * options.tensor > 1:
        raise ValueError("--in-process runs one pipeline; leave --replicas and --tensor out")
    config = gpt.Config(options.width, options.layers, options.heads, options.context, tied=options.tied)
    tensor = mesh["tp"] if options.tensor > 1 and mesh is not None else None
    model, parts = gpt.layers(config, tensor), len(schedule.flows[0].stages)
    if parts > len(model):
        raise ValueError(
            f"the model has {len(model)} layers, too few for {parts} stages; take fewer --stages, or more"
            " --layers"
        )
    if options.partition == "balanced":
        partition = partition_balanced(gpt.multiplications(config), parts)
    else:
        partition = partition_uniform(len(model), parts)
    return Plan(schedule, config, model, partition, tensor)


def schedule_of(options: argparse.Namespace) -> Schedule:
    """The schedule that was asked for, over as many ranks as hold the stages that were asked for."""
    build, more = BUILDERS[options.schedule], {} if options.chunks is None else {"chunks": options.chunks}
    if "chunks" in more and "chunks" not in inspect.signature(build).parameters:
        raise ValueError(f"{options.schedule} has no choice of chunks; leave --chunks out")
    processes, pipelines = launch.processes_given(), options.replicas * options.tensor
    if processes is not None and processes % pipelines:
        raise ValueError(
            f"{processes} processes are not divisible by --replicas {options.replicas} x --tensor"
            f" {options.tensor}"
        )
    if options.stages is None and processes is not None:
        return build(processes // pipelines, options.microbatches, **more)
    wanted, reason = options.stages or 4, ""
    for ranks in range(wanted, 0, -1):
        try:
            schedule = build(ranks, options.microbatches, **more)
        except ValueError as error:
            reason = reason or f": {error}"
            continue
        if len(schedule.flows[0].stages) == wanted:
            return schedule
    raise ValueError(
        f"no {options.schedule} schedule has {wanted} stages and {options.microbatches} microbatches{reason}"
    )
