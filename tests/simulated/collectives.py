"""Say what the collectives of NCCL do, by an exchange of the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from .wire import forms

Ranks = list[list[Tensor]]
"""The flat tensors of every rank."""

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}


class Exchanges(Protocol):
    """What a collective is made of; see :meth:`tests.simulated.nccl.ProcessGroupNCCL.exchange`."""

    _rank: int
    _size: int

    def exchange(
        self,
        kind: str,
        facts: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        finish: Callable[[Ranks], Iterable[Tensor]],
    ) -> Any: ...


class Collectives:
    """The collectives by the names of torch's ``ProcessGroupNCCL``; sums are in the order of the ranks."""

    def allreduce(self: Exchanges, tensors: list[Tensor], options: Any) -> Any:
        total = _reduction(options, self._size)
        facts = f"{options.reduceOp.op.name} of {forms(tensors)}"
        return self.exchange("all-reduce", facts, tensors, tensors, lambda ranks: map(total, _columns(ranks)))

    allreduce_coalesced = allreduce

    def reduce(self: Exchanges, tensors: list[Tensor], options: Any) -> Any:
        total, root = _reduction(options, self._size), options.rootRank
        writes = tensors if self._rank == root else []
        count = len(writes)
        facts = f"{options.reduceOp.op.name} to rank {root} of {forms(tensors)}"
        return self.exchange(
            "reduce", facts, tensors, writes, lambda ranks: map(total, _columns(ranks)[:count])
        )

    def broadcast(self: Exchanges, tensors: list[Tensor], options: Any) -> Any:
        root = options.rootRank
        here, elsewhere = (tensors, []) if self._rank == root else ([], tensors)
        count = len(elsewhere)
        facts = f"from rank {root} of {forms(tensors)}"
        return self.exchange("broadcast", facts, here, elsewhere, lambda ranks: ranks[root][:count])

    def _allgather_base(self: Exchanges, whole: Tensor, part: Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([whole], [part], options)

    def allgather_into_tensor_coalesced(
        self: Exchanges, wholes: list[Tensor], parts: list[Tensor], options: Any = None
    ) -> Any:
        _require_sizes("all-gather", wholes, parts, self._size)
        return self.exchange(
            "all-gather", f"of {forms(parts)}", parts, wholes, lambda ranks: map(torch.cat, _columns(ranks))
        )

    def allgather(
        self: Exchanges, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Any:
        [rows] = outputs
        return self.exchange(
            "all-gather", f"of {forms(inputs)}", inputs, rows, lambda ranks: [r[0] for r in ranks]
        )

    def _reduce_scatter_base(self: Exchanges, part: Tensor, whole: Tensor, options: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([part], [whole], options)

    def reduce_scatter_tensor_coalesced(
        self: Exchanges, parts: list[Tensor], wholes: list[Tensor], options: Any
    ) -> Any:
        _require_sizes("reduce-scatter", wholes, parts, self._size)
        total, size, rank = _reduction(options, self._size), self._size, self._rank

        def finish(ranks: Ranks) -> Iterable[Tensor]:
            return (total([whole.view(size, -1)[rank] for whole in column]) for column in _columns(ranks))

        facts = f"{options.reduceOp.op.name} of {forms(parts)}"
        return self.exchange("reduce-scatter", facts, wholes, parts, finish)

    def reduce_scatter(
        self: Exchanges, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any
    ) -> Any:
        [parts], [mine] = inputs, outputs
        total, rank = _reduction(options, self._size), self._rank
        facts = f"{options.reduceOp.op.name} of {forms(outputs)}"
        return self.exchange(
            "reduce-scatter", facts, parts, [mine], lambda ranks: [total([r[rank] for r in ranks])]
        )

    def alltoall_base(
        self: Exchanges,
        received: Tensor,
        sent: Tensor,
        receives: Sequence[int],
        sends: Sequence[int],
        options: Any = None,
    ) -> Any:
        rows_in, rows_out = (
            list(counts) or [len(t) // self._size] * self._size
            for counts, t in ((receives, received), (sends, sent))
        )
        if sum(rows_in) != len(received) or sum(rows_out) != len(sent):
            raise ValueError("simulated NCCL: all-to-all: Split sizes don't match total dim 0 size")
        return self.alltoall(list(received.split(rows_in)), list(sent.split(rows_out)), options)

    def alltoall(self: Exchanges, received: list[Tensor], sent: list[Tensor], options: Any = None) -> Any:
        rank, wanted = self._rank, [t.numel() for t in received]

        def finish(ranks: Ranks) -> Iterable[Tensor]:
            mine = [tensors[rank] for tensors in ranks]
            if [t.numel() for t in mine] != wanted:
                counts = [t.numel() for t in mine]
                raise RuntimeError(
                    f"simulated NCCL: all-to-all: {counts} elements are sent, {wanted} received"
                )
            return mine

        return self.exchange("all-to-all", f"of {sent[0].dtype}", sent, received, finish)

    def gather(self: Exchanges, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        writes = outputs[0] if self._rank == options.rootRank else []
        count = len(writes)
        facts = f"to rank {options.rootRank} of {forms(inputs)}"
        return self.exchange("gather", facts, inputs, writes, lambda ranks: [r[0] for r in ranks][:count])

    def scatter(self: Exchanges, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> Any:
        root, rank = options.rootRank, self._rank
        reads = inputs[0] if rank == root else []
        facts = f"from rank {root} of {forms(outputs)}"
        return self.exchange("scatter", facts, reads, outputs, lambda ranks: [ranks[root][rank]])


def _columns(ranks: Ranks) -> list[list[Tensor]]:
    """The first tensors of all ranks, then the second ones, and so on."""
    return [list(column) for column in zip(*ranks, strict=True)]


def _reduction(options: Any, size: int) -> Callable[[list[Tensor]], Tensor]:
    name = options.reduceOp.op.name
    if name not in _REDUCTIONS:
        raise ValueError(f"simulated NCCL: got the reduction {name}, expected one of {list(_REDUCTIONS)}")

    def total(column: list[Tensor]) -> Tensor:
        result = reduce(_REDUCTIONS[name], column)
        return result / size if name == "AVG" else result

    return total


def _require_sizes(kind: str, wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> None:
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"simulated NCCL: {kind}: got {forms([whole])} and {forms([part])}, expected {size} times"
                " as many elements, of one dtype"
            )
