"""The stages: each returns what it has found, or raises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.gpu.ranks import agrees, counts_waits, host_waits, in_processes, refused, step_in_process, survives

Facts = dict[str, Any]
_ROOT = Path(__file__).parents[2]
_SHOWN = 300  # characters of an error


class Skipped(Exception):
    """Says why a stage cannot run here."""


class Stage(NamedTuple):
    """A function that returns what it has found, and the seconds that it may take."""

    run: Callable[[], Facts]
    seconds: float


def gpus(count: int = 1) -> int:
    """Return the number of GPUs; skips the stage where there are fewer than ``count``."""
    if torch.cuda.device_count() < count:
        raise Skipped("no CUDA device" if count == 1 else f"fewer than {count} CUDA devices")
    return torch.cuda.device_count()


def probe() -> Facts:
    """Versions, devices, and names of NCCL that ppfunc uses and this torch lacks."""
    names = ["_start_coalescing", "_end_coalescing", "abort", "allreduce", "_allgather_base"]
    made = getattr(dist, "ProcessGroupNCCL", None)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "missing": ["ProcessGroupNCCL"] if made is None else [n for n in names if not hasattr(made, n)],
    }


def marked_tests() -> Facts:
    """Run the tests marked ``cuda``: streams, graphs, recording, offload."""
    gpus()
    return pytest("-m", "cuda")


def sanitizer() -> Facts:
    """Look for races between streams with torch's CUDA sanitizer, and for host waits in a second step."""
    gpus()
    os.environ["TORCH_CUDA_SANITIZER"] = "1"
    found = pytest("-m", "cuda", "-k", "not captured and not graphs and not compile")
    return found | {"host waits": host_waits(step_in_process)}


def one_rank() -> Facts:
    """Make a communicator of one rank, sum and gather on it, and end it."""
    gpus()
    from ppfunc.runtime.transport import _torch

    store = dist.HashStore()
    group = _torch.ProcessGroupNCCL(store, 0, 1, timedelta(seconds=30))
    whole = torch.ones(3, device="cuda")
    group.allreduce([whole]).wait()
    group._allgather_base(torch.empty(3, device="cuda"), whole).wait()
    torch.cuda.synchronize()
    assert whole.tolist() == [1, 1, 1]
    group.abort()
    left = subprocess.run(
        [sys.executable, "-c", _LEAVES], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    assert left.returncode == 0, left.stderr[-_SHOWN:]
    return {"exit without close": left.returncode, "said": left.stderr.strip()[-_SHOWN:]}


_LEAVES = """
import os, torch, torch.distributed as dist, ppfunc as pp
from tests.gpu.ranks import free_port, step_of
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
step_of(pp.one_f_one_b(1, 2), pp.P2P(), torch.device("cuda"))[0]()
"""


def gloo_refuses() -> Facts:
    """Two processes over gloo with tensors of the GPU are refused by name."""
    gpus()
    answers = in_processes(refused, "gloo", "cuda", seconds=60)
    assert all("gloo" in answer and "cpu" in answer.lower() for answer in answers), answers
    return {"says": answers[0][:_SHOWN]}


def one_gpu_for_two() -> Facts:
    """Two processes that take the same GPU are refused within 30 s; with two GPUs they agree."""
    if gpus() > 1:
        return {"losses": in_processes(agrees, "nccl", "cuda", "one_f_one_b", seconds=90)}
    began = time.monotonic()
    answers = in_processes(refused, "nccl", "cuda", seconds=60)
    seconds = time.monotonic() - began
    assert seconds < 30, seconds
    return {"seconds": seconds, "says": answers[0][:_SHOWN]}


def two_ranks() -> Facts:
    """Two ranks over NCCL: two schedules, a rank that fails, a rank that is killed."""
    host = {"NCCL_HOSTID": "rank{rank}"} if gpus() == 1 else {}
    found: Facts = {}
    for name in ("one_f_one_b", "dualpipe"):
        found[name] = in_processes(agrees, "nccl", "cuda", name, environment=host, seconds=60)
    for how in ("raises", "killed"):
        _, says = in_processes(survives, "nccl", "cuda", how, environment=host, seconds=90)
        assert says is not None and "rank 0" in says, says
        found[how] = says[:_SHOWN]
    return found


def waits_of_two_ranks() -> Facts:
    """Count the host waits of a second step, in process and between two ranks; the simulation says 0."""
    host = {"NCCL_HOSTID": "rank{rank}"} if gpus() == 1 else {}
    return {
        "in process": host_waits(step_in_process),
        "two ranks": in_processes(counts_waits, "nccl", "cuda", environment=host, seconds=60),
    }


def pytest(*arguments: str) -> Facts:
    """Run tests; raises AssertionError with the end of what pytest prints where one fails."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, "\n".join(lines[-20:])
    return {"pytest": lines[-1].strip("= ")}


STAGES = {
    "probe": Stage(probe, 60),
    "tests": Stage(marked_tests, 180),
    "sanitizer": Stage(sanitizer, 180),
    "one rank": Stage(one_rank, 60),
    "gloo refuses": Stage(gloo_refuses, 60),
    "one gpu for two": Stage(one_gpu_for_two, 90),
    "two ranks": Stage(two_ranks, 240),
    "host waits": Stage(waits_of_two_ranks, 90),
}
