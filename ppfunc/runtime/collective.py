"""Collective operations among ranks of several pipelines, over communicators that a transport opens again after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from . import _torch

Wait = Callable[[], None]
"""Waits until an operation is done."""

Among = Literal["data", "model", "world"]
"""The ranks that hold the same parameters and run other batches; the parts of the same stage; all that train together."""


class Collective:
    """Sums and gathers among some ranks. Every one of them calls the same operations, in the same order.

    Args:
        size: how many ranks.
        place: of this rank among them.
    """

    def __init__(self, size: int = 1, place: int = 0) -> None:
        self.size, self.place = size, place
        self.group: Any = None  # until the transport has connected, and again after a failure

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Wait:
        """Replace a contiguous tensor by the sum, or the largest, of those of all ranks."""
        return _nothing if self.size == 1 else self._begin(_torch.all_reduce, tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """This rank's part of the sum of tensors [size * n]: a new tensor [n]."""
        if self.size == 1:
            return tensor, _nothing
        part = tensor.new_empty(tensor.numel() // self.size)
        return part, self._begin(_torch.reduce_scatter, part, tensor)

    def all_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """The tensors [n] of all ranks one after the other: a new tensor [size * n]."""
        if self.size == 1:
            return part, _nothing
        whole = part.new_empty(part.numel() * self.size)
        return whole, self._begin(_torch.all_gather, whole, part)

    def _begin(self, operation: Callable[..., Any], *args: Any) -> Wait:
        work = operation(self.group, *args)
        return lambda: _finish(work, args)


def _finish(work: Any, args: tuple[Any, ...]) -> None:
    """Wait; the tensors live until then."""
    work.wait()


def _nothing() -> None:
    pass
