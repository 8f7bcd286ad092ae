"""Let the processes of one transport find each other: keys in the store of their process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from . import _torch
from .errors import LinkError

T = TypeVar("T")
_LATER = 30.0  # seconds


class Rendezvous:
    """Keys of one transport in the store of a process group.

    The store may end with the process that serves it, or be frozen with it: once the ranks have met, nothing is asked of
    it under gloo.

    Args:
        group: the user's process group.
        timeout: seconds to wait for a peer; that of the group where none is given.
        ranks: those of the world that take part, in order, where they are not all of the group.

    Raises:
        ValueError: the group has neither gloo nor NCCL.
        LinkError: the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, ranks: Sequence[int] | None = None) -> None:
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        backend = _torch.backend_of(group)
        if backend not in ("gloo", "nccl"):
            raise ValueError(
                f"P2P got a process group with the backend {backend!r}, it knows 'gloo' and 'nccl'; "
                f"make one with torch.distributed.new_group(backend='gloo') and give it as P2P(group)"
            )
        self.backend = str(backend)
        # The group may be destroyed while its store is still asked.
        self._gloo, self._places = _torch.gloo_of(group), [dist.get_group_rank(group, rank) for rank in self.ranks]
        self.timeout = _torch.timeout_of(group).total_seconds() if timeout is None else timeout
        self._server = self.ranks.index(0) if 0 in self.ranks else self.rank  # the world's rank 0 serves the store
        name = "ppfunc" if ranks is None else f"ppfunc/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        store = _torch.store_of(group)
        # The n-th transport that each rank makes over the same ranks is the same transport.
        number = self._ask(lambda: store.add(f"{name}/transports/{self.rank}", 1))
        self._store = PrefixStore(f"{name}/{number}", store)

    def write(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        self._ask(lambda: self._store.set(key, text))

    def read(self, key: str) -> str | None:
        """A text that another rank has left, None where it has not yet. Waits for the store, for ever where it is frozen."""
        with self._within_reach():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def alive(self, peer: int) -> bool:
        """Whether the process of a peer may still live, as far as that is known."""
        return _torch.alive(self._gloo, self._places[peer])

    def open_nccl(self, name: str, place: int, size: int) -> Any:
        """An NCCL communicator, which connects in its first operation. Its operations may take longer than peers do: who is late is
        found first."""
        return _torch.ProcessGroupNCCL(PrefixStore(name, self._store), place, size, timedelta(seconds=2 * self.timeout + _LATER))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            with self._within_reach():
                return ask(call, self.timeout)
        except TimeoutError:
            raise LinkError(self._server, "late", f"the store of the process group has not answered in {self.timeout:g} s") from None

    @contextmanager
    def _within_reach(self) -> Iterator[None]:
        """Say which process is gone where the store does not answer."""
        try:
            yield
        except dist.DistError as error:
            raise LinkError(
                self._server, "gone", f"the store of the process group is out of reach, the process that serves it may have ended ({error})"
            ) from error


def ask(call: Callable[[], T], seconds: float) -> T:
    """Make a call of a store, in a thread: a store that is frozen holds up that one only.

    Raises:
        TimeoutError: it has not answered so soon.
    """
    told: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            answer = call()
            told.put(lambda: answer)
        except Exception as error:
            told.put(partial(_raise, error))

    threading.Thread(target=run, name="ppfunc store", daemon=True).start()
    try:
        answer = told.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"the store of the process group has not answered in {seconds:g} s") from None
    return answer()


def _raise(error: Exception) -> NoReturn:
    raise error
