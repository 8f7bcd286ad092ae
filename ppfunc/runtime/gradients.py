"""Accumulate the parameter gradients of a stage over its microbatches: their sum, or one beside the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from ppfunc.stage import LeafSignature
from ppfunc.stage._torch import add_each, add_into_each
from ppfunc.stage.signature import differentiable

from .functorch import transforming
from .ownership import Owned

LeafGradients = tuple[torch.Tensor | None, ...]  # one tensor of the parameter's shape and dtype per leaf, None for zero
Leaves = tuple[torch.Tensor, ...]
Absent = tuple[bool, ...]  # of every leaf, whether its gradient is None


class Gradients(Protocol):
    """Takes the gradients of microbatches one after the other and makes one tree of them."""

    def add(self, gradients: LeafGradients, microbatch: int, absent: Absent | None = None) -> None:
        """Take the gradients of one microbatch; ``absent`` says which are None, where that is known beforehand."""
        ...

    def merge(self, gradients: Leaves) -> None:
        """Take the sum of a replica of the stage."""
        ...

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        """Signature of the result for a parameter of this signature."""
        ...

    def take(self, like: Leaves, owned: Owned) -> Leaves:
        """The result, every leaf its own memory, for parameters ``like``; empties it."""
        ...


class Sum:
    """Adds up gradients, in place once the sum is its own tensor.

    Equivalent to: ``total = g1 + g2 + g3 + ...``, from left to right, None standing for zero.

    The first gradients are only borrowed: they may share memory with a message that is still
    on its way, with each other, or with a parameter. The second sum is therefore a new tensor,
    and later ones are added to it in place.

    Args:
        dtype: of the sum, where that of a gradient is narrower; that of the gradients where none is given.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._absent: Absent | None = None  # None until something has come
        self._total: list[torch.Tensor] | Leaves = ()  # the sums of those that are not absent
        self._is_own = False

    def add(self, gradients: LeafGradients, microbatch: int, absent: Absent | None = None) -> None:
        absent = tuple([g is None for g in gradients]) if absent is None else absent
        present: Any = gradients if True not in absent else [g for g in gradients if g is not None]
        if self._absent is None:
            self._absent, self._total = absent, [self._wide(g) for g in present] if self._dtype else present
        elif absent != self._absent:
            self._add_unlike(gradients)
        elif transforming():  # several tensors at once is more than vmap can do
            self._total = [a + b for a, b in zip(self._total, present, strict=True)]
        elif not present:
            pass
        elif self._is_own:
            add_into_each(self._total, present)
        else:
            self._total, self._is_own = add_each(self._total, present), True

    def _add_unlike(self, gradients: LeafGradients) -> None:
        """Add gradients that are absent in other places than those before."""
        rest = iter(self._total)
        before = [None if absent else next(rest) for absent in self._absent or ()]
        wide = [None if g is None else self._wide(g) for g in gradients]
        total = [b if a is None else a if b is None else a + b for a, b in zip(before, wide, strict=True)]
        own = [t.clone() if t is a or t is b else t for t, a, b in zip(total, before, gradients, strict=True) if t is not None]
        self._absent, self._total, self._is_own = tuple([t is None for t in total]), own, True

    def _wide(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self._dtype_of(gradient.dtype))

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self._dtype) if self._dtype and differentiable(dtype) else dtype

    def merge(self, gradients: Leaves) -> None:
        self.add(gradients, -1)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        dtype = self._dtype_of(leaf.dtype)
        return leaf if dtype is leaf.dtype else replace(leaf, dtype=dtype)

    def take(self, like: Leaves, owned: Owned) -> Leaves:
        absent, total, is_own = self._absent, self._total, self._is_own
        self._absent, self._total, self._is_own = None, (), False
        total = total if is_own else list(map(owned, total))
        if absent is not None and True not in absent:
            return tuple(total)
        rest = iter(total)
        missing = [absent is None or absent[i] for i in range(len(like))]
        pairs = zip(like, missing, strict=True)
        return tuple([torch.zeros_like(leaf, dtype=self._dtype_of(leaf.dtype)) if none else next(rest) for leaf, none in pairs])


class Stack:
    """Keeps the gradients of all microbatches beside each other, in their order.

    Equivalent to: ``torch.stack([g0, g1, ...])``, zeros for microbatches that never came.

    Args:
        microbatches: length of the new leading axis.
    """

    def __init__(self, microbatches: int) -> None:
        self._rows: list[LeafGradients | None] = [None] * microbatches
        self._merged = Sum()

    def add(self, gradients: LeafGradients, microbatch: int, absent: Absent | None = None) -> None:
        self._rows[microbatch] = gradients

    def merge(self, gradients: Leaves) -> None:
        self._merged.merge(gradients)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf.stacked(len(self._rows))

    def take(self, like: Leaves, owned: Owned) -> Leaves:
        if any(row is not None for row in self._rows):
            nothing = (None,) * len(like)
            columns = zip(*(row or nothing for row in self._rows), strict=True)
            self.merge(tuple(_stacked(column, leaf) for column, leaf in zip(columns, like, strict=True)))
            self._rows = [None] * len(self._rows)
        return self._merged.take(tuple(leaf.expand(len(self._rows), *leaf.shape) for leaf in like), owned)


def _stacked(column: LeafGradients, leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(leaf) if row is None else row for row in column])
