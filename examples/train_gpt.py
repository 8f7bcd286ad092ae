"""Train a byte-level GPT through a pipeline, on the sources of Python's standard library.

    python examples/train_gpt.py                                  # 4 stages in 4 processes
    python examples/train_gpt.py --schedule zbv --stages 8        # two stages on each of 4 ranks
    torchrun --nproc-per-node 4 examples/train_gpt.py             # the same, started by torchrun

The loss curve is the same whatever the schedule and the number of stages.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from threading import RLock
from typing import NamedTuple

import corpus
import gpt
import launch
import optree
import torch
import torch.distributed as dist
from curve import loss_curve
from torch import Tensor
from tqdm import tqdm

import ppfunc as pp
from ppfunc.parallel import Partition, partition_balanced, partition_uniform
from ppfunc.schedule import BUILDERS, Schedule, Timeline, remove_tail, simulate, to_svg
from ppfunc.training import adamw

ENGINES = {"graph": pp.graph, "functional": pp.functional, "eager": pp.eager}
VALIDATION_BATCHES = 40
SAMPLE = 240
MOST_CONTEXT = 8192


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--schedule", choices=BUILDERS, default="1f1b", help="as `ppfunc list` names them (default: %(default)s)")
    add("--stages", type=int, help="parts that the model is cut into (default: 4, or what torchrun's processes hold)")
    add("--chunks", type=int, help="stages of a rank, for the schedules that have that choice")
    add("--microbatches", type=int, default=8, help="(default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences in a batch (default: %(default)s)")
    add("--context", type=int, default=64, help="bytes in a sequence (default: %(default)s)")
    add("--width", type=int, default=64, help="(default: %(default)s)")
    add("--layers", type=int, default=8, help="transformer blocks (default: %(default)s)")
    add("--heads", type=int, default=4, help="(default: %(default)s)")
    add("--partition", choices=("balanced", "uniform"), default="balanced", help="(default: %(default)s)")
    add("--engine", choices=ENGINES, default="graph", help="how stages are differentiated (default: %(default)s)")
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--in-process", action="store_true", help="all ranks in this process")
    add("--out", type=Path, default=Path("out"), help="folder for the loss and the pictures (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        plan(options)
    except ValueError as error:
        parser.error(str(error))
    return options


class Plan(NamedTuple):
    """What is trained: the schedule, and the model cut into its stages.

    Args:
        model: all layers in order.
        partition: which layers make up each stage of the model.
    """

    schedule: Schedule
    config: gpt.Config
    model: list[gpt.Layer]
    partition: Partition

    @property
    def stages(self) -> list[Callable[..., Tensor]]:
        """One pure function per stage of the model."""
        return pp.stages_from_layers([layer.apply for layer in self.model], self.partition)

    def initialise(self, stage: int, seed: int, device: torch.device) -> list[gpt.Params]:
        """The first parameters of a stage of the model."""
        return gpt.initialise(self.model, self.partition.layers_of(stage), seed, device)


def plan(options: argparse.Namespace) -> Plan:
    """The plan that the options ask for, the same in every process.

    Raises:
        ValueError: options that do not fit together.
    """
    for name in ("steps", "stages", "microbatches", "batch", "context", "width", "layers", "heads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: got {value}, expected at least 1")
    if options.context > MOST_CONTEXT:
        raise ValueError(f"--context: got {options.context} bytes, expected at most {MOST_CONTEXT}")
    schedule = schedule_of(options)
    if schedule.forward_only:
        raise ValueError(f"{options.schedule} runs forward only; choose a schedule for training")
    if options.batch % schedule.microbatches:
        raise ValueError(f"a batch of {options.batch} is not divisible by {schedule.microbatches} microbatches")
    config = gpt.Config(options.width, options.layers, options.heads, options.context)
    model, parts = gpt.layers(config), len(schedule.chains[0].stages)
    if options.partition == "balanced":
        partition = partition_balanced(gpt.multiplications(config), parts)
    else:
        partition = partition_uniform(len(model), parts)
    return Plan(schedule, config, model, partition)


def schedule_of(options: argparse.Namespace) -> Schedule:
    """The schedule that was asked for, over as many ranks as hold the stages that were asked for, up to the gradients."""
    build, more = BUILDERS[options.schedule], {} if options.chunks is None else {"chunks": options.chunks}
    if "chunks" in more and "chunks" not in inspect.signature(build).parameters:
        raise ValueError(f"{options.schedule} has no choice of chunks; leave --chunks out")
    processes = launch.processes_given()
    if options.stages is None and processes is not None:
        return remove_tail(build(processes, options.microbatches, **more))
    wanted, reason = options.stages or 4, ""
    for ranks in range(wanted, 0, -1):
        try:
            schedule = remove_tail(build(ranks, options.microbatches, **more))
        except ValueError as error:
            reason = reason or f": {error}"
            continue
        if len(schedule.chains[0].stages) == wanted:
            return schedule
    raise ValueError(f"no {options.schedule} schedule has {wanted} stages and {options.microbatches} microbatches{reason}")


def learning_rate(peak: float, steps: int, warmup: int = 20) -> Callable[[int], float]:
    """A short linear rise, then half a cosine down to a tenth."""

    def rate(step: int) -> float:
        fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        return peak * fall * min(1.0, (step + 1) / warmup)

    return rate


class Result(NamedTuple):
    """The loss of every step, and that of the validation text, in nats per byte."""

    losses: list[float]
    validation: float


def train(options: argparse.Namespace, place: launch.Place) -> Result:
    """The whole job, as every process runs it."""
    todo = plan(options)
    schedule, stages, engine = todo.schedule, todo.stages, ENGINES[options.engine]
    text = corpus.load()

    def batch(n: int) -> corpus.Windows:
        return corpus.training_batch(text.train, options.batch, options.context, options.seed, n).to(place.device)

    # A process holds the parameters of the stages of the model that it runs.
    held = sorted({schedule.model_stages[stage] for stage in place.stages(schedule)})
    params = {stage: todo.initialise(stage, options.seed, place.device) for stage in held}
    optimizer = adamw(learning_rate(options.lr, options.steps), betas=(0.9, 0.95), weight_decay=0.1)
    state = optimizer.init(params)
    step = pp.value_and_grad(stages, gpt.cross_entropy, schedule, place.transport, engine=engine)
    validate = pp.evaluate(stages, gpt.cross_entropy, schedule, place.transport, engine=engine)

    one = corpus.Windows(*(pp.microbatch(t, schedule.microbatches)[0] for t in batch(0)))
    ideal = ideal_step(todo, options, one, place)
    progress = Progress(options, ideal.makespan, shown=place.rank == 0)
    for n in progress:
        loss, grads = step(params, *batch(n))
        params, state = optimizer.update(grads, state, params)
        progress.note(loss.item())

    pieces = (corpus.validation_batch(text.validation, options.batch, options.context, n) for n in range(VALIDATION_BATCHES))
    result = Result(progress.losses, mean(validate(params, *windows.to(place.device)).item() for windows in pieces))
    _, measured = step.record(params, *batch(options.steps))
    whole = gathered(todo, params, place)
    if place.rank == 0:
        report(options, place, measured, ideal, median(progress.seconds), result)
        sample = gpt.generate(todo.model, whole, text.validation[: options.context], SAMPLE, options.seed)
        print(f"\nA sample, after the {options.context} bytes that it begins with:\n{sample}")
    return result


def ideal_step(todo: Plan, options: argparse.Namespace, one: corpus.Windows, place: launch.Place) -> Timeline:
    """A step on paper, in seconds and bytes: every stage as long as on rank 0 alone, while the others wait; messages take no time."""
    costs: list[pp.Costs | None] = [None]
    if place.rank == 0:
        params = {stage: todo.initialise(stage, options.seed, place.device) for stage in range(len(todo.stages))}
        engine, memory = ENGINES[options.engine], options.engine == "graph"  # the other engines do not know what they keep
        costs = [pp.measure(todo.stages, params, one.inputs, gpt.cross_entropy, one.targets, engine=engine, memory=memory)]
    if place.processes > 1:
        dist.broadcast_object_list(costs, 0, device=place.device)
    return simulate(todo.schedule, costs[0].of_stages(todo.schedule.model_stages))


def least(timeline: Timeline, processes: int) -> float:
    """The least time that the work of a step takes: processes may have to share the cores of a CPU."""
    work = sum(timeline.makespan - idle for idle in timeline.idle)
    return max(timeline.makespan, work / min(processes, os.cpu_count() or 1))


class Progress:
    """A progress bar with the loss and the speed, and what it has seen."""

    def __init__(self, options: argparse.Namespace, ideal: float, shown: bool) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.tokens, self.ideal = options.batch * options.context, ideal
        tqdm.set_lock(RLock())  # one process writes; the lock for several would outlive an interrupt
        self.bar = tqdm(range(options.steps), unit="step", disable=not shown, dynamic_ncols=True)

    def __iter__(self) -> Iterator[int]:
        for n in self.bar:
            self.start = time.perf_counter()
            yield n

    def note(self, loss: float) -> None:
        """The end of a step."""
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - self.start)
        usual = median(self.seconds[-20:])
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {self.tokens / usual:,.0f} tokens/s, step {1e3 * usual:.0f} ms, ideal {1e3 * self.ideal:.0f} ms",
            refresh=False,
        )


def gathered(todo: Plan, params: dict[int, list[gpt.Params]], place: launch.Place) -> list[gpt.Params]:
    """The parameters of the whole model, layer by layer, on every rank."""
    whole = []
    for stage in todo.schedule.chains[0].stages:
        tree = params.get(stage) or todo.initialise(stage, 0, place.device)
        if place.processes > 1:
            for leaf in optree.tree_leaves(tree):
                dist.broadcast(leaf, todo.schedule.placement[stage])
        whole += tree
    return whole


def report(options: argparse.Namespace, place: launch.Place, measured: Timeline, ideal: Timeline, seconds: float, result: Result) -> None:
    """Say how it went, write the loss down, and draw it and a step, on paper and as measured."""
    options.out.mkdir(parents=True, exist_ok=True)
    name = ideal.schedule.name
    files = {
        "loss.csv": "".join(f"{step},{loss!r}\n" for step, loss in enumerate(result.losses)),
        "schedule.svg": to_svg(ideal.schedule, ideal),
        "measured.svg": to_svg(measured.schedule, measured),
        "loss.svg": loss_curve(result.losses, result.validation, f"Byte-level GPT, {name}, {ideal.schedule.ranks} ranks"),
    }
    for file, content in files.items():
        (options.out / file).write_text(content, encoding="utf-8")
    tokens = options.batch * options.context / seconds
    print(
        f"\nloss: {result.losses[0]:.3f} at first, {result.losses[-1]:.3f} at last, "
        f"{result.validation:.3f} nats per byte in validation\n"
        f"step: {1e3 * seconds:.1f} ms, {tokens:,.0f} tokens/s; ideal {1e3 * ideal.makespan:.1f} ms, "
        f"the simulation of {name} with the stages' own times and every rank on a core of its own; "
        f"{1e3 * least(ideal, place.processes):.1f} ms is the least with what this machine has\n"
        f"written: {', '.join(str(options.out / file) for file in files)}\n\n"
        f"One more step, measured and on paper, in shares of its time:\n{pp.compare(measured, ideal)}"
    )


if __name__ == "__main__":
    chosen = parse_options()
    launch.run(train, chosen, plan(chosen).schedule.ranks, chosen.in_process)
