"""Accumulate the parameter gradients of a stage over its microbatches: their sum, or one beside the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from ppfunc.stage import LeafSignature
from ppfunc.stage._torch import add_into_each, transforming
from ppfunc.stage.signature import differentiable

from ..call.batch import Leaves as Leaves

# One tensor of the parameter's shape and dtype per leaf, None for zero.
LeafGradients = tuple[torch.Tensor | None, ...]
# Of leaves, ascending; a range of all of them, which is looked up in no time.
Numbers = tuple[int, ...] | range
# Returns a tensor, or a copy where anything else uses its memory.
Owner = Callable[[torch.Tensor], torch.Tensor]


class Gradients(Protocol):
    """Takes the gradients of microbatches one after the other and makes one tree of them."""

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int) -> None:
        """Add gradients of one microbatch, for the leaves of these numbers, each once.

        A leaf that gets none counts as zero. It is fastest if every microbatch groups its leaves alike.
        """

    def put_back(self, gradients: Leaves) -> None:
        """Replace what ``take`` gave by sums over all places of the parameters, one gradient per leaf."""

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        """Return the signature of the result for a parameter of this signature."""

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        """Return the result for parameters ``like``, and drop it here.

        The caller owns it, unless it lies in the buckets of an update.
        """


class Sum:
    """Adds up gradients, in place once the sum is its own tensor.

    Equivalent to: ``total = g1 + g2 + g3 + ...``, from left to right, for each leaf.

    The first gradients are only borrowed: they may share memory with a message that is still
    on its way, with each other, or with a parameter. The second sum is therefore a new tensor,
    and later ones are added to it in place.

    Args:
        dtype: of the sum, where that of a gradient is narrower; that of the gradients where none is given.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._parts: dict[Numbers, _Part] = {}

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int) -> None:
        part = self._parts.get(numbers)
        if part is None:
            self._add_other(gradients, numbers, microbatch)
        elif not numbers:
            pass
        elif part.is_own and not transforming():
            add_into_each(part.total, gradients)
        else:  # leaf by leaf: each sum frees the gradient that it replaces, and vmap takes it
            total = list(part.total)
            self._parts[numbers] = _Part(total, part.is_own or not transforming())
            del part
            for n, gradient in enumerate(gradients):
                total[n] = total[n] + gradient

    def _add_other(self, gradients: Leaves, numbers: Numbers, microbatch: int) -> None:
        """Add gradients of leaves that are divided otherwise than before, or new."""
        if {n for known in self._parts for n in known}.isdisjoint(numbers):
            self._parts[numbers] = _Part(
                [self._wide(g) for g in gradients] if self._dtype else gradients, False
            )
            return
        self._parts = {
            (n,): _Part([t], part.is_own)
            for known, part in self._parts.items()
            for n, t in zip(known, part.total, strict=True)
        }
        for n, gradient in zip(numbers, gradients, strict=True):
            self.add((gradient,), (n,), microbatch)

    def _wide(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self._dtype_of(gradient.dtype))

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self._dtype) if self._dtype and differentiable(dtype) else dtype

    def put_back(self, gradients: Leaves) -> None:
        self.add(gradients, range(len(gradients)), -1)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        if self._dtype is None or (dtype := self._dtype_of(leaf.dtype)) is leaf.dtype:
            return leaf
        return replace(leaf, dtype=dtype)

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        parts, self._parts = self._parts, {}
        whole = parts.get(range(len(like)))
        if whole is not None and whole.is_own:
            return tuple(whole.total)
        sums = {
            n: t if part.is_own else owned(t)
            for known, part in parts.items()
            for n, t in zip(known, part.total, strict=True)
        }
        return tuple(
            [
                sums[n] if n in sums else torch.zeros_like(leaf, dtype=self._dtype_of(leaf.dtype))
                for n, leaf in enumerate(like)
            ]
        )


class _Part(NamedTuple):
    """Hold the sums of leaves whose gradients come together."""

    total: list[torch.Tensor] | Leaves
    is_own: bool  # whether they share memory with nothing else


class Stack:
    """Keeps the gradients of all microbatches beside each other, in their order.

    Equivalent to: ``torch.stack([g0, g1, ...])``, zeros for microbatches that never came.

    Args:
        microbatches: length of the new leading axis.
    """

    def __init__(self, microbatches: int) -> None:
        self._rows: list[dict[int, torch.Tensor]] = [{} for _ in range(microbatches)]
        self._sums = Sum()

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int) -> None:
        self._rows[microbatch].update(zip(numbers, gradients, strict=True))

    def put_back(self, gradients: Leaves) -> None:
        self._sums.put_back(gradients)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf.stacked(len(self._rows))

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        if any(self._rows):
            self.put_back(
                tuple(_stacked([row.get(n) for row in self._rows], leaf) for n, leaf in enumerate(like))
            )
            self._rows = [{} for _ in self._rows]
        return self._sums.take(tuple(leaf.expand(len(self._rows), *leaf.shape) for leaf in like), owned)


def _stacked(column: Sequence[torch.Tensor | None], leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(leaf) if row is None else row for row in column])
