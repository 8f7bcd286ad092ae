"""Pair up the calls of all ranks that make a transport, or a save: keys in the store of their group."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import Failure, FailureRecord, LinkError
from ..transport import _torch
from .sockets import Address

T = TypeVar("T")
_LATER = 30.0  # seconds
_SOON = 1.0  # seconds for the store to take a note


class Abandoned(NamedTuple):
    """A round that failed before all ranks had met.

    Args:
        failure: the first one.
        missing: the ranks whose absence is the failure. Their next call is of another round.
    """

    failure: str
    missing: Sequence[int]


class Rendezvous:
    """One round: the calls of all ranks that belong together, which find each other's addresses.

    The n-th call of each rank over the same ranks is of round n. A rank that was missing from an abandoned
    round skips it, so that the next calls of all ranks meet again.

    The store may end with the process that serves it, or be stopped with it. Under gloo it is not used once
    the ranks have met.

    Args:
        name: of what is made.
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
            abandoned = self._ask(self.abandoned)
            if abandoned is None or self.rank not in abandoned.missing:
                return

    def publish(self, address: Address) -> None:
        """Publish where this rank listens."""
        self._ask(lambda: self._store.set(f"address/{self.rank}", json.dumps(address)))

    def address(self, peer: int) -> Address | None:
        """Return where a peer listens, or None before its call. Blocks while the store is stopped."""
        text = self._read(f"address/{peer}")
        return None if text is None else Address(*json.loads(text))

    def abandoned(self) -> Abandoned | None:
        """Return why this round has failed, or None. Blocks while the store is stopped."""
        text = self._read("abandoned")
        return None if text is None else Abandoned(*json.loads(text))

    def abandon(self, failure: str, missing: Sequence[int] = ()) -> None:
        """Fail this round on all ranks. The first failure of a round stays."""
        text = json.dumps([failure, list(missing)])
        with suppress(OSError, RuntimeError):  # out of reach; or the interpreter is ending
            ask(lambda: self._store.compare_set("abandoned", "", text), _SOON)

    def forget(self) -> None:
        """Delete the address of this rank, once all have met."""
        with suppress(OSError, RuntimeError):
            ask(lambda: self._store.delete_key(f"address/{self.rank}"), _SOON)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Fail the round on all ranks if the body raises."""
        try:
            yield
        except BaseException as error:
            reason = Failure(self.rank, None, None, error).reason
            self.abandon(FailureRecord(self.rank, None, None, reason, self.rank, False).write())
            raise

    def _read(self, key: str) -> str | None:
        with self._within_reach():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def alive(self, peer: int) -> bool:
        """Return False where the process of a peer is known to have ended."""
        return _torch.alive(self._gloo, self._places[peer])

    def open_nccl(self, name: str, place: int, size: int) -> Any:
        """Make an NCCL communicator, which connects in its first operation.

        Its operations may take longer than peers do: who is late is found first.
        """
        limit = timedelta(seconds=2 * self.timeout + _LATER)
        return _torch.ProcessGroupNCCL(PrefixStore(name, self._store), place, size, limit)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            with self._within_reach():
                return ask(call, self.timeout)
        except TimeoutError as error:
            reason = f"it serves the store of the process group, and does not answer: {error}"
            raise LinkError(self._server, "late", reason) from None

    @contextmanager
    def _within_reach(self) -> Iterator[None]:
        """Raise LinkError of the process that serves the store if it is gone."""
        try:
            yield
        except dist.DistError as error:
            reason = (
                "the store of the process group is out of reach, the process that serves it may have ended"
                f" ({error})"
            )
            raise LinkError(self._server, "gone", reason) from error


def ask(call: Callable[[], T], seconds: float) -> T:
    """Make a call of a store in a thread: a store that is stopped blocks that thread only.

    Raises:
        TimeoutError: it has not answered within ``seconds``.
    """
    answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="ppfunc store", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"the store of the process group has not answered in {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
