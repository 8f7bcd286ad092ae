"""Where the ranks of an example run: processes of its own, those of torchrun, or this one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ppfunc as pp


class Place(NamedTuple):
    """What a process needs to know of where it runs.

    Args:
        transport: carries messages between the ranks.
        device: where this process computes.
        rank: the number of this process, 0 where there is only one.
        processes: how many there are.
    """

    transport: pp.Transport
    device: torch.device
    rank: int = 0
    processes: int = 1

    def stages(self, schedule: pp.Schedule) -> Sequence[int]:
        """The stages of a schedule that this process runs: those of its rank; all of them where it is alone."""
        return schedule.stages_of(self.rank) if self.processes > 1 else range(schedule.stages)


def processes_given() -> int | None:
    """How many processes torchrun, or :func:`run`, has started; None where neither has."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def run(job: Callable[[Any, Place], None], options: Any, ranks: int, in_process: bool) -> None:
    """Call ``job(options, place)`` in every process of a pipeline of ``ranks``.

    Under torchrun this process is one of them. Otherwise they are started here, unless all ranks
    are to share this process: when asked to, for a single rank, and where they share one GPU.
    """
    gpus = torch.cuda.device_count()
    if processes_given() is not None:
        with joined() as place:
            job(options, place)
    elif in_process or ranks == 1 or 0 < gpus < ranks:
        one_thread()
        job(options, Place(pp.InProcess(), torch.device("cuda" if gpus else "cpu")))
    else:
        start(job, options, ranks)


def one_thread() -> None:
    # Sums depend on the number of threads: with one each, the numbers are the same however
    # many ranks there are, and the ranks do not fight for cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


@contextmanager
def joined() -> Iterator[Place]:
    """This process as the rank that the environment says: NCCL with a GPU per rank, else gloo."""
    one_thread()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        with pp.P2P() as transport:
            yield Place(transport, device, rank, dist.get_world_size())
    except pp.PipelineError as error:
        # The rank that failed tells; its peers leave in silence, so that the reason stands once.
        if error.rank == rank:
            raise
    finally:
        dist.destroy_process_group()


def start(job: Callable[[Any, Place], None], options: Any, ranks: int) -> None:
    """Run the job in ``ranks`` new processes; the first failure ends all of them, and this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A server that has imported everything once forks the processes, where there is such a thing.
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    mp.set_forkserver_preload(["__main__", "torch._dynamo"])
    context = mp.start_processes(enter, (job, options, ranks, store.port), nprocs=ranks, join=False, daemon=True, start_method=method)
    try:
        while not context.join(grace_period=5):
            pass
    except KeyboardInterrupt:
        for process in context.processes:
            process.kill()
        sys.exit(130)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error).strip())


def enter(rank: int, job: Callable[[Any, Place], None], options: Any, ranks: int, port: int) -> None:
    """The beginning of a started process: the environment that torchrun would have given it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with joined() as place:
        job(options, place)
