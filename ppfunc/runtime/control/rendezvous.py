"""Pair up the calls of all ranks that make a transport, or a save: keys in the store of their group."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..ports import _torch
from ..values.errors import Failure, FailureRecord, LinkError
from .connections import Address, in_thread, own_host

T = TypeVar("T")
_SOON = 1.0  # seconds for the store to take a note
_LOOK = 0.5  # seconds between looks whether a rank has failed; more where these take long


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
        PipelineError: the store does not answer.

    Attributes:
        store: of this round.
        carried: the kind of device whose tensors the backend of the group carries.
        queued: whether the host only queues the backend's operations on a device, as under NCCL; those of
            other backends, such as gloo, hold up the host.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, timeout: float | None, ranks: Sequence[int] | None = None
    ) -> None:
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.backend = str(_torch.backend_of(group))
        self.carried = _torch.carried_by(self.backend) or "cpu"
        self.queued = self.carried != "cpu"
        # The group may be destroyed while its store is still asked.
        self._gloo = _torch.gloo_of(group)
        self._places = [dist.get_group_rank(group, rank) for rank in self.ranks]
        self.timeout = _torch.timeout_of(group).total_seconds() if timeout is None else timeout
        self._server = self.ranks.index(0) if 0 in self.ranks else self.rank  # rank 0 of the world serves it
        self._next_look = 0.0
        if ranks is not None:
            name = f"{name}/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        store = _torch.store_of(group)
        self.host = own_host(_torch.host_of(store))
        try:
            while True:
                number = self._ask(lambda: store.add(f"{name}/{self.rank}", 1))
                self.store = PrefixStore(f"{name}/{number}", store)
                self._earlier = PrefixStore(f"{name}/{number - 1}", store)
                abandoned = self._read("abandoned")
                if abandoned is None or self.rank not in abandoned[1]:
                    return
        except LinkError as error:
            raise FailureRecord.lost(error, self.rank).error(self.rank) from error

    def publish(self, address: Address) -> None:
        """Publish where this rank listens."""
        self._ask(lambda: self.store.set(f"address/{self.rank}", json.dumps(address)))

    def address(self, rank: int) -> Address | None:
        """Return where a rank listens; None if it has not come."""
        address = self._read(f"address/{rank}")
        return None if address is None else Address(*address)

    def missing(self) -> list[int]:
        """List the ranks that have not come; none if the store does not say."""
        keys = [f"address/{rank}" for rank in range(self.size)]
        with suppress(LinkError):
            present = self._ask(lambda: [self.store.check([key]) for key in keys], _SOON)
            return [rank for rank, here in enumerate(present) if not here]
        return []

    def failure(self, awaited: Sequence[int]) -> str | None:
        """Return the FailureRecord, as text, of an abandoned round or an ended process, else None.

        It asks the store only now and then, and returns None between.
        """
        began = time.monotonic()
        if began < self._next_look:
            return None
        abandoned = self._read("abandoned")
        if abandoned is not None:
            return str(abandoned[0])
        ended = next((rank for rank in awaited if not self.alive(rank)), None)
        self._next_look = time.monotonic() + max(_LOOK, 10 * (time.monotonic() - began))
        return None if ended is None else FailureRecord.lost(LinkError(ended, "gone"), self.rank).write()

    def abandon(self, failure: str) -> str:
        """Fail this round on all ranks with a FailureRecord; return the first one of the round.

        If it is the absence of a rank whose process may live, the next calls of all absent ones are of
        another round. Where it has ended, they fail as this one.
        """
        record = FailureRecord.read(failure)
        absent = [] if record.rank == self.rank or record.kind == "gone" else self.missing()
        text = json.dumps([failure, absent if record.rank in absent else []])
        with suppress(LinkError):
            return str(json.loads(self._ask(lambda: self.store.compare_set("abandoned", "", text), _SOON))[0])
        return failure

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Fail the round on all ranks if the body raises."""
        try:
            yield
        except BaseException as error:
            reason = Failure(self.rank, None, None, error).reason
            self.abandon(FailureRecord(self.rank, None, None, reason, self.rank, "error").write())
            raise

    def forget(self) -> None:
        """Delete the address of this rank in the round before, once all have met in this one.

        That of this round stays: it tells late ranks that this one has come.
        """
        with suppress(LinkError):
            self._ask(lambda: self._earlier.delete_key(f"address/{self.rank}"), _SOON)

    def alive(self, peer: int) -> bool:
        """Return False where the process of a peer is known to have ended."""
        return _torch.alive(self._gloo, self._places[peer])

    def _read(self, key: str) -> Any:
        return self._ask(lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None)

    def _ask(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Make a call of the store in a thread: a store that is stopped blocks that thread only.

        Raises:
            LinkError: the store, or the process that serves it, does not answer.
        """
        seconds = self.timeout if seconds is None else seconds
        try:
            return in_thread(call, "store").result(seconds)
        except TimeoutError:
            late = f"it serves the store of the process group, which has not answered in {seconds:g} s"
            # Not "late": nobody else is asked, since the other ranks ask the store as well.
            raise LinkError(self._server, "cut", late) from None
        except (dist.DistError, RuntimeError) as error:
            raise LinkError(self._server, "gone") from error
