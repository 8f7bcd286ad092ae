"""Sum and gather among ranks, over communicators that a transport opens again after a failure."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from einops import rearrange

from ..ports import _torch

Wait = Callable[[], None]
"""Wait until an operation is done."""

Among = Literal["world"] | tuple[str, ...] | tuple[int, ...]
"""Name ranks.

``"world"``: all that train together. A tuple of axes of the mesh: those that differ along these alone. A
tuple of numbers: ranks of the pipeline, ascending.
"""


def named(among: Among) -> tuple[str, tuple[Any, ...]]:
    """Name a set of ranks, such that sets sort in one order on all ranks."""
    if not isinstance(among, tuple):
        return among, ()
    return (f"axes {','.join(map(str, among))}", ()) if isinstance(among[0], str) else ("line", among)


class Collective:
    """Sums and gathers among some ranks, all of which call the same operations in the same order.

    An operation begins at once, and returns a function that waits for it. Tensors are read and written until
    then.

    Args:
        size: how many ranks.
        index: of this rank among them.
        guard: calls what waits for an operation, and translates its errors into those of the transport.
        require_carried: raises for a device whose tensors the backend does not carry.
    """

    def __init__(
        self,
        size: int = 1,
        index: int = 0,
        guard: Callable[[Wait], None] = lambda wait: wait(),
        require_carried: Callable[[torch.device], None] | None = None,
    ) -> None:
        self.size, self.index = size, index
        self.group: Any = None  # until the transport has connected, and again after a failure
        self._guard, self._require_carried = guard, require_carried
        self._running: dict[int, tuple[Any, ...]] = {}  # works, and tensors that live until they are done
        self._begun = 0

    def let_go(self) -> list[_torch.UnderWay]:
        """Forget the communicator; return what is under way on it."""
        under_way: list[_torch.UnderWay] = [([work], tensors) for work, tensors in self._running.values()]
        self.group = None
        self._running.clear()
        return under_way

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
        """Gather the tensors [n] of all ranks one after the other: a new tensor [size * n]."""
        if self.size == 1:
            return part, _nothing
        whole = part.new_empty(part.numel() * self.size)
        return whole, self._begin(_torch.all_gather, whole, part)

    def all_to_all(
        self, sent: torch.Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> tuple[torch.Tensor, Wait]:
        """Send a part of a flat tensor to each rank; gather what all send to this one, in a new tensor.

        Args:
            receives, sends: how many elements each rank sends to this one, and gets from it.
        """
        received = sent.new_empty(sum(receives))
        return received, self._begin(_torch.all_to_all, received, sent, list(receives), list(sends))

    def all_reduce_in_order(
        self, rows: Sequence[Sequence[torch.Tensor]], owners: Sequence[int]
    ) -> list[torch.Tensor]:
        """Add up rows of tensors from left to right, with the same bits wherever each row is.

        Each rank adds up an equal part of the elements, so that about as much travels as in a ring.

        Args:
            rows: those of this rank, in order; tensors of one dtype, of the same shapes in each row.
            owners: the index of the rank of every row, in the order of the sum.

        Returns:
            The sums, on every rank: views of one tensor where there are several ranks.
        """
        if self.size == 1:
            return [reduce(torch.add, column) for column in zip(*rows, strict=True)]
        like = rows[0]
        length = sum(t.numel() for t in like)
        if not length:
            return list(like)
        n = -(-length // self.size)  # elements that each rank adds up
        flat = like[0].new_zeros(len(rows), self.size * n)
        for row, tensors in zip(flat, rows, strict=True):
            torch.cat([t.reshape(-1) for t in tensors], out=row[:length])
        sent = rearrange(flat, "k (r n) -> (r k n)", r=self.size)
        # As bytes, which every backend carries.
        counts = [owners.count(rank) * n * flat.itemsize for rank in range(self.size)]
        sends = [len(rows) * n * flat.itemsize] * self.size
        received, wait = self.all_to_all(sent.view(torch.uint8), counts, sends)
        wait()
        by_rank = [iter(part.view(flat.dtype).split(n)) for part in received.split(counts)]
        total, wait = self.all_gather(
            reduce(torch.add, [next(by_rank[rank]) for rank in owners]).view(torch.uint8)
        )
        wait()
        pieces = total.view(flat.dtype)[:length].split([t.numel() for t in like])
        return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]

    def _begin(self, operation: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Wait:
        if self._require_carried is not None:
            self._require_carried(tensor.device)
        self._begun += 1
        number = self._begun
        with _torch.in_use(self.group):
            self._running[number] = operation(self.group, tensor, *args), (tensor, *args)

        def wait() -> None:
            work, _ = self._running[number]
            self._guard(work.wait)
            del self._running[number]

        return wait


def _nothing() -> None:
    pass
