"""The stages: each returns what it has found, or raises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    """Versions, devices, and what ppfunc needs and finds neither in NCCL's class nor among the packages."""
    names = (
        "_start_coalescing _end_coalescing abort send recv allreduce _allgather_base _reduce_scatter_base"
        " alltoall_base eager_connect_single_device"
    ).split()
    made = getattr(dist, "ProcessGroupNCCL", None)
    packages = "optree einops safetensors pytest hypothesis".split()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "missing": ["ProcessGroupNCCL"] if made is None else [n for n in names if not hasattr(made, n)],
        "packages missing": [name for name in packages if find_spec(name) is None],
    }


def marked_tests() -> Facts:
    """Run the tests marked ``cuda``: streams, graphs, recording, offload."""
    gpus()
    marked = [str(p) for p in (_ROOT / "tests").rglob("test_*.py") if "mark.cuda" in p.read_text()]
    side_by_side = ["-n", "4"] if find_spec("xdist") else []
    return pytest("-m", "cuda", *side_by_side, *marked)


def sanitizer() -> Facts:
    """Look for races between streams with torch's CUDA sanitizer, once programs have been traced."""
    gpus()
    from tests.gpu.ranks import sanitized

    return {"steps": sanitized()}


def one_rank() -> Facts:
    """Make a communicator of one rank, sum and gather on it, and end it."""
    gpus()
    from ppfunc.runtime.ports import _torch

    store = dist.HashStore()
    group = _torch.communicator("nccl", "ppfunc/alone", store, [0], 0, timedelta(seconds=30))
    whole = torch.ones(3, device="cuda")
    group.allreduce([whole]).wait()
    group._allgather_base(torch.empty(3, device="cuda"), whole).wait()
    torch.cuda.synchronize()
    assert whole.tolist() == [1, 1, 1]
    group.abort()
    return {"sum": whole.tolist()}


def gloo_refuses() -> Facts:
    """Two processes over gloo with tensors of the GPU are refused by name."""
    gpus()
    from tests.gpu.ranks import in_processes, refused

    answers = in_processes(refused, "gloo", "cuda", seconds=60)
    assert all("gloo" in answer and "cpu" in answer.lower() for answer in answers), answers
    return {"says": answers[0][:_SHOWN]}


def one_gpu_for_two() -> Facts:
    """Two processes that take the same GPU are refused within 30 s; with two GPUs they agree."""
    from tests.gpu.ranks import agrees, in_processes, refused

    if gpus() > 1:
        return {"losses": in_processes(agrees, "nccl", "cuda", "one_f_one_b", seconds=90)}
    began = time.monotonic()
    answers = in_processes(refused, "nccl", "cuda", seconds=60)
    seconds = time.monotonic() - began
    assert seconds < 30, seconds
    return {"seconds": seconds, "says": answers[0][:_SHOWN]}


def two_ranks() -> Facts:
    """Two ranks over NCCL: schedules, a rank that fails in several ways, an exit without ``close``."""
    host, found, failed = _hosts(), Facts(), list[str]()
    from tests.gpu.ranks import WAYS, agrees, in_processes, leaves, survives

    def run(name: str, job: Any, *args: str, **options: Any) -> None:
        try:
            found[name] = in_processes(job, "nccl", "cuda", *args, environment=host, seconds=60, **options)
        except AssertionError as error:  # the others run all the same
            failed.append(f"{name}: {error}")

    for name, *overlapped in (("one_f_one_b",), ("dualpipe",), ("dualpipev", "two_streams")):
        run(name, agrees, name, *overlapped)
    for how in WAYS:
        run(how, survives, how)
    run("exits", leaves, exits=True)
    if found.get("exits", [0, 0]) != [0, 0]:
        failed.append(f"exits: {found['exits']}")
    assert not failed, "\n".join([f"{len(failed)} of {len(found) + len(failed)}", *failed])
    return found


def _hosts() -> dict[str, str]:
    """Return what lets two ranks on one GPU pass for two hosts."""
    return {"NCCL_HOSTID": "rank{rank}", "NCCL_SOCKET_IFNAME": "lo"} if gpus() == 1 else {}


def waits_of_two_ranks() -> Facts:
    """Count the host waits of a second step, in process and between two ranks; the simulation says 0."""
    host = _hosts()
    from tests.gpu.ranks import counts_waits, host_waits, in_processes, step_in_process

    return {
        "in process": host_waits(step_in_process),
        "two ranks": in_processes(counts_waits, "nccl", "cuda", environment=host, seconds=60),
    }


def training() -> Facts:
    """Trainers of two ranks over NCCL, whole and in shards, give what they give over gloo on the CPU."""
    host = _hosts()
    from tests.gpu.ranks import TRAINED, in_processes, trains

    wanted = in_processes(trains, "gloo", "cpu", seconds=60)
    found = in_processes(trains, "nccl", "cuda", environment=host, seconds=120)
    for mine, others in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-9, atol=1e-12)
    return {f"{shape} {shard}": found[0][n][0][-1] for n, (shape, shard) in enumerate(TRAINED)}


def collectives() -> Facts:
    """Experts and sequences over two ranks: what stages exchange, in turn and beside compute."""
    host = _hosts()
    from tests.gpu.ranks import attends, exchanges, in_processes

    same = in_processes(exchanges, "nccl", "cuda", environment=host, seconds=60)
    assert all(map(all, same)), same
    far = [in_processes(attends, "nccl", "cuda", s, environment=host, seconds=60) for s in ("none", "params")]
    assert max(map(max, far)) < 1e-12, far
    return {"experts": same, "context": far}


def pytest(*arguments: str) -> Facts:
    """Run tests; raises AssertionError with the end of what pytest prints where one fails.

    Only the plugins that tests need are loaded: any other's warning would be an error.
    """
    plugins = {"xdist": "xdist.plugin", "hypothesis": "_hypothesis_pytestplugin"}
    loaded = [option for name, plugin in plugins.items() if find_spec(name) for option in ("-p", plugin)]
    options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]  # of an older pytest
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *loaded, *options, *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits on any stream
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, "\n".join(lines[-20:])
    return {"pytest": lines[-1].strip("= ")}


STAGES = {
    "probe": Stage(probe, 60),
    "one rank": Stage(one_rank, 60),
    "gloo refuses": Stage(gloo_refuses, 60),
    "one gpu for two": Stage(one_gpu_for_two, 90),
    "two ranks": Stage(two_ranks, 300),
    "training": Stage(training, 180),
    "collectives": Stage(collectives, 180),
    "host waits": Stage(waits_of_two_ranks, 90),
    "sanitizer": Stage(sanitizer, 60),
    "tests": Stage(marked_tests, 240),
}
