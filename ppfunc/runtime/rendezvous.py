"""Let the processes of one transport find each other: keys in the store of their process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from . import _torch
from .errors import LinkError
from .interrupts import hold_interrupts, let_interrupts

T = TypeVar("T")

_BOTH, _LEFT = "both", "left"  # states of a communicator, beside the rank that waits


class Rendezvous:
    """Keys of one transport in the store of a process group, and communicators opened through them.

    Args:
        group: the user's process group.
        timeout: seconds to wait for a peer; that of the group where none is given.
        ranks: those of the world that take part, in order, where they are not all of the group.

    Raises:
        ValueError: the group has neither gloo nor NCCL.
        LinkError: the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.backend = _torch.backend_of(group)
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(
                f"P2P got a process group with the backend {self.backend!r}, it knows 'gloo' and 'nccl'; "
                f"make one with torch.distributed.new_group(backend='gloo') and give it as P2P(group)"
            )
        self.timeout = _torch.timeout_of(group).total_seconds() if timeout is None else timeout
        self._server = self.ranks.index(0) if 0 in self.ranks else self.rank  # the world's rank 0 serves the store
        name = "ppfunc" if ranks is None else f"ppfunc/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        store = _torch.store_of(group)
        with self._within_reach():
            # The n-th transport that each rank makes over the same ranks is the same transport.
            number = store.add(f"{name}/transports/{self.rank}", 1)
            self._store = PrefixStore(f"{name}/{number}", store)
        self._written: list[list[str]] = [[]]  # keys of communicators, by generation

    def write(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        with self._within_reach():
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """A text that another rank has left, None where it has not yet."""
        with self._within_reach():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def alive(self, peer: int) -> bool:
        """Whether the process of a peer may still live, as far as that is known."""
        return _torch.alive(self._group, dist.get_group_rank(self._group, self.ranks[peer]))

    def wait(self, key: str, peer: int, check: Callable[[int], None]) -> str:
        """A text that ``peer`` leaves; ``check(peer)`` raises where it is not to be waited for any longer."""
        return self._poll(lambda: self.read(key), peer, check)

    def open(self, name: str, peer: int, check: Callable[[int], None]) -> Any:
        """A communicator of this rank and a peer, which comes to the same call. The higher rank has the place 1 in it."""
        place = int(self.rank > peer)
        self._written[-1] += [f"{name}/state", f"{name}/0/{place}"]  # the second one by gloo
        interrupt = self._commit(f"{name}/state", peer, check)
        store, timeout = PrefixStore(name, self._store), timedelta(seconds=self.timeout)
        with hold_interrupts(), self._within_reach():  # the peer is waiting there
            make = _torch.ProcessGroupGloo if self.backend == "gloo" else _torch.ProcessGroupNCCL
            group = make(store, place, 2, timeout)
        if interrupt is not None:
            raise interrupt
        return group

    def open_all(self, name: str, place: int, size: int) -> Any:
        """A communicator of several ranks, all of which are on their way to the same call."""
        self._written[-1] += [f"{name}/0/{place}"]
        store, timeout = PrefixStore(name, self._store), timedelta(seconds=self.timeout)
        with hold_interrupts(), self._within_reach():
            make = _torch.ProcessGroupGloo if self.backend == "gloo" else _torch.ProcessGroupNCCL
            return make(store, place, size, timeout)

    def _commit(self, key: str, peer: int, check: Callable[[int], None]) -> BaseException | None:
        """Return on both ranks or on none: what they do then cannot be ended from outside.

        The first of them leaves its number, the second one answers; where the first gives up before, it says so.

        Returns:
            An interrupt that came too late to give up, to be raised afterwards.
        """
        mine, theirs = str(self.rank), str(peer)
        with hold_interrupts():
            state = self._exchange(key, "", mine)
            if state == theirs:
                state = self._exchange(key, theirs, _BOTH)
        if state == _LEFT:
            self._poll(lambda: None, peer, check)  # raises, as it did there
        if state == mine:
            try:
                self._poll(lambda: self.read(key) == _BOTH or None, peer, check)
            except BaseException as error:
                with hold_interrupts():
                    if self._exchange(key, mine, _LEFT) != _BOTH:
                        raise
                return None if isinstance(error, LinkError) else error
        return None

    def _exchange(self, key: str, expected: str, wanted: str) -> str:
        """Set a key to ``wanted`` where it is ``expected``, empty meaning that it is absent; what it is then."""
        with self._within_reach():
            return self._store.compare_set(key, expected, wanted).decode()

    def _poll(self, look: Callable[[], T | None], peer: int, check: Callable[[int], None]) -> T:
        """The first result of ``look`` that is not None."""
        end, pause = time.monotonic() + self.timeout, 0.001
        while (found := look()) is None:
            check(peer)
            if time.monotonic() > end:
                raise LinkError(peer, "late", f"rank {self.rank} waited for rank {peer}, which has not come in {self.timeout:g} s")
            with let_interrupts():
                time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return found

    def move_on(self) -> None:
        """Begin a generation. Delete the keys of the one before the last; a peer may still read those of the last."""
        self._written.append([])
        with suppress(LinkError):
            self._delete(self._written.pop(0) if len(self._written) > 2 else [])

    def close(self) -> None:
        """Delete the keys of all generations."""
        with suppress(LinkError):
            self._delete([key for keys in self._written for key in keys])
        self._written = [[]]

    def _delete(self, keys: list[str]) -> None:
        with self._within_reach():
            for key in keys:
                self._store.delete_key(key)

    @contextmanager
    def _within_reach(self) -> Iterator[None]:
        """Say which process is gone where the store does not answer."""
        try:
            yield
        except dist.DistError as error:
            raise LinkError(
                self._server, "gone", f"the store of the process group is out of reach, the process that serves it may have ended ({error})"
            ) from error
