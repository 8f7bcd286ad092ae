"""Where the ranks of an example run: processes of its own, those of torchrun, or this one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ppfunc as pp

AXES = pp.Axes(pipe="pp", data="dp", model="tp")
Sizes = tuple[
    int, int, int
]  # ranks of a pipeline, pipelines that run other batches, ranks that compute parts of a stage


class Place(NamedTuple):
    """What a process needs to know of where it runs.

    Args:
        transport: carries messages between the ranks.
        device: where this process computes.
        rank: the number of this process, 0 where there is only one.
        mesh: all processes, over ``AXES``; None where there is only one.
    """

    transport: pp.runtime.Transport
    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None

    def held(self, schedule: pp.Schedule) -> list[int]:
        """The stages of the model whose parameters this process holds, those that it runs."""
        return sorted(
            {
                stage
                for rank in self.transport.local_ranks(schedule.ranks)
                for stage in schedule.model_stages_of(rank)
            }
        )

    def along(self, axis: str) -> int:
        """The place of this process along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)


def processes_given() -> int | None:
    """How many processes torchrun, or :func:`run`, has started; None where neither has."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def run(job: Callable[[Any, Place], None], options: Any, sizes: Sizes, in_process: bool) -> None:
    """Call ``job(options, place)`` in every process.

    Under torchrun this process is one of them. Otherwise they are started here, unless all ranks of a
    single pipeline are to share this process: when asked to, for a single rank, and where they share one GPU.
    """
    gpus, one_pipeline = torch.cuda.device_count(), prod(sizes[1:]) == 1
    if processes_given() is not None:
        with joined(sizes, options) as place:
            job(options, place)
    elif in_process or prod(sizes) == 1 or (one_pipeline and 0 < gpus < sizes[0]):
        one_thread()
        job(options, Place(pp.InProcess(), torch.device("cuda" if gpus else "cpu")))
    else:
        start(job, options, sizes)


def one_thread() -> None:
    # Sums depend on the number of threads: with one each, the numbers are the same however
    # many ranks there are, and the ranks do not fight for cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


@contextmanager
def joined(sizes: Sizes, options: Any) -> Iterator[Place]:
    """This process as the rank that the environment says: NCCL with a GPU per rank, else gloo."""
    one_thread()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # torchrun starts processes anew on the store of those that have died: what these have left there must not
    # be found.
    store, _, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, device_id=device if on_gpu else None
    )
    try:
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
        shard = getattr(options, "shard", "none")
        with pp.P2P(mesh=mesh, axes=AXES, shard=shard) as transport:
            yield Place(transport, device, rank, mesh)
    except pp.PipelineError as error:
        # The rank that failed tells; its peers leave in silence, so that the reason stands once.
        if error.rank == rank:
            raise
    finally:
        dist.destroy_process_group()


def start(job: Callable[[Any, Place], None], options: Any, sizes: Sizes) -> None:
    """Run the job in new processes; the first failure ends all of them, and this one; an interrupt ends all
    of them.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A server that has imported everything once forks the processes, where there is such a thing.
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    mp.set_forkserver_preload(["__main__", "torch._dynamo"])
    arguments = job, options, sizes, store.port
    context = mp.start_processes(
        enter, arguments, nprocs=prod(sizes), join=False, daemon=True, start_method=method
    )
    try:
        while not context.join(grace_period=5):
            pass
    except KeyboardInterrupt:
        for process in context.processes:
            process.kill()
            process.join()
        raise
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error).strip())


def enter(rank: int, job: Callable[[Any, Place], None], options: Any, sizes: Sizes, port: int) -> None:
    """The beginning of a started process: the environment that torchrun would have given it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(prod(sizes)),
        "LOCAL_WORLD_SIZE": str(prod(sizes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with joined(sizes, options) as place:
        job(options, place)
