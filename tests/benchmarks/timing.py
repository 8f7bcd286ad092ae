"""Timing of one side of a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist


def measure(step: Callable[[], object], steps: int) -> float:
    """Seconds per step, all ranks beginning together."""
    step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps
