"""Private and unstable names of torch.distributed that the transports use, each used here only.

``tests/test_torch_names.py`` says which of them another torch than 2.13 has not.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed.distributed_c10d import Store, _get_process_group_store, default_pg_timeout

from ppfunc.stage.device import kinds, new_stream, on_device, record_event

# The kind of device whose tensors a backend carries. For all engines of NCCL that a group may have, the
# communicators that are made here are of ``ProcessGroupNCCL``.
CARRIES = {"gloo": "cpu", **dict.fromkeys(("nccl", "nccl2", "nccl-lazy", "nccl-legacy"), "cuda")}
_WITHOUT = ("fake", "mpi")  # fake messages; communicators that all ranks of the world have to make
_NEEDED = ("send", "recv")
_PROBE = 0x70706675  # a tag
UnderWay = tuple[list[Any], Sequence[Any]]
"""Works, and the tensors that they use."""

_ABORT = 10.0  # seconds
_USE = 1.0  # seconds that an abort waits for a thread, which a GPU with a full queue may hold up
_AT_EXIT = 5.0  # seconds that the end of the process waits for communicators that are ended or dropped
_ASIDE: set[threading.Thread] = set()
# Communicators of NCCL and of vendors' devices, which none has closed, each with what its user holds.
_OPEN: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()

# Without a registry such a communicator ends when it is let go, and peers that wait on it raise.
ProcessGroupGloo = dist.ProcessGroupGloo


def prepare_nccl() -> None:
    """Make a failure on a communicator fail the step, not end the process, unless the user has chosen.

    Communicators read it as they are made, and their threads read the environment: it may not change later.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def communicator(
    backend: str, name: Any, store: Any, ranks: Sequence[int], place: int, timeout: timedelta
) -> Any:
    """Make a communicator of some ranks of the world, not of gloo, over a connection of its own to the store:
    waiting there holds up no other. Torch's flight recorder knows it by its name.
    """
    store, size = store.clone(), len(ranks)
    if backend in CARRIES:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, list(ranks)
        return dist.ProcessGroupNCCL(store, place, size, options)
    plugin: Any = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, place, size, timeout)
    given: Any = _DistributedBackendOptions()
    given.store, given.timeout, given.global_ranks_in_group = store, timeout, list(ranks)
    given.group_rank, given.group_size, given.group_id = place, size, name
    return plugin.creator_fn(given, None)


def begin_nccl(group: Any, device: torch.device) -> None:
    """Begin a new NCCL communicator; all of its ranks call it, and no rank waits for another in it."""
    _OPEN[group] = threading.Lock()
    with on_device(device):
        group.eager_connect_single_device(device)


def connect_nccl(group: Any, place: int, size: int, device: torch.device, messages: bool) -> None:
    """Connect a new NCCL communicator, for messages from the first rank to the second, or for sums; all of
    its ranks call it.

    A communicator connects in the first operation of each kind, and holds up the host until the other end
    comes to that operation. In the middle of a step the other end may be held up by its GPU, which waits for
    what this one has not sent. It runs in a thread of its own, where a block that is left open holds up none.
    """
    stream = new_stream(device)
    with stream:  # the others wait for no rank that may not come
        mine, all_of_them = torch.zeros(1, device=device), torch.empty(size, device=device)
        if messages:
            group._start_coalescing()
            group.recv([mine], 0, 0) if place else group.send([mine], 1, 0)
            group._end_coalescing().wait()
        else:
            for work in (
                all_reduce(group, mine, "sum"),
                all_gather(group, all_of_them, mine),
                reduce_scatter(group, mine, all_of_them),
                all_to_all(group, torch.empty_like(all_of_them), all_of_them, [1] * size, [1] * size),
            ):
                work.wait()
        stream.synchronize()


