"""Add gradients up over the microbatches of a stage, then over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..stage.signature import LeafSignature
from ._torch import add_into_each, copy_into_each
from .buckets import MOST, plan_buckets, views
from .protocols import Ranks, Wait


class Reducer:
    """The gradients of a stage in flat buffers, which are accumulated into directly, and their sums over ranks.

    Equivalent to, for each leaf::

        total = sum(gradients of the microbatches)
        for among in ranks: total = sum(total of each of them)

    It owns its buffers, which live as long as it does: what ``wait`` returns is overwritten by the next ``add`` after it.

    Args:
        leaves: the parameters of the stage, or their signatures.
        ranks: of one axis each, over which to add up in turn; none for one rank.
        axis, stage: names of the buckets.
        dtype: in which real gradients are added up, such as ``Precision.reduce``; by default that of the leaf.
        chosen: numbers of the leaves that are added up here; by default all that are floating or complex.
        device: of the buffers.
        most: bytes of a bucket.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor | LeafSignature],
        ranks: Sequence[Ranks] = (),
        *,
        axis: str = "dp",
        stage: int = 0,
        dtype: torch.dtype | None = None,
        chosen: Iterable[int] | None = None,
        device: torch.device | str | None = None,
        most: int = MOST,
    ) -> None:
        self.buckets = plan_buckets(leaves, axis=axis, stage=stage, dtype=dtype, chosen=chosen, most=most)
        self.flats = tuple(torch.zeros(bucket.numel, dtype=bucket.dtype, device=device) for bucket in self.buckets)
        self._ranks = tuple(ranks)
        self._leaves = len(leaves)
        self._numbers = [place.leaf for bucket in self.buckets for place in bucket.places]
        self._views = [view for bucket, flat in zip(self.buckets, self.flats, strict=True) for view in views(bucket, flat)]
        self._begun = False  # whether the buffers hold gradients of this step
        self._waits: list[Wait] | None = None  # of the reduction that is under way

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one microbatch, one per leaf, None for zero; the first of a step are copied.

        Raises:
            RuntimeError: while a reduction is under way.
            ValueError: another number of gradients than of leaves.
        """
        if self._waits is not None:
            raise RuntimeError("gradients came while a reduction is under way: wait for it first")
        if len(gradients) != self._leaves:
            raise ValueError(f"got {len(gradients)} gradients, expected {self._leaves}, one per leaf")
        pairs = [(view, g) for n, view in zip(self._numbers, self._views, strict=True) if (g := gradients[n]) is not None]
        if not self._begun and len(pairs) < len(self._views):
            self._zero()
        if pairs:
            into, given = map(list, zip(*pairs, strict=True))
            (add_into_each if self._begun else copy_into_each)(into, _like(given, into) if self._begun else given)
        self._begun = True

    def accumulated(self) -> tuple[Tensor | None, ...]:
        """The sums over the microbatches so far, one per leaf, None for leaves that are not added up here.

        They share the memory of the buffers: what is written into them is reduced.
        """
        if not self._begun:
            self._zero()
            self._begun = True
        found = dict(zip(self._numbers, self._views, strict=True))
        return tuple(found.get(n) for n in range(self._leaves))

    def launch(self) -> None:
        """Begin to add up over the first axis, bucket after bucket; returns at once. All its ranks launch in one order.

        Raises:
            RuntimeError: a reduction is under way already.
        """
        if self._waits is not None:
            raise RuntimeError("a reduction is under way already: wait for it first")
        self.accumulated()
        self._waits = self._all_reduce(self._ranks[:1])

    def wait(self) -> tuple[Tensor | None, ...]:
        """Wait for the sums; return one per leaf, in the dtype of its bucket, None for leaves that are not in any.

        Raises:
            RuntimeError: no reduction is under way.
        """
        if self._waits is None:
            raise RuntimeError("no reduction is under way: launch one first")
        for wait in self._waits:
            wait()
        for among in self._ranks[1:]:
            for wait in self._all_reduce([among]):
                wait()
        sums = self.accumulated()
        self._waits, self._begun = None, False
        return sums

    def _all_reduce(self, ranks: Iterable[Ranks]) -> list[Wait]:
        return [among.all_reduce(flat) for among in ranks for flat in self.flats]

    def _zero(self) -> None:
        for flat in self.flats:
            flat.zero_()


def _like(given: Sequence[Tensor], into: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes of the sums."""
    return [g if g.dtype == view.dtype else g.to(view.dtype) for g, view in zip(given, into, strict=True)]
