"""Where the processes of one transport meet: their store, and the communicators that they open through it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# Lets threads of gloo's run that wait for this core; they would wait until it has computed for a millisecond. Before a
# send they have to note that its receive is posted, or it takes another round trip; after it, to take in what it delivers.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Meeting:
    """What the ranks of one transport share, from one failure to the next.

    Args:
        group: the user's process group.
        timeout: seconds to wait for a peer; that of the group's backend where none is given.

    Raises:
        ValueError: the group has neither gloo nor NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = _backend(group)
        self.timeout = timedelta(seconds=timeout) if timeout is not None else dist.distributed_c10d.default_pg_timeout
        self.generation = 0
        self.waiting_on: int | None = None  # the rank that a wait in progress, or one that has failed, is for
        store = group.get_group_store()
        # The n-th transport that each rank makes over a group is the same transport.
        number = store.add(f"ppfunc/transports/{self.rank}", 1)
        self._store = dist.PrefixStore(f"ppfunc/{number}", store)

    def open(self, name: str, rank: int, size: int, backend: str | None = None) -> dist.ProcessGroup:
        """A communicator of its own, known to no registry: it ends when it is let go."""
        backend = backend or self.backend
        store = dist.PrefixStore(f"{self.generation}/{name}", self._store)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, self.timeout)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        raise AssertionError(backend)

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a message from or to a rank."""
        self.waiting_on = peer
        work.wait()
        self.waiting_on = None

    def write(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        with _within_reach():
            self._store.set(f"{self.generation}/{key}", text)

    def read(self, key: str, what: str) -> str:
        """A text that another rank leaves; a peer's failure ends the wait for it, whatever has been left."""
        end = time.monotonic() + self.timeout.total_seconds()
        pause = 0.001
        with _within_reach():
            while True:
                if self._store.check([f"{self.generation}/failure"]):
                    raise ConnectionError("a peer has failed")  # whoever tears down puts its name in
                if self._store.check([f"{self.generation}/{key}"]):
                    return self._store.get(f"{self.generation}/{key}").decode()
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {self.rank} waited {self.timeout.total_seconds():g} s for {what}")
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def first_failure(self, mine: str) -> str | None:
        """The failure that was published first, ``mine`` where there was none; None where nobody can be asked."""
        try:
            return self._store.compare_set(f"{self.generation}/failure", "", mine).decode()
        except dist.DistError:
            return None  # the process that served the store may be the one that is gone

    def move_on(self) -> None:
        """What follows is found under other names."""
        self.generation += 1
        self.waiting_on = None


def _backend(group: dist.ProcessGroup) -> str:
    """The backend of a group for the device that computes: a group may have one for each kind of device."""
    by_device = dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
    backend = by_device.get("cuda") if torch.cuda.is_available() else None
    backend = backend or by_device.get("cpu") or by_device.get("cuda")
    if backend not in ("gloo", "nccl"):
        raise ValueError(
            f"P2P got a process group with the backend {backend!r}, it knows 'gloo' and 'nccl'; "
            f"make one with torch.distributed.new_group(backend='gloo') and give it as P2P(group)"
        )
    return backend


@contextmanager
def _within_reach() -> Iterator[None]:
    """Says what it means that a store does not answer."""
    try:
        yield
    except dist.DistError as error:
        raise ConnectionError(
            f"the store of the process group is out of reach, the process that serves it may have ended ({error})"
        ) from error
