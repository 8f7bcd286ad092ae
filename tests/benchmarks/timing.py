"""Timing of one side of a comparison."""

import argparse
import ctypes
import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
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
