"""Train a byte-level GPT through a pipeline, on the sources of Python's standard library.

    python examples/train_gpt.py                                  # 4 stages in 4 processes
    python examples/train_gpt.py --schedule zbv --stages 8        # two stages on each of 4 ranks
    python examples/train_gpt.py --stages 2 --replicas 2 --tensor 2   # a grid of 2 x 2 x 2 processes
    python examples/train_gpt.py --data my.txt --log run.jsonl    # on a text of yours, with a log
    torchrun --nproc-per-node 4 examples/train_gpt.py             # the first, started by torchrun
    python examples/train_gpt.py --save runs --resume             # from the last checkpoint, on any grid

Under ``torchrun --max-restarts 3 ... --save runs --resume`` it goes on by itself after a process has died.

The loss curve is the same whatever the schedule, the number of stages and the grid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from contextlib import suppress
from statistics import mean, median
from typing import Any, NamedTuple

import corpus
import gpt
import launch
import optree
import torch
import torch.distributed as dist
from curve import loss_curve
from options import ENGINES, PRECISIONS, Plan, parse_options, plan
from progress import Log, Progress, peak_speed
from torch.distributed.tensor import DTensor

import ppfunc as pp
from ppfunc.schedule import Timeline, simulate, to_svg

VALIDATION_BATCHES = 40
SAMPLE = 240


class Result(NamedTuple):
    """The loss of every step, and that of the validation text after some of them, in nats per byte."""

    losses: list[float]
    validations: list[tuple[int, float]]

    @classmethod
    def of(cls, saved: list[Any]) -> Result:
        """The result that JSON has kept."""
        return cls(saved[0], [(step, loss) for step, loss in saved[1]])

    @property
    def validation(self) -> float:
        """The last one."""
        return self.validations[-1][1]


def logging(options: argparse.Namespace, place: launch.Place, steps: int) -> tuple[Log, float | None]:
    """The log of this process, after so many steps, and the MFU of a step that takes a second."""
    if place.rank != 0 or not (options.log or options.tensorboard):
        return Log(None, None, 0), None
    dtype = PRECISIONS[options.precision].compute
    peak = options.peak * 1e12 if options.peak else peak_speed(place.device, dtype)
    devices = 1 if place.mesh is None else place.mesh.size()
    return Log(options.log, options.tensorboard, steps), operations(options) / (peak * devices)


def operations(options: argparse.Namespace) -> int:
    """Floating point operations of a step on all devices: counted, on tensors without values."""
    todo = plan(options)
    params = {s: todo.initialise(s, 0, torch.device("meta")) for s in todo.schedule.flows[0].stages}
    sequences = torch.empty(
        options.batch // options.replicas, options.context, dtype=torch.int64, device="meta"
    )
    step = pp.value_and_grad(todo.stages, gpt.cross_entropy, todo.schedule, tied=todo.tied)
    costs = step.lower(params, sequences, sequences).cost_analysis()
    return options.replicas * sum(cost.total for cost in costs.values())


def train(options: argparse.Namespace, place: launch.Place) -> Result:
    """The whole job, as every process runs it."""
    todo = plan(options, place.mesh)
    schedule, text = todo.schedule, corpus.load() if options.data is None else corpus.read(options.data)

    def part(windows: corpus.Windows) -> corpus.Windows:
        return corpus.Windows(
            *(t.chunk(options.replicas)[place.along("dp")].to(place.device) for t in windows)
        )

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

    def run(result: Result) -> dict[str, Any]:
        """All that training goes on from."""
        return {"state": state, "step": len(result.losses), "result": json.dumps(result)}

    def validate() -> None:
        pieces = (
            corpus.validation_batch(text.validation, options.batch, options.context, n)
            for n in range(VALIDATION_BATCHES)
        )
        loss = mean(trainer.evaluate(state, *part(windows)).item() for windows in pieces)
        result.validations.append((len(result.losses), loss))
        progress.log.write(len(result.losses), validation=loss)

    result = Result([], [])
    if options.resume:
        with suppress(FileNotFoundError):  # before the first checkpoint
            last = pp.checkpoint.load(options.save, like=run(result), names=todo.name)
            state, result = last["state"], Result.of(json.loads(last["result"]))
    progress = Progress(options, result.losses, place.rank == 0, *logging(options, place, len(result.losses)))
    for n in progress:
        state, metrics = trainer.step(state, *batch(n))
        progress.note(metrics)
        if (n + 1) % options.validate == 0 or n + 1 == options.steps:
            validate()
        if options.save and ((n + 1) % options.every == 0 or n + 1 == options.steps):
            pp.checkpoint.save(options.save, run(result), names=todo.name)
    if not result.validations:
        validate()

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


def gathered(todo: Plan, state: pp.TrainState, place: launch.Place) -> list[gpt.Params]:
    """The parameters of the whole model, layer by layer, on every rank."""
    whole = []
    for stage in todo.schedule.flows[0].stages:
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
        "schedule.svg": to_svg(paper),
        "measured.svg": to_svg(measured),
        "loss.svg": loss_curve(
            result.losses, result.validations, f"Byte-level GPT, {schedule.name}, {schedule.ranks} ranks"
        ),
    }
    for file, content in files.items():
        (options.out / file).write_text(content, encoding="utf-8")
    print(
        f"\nloss: {result.losses[0]:.3f} at first, {result.losses[-1]:.3f} at last, "
        f"{result.validation:.3f} nats per byte in validation\n"
        f"step: {1e3 * seconds:.1f} ms, {options.batch * options.context / seconds:,.0f} tokens/s\n"
        f"written: {', '.join(str(options.out / file) for file in files)}\n\n"
        "One more step in seconds, as measured and on paper, where messages take no time, and its costs:\n"
        f"{measured}\n{paper}\n{measured.costs()}"
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
            train, chosen, (plan(chosen).schedule.ranks, chosen.replicas, chosen.tensor), chosen.in_process
        )
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{farewell(chosen)}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