@contextmanager
def in_use(group: Any) -> Iterator[None]:
    """Hold up an abort of an NCCL communicator, which would free memory that a thread in this block uses.

    Raise RuntimeError where an abort has begun and does not end.
    """
    use = _OPEN.get(group, threading.Lock())  # others have none
    if not use.acquire(timeout=_ABORT):
        raise RuntimeError(f"the communicator is being aborted, which has not ended after {_ABORT:g} s")
    try:
        yield
    finally:
        use.release()


@contextmanager
def coalesced(group: Any) -> Iterator[list[Any]]:
    """Issue the operations of a block together; the list that it yields gets the work, also if they raise.

    NCCL counts the blocks of a thread over all communicators, and issues nothing before all have ended.
    """
    works: list[Any] = []

    def end() -> None:
        if (work := group._end_coalescing()) is not None:
            works.append(work)

    with in_use(group):
        group._start_coalescing()
        try:
            yield works
        except BaseException:
            with suppress(RuntimeError):  # the first error is told
                end()
            raise
        end()


def all_reduce(group: Any, tensor: torch.Tensor, op: str) -> Any:
    """Begin to sum in place, or to take the largest, over the ranks of a communicator."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    return group.allreduce([_real(tensor)], options)


def reduce_scatter(group: Any, part: torch.Tensor, whole: torch.Tensor) -> Any:
    """Begin to sum flat tensors, of which every rank gets a part."""
    return group._reduce_scatter_base(_real(part), _real(whole), dist.ReduceScatterOptions())


def all_gather(group: Any, whole: torch.Tensor, part: torch.Tensor) -> Any:
    """Begin to gather flat tensors of all ranks."""
    return group._allgather_base(_real(whole), _real(part))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of reals: backends do not support complex dtypes."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_to_all(
    group: Any, received: torch.Tensor, sent: torch.Tensor, receives: list[int], sends: list[int]
) -> Any:
    """Begin to exchange flat tensors: ``sends`` elements go to, ``receives`` come from, each rank."""
    return group.alltoall_base(received, sent, receives, sends, dist.AllToAllOptions())


def forget_group(mesh: Any, axis: str) -> Any:
    """Take the group of an axis from its mesh and from torch, and return it.

    Under gloo it ends with its last reference. Peers that wait in one of its operations then raise.
    """
    group, root = mesh.get_group(axis), getattr(mesh, "_root_mesh", None) or mesh
    dist.destroy_process_group(group)
    getattr(root, "_pg_registry", {}).pop(group.group_name, None)
    return group


class Aborts:
    """Aborts NCCL communicators, each once and all at the same time: an abort waits for all that the GPU
    runs, also on other communicators.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By identity of the communicator, which is kept alive.
        self._begun: dict[int, tuple[Any, threading.Thread | None]] = {}

    def begin(self, groups: Iterable[Any]) -> None:
        """Begin to end the communicators that are new."""
        with self._lock:
            for group in groups:
                if id(group) not in self._begun:
                    self._begun[id(group)] = group, _aside(partial(_abort, group), "ppfunc aborts")

    def wait(self) -> None:
        """Wait until all have ended, and forget them."""
        with self._lock:
            begun, self._begun = self._begun, {}
        end = time.monotonic() + _ABORT
        for _, thread in begun.values():
            if thread is not None:
                thread.join(max(0.0, end - time.monotonic()))


def _abort(group: Any) -> None:
    use = _OPEN.get(group, threading.Lock())  # the user's own have none
    unused = use.acquire(timeout=_USE)
    try:
        group.abort()
    finally:
        if unused:
            use.release()


def drop_aside(groups: list[Any]) -> None:
    """Drop the last references to communicators, each in a thread, and empty the list.

    One of gloo ends when what is under way on it has ended. A peer that it waits for may itself wait for what
    the caller ends next.
    """
    while groups:
        _aside([groups.pop()].clear, "ppfunc drops")


