"""Saving and loading a checkpoint beside plain safetensors, and beside torch's own checkpoints, each in turn
in one process.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/checkpoints.py --megabytes 200 --repeats 7
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/checkpoints.py

* ``save``: ``ppfunc.checkpoint.save``, with digests, flushed to the disk, beside
  ``safetensors.torch.save_file``, which does neither.
* ``flushed``: the same beside ``save_file`` and an fsync.
* ``stall``: how long ``save_async`` takes to return, beside ``ppfunc.checkpoint.save``.
* ``load``: ``ppfunc.checkpoint.load``, which verifies digests, beside ``safetensors.torch.load_file``, which
  maps the file, and a copy into memory.
* ``torch save``, ``torch load``: ``torch.distributed.checkpoint`` on the same tensors beside ``save_file``
  and ``load_file``.

With several processes each has tensors of its own, of so many megabytes together, and its own plain file.
Printed are the medians of the wall times and of the CPU times of each side, and the medians of the ratios
round by round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ppfunc as pp

Times = tuple[float, float]


def timed(work: Callable[[], object]) -> Times:
    """Wall and CPU seconds."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def rounds(folder: Path, rank: int, state: dict[str, torch.Tensor], repeats: int) -> dict[str, list[Times]]:
    """The times of every side in every round."""
    found: dict[str, list[Times]] = {}
    like = {name: torch.zeros_like(t) for name, t in state.items()}
    plain, theirs = folder / f"plain-{rank}.safetensors", folder / "torch"

    def note(name: str, work: Callable[[], object]) -> None:
        found.setdefault(name, []).append(timed(work))

    for step in range(repeats + 1):
        os.sync()
        note("plain save", lambda: save_file(state, plain))
        os.sync()
        note("flushed save", lambda: (save_file(state, plain), flush(plain)))
        note("save", lambda step=step: pp.checkpoint.save(folder / "sync", state, step=step, keep=1))
        note(
            "stall",
            lambda step=step: savings.append(
                pp.checkpoint.save_async(folder / "async", state, step=step, keep=1)
            ),
        )
        savings.pop().result()
        note("plain load", lambda: {name: t.clone() for name, t in load_file(plain).items()})
        note("load", lambda: pp.checkpoint.load(folder / "sync", like=like))
        os.sync()
        note("torch save", lambda: dcp.save(state, checkpoint_id=theirs))
        note("torch load", lambda: dcp.load(like, checkpoint_id=theirs))
    return {name: times[1:] for name, times in found.items()}


savings: list[Future[Path]] = []
RATIOS = {
    "save": ("save", "plain save"),
    "flushed": ("save", "flushed save"),
    "stall": ("stall", "save"),
    "load": ("load", "plain load"),
    "torch save": ("torch save", "plain save"),
    "torch load": ("torch load", "plain load"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the system's folder for temporary files)"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    numbers = options.megabytes * 10**6 // 4 // options.tensors // size
    state = {f"rank{rank}.{n}": torch.randn(numbers) for n in range(options.tensors)}
    folder = [tempfile.mkdtemp(dir=options.folder)] if rank == 0 else [""]
    if size > 1:
        dist.broadcast_object_list(folder)
    try:
        times = rounds(Path(folder[0]), rank, state, options.repeats)
    finally:
        if size > 1:
            dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])
    if rank == 0:
        print(
            f"{options.megabytes} MB in {options.tensors * size} tensors, {size} processes, {options.repeats}"
            " rounds"
        )
        for name, found in times.items():
            wall, cpu = (1e3 * median(side) for side in zip(*found, strict=True))
            print(f"{name:13} {wall:8.1f} ms wall {cpu:8.1f} ms CPU")
        for name, (one, other) in RATIOS.items():
            wall, cpu = (
                median(a[k] / b[k] for a, b in zip(times[one], times[other], strict=True)) for k in (0, 1)
            )
            print(f"{name:13} {wall:8.2f} wall    {cpu:8.2f} CPU     ({one} / {other})")
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
