"""What a communicator issues: coalesced operations on its stream, and what their issuer holds of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import Work as TorchWork

from .wire import poison


class Part(NamedTuple):
    """One operation, or one of a coalesced group.

    Args:
        kind: of the connection that it needs.
        what: for errors.
        ranks: those that connect.
        reads, writes: tensors of the device.
        advance: called again and again at the head of the stream; tells whether the operation has ended.
    """

    kind: str
    what: str
    ranks: Sequence[int]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    advance: Callable[[], bool]


class Work(TorchWork):
    """What was issued. Its tensors live until it has ended, or was waited for."""

    def __init__(self, device: Any, index: int, tensors: list[Tensor]) -> None:
        super().__init__()
        self.mark: Any = None  # until it is issued
        self.late = False
        self._device, self._index, self._tensors = device, index, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream of the device wait."""
        if not self._device.omits("Work.wait"):
            self._device.order(self.mark, self._device.current(self._index))
        self.release()
        return True

    def release(self) -> None:
        """Keep the tensors no longer."""
        self._tensors = []

    def is_completed(self) -> bool:
        return self.late or self._device.poll("Work.is_completed", self.mark)


class Kernel:
    """A coalesced group of operations on the stream of its communicator; it keeps no tensors alive."""

    def __init__(self, group: Any, parts: list[Part], work: Work, view: Any) -> None:
        self.what = "nccl: " + " + ".join(part.what for part in parts)
        self._group, self._work = group, work
        self._left = [(part.advance, [view(tensor) for tensor in part.writes]) for part in parts]
        self._end = time.monotonic() + group.options._timeout.total_seconds()
        self._error: Exception | None = None

    def ready(self) -> bool:
        """Advance all parts; tell whether the kernel ends."""
        if self._group.aborted:
            return True
        try:
            self._left = [(advance, targets) for advance, targets in self._left if not advance()]
        except Exception as error:
            self._error = error
            return True
        if self._left and time.monotonic() > self._end and not self._work.late:
            self._work.late = True
            self._group.timed_out(self.what)
        return not self._left

    def run(self) -> None:
        """End: what an abort has left half done is NaN."""
        if self._error is not None:
            raise self._error
        for _, targets in self._left:
            for target in targets:
                poison(target)