def drop_when_done(device: torch.device, under_way: list[UnderWay]) -> None:
    """Drop tensors, with the works on them, once the device is done with them; empty the list.

    A communicator may write into its tensors until its end, which may come after that of :class:`Aborts`.
    """
    with new_stream(device):
        for work in [work for works, _ in under_way for work in works]:
            with suppress(RuntimeError):  # it has failed
                work.wait()
        done = record_event(device)

    def drop() -> None:
        with suppress(RuntimeError):  # the device has failed
            done.synchronize()
        under_way.clear()

    _aside(drop, "ppfunc drops")


def _aside(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Run ``work`` in a thread that the end of the process waits for; not if the interpreter is ending."""

    def run(last: list[Callable[[], None]]) -> None:
        try:
            last.pop()()
        finally:
            _ASIDE.discard(threading.current_thread())

    thread = threading.Thread(target=run, args=([work],), name=name, daemon=True)
    _ASIDE.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        _ASIDE.discard(thread)
        return None
    return thread


@atexit.register
def _join_background_threads() -> None:
    """Join background threads at exit: one that returns from C++ later aborts the process.

    Communicators that are still open are ended first.
    """
    Aborts().begin(list(_OPEN))
    end = time.monotonic() + _AT_EXIT
    for thread in list(_ASIDE):
        thread.join(max(0.0, end - time.monotonic()))


def begun_in(group: dist.ProcessGroup) -> int:
    """Count the collectives that this rank has begun in a group."""
    return int(_backend(group)._get_sequence_number_for_group())


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store through which the ranks of a group met."""
    return group.get_group_store() or _get_process_group_store(group)  # one written in Python has none


def host_of(store: Any) -> str | None:
    """Return the host that serves a store, if one does."""
    while store is not None and not hasattr(store, "host"):
        store = getattr(store, "underlying_store", None)
    return None if store is None else str(store.host)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the operations of a group; torch's default where its backend does not tell."""
    with suppress(AttributeError, RuntimeError):
        return _backend(group).options._timeout
    return default_pg_timeout


def backend_of(group: dist.ProcessGroup) -> str | None:
    """Return the backend of a group for the device that computes; a group may have several."""
    by_device = _backends(group)
    return by_device.get(kinds()[-1]) or next(iter(by_device.values()), None)


def carried_by(backend: str) -> str | None:
    """Return the kind of device whose tensors a backend carries. Return None for an unknown backend."""
    known = backend.upper() in dist.Backend._plugins and backend not in _WITHOUT
    devices = dist.Backend.backend_capability[backend] if known else ()
    return CARRIES.get(backend) or next((kind for kind in reversed(kinds()) if kind in devices), None)


def lacking(group: dist.ProcessGroup) -> str:
    """List the methods that P2P needs of a group's backend, and that it lacks, in words."""
    backend, made = str(backend_of(group)), type(_backend(group))
    if carried_by(backend) is None:
        return "messages"
    missing = (None, *(getattr(dist.ProcessGroup, name) for name in _NEEDED))  # these ask a backend
    names = [] if backend in CARRIES else [name for name in _NEEDED if getattr(made, name, None) in missing]
    return ", ".join(names)


def _backend(group: dist.ProcessGroup) -> Any:
    """Return the backend of a group for the device that computes; a group written in Python is its own."""
    with suppress(RuntimeError):
        return group._get_backend(torch.device(carried_by(str(backend_of(group))) or "cpu"))
    return group


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))


def gloo_of(group: dist.ProcessGroup) -> Any:
    """Return the part of a group that is gloo, with a connection to each rank. Return None without gloo."""
    return group._get_backend(torch.device("cpu")) if _backends(group).get("cpu") == "gloo" else None


def alive(gloo: Any, peer: int) -> bool:
    """Return False if the process of a rank has ended, as far as gloo knows; True without gloo.

    Post a receive with a tag that nobody sends with: gloo raises if its connection to that rank has ended.
    """
    if gloo is None:
        return True
    try:
        gloo.recv([torch.empty(1, device="cpu")], peer, _PROBE)
    except RuntimeError:
        return False
    return True
