"""Let the ranks that save or load together exchange small values, as JSON over a process group of their own."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from ppfunc.runtime._torch import alive, gloo_of, store_of, timeout_of
from ppfunc.runtime.opening import make_gloo
from ppfunc.runtime.rendezvous import ask
from ppfunc.stage.errors import is_of_a_library

from .._torch import all_gather_within
from .errors import CheckpointError, RankError
from .tensor_file import bytes_of

Group = ProcessGroup | DeviceMesh | None
"""The ranks that save or load together: by default all of ``torch.distributed``, or this process where that is not initialised."""

T = TypeVar("T")

_CONNECT = 30.0  # seconds: all are here
_ANSWER = 2.0  # seconds for a rank to say that it waits, too
_LOOK = 0.01  # seconds between looks whether all have answered
_PAUSE = 0.1  # seconds between looks whether a rank has ended
_ENDING = 1.0  # seconds for a process that ends to close all of its connections, more than a busy machine takes

_KINDS = {kind.__name__: kind for kind in (CheckpointError, FileExistsError, FileNotFoundError, ValueError, TypeError)}


class Peers:
    """The ranks that save or load together: every one of them makes one, at the same point of its program.

    A context manager that ends its process group: peers that still wait in it raise.

    Raises:
        ValueError: this process is none of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group: Any = None
        self._store: Any = None
        ranks, own = _ranks(group)
        if own not in ranks:
            raise ValueError(f"group: got one of the ranks {ranks}, this process is rank {own}; call it on the ranks of the group only")
        self.rank, self.size = ranks.index(own), len(ranks)
        if self.size > 1:
            self._ranks = ranks
            self._open(dist.group.WORLD)

    def _open(self, world: Any) -> None:
        """Connect to the others. torch's new_group would take the keys of a group that has ended for those of the next one."""
        self._timeout = timeout_of(world)
        name = f"ppfunc/checkpoints/{sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        with self._within_reach():
            # The n-th time that each rank comes here is the same.
            limit = self._timeout.total_seconds()
            number = self._ask(lambda: store_of(world).add(f"{name}/{self.rank}", 1), limit)
            store = self._store = PrefixStore(f"{name}/{number}", store_of(world))
            self._ask(lambda: store.set(f"here/{self.rank}", ""), limit)
            for peer in range(self.size):
                self._await(store, peer)
            self._group = self._connect(store)
            self.all_gather(None)
            for key in (f"here/{self.rank}", f"0/{self.rank}"):  # the second one is gloo's; all have read both
                store.delete_key(key)

    def _await(self, store: PrefixStore, peer: int) -> None:
        """Wait until a rank is here, as long as it lives."""
        end, pause = time.monotonic() + self._timeout.total_seconds(), 0.001
        while not self._ask(lambda: store.check([f"here/{peer}"]), max(end - time.monotonic(), _ANSWER)):
            if pause > _PAUSE:
                self._require_alive(peer)
            if time.monotonic() > end:
                raise RankError(f"rank {peer} has not come within {self._timeout.total_seconds():g} s; all ranks save and load together")
            time.sleep(min(pause, _PAUSE))
            pause *= 2

    def _connect(self, store: PrefixStore) -> Any:
        """Make the process group, as long as all ranks live."""
        told: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        make_gloo(store, self.rank, self.size, _CONNECT, told.put)
        end = time.monotonic() + _CONNECT
        while time.monotonic() < end:
            try:
                kind, what = told.get(timeout=_PAUSE)
            except Empty:
                for peer in range(self.size):
                    self._require_alive(peer)
                continue
            if kind == "failed" and "timeout" in str(what):  # which says of nobody that it is late
                break
            if kind == "failed":
                raise what
            return what
        silent = ", ".join(map(str, self._silent(store)))
        if silent:
            raise RankError(f"rank {silent} has not connected within {_CONNECT:g} s, and does not answer: it is stopped or busy")
        raise RankError(
            f"no rank has connected to all others within {_CONNECT:g} s, though all are here; see that their hosts reach each other"
        )

    def _silent(self, store: PrefixStore) -> list[int]:
        """The ranks that do not say that they have waited in vain, which all do at the same time."""

        def look() -> list[int]:
            store.set(f"waited/{self.rank}", "")
            silent, end = list(range(self.size)), time.monotonic() + _ANSWER
            while silent and time.monotonic() < end:
                time.sleep(_PAUSE)
                silent = [peer for peer in silent if not store.check([f"waited/{peer}"])]
            return silent

        return self._ask(look, 2 * _ANSWER)

    def _ask(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call of the store; raise RankError for the rank that serves it where that is silent."""
        try:
            return ask(call, seconds)
        except TimeoutError as error:
            host = f"rank {self._ranks.index(0)}" if 0 in self._ranks else "the process"
            raise RankError(f"{host} serves the store of the process group, and does not answer: it is stopped or busy ({error})") from None

    def _require_alive(self, peer: int) -> None:
        if not self._alive(peer):
            raise RankError(f"rank {peer} is gone: its process has ended")

    def _alive(self, peer: int) -> bool:
        world: Any = dist.group.WORLD
        return peer == self.rank or alive(gloo_of(world), dist.get_group_rank(world, self._ranks[peer]))

    @contextmanager
    def _within_reach(self) -> Iterator[None]:
        """Raise RankError where another rank does not answer, with the rank where that is known; tell the others of an interrupt."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if not isinstance(error, RuntimeError) or not is_of_a_library(_innermost_file(error)):  # that of a handler of signals
                self._leave(error)
                raise
            raise RankError(f"{self._whereabouts()} ({str(error).splitlines()[0][:300]})") from error

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank does not wait for them any more."""
        if self._store is not None:
            with suppress(Exception):  # the others are about to hear that a connection has ended
                ask(lambda: self._store.set(f"left/{self.rank}", type(error).__name__), _ANSWER)

    def _whereabouts(self) -> str:
        """The ranks that have ended, or have given up, as far as that can be known."""
        if gone := self._gone():
            return f"rank {', '.join(map(str, gone))} is gone"

        def told() -> list[str]:
            left = [peer for peer in range(self.size) if self._store.check([f"left/{peer}"])]
            return [f"rank {peer} has given up: {self._store.get(f'left/{peer}').decode()}" for peer in left]

        with suppress(Exception):  # the store has ended
            if self._store is not None and (left := ask(told, _ANSWER)):
                return ", ".join(left)
        return "a rank is gone, or has given up"

    def _gone(self) -> list[int]:
        """The ranks whose processes have ended. One that ends closes one connection after the other."""
        end = time.monotonic() + _ENDING
        while not (gone := [peer for peer in range(self.size) if not self._alive(peer)]) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return gone

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks, in their order; JSON."""
        if self.size == 1:
            return [value]
        text = bytearray(json.dumps(value).encode())
        with self._within_reach():
            sizes = self._gathered(torch.tensor([len(text)], device="cpu")).tolist()
            texts = self._gathered(torch.frombuffer(text.ljust(max(sizes)), dtype=torch.uint8))
        memory = bytes_of(texts)
        return [json.loads(bytes(memory[max(sizes) * rank :][:size])) for rank, size in enumerate(sizes)]

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the tensors of all ranks one after the other."""
        every, pause = own.new_empty(self.size * own.numel()), 1e-4
        work = all_gather_within(self._timeout, self._group, every, own)
        while not work.is_completed():  # where it waits, no interrupt acts
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)
        work.wait()
        return every

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank; where it raises on one, all raise, with its kind and the rank.

        An error that is no plain CheckpointError goes before those that are: on all ranks, or on none, another checkpoint is worth a try.

        Returns:
            What every rank has found; JSON.

        Raises:
            RankError: ``work`` has raised on another rank, of a kind that is only known there.
        """
        found, failure = None, None
        try:
            found = work()
        except BaseException as error:
            failure = error
        told = self.all_gather([found, failure and [type(failure).__name__, str(failure)[:2000]]])
        failures = [(rank, *raised) for rank, (_, raised) in enumerate(told) if raised]
        for rank, name, text in sorted(failures, key=lambda raised: raised[1] == CheckpointError.__name__):
            if failure is not None and (name == CheckpointError.__name__ or type(failure) is not CheckpointError):
                raise failure
            kind = _KINDS.get(name)
            raise (kind or RankError)(f"rank {rank}: {'' if kind else name + ': '}{text}") from failure
        return [found for found, _ in told]

    def close(self) -> None:
        """End the process group, which ends with its last reference."""
        self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _innermost_file(error: BaseException) -> str:
    """The file whose code has raised."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename


def _ranks(group: Group) -> tuple[list[int], int]:
    """Number the ranks of a group, and this one, as the world numbers them."""
    if isinstance(group, DeviceMesh):
        return group.mesh.flatten().tolist(), dist.get_rank()
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup, a DeviceMesh, or None for all ranks")
    if group is None and not dist.is_initialized():
        return [0], 0
    return dist.get_process_group_ranks(group), dist.get_rank()
