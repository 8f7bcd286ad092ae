"""Pair up the calls of all ranks that make a transport, or a save: keys in the store of their group."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import Failure, FailureRecord, LinkError
from ..transport import _torch
from .sockets import Address

T = TypeVar("T")
_LATER = 30.0  # seconds
_SOON = 1.0  # seconds for the store to take a note
_FIRST, _PAUSE = 0.001, 0.05  # seconds between looks into the store, at first and later
_PROBE = 0.5  # seconds between looks after ranks that have not come; more where these take long


class Rendezvous:
    """Brings ranks together: each makes one at the same point of its program, and they exchange addresses.

    The n-th call of each rank over the same ranks is of round n. A rank that was missing from an abandoned
    round skips it, so that the next calls of all ranks meet again.

    The store may end with the process that serves it, or be stopped with it. Under gloo it is not used once
    the ranks have met.

    Args:
        name: of the thing that the ranks make together.
        group: the process group whose store, and connections between processes, are used.
        timeout: seconds to wait for a peer; by default that of the group.
        ranks: those of the world that take part, in order; by default those of the group.

    Raises:
        LinkError: the store does not answer.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, timeout: float | None, ranks: Sequence[int] | None = None
    ) -> None:
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.backend = str(_torch.backend_of(group))
        # The group may be destroyed while its store is still asked.
        self._gloo = _torch.gloo_of(group)
        self._places = [dist.get_group_rank(group, rank) for rank in self.ranks]
        self.timeout = _torch.timeout_of(group).total_seconds() if timeout is None else timeout
        self._server = self.ranks.index(0) if 0 in self.ranks else self.rank  # rank 0 of the world serves it
        if ranks is not None:
            name = f"{name}/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        store = _torch.store_of(group)
        while True:
            number = self._ask(lambda: store.add(f"{name}/{self.rank}", 1))
            self._store = PrefixStore(f"{name}/{number}", store)
            abandoned = self._ask(lambda: self._read("abandoned"))
            if abandoned is None or self.rank not in abandoned[1]:
                return

    def publish(self, address: Address) -> None:
        """Publish where this rank listens."""
        self._ask(lambda: self._store.set(f"address/{self.rank}", json.dumps(address)))

    def look(
        self, above: int | None, missing: Callable[[], Sequence[int] | None]
    ) -> Iterator[tuple[str, Any]]:
        """Look into the store until the ranks have met. Blocks while the store is stopped.

        Args:
            above: the rank whose address is wanted.
            missing: returns the ranks that have not come; None when they have met.

        Yields:
            ``("at", (above, address))``, ``("gone", rank)`` for one whose process has ended, and at the end
            ``("abandoned", failure)`` of this round, or ``("lost", server)`` without the store.
        """
        pause, probe = _FIRST, time.monotonic() + _PROBE
        try:
            while (ranks := missing()) is not None:
                if above is not None and (address := self._read(f"address/{above}")) is not None:
                    yield "at", (above, Address(*address))
                    above = None
                if (began := time.monotonic()) > probe:
                    if (abandoned := self._read("abandoned")) is not None:
                        yield "abandoned", abandoned[0]
                        return
                    yield from (("gone", rank) for rank in ranks if not self.alive(rank))
                    probe = time.monotonic() + max(_PROBE, 10 * (time.monotonic() - began))
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE)
        except LinkError as error:
            yield "lost", error.peer

    def abandon(self, failure: str, missing: Sequence[int] = ()) -> None:
        """Fail this round on all ranks. The first failure of a round stays.

        Args:
            failure: a FailureRecord, as text.
            missing: the ranks whose absence it is. Their next call is of another round.
        """
        text = json.dumps([failure, list(missing)])
        with suppress(OSError, RuntimeError):  # out of reach; or the interpreter is ending
            self._ask(lambda: self._store.compare_set("abandoned", "", text), _SOON)

    def forget(self) -> None:
        """Delete the address of this rank, once all have met."""
        with suppress(OSError, RuntimeError):
            self._ask(lambda: self._store.delete_key(f"address/{self.rank}"), _SOON)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Fail the round on all ranks if the body raises."""
        try:
            yield
        except BaseException as error:
            reason = Failure(self.rank, None, None, error).reason
            self.abandon(FailureRecord(self.rank, None, None, reason, self.rank, False).write())
            raise

    def _read(self, key: str) -> Any:
        with self._within_reach():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def alive(self, peer: int) -> bool:
        """Return False where the process of a peer is known to have ended."""
        return _torch.alive(self._gloo, self._places[peer])

    def open_nccl(self, name: str, place: int, size: int) -> Any:
        """Make an NCCL communicator, which connects in its first operation.

        Its operations may take longer than peers do: who is late is found first.
        """
        limit = timedelta(seconds=2 * self.timeout + _LATER)
        return _torch.ProcessGroupNCCL(PrefixStore(name, self._store), place, size, limit)

    def _ask(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Make a call of the store in a thread: a store that is stopped blocks that thread only."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="ppfunc store", daemon=True).start()
        seconds = self.timeout if seconds is None else seconds
        try:
            with self._within_reach():
                return answer.result(seconds)
        except TimeoutError:
            reason = f"it serves the store of the process group, which has not answered in {seconds:g} s"
            raise LinkError(self._server, "late", reason) from None

    @contextmanager
    def _within_reach(self) -> Iterator[None]:
        """Raise LinkError of the process that serves the store if it is gone."""
        try:
            yield
        except dist.DistError as error:
            reason = f"it serves the store of the process group, which is out of reach ({error})"
            raise LinkError(self._server, "gone", reason) from error
