"""Where the processes of one transport meet: their store, and the communicators that they open through it."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist


class Meeting:
    """What the ranks of one transport share, from one failure to the next.

    Args:
        group: the user's process group.
        timeout: seconds to wait for a peer; that of the group's backend where none is given.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.timeout = timedelta(seconds=timeout) if timeout is not None else dist.distributed_c10d.default_pg_timeout
        self.generation = 0
        self.waiting_on: int | None = None  # the rank that the last wait was for
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
        raise ValueError(f"the process group has the backend {backend!r}; P2P knows 'gloo' and 'nccl'")

    def write(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        self._store.set(f"{self.generation}/{key}", text)

    def read(self, key: str, what: str) -> str:
        """A text that another rank leaves; a peer's failure ends the wait for it."""
        end = time.monotonic() + self.timeout.total_seconds()
        pause = 0.001
        while not self._store.check([f"{self.generation}/{key}"]):
            if self._store.check([f"{self.generation}/failure"]):
                raise ConnectionError("a peer has failed")  # whoever tears down puts its name in
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} waited {self.timeout.total_seconds():g} s for {what}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self._store.get(f"{self.generation}/{key}").decode()

    def first_failure(self, mine: str) -> str:
        """The failure that was published first; ``mine`` where there was none, or nobody can be asked."""
        try:
            return self._store.compare_set(f"{self.generation}/failure", "", mine).decode()
        except dist.DistError:
            return mine  # the process that served the store may be the one that is gone

    def move_on(self) -> None:
        """What follows is found under other names."""
        self.generation += 1
