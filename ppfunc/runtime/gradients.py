"""The parameter gradients of a stage over its microbatches: their sum, or one beside the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from ppfunc.stage import LeafSignature

from .outside import transformed, transforming

Given = tuple[torch.Tensor | None, ...]  # one tensor of the parameter's shape and dtype per leaf, None for zero
Leaves = tuple[torch.Tensor, ...]


class Gradients(Protocol):
    """Takes the gradients of microbatches one after the other and makes one tree of them."""

    def add(self, gradients: Given, microbatch: int) -> None:
        """Take the gradients of one microbatch."""

    def merge(self, gradients: Leaves) -> None:
        """Take what another one has made, that of a copy of the stage."""

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        """What it makes for a parameter of this signature."""

    def take(self, like: Leaves, seen: set[int]) -> Leaves:
        """What it has made, every leaf its own memory, for parameters ``like``; then it is empty.

        ``seen`` has the addresses of memory handed out already, shared by the stages of a process.
        """

    def clear(self) -> None:
        """Forget everything."""


class Sum:
    """Adds up gradients, in place once the sum is its own tensor.

    Equivalent to: ``total = g1 + g2 + g3 + ...``, from left to right, None standing for zero.

    The first gradients are only borrowed: they may share memory with a message that is still
    on its way, with each other, or with a parameter. The second sum is therefore a new tensor,
    and later ones are added to it in place.
    """

    def __init__(self) -> None:
        self._total: list[torch.Tensor | None] = []
        self._owned: list[bool] = []

    def add(self, gradients: Given, microbatch: int) -> None:
        if not self._total:
            self._total = list(gradients)
            self._owned = [False] * len(self._total)
            return
        total, owned = self._total, self._owned
        in_place: list[int] = []
        fresh: list[int] = []
        apart = transforming()  # several tensors at once is more than vmap can do
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if total[i] is None:
                total[i] = gradient
            elif apart:
                total[i] = total[i] + gradient
            elif owned[i]:
                in_place.append(i)
            else:
                fresh.append(i)
        if in_place:
            torch._foreach_add_([total[i] for i in in_place], [gradients[i] for i in in_place])
        if fresh:
            sums = torch._foreach_add([total[i] for i in fresh], [gradients[i] for i in fresh])
            for i, value in zip(fresh, sums, strict=True):
                total[i] = value
                owned[i] = True

    def merge(self, gradients: Leaves) -> None:
        self.add(gradients, -1)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf

    def take(self, like: Leaves, seen: set[int]) -> Leaves:
        total = self._total or [None] * len(like)
        owned = self._owned or [False] * len(like)
        result = []
        for value, leaf, own in zip(total, like, owned, strict=True):
            if value is None:
                value = torch.zeros_like(leaf)
            elif not own and not transformed(value) and _shared(value, seen):
                value = value.clone()
            result.append(value)
        self.clear()
        return tuple(result)

    def clear(self) -> None:
        self._total, self._owned = [], []


class Stack:
    """Keeps the gradients of all microbatches beside each other, in their order.

    Equivalent to: ``torch.stack([g0, g1, ...])``, zeros for microbatches that never came.

    Args:
        microbatches: length of the new leading axis.
    """

    def __init__(self, microbatches: int) -> None:
        self._rows: list[Given | None] = [None] * microbatches
        self._merged = Sum()

    def add(self, gradients: Given, microbatch: int) -> None:
        self._rows[microbatch] = gradients

    def merge(self, gradients: Leaves) -> None:
        self._merged.merge(gradients)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return replace(leaf, shape=(len(self._rows), *leaf.shape))

    def take(self, like: Leaves, seen: set[int]) -> Leaves:
        if any(row is not None for row in self._rows):
            nothing = (None,) * len(like)
            columns = zip(*(row or nothing for row in self._rows), strict=True)
            self.merge(tuple(_stack(column, leaf) for column, leaf in zip(columns, like, strict=True)))
        made = self._merged.take(tuple(leaf.expand(len(self._rows), *leaf.shape) for leaf in like), seen)
        self.clear()
        return made

    def clear(self) -> None:
        self._rows = [None] * len(self._rows)
        self._merged.clear()


def _stack(column: Given, leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros_like(leaf) if row is None else row for row in column])


def _shared(gradient: torch.Tensor, seen: set[int]) -> bool:
    """Whether the gradient of a single microbatch may share memory with something else."""
    storage = gradient.untyped_storage()
    place = storage.data_ptr()
    whole = storage.nbytes() == gradient.numel() * gradient.element_size()
    # A scalar may be the weight of the microbatch itself, which later steps use again.
    if gradient._is_view() or not whole or place in seen or gradient.ndim == 0:
        return True
    seen.add(place)
    return False
