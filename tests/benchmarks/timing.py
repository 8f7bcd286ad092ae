"""Timing of two sides of a comparison, in turn."""

import argparse
import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine(), -1)  # number of the system call


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


def in_turn(
    first: Callable[[], object],
    second: Callable[[], object],
    rounds: int,
    steps: int,
) -> list[tuple[Cost, Cost]]:
    """Costs of a step of both sides, by round; who is measured first takes turns."""
    found = []
    for n in range(rounds):
        costs = {}
        for side in (n % 2, 1 - n % 2):
            costs[side] = measure(second if side else first, steps)
        found.append((costs[0], costs[1]))
    return found


def report(first: str, second: str, rounds: list[tuple[Cost, Cost]]) -> None:
    """Print on rank 0 the medians of both sides, and the medians of the ratios round by round."""
    for k, what in enumerate(("step", "CPU of all ranks") if dist.get_rank() == 0 else ()):
        mine, other = (median(sides[n][k] * 1e3 for sides in rounds) for n in (0, 1))
        ratio = median(a[k] / b[k] for a, b in rounds)
        print(f"{what}: {first} {mine:.2f} ms, {second} {other:.2f} ms, ratio {ratio:.4f}")


def add_foremost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--foremost", action="store_true", help="run before all other processes, as root on Linux"
    )


def foremost() -> None:
    """Run before other processes: in a group of its own, at the highest priority, in slices of 0.1 ms.

    A core is shared between groups of processes, one for each session, and `nice` acts within one (sched(7)).

    Raises:
        PermissionError: this process is not root's.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    Path("/proc/self/autogroup").write_text("-20")
    # struct sched_attr: size, policy, flags, nice, priority; runtime, here the slice in ns; deadline, period
    attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, -20, 0, 100_000, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SCHED_SETATTR, os.getpid(), attributes, 0):
        raise OSError(ctypes.get_errno(), "sched_setattr")


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees for the next one.

    It gives back what is free beyond twice the largest block that was mapped by itself and freed. A step of
    smaller tensors then faults in thousands of pages, up to 3% of its CPU seconds, or none, as chance has it.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)  # it maps up to 32 MiB by itself


def _together() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
