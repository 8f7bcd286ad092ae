"""Timing of one side of a comparison."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist


class Cost(NamedTuple):
    """Seconds of a step: on the wall; on the CPU, of all ranks together, threads of transports included."""

    wall: float
    cpu: float


def measure(step: Callable[[], object], steps: int) -> Cost:
    """Cost of a step, all ranks beginning together, what they have issued on CUDA included."""
    step()
    _together()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    cpu = time.process_time() - cpu
    _together()
    wall = time.perf_counter() - wall
    total = torch.tensor(cpu, dtype=torch.float64)
    if torch.cuda.is_available():
        total = total.cuda()
    dist.all_reduce(total)
    return Cost(wall / steps, total.item() / steps)


def _together() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
