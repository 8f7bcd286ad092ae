"""How long a training step should take: the stages' own times, put through the simulation of the schedule."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from corpus import Windows
from launch import Place

from ppfunc.schedule import Costs, Schedule, Timeline, simulate
from ppfunc.stage import Engine, StageProgram

REPEATS = 15


def ideal(
    engine: Engine,
    stages: Sequence[Callable[..., Any]],
    loss: Callable[..., torch.Tensor],
    schedule: Schedule,
    params: Mapping[int, Any],
    microbatch: Windows,
    width: int,
    place: Place,
) -> Timeline:
    """The simulated step, in milliseconds: every instruction as long as here alone, messages no time.

    Args:
        stages: of the model.
        params: those of the stages of the model that this process holds.
        microbatch: one of the size that is trained on.
        width: of the float[b, t, d] between two stages.
    """
    times = torch.zeros(schedule.stages, 4, dtype=torch.float64, device=place.device)
    first, last = (schedule.chains[0].stages[k] for k in (0, -1))
    between = torch.randn(*microbatch.inputs.shape, width, device=place.device)
    # One process at a time, so that they do not slow each other down.
    for turn in range(place.processes):
        for stage in place.stages(schedule) if turn == place.rank else ():
            model = schedule.model_stages[stage]
            x = microbatch.inputs if model == first else between
            if model == last:
                fn, example = _with_loss(stages[model], loss), (params[model], x, microbatch.targets)
            else:
                fn, example = stages[model], (params[model], x)
            program = engine(fn, example, name=f"stage {model}", device=place.device)
            times[stage] = torch.tensor(_times(program, example, place.device))
        if place.processes > 1:
            dist.barrier()
    if place.processes > 1:
        dist.all_reduce(times)
    forward, whole, backward_input, backward_weight = (tuple(column) for column in times.T.tolist())
    return simulate(schedule, Costs(forward, backward_input, backward_weight, whole))


def least(timeline: Timeline, processes: int) -> float:
    """The least time that the work of a step takes: processes may have to share the cores of a CPU."""
    work = sum(timeline.makespan - idle for idle in timeline.idle)
    return max(timeline.makespan, work / min(processes, os.cpu_count() or 1))


def _with_loss(fn: Callable[..., Any], loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda params, x, target: loss(fn(params, x), target)


def _times(program: StageProgram, example: tuple[Any, ...], device: torch.device) -> list[float]:
    """Milliseconds of forward, whole backward, input gradient and weight gradient: medians."""
    rows = []
    gy = torch.ones(program.y.leaves[0].shape, device=device)
    for _ in range(REPEATS):
        start = _now(device)
        _, residuals = program.forward(*example)
        forward = _now(device)
        program.backward(residuals, gy)
        whole = _now(device)
        _, residuals = program.forward(*example)
        again = _now(device)
        _, rest = program.backward_input(residuals, gy)
        inputs = _now(device)
        program.backward_weight(rest)
        rows.append((forward - start, whole - forward, inputs - again, _now(device) - inputs))
    return [1e3 * median(column) for column in zip(*rows, strict=True)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
