"""Timing of one side of a comparison."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def measure(step: Callable[[], object], steps: int) -> float:
    """Seconds per step, all ranks beginning together, what they have issued on CUDA included."""
    step()
    _together()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _together()
    return (time.perf_counter() - start) / steps


def _together() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
