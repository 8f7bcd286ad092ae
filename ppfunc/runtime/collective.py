"""Collective operations among the ranks of a pipeline, or of several, over communicators that a transport opens again after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from . import _torch

Wait = Callable[[], None]
"""Waits until an operation is done."""

Among = Literal["data", "model", "world"]
"""The ranks that hold the same parameters and run other batches; the parts of the same stage; all that train together."""


def _call(wait: Wait) -> None:
    wait()


class Collective:
    """Sums and gathers among some ranks. Every one of them calls the same operations, in the same order.

    Args:
        size: how many ranks.
        index: of this rank among them.
        guard: calls what waits for an operation, and makes of its errors those of the transport.
    """

    def __init__(self, size: int = 1, index: int = 0, guard: Callable[[Wait], None] = _call) -> None:
        self.size, self.index = size, index
        self.group: Any = None  # until the transport has connected, and again after a failure
        self._guard = guard
        self._running: dict[int, tuple[Any, ...]] = {}  # works and their tensors; whoever keeps a Wait keeps none of them
        self._begun = 0

    def let_go(self) -> None:
        """Forget the communicator and all that is under way, so that peers which wait for it raise."""
        self.group = None
        self._running.clear()

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        """Replace a contiguous tensor by the sum, or the largest, of those of all ranks."""
        return _nothing if self.size == 1 else self._begin(_torch.all_reduce, tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor, part: torch.Tensor) -> Wait:
        """Write this rank's part of the sum of tensors [size * n] into ``part``, [n]."""
        if self.size == 1:
            part.copy_(tensor)
            return _nothing
        return self._begin(_torch.reduce_scatter, part, tensor)

    def all_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """The tensors [n] of all ranks one after the other: a new tensor [size * n]."""
        if self.size == 1:
            return part, _nothing
        whole = part.new_empty(part.numel() * self.size)
        return whole, self._begin(_torch.all_gather, whole, part)

    def _begin(self, operation: Callable[..., Any], *args: Any) -> Wait:
        self._begun += 1
        number = self._begun
        self._running[number] = operation(self.group, *args), args  # the tensors live until then

        def wait() -> None:
            work, _ = self._running[number]
            self._guard(work.wait)
            del self._running[number]

        return wait


def _nothing() -> None:
    pass
