"""Run ranks on the simulated NCCL, in processes or in threads: torch's own functions make the groups.

Within :func:`simulated_nccl`, ``init_process_group("cpu:gloo,cuda:nccl")``, ``new_group`` and ``DeviceMesh``
make a :class:`Group` each, and ``ProcessGroupNCCL`` is there.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d as c10d

from . import census, names, nccl

BACKENDS = "cpu:gloo,cuda:nccl"
_PAUSE = 0.005  # seconds between looks whether ranks have ended
_LATER = 5.0  # seconds that the others have, once a rank has failed


class Group(dist.ProcessGroup):
    """A process group in the place of torch's, whose backends may be Python classes.

    It gives each operation to the backend of the device of its tensors. gloo gets none of the device: it
    would read what is not there yet.
    """

    bound_device_id = None

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._backends = store, dict[str, Any]()
        self._name = self._description = ""

    def get_group_store(self) -> Store:
        return self._store

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        self._backends[device.type] = backend

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backends[device.type]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends]

    def _set_default_backend(self, kind: Any) -> None: ...

    def _has_hooks(self) -> bool:
        return False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def _of_nccl(self) -> list[nccl.ProcessGroupNCCL]:
        return [one for one in self._backends.values() if isinstance(one, nccl.ProcessGroupNCCL)]

    def abort(self) -> None:
        for backend in self._of_nccl():
            backend.abort()

    def shutdown(self) -> None:
        for backend in self._of_nccl():
            backend.shutdown()

    def barrier(self, opts: Any = None) -> Any:
        """Over gloo; under NCCL it holds up the host until a sum is done."""
        for backend in self._backends.values():
            if not isinstance(backend, nccl.ProcessGroupNCCL):
                return backend.barrier(opts or dist.BarrierOptions())
        [backend] = self._of_nccl()
        work = backend.allreduce([torch.zeros(1, device="cuda")], dist.AllreduceOptions())
        work.wait()
        torch.cuda.current_stream().synchronize()
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._get_backend(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._get_backend(device)._end_coalescing()

    def _run(self, name: str, *arguments: Any) -> Any:
        backend = self._get_backend(_first(arguments).device)
        if _first(arguments).is_cuda and not isinstance(backend, nccl.ProcessGroupNCCL):
            raise RuntimeError(
                f"{name} of a tensor of the simulated device over {backend.name()}, which would read"
                " memory that is not written yet; give the group the backend 'cpu:gloo,cuda:nccl'"
            )
        if name in _ONE_BY_ONE and not hasattr(backend, name):
            firsts, seconds, *rest = arguments
            return [
                getattr(backend, _ONE_BY_ONE[name])(*pair, *rest)
                for pair in zip(firsts, seconds, strict=True)
            ][-1]
        return getattr(backend, name)(*arguments)


_NAMES = {  # of a group: that of its backends
    **{
        name: name
        for name in "allreduce allreduce_coalesced allgather reduce broadcast gather scatter reduce_scatter"
        " alltoall send recv".split()
    },
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
}


_ONE_BY_ONE = {  # where a backend in C++ shows no other
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


def _operation(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._run(name, *arguments)


for _of_group, _of_backend in _NAMES.items():
    setattr(Group, _of_group, _operation(_of_backend))


def _first(arguments: Any) -> torch.Tensor:
    """Return the first tensor among nested lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list | tuple) and argument:
            return _first(argument)
    raise ValueError("an operation of a process group without a tensor")


@contextmanager
def simulated_nccl(abort_takes: float = 0.0) -> Iterator[census.Census]:
    """Put the simulated NCCL in the place of torch's, within a simulated device.

    Args:
        abort_takes: seconds of an abort.
    """
    count, stack = census.new(abort_takes), ExitStack()
    with stack:
        for module in (c10d, dist):
            for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
                stack.enter_context(mock.patch.object(module, name, nccl.ProcessGroupNCCL, create=True))
        stack.enter_context(mock.patch.object(c10d, "_NCCL_AVAILABLE", True))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 29, 7)))
        stack.enter_context(mock.patch.object(c10d, "ProcessGroup", Group))
        for name in ("putenv", "unsetenv"):
            stack.enter_context(mock.patch.object(os, name, _watched(getattr(os, name), count)))
        yield count


def _watched(change: Callable[..., None], count: census.Census) -> Callable[..., None]:
    """Note a change of the environment while threads of NCCL may read it, which crashes glibc."""

    def watched(key: bytes, *value: bytes) -> None:
        if any(one.alive for one in count.communicators):
            count.fault(f"{os.fsdecode(key)} is set in the environment while a communicator is connected")
        change(key, *value)

    return watched


@contextmanager
def member(
    store: Store, rank: int, size: int, backend: str = BACKENDS, timeout: float = 30.0
) -> Iterator[None]:
    """Be a rank of a world, on the device of its number if there is one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        yield
    except BaseException:  # what has failed may never end
        aborts = [threading.Thread(target=group.abort) for group in c10d._world.pg_map]
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join()
        raise
    finally:
        dist.destroy_process_group()


_OUTER: list[Store] = []  # that of the pool of processes, which is given up
_ROUNDS = [0]


@contextmanager
def member_in_pool(
    rank: int, size: int, seed: int = 0, backend: str = BACKENDS, timeout: float = 30.0, **options: Any
) -> Iterator[tuple[Any, census.Census]]:
    """Be a rank of a world of processes that gloo has joined, each with devices of its own."""
    if not _OUTER:
        _OUTER.append(c10d._get_default_store())
        dist.destroy_process_group()
    _ROUNDS[0] += 1
    store = PrefixStore(f"simulated/{_ROUNDS[0]}", _OUTER[0])
    with (
        names.simulated(devices=size, seed=seed) as device,
        simulated_nccl(**options) as count,
        member(store, rank, size, backend, timeout),
    ):
        yield device, count


class _WorldOfThread(threading.local):
    """What torch knows of process groups, for a thread of its own."""

    def __init__(self) -> None:
        self.default_pg, self.group_count = None, 0
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.pg_coalesce_state, self.comms, self.pg_config_info = {}, [], []


def in_threads(
    size: int, function: Callable[..., Any], *arguments: Any, backend: str = BACKENDS, limit: float = 60.0
) -> list[Any]:
    """Run ``function(rank, size, *arguments)`` on every rank, each a thread with a world and a device.

    Returns:
        What each rank has returned. The first exception is raised.

    Raises:
        TimeoutError: a rank has not ended within ``limit`` seconds.
    """
    store, answers, errors = HashStore(), [None] * size, dict[int, BaseException]()

    def run(rank: int) -> None:
        try:
            with member(store, rank, size, backend):
                answers[rank] = function(rank, size, *arguments)
        except BaseException as error:
            errors[rank] = error

    names = [f"rank {rank}" for rank in range(size)]
    threads = [
        threading.Thread(target=run, args=(n,), name=name, daemon=True) for n, name in enumerate(names)
    ]
    with mock.patch.object(c10d, "_world", _WorldOfThread()), _registry_of_each_thread():
        end, failed = time.monotonic() + limit, False
        for thread in threads:
            thread.start()
        while (late := [t.name for t in threads if t.is_alive()]) and time.monotonic() < end:
            time.sleep(_PAUSE)
            if errors and not failed:
                failed, end = True, time.monotonic() + _LATER
    for error in errors.values():
        raise error
    if late:
        raise TimeoutError(f"{', '.join(late)} did not end within {limit:g} s")
    return answers


@contextmanager
def _registry_of_each_thread() -> Iterator[None]:
    """Let each thread have groups of the same names, which operators find."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
