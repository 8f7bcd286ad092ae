"""Train a byte-level GPT through a pipeline, on the sources of Python's standard library.

    python examples/train_gpt.py                                  # 4 stages in 4 processes
    python examples/train_gpt.py --schedule zbv --stages 8        # two stages on each of 4 ranks
    python examples/train_gpt.py --stages 2 --data 2 --tensor 2   # a grid of 2 x 2 x 2 processes
    torchrun --nproc-per-node 4 examples/train_gpt.py             # the first, started by torchrun
    python examples/train_gpt.py --save runs --resume             # goes on from the last checkpoint, on any
    grid

Under ``torchrun --max-restarts 3 ... --save runs --resume`` it goes on by itself after a process has died.

The loss curve is the same whatever the schedule, the number of stages and the grid.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from threading import RLock
from typing import Any, NamedTuple

import corpus
import gpt
import launch
import optree
import torch
import torch.distributed as dist
from curve import loss_curve
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import ppfunc as pp
from ppfunc.parallel import Partition, partition_balanced, partition_uniform
from ppfunc.schedule import BUILDERS, Schedule, Timeline, simulate, to_svg

ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
PRECISIONS = {
    name: pp.Precision(compute=getattr(torch, name), master=torch.float32, scale=scale)
    for name, scale in (("float32", None), ("bfloat16", None), ("float16", pp.dynamic_scale()))
}
VALIDATION_BATCHES = 40
SAMPLE = 240
MOST_CONTEXT = 8192
MOST_SKIPPED = 10


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--schedule",
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
    add(
        "--data",
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
        "data",
        "tensor",
        "every",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: got {value}, expected at least 1")
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
    if options.batch % (options.data * schedule.microbatches):
        raise ValueError(
            f"a batch of {options.batch} is not divisible by {options.data} pipelines and "
            f"{schedule.microbatches} microbatches"
        )
    if options.heads % options.tensor:
        raise ValueError(f"{options.heads} heads are not divisible by --tensor {options.tensor}")
    if options.in_process and options.data * options.tensor > 1:
        raise ValueError("--in-process runs one pipeline; leave --data and --tensor out")
    config = gpt.Config(options.width, options.layers, options.heads, options.context, tied=options.tied)
    tensor = mesh["tp"] if options.tensor > 1 and mesh is not None else None
    model, parts = gpt.layers(config, tensor), len(schedule.chains[0].stages)
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
    processes, pipelines = launch.processes_given(), options.data * options.tensor
    if processes is not None and processes % pipelines:
        raise ValueError(
            f"{processes} processes are not divisible by --data {options.data} x --tensor {options.tensor}"
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
        if len(schedule.chains[0].stages) == wanted:
            return schedule
    raise ValueError(
        f"no {options.schedule} schedule has {wanted} stages and {options.microbatches} microbatches{reason}"
    )


class Result(NamedTuple):
    """The loss of every step, and that of the validation text, in nats per byte."""

    losses: list[float]
    validation: float


def train(options: argparse.Namespace, place: launch.Place) -> Result:
    """The whole job, as every process runs it."""
    todo = plan(options, place.mesh)
    schedule, text = todo.schedule, corpus.load()

    def part(windows: corpus.Windows) -> corpus.Windows:
        return corpus.Windows(*(t.chunk(options.data)[place.along("dp")].to(place.device) for t in windows))

    def batch(n: int) -> corpus.Windows:
        return part(corpus.training_batch(text.train, options.batch, options.context, options.seed, n))

    rate = pp.optim.warmup_cosine(
        options.lr, warmup=min(20, options.steps // 2), steps=options.steps, end=options.lr / 10
    )
    optimizer = pp.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1)
    if options.clip is not None:
        optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(options.clip), optimizer)
    trainer = pp.Trainer(
        todo.stages,
        gpt.cross_entropy,
        schedule,
        optimizer,
        place.transport,
        engine=ENGINES[options.engine],
        tied=todo.tied,
        precision=PRECISIONS[options.precision],
    )
    state = trainer.init(
        {stage: todo.initialise(stage, options.seed, place.device) for stage in place.held(schedule)}
    )

    def run(losses: list[float]) -> dict[str, Any]:
        """All that training goes on from."""
        return {"state": state, "step": len(losses), "losses": json.dumps(losses)}

    losses: list[float] = []
    if options.resume:
        with suppress(FileNotFoundError):  # before the first checkpoint
            last = pp.checkpoint.load(options.save, like=run(losses), names=todo.name)
            state, losses = last["state"], json.loads(last["losses"])
    progress = Progress(options, losses, shown=place.rank == 0)
    for n in progress:
        state, metrics = trainer.step(state, *batch(n))
        progress.note(metrics.loss.item(), bool(metrics.skipped))
        if options.save and ((n + 1) % options.every == 0 or n + 1 == options.steps):
            pp.checkpoint.save(options.save, run(progress.losses), names=todo.name)

    pieces = (
        corpus.validation_batch(text.validation, options.batch, options.context, n)
        for n in range(VALIDATION_BATCHES)
    )
    result = Result(
        progress.losses, mean(trainer.evaluate(state, *part(windows)).item() for windows in pieces)
    )
    _, measured = trainer.record(state, *batch(options.steps))
    whole = gathered(todo, state, place)
    if place.rank == 0:
        report(
            options,
            measured,
            simulate(trainer.schedule, measured.costs()),
            median(progress.seconds or [math.nan]),
            result,
        )
        if math.isfinite(result.validation):
            sample = gpt.generate(
                gpt.layers(todo.config), whole, text.validation[: options.context], SAMPLE, options.seed
            )
            print(f"\nA sample, after the {options.context} bytes that it begins with:\n{sample}")
    return result


class Progress:
    """A progress bar with the loss and the speed, and what it has seen."""

    def __init__(self, options: argparse.Namespace, losses: list[float], shown: bool) -> None:
        self.losses = losses
        self.skipped = 0  # steps in a row
        self.seconds: list[float] = []
        self.tokens = options.batch * options.context
        tqdm.set_lock(RLock())  # one process writes; the lock for several would outlive an interrupt
        self.bar = tqdm(
            range(len(losses), options.steps),
            initial=len(losses),
            total=options.steps,
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
        )

    def __iter__(self) -> Iterator[int]:
        for n in self.bar:
            self.start = time.perf_counter()
            yield n

    def note(self, loss: float, skipped: bool) -> None:
        """The end of a step."""
        self.losses.append(loss)
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped == MOST_SKIPPED and not self.bar.disable:
            advice = (
                f"Loss or gradients were not finite in {self.skipped} steps in a row, which updated nothing."
                " Lower --lr, or --clip."
            )
            self.bar.write(advice, file=sys.stderr)
        self.seconds.append(time.perf_counter() - self.start)
        usual = median(self.seconds[-20:])
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {self.tokens / usual:,.0f} tokens/s, step {1e3 * usual:.0f} ms", refresh=False
        )


def gathered(todo: Plan, state: pp.TrainState, place: launch.Place) -> list[gpt.Params]:
    """The parameters of the whole model, layer by layer, on every rank."""
    whole = []
    for stage in todo.schedule.chains[0].stages:
        mine = state.params.get(stage) or gpt.initialise(
            todo.model, todo.partition.layers_of(stage), 0, place.device
        )
        tree = optree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, mine)
        if place.mesh is not None:
            for leaf in optree.tree_leaves(tree):
                dist.broadcast(
                    leaf, group=place.mesh.get_group("pp"), group_src=todo.schedule.placement[stage]
                )
        whole += tree
    return whole


def report(
    options: argparse.Namespace, measured: Timeline, paper: Timeline, seconds: float, result: Result
) -> None:
    """Say how it went, write the loss down, and draw it and a pass of the schedule, on paper and as
    measured.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    schedule = paper.schedule
    files = {
        "loss.csv": "".join(f"{step},{loss!r}\n" for step, loss in enumerate(result.losses)),
        "schedule.svg": to_svg(schedule, paper),
        "measured.svg": to_svg(measured.schedule, measured),
        "loss.svg": loss_curve(
            result.losses, result.validation, f"Byte-level GPT, {schedule.name}, {schedule.ranks} ranks"
        ),
    }
    for file, content in files.items():
        (options.out / file).write_text(content, encoding="utf-8")
    print(
        f"\nloss: {result.losses[0]:.3f} at first, {result.losses[-1]:.3f} at last, "
        f"{result.validation:.3f} nats per byte in validation\n"
        f"step: {1e3 * seconds:.1f} ms, {options.batch * options.context / seconds:,.0f} tokens/s\n"
        f"written: {', '.join(str(options.out / file) for file in files)}\n\n"
        f"One more step, measured and on paper, where messages take no time: {1e3 * measured.makespan:.1f} ms"
        f" and {1e3 * paper.makespan:.1f} ms. In shares of it:\n{pp.compare(measured, paper)}"
    )


def farewell(options: argparse.Namespace) -> str:
    """What an interrupt leaves, and how to go on."""
    last = pp.checkpoint.latest(options.save) if options.save else None
    if last is None:
        return f"Interrupted. Nothing was saved{'' if options.save else ': there was no --save'}."
    command = (
        "the same command"
        if launch.processes_given()
        else shlex.join(word for word in sys.orig_argv if word != "--resume")
    )
    return f"Interrupted. The last checkpoint is {last}. Go on with: {command} --resume"


def main() -> None:
    chosen = parse_options()
    try:
        launch.run(
            train, chosen, (plan(chosen).schedule.ranks, chosen.data, chosen.tensor), chosen.in_process
        )
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{farewell(chosen)}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
