"""Simulate NCCL on the simulated device: the class in the place of ``torch.distributed.ProcessGroupNCCL``.

Equivalent to NCCL as it may be at its strictest:

* A communicator runs its operations in the order in which they were issued, on a stream of its own, each
  after what was issued on the current stream before. ``Work.wait`` orders the current stream, and holds up no
  host.
* A send ends when the receive is at the head of its communicator, never before. The parts of a coalesced
  group advance together.
* A thread issues nothing while it is in a group, of whichever communicator; works of that time wait for
  nothing. An operation raises within a group, too, where its communicator was aborted.
* The first operation of a kind connects: it holds up the host until all of its ranks have come, and refuses
  two ranks on one device.
* An abort ends the kernels of this rank alone, takes the time that the test sets, and leaves NaN. What a
  thread has collected before, it would issue on freed memory: a fault. A timeout marks the work: the kernel
  goes on until the abort.
* The environment is read when a communicator is made. To change it while one is connected is a fault.

Ranks are threads over a ``HashStore``, or processes over a ``TCPStore``: data travel through the store.
Import it before ``ppfunc``, so that what it says at the exit of the process comes after the exit of ppfunc.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Store

from . import census, names
from .clocks import caller_place
from .collectives import Collectives
from .kernels import Kernel, Part, Work
from .wire import form, packed, poison, unpacked

_CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
_PAUSE = 0.001  # seconds between looks whether another rank has come
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class _Groups(threading.local):
    """How many groups a thread is in, and what it is to issue at the end of the outermost."""

    def __init__(self) -> None:
        self.depth, self.collected = 0, list[Callable[[], None]]()

    def issue(self) -> None:
        """Issue what was collected, unless a group goes on; an error drops the rest."""
        if not self.depth:
            collected, self.collected = self.collected, []
            for issue in collected:
                issue()


_groups = _Groups()


class Options:
    """Those of a communicator; as torch's, it takes no other attribute."""

    __slots__ = ("_timeout", "global_ranks_in_group", "group_name", "is_high_priority_stream")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class ProcessGroupNCCL(Collectives):
    """A communicator over a store, with the methods of torch's."""

    Options = Options
    supports_splitting = False
    supports_coalescing = True

    def __init__(
        self, store: Store, rank: int, size: int, options: Options | None = None, device: object = None
    ) -> None:
        self.store, self._rank, self._size, self.options = store, rank, size, options or Options()
        self._device, self._stream = names.device(), None
        self._connected: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._coalescing, self._coalesced = False, list[Part]()
        self._kept: list[Work] = []
        self._begun, self._ended, self.aborted = 0, False, False
        self._aborts, self._ending = threading.Lock(), False
        self._handles_errors = os.environ.get(_HANDLING, "3") != "0"
        self._census = census.current
        self._census.made += 1
        self._census.communicators.add(self)

    def __str__(self) -> str:
        return f"communicator of rank {self._rank} of {self._size} on {self.options.group_name or 'a store'}"

    def __del__(self) -> None:
        if "_census" in self.__dict__ and self.alive:
            self._census.dropped.append(f"{self} (dropped without an end)")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None:
        self._begun = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    # -- messages --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work | None:
        [tensor] = tensors
        key, number = self._message(self._rank, to)
        source = self._device.host_view(tensor)

        def advance() -> bool:
            if not self.store.check([f"{key}/ready"]):
                return False
            wanted = self.store.get(f"{key}/ready").decode()  # before the receiver deletes it
            self.store.set(key, packed("message", [source]))
            _require_same_form(number, form(source), wanted)
            return True

        return self._issue(
            Part(self._pair(to), f"send {number} to rank {to}", (self._rank, to), tensors, [], advance)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work | None:
        [tensor] = tensors
        key, number = self._message(source, self._rank)
        target, begun = self._device.host_view(tensor), [False]

        def advance() -> bool:
            if not begun[0]:
                begun[0] = True
                poison(target)
                self.store.set(f"{key}/ready", form(target))
            if not self.store.check([key]):
                return False
            _, (value,) = unpacked(self.store.get(key))
            _require_same_form(number, form(value), form(target))
            target.copy_(value.view(target.shape))
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/ready")
            return True

        what = f"receive {number} from rank {source}"
        return self._issue(Part(self._pair(source), what, (source, self._rank), [], tensors, advance))

    def _message(self, source: int, to: int) -> tuple[str, int]:
        self._counts[f"{source}-{to}"] += 1
        number = self._counts[f"{source}-{to}"]
        return f"message/{source}-{to}/{number}", number

    def _pair(self, peer: int) -> str:
        return f"messages of {min(self._rank, peer)} and {max(self._rank, peer)}"

    # -- collectives -----------------------------------------------------------------------

    def exchange(
        self,
        kind: str,
        facts: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        finish: Callable[[list[list[Tensor]]], Iterable[Tensor]],
    ) -> Work | None:
        """Issue a collective: ``finish`` makes the values of ``writes`` of the flat ``reads`` of all ranks.

        Args:
            kind: of the connection that it needs.
            facts: what has to be the same on all ranks.
        """
        self._counts["collective"] += 1
        number, ranks = self._counts["collective"], range(self._size)
        mine, key, view = f"{kind} {facts}", f"collective/{number}", self._device.host_view
        sources, targets = [view(tensor) for tensor in reads], [view(tensor) for tensor in writes]
        keys, begun = [f"{key}/{rank}" for rank in ranks], [False]

        def advance() -> bool:
            if not begun[0]:
                begun[0] = True
                self.store.set(keys[self._rank], packed(mine, sources))
            if not self.store.check(keys):
                return False
            theirs, values = zip(*(unpacked(self.store.get(k)) for k in keys), strict=True)
            if len(set(theirs)) > 1:
                listed = ", ".join(f"rank {rank} runs {one}" for rank, one in enumerate(theirs))
                raise RuntimeError(f"simulated NCCL: collective {number} of {self} differs: {listed}")
            for target, value in zip(targets, finish(list(values)), strict=True):
                target.copy_(value.view(target.shape))
            if self.store.add(f"{key}/read", 1) == self._size:
                for k in (*keys, f"{key}/read"):
                    self.store.delete_key(k)
            return True

        return self._issue(Part(kind, f"{mine}, collective {number}", ranks, reads, writes, advance))

    # -- issue -----------------------------------------------------------------------------

    def _start_coalescing(self) -> None:
        self._coalescing, self._coalesced = True, []
        _groups.depth += 1

    def _end_coalescing(self) -> Work | None:
        parts, self._coalescing, self._coalesced = self._coalesced, False, []
        _groups.depth -= 1
        if parts:
            return self._launch(parts)
        _groups.issue()
        return None

    def _issue(self, part: Part) -> Work | None:
        for tensor in (*part.reads, *part.writes):
            if not tensor.is_cuda:
                raise ValueError(f"simulated NCCL: {part.what}: no backend for a tensor on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"simulated NCCL: {part.what}: Tensors must be contiguous")
            if tensor.dtype not in _CARRIED:
                raise ValueError(f"simulated NCCL: {part.what}: Unconvertible NCCL type {tensor.dtype}")
        with self._aborts:
            self._require_alive()
        if not self._coalescing:
            return self._launch([part])
        self._coalesced.append(part)
        return None

    def _require_alive(self) -> None:
        if self.aborted:
            raise DistBackendError(f"simulated NCCL: communicator was aborted on rank {self._rank}")

    def _launch(self, parts: list[Part]) -> Work:
        tensors = [t for part in parts for t in (*part.reads, *part.writes)]
        places = {t.device.index for t in tensors}
        if len(places) > 1 or (self._stream is not None and self._stream.device not in places):
            raise ValueError(f"simulated NCCL: {self} got tensors of other devices: {sorted(places)}")
        [index], device = places, self._device
        if self._stream is None:
            self._stream = device.new_stream(index)
        work = Work(device, index, tensors)
        _groups.collected.append(partial(self._give, parts, index, work))
        _groups.issue()
        with device.lock:
            work.mark = device.mark(self._stream)
            self._kept = [*(kept for kept in self._kept if not device.done(kept.mark)), work]
            self._begun += 1
        return work

    def _give(self, parts: list[Part], index: int, work: Work) -> None:
        """Give operations to the device, after what was issued on the current stream."""
        if self._ending:
            self._census.fault(f"{self} is given {parts[0].what}, which was collected before its abort began")
        self._require_alive()
        for part in parts:
            self._connect(part.kind, part.ranks, index)
        device = self._device
        kernel = Kernel(self, parts, work, device.host_view)
        reads, writes = [t for p in parts for t in p.reads], [t for p in parts for t in p.writes]
        with device.lock:
            device.order(device.mark(device.current(index)), self._stream)
            device.issue(self._stream, kernel.what, kernel.run, reads, writes, kernel.ready)

    def timed_out(self, what: str) -> None:
        """Mark a work, as the watchdog does."""
        if self._handles_errors:
            self._census.fault(f"{what} timed out, and torch ends the process, as {_HANDLING} is not 0")

    # -- beginning and end -----------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._stream is not None and not self._ended

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Meet the other ranks before the first operation."""
        self._connect("communicator", range(self._size), device.index)

    def _connect(self, kind: str, ranks: Sequence[int], index: int) -> None:
        """Meet the ranks of an operation, if it is the first of its kind."""
        if self._stream is None:
            self._stream = self._device.new_stream(index)
        if kind in self._connected:
            return
        self._device.waits["connect", caller_place()] += 1
        keys = {rank: f"connect/{kind}/{rank}" for rank in ranks}
        mine = f"{os.environ.get('NCCL_HOSTID', '')}:{index}"  # ranks of other hosts have other devices
        self.store.set(keys[self._rank], mine)
        end = time.monotonic() + self.options._timeout.total_seconds()
        while not self.store.check(list(keys.values())):
            if self.aborted or time.monotonic() > end:
                why = "aborted" if self.aborted else "timed out"
                raise DistBackendError(f"simulated NCCL: {kind}: ncclCommInitRankConfig: {why}")
            time.sleep(_PAUSE)
        for rank, key in keys.items():
            if rank != self._rank and self.store.get(key).decode() == mine:
                raise DistBackendError(
                    f"simulated NCCL: ncclInvalidUsage: Duplicate GPU detected : rank {self._rank} and rank"
                    f" {rank} both on CUDA device {index}"
                )
        self._connected.add(kind)

    def abort(self) -> None:
        """End what runs here: peers go on to wait. As freeing memory does, it waits for all of the device.

        Tensors that only works keep are free at its beginning: nothing promises that the watchdog keeps them
        until the kernels have ended.
        """
        while self._kept:
            self._kept.pop().release()
        self._ending = True
        with self._aborts:  # what is to be issued waits, and then raises
            time.sleep(self._census.abort_takes)
            self.aborted = self._ended = True
            if self._stream is not None and not self._device.drain(self._stream.device):
                self._census.fault(f"the abort of {self} waits for others, which go on")

    def shutdown(self) -> None:
        """End once all that was issued is done."""
        if self.alive:
            self._device.wait("ncclCommFinalize", self._device.mark(self._stream))
        self._ended, self._kept = True, []


def _require_same_form(number: int, sent: str, wanted: str) -> None:
    if sent != wanted:
        raise RuntimeError(f"simulated NCCL: message {number}: {sent} is sent, and {wanted} is received")
