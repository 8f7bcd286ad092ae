"""The sum of a stage's parameter gradients over microbatches, in the order in which they come."""

from __future__ import annotations

import torch

Gradients = tuple[torch.Tensor | None, ...]


class Accumulator:
    """Adds up gradients, in place once the sum is its own tensor.

    Equivalent to: ``total = g1 + g2 + g3 + ...``, from left to right, None standing for zero.

    The first gradients are only borrowed: they may share memory with a message that is still
    on its way, with each other, or with a parameter. The second sum is therefore a new tensor,
    and later ones are added to it in place.
    """

    def __init__(self) -> None:
        self._total: list[torch.Tensor | None] = []
        self._owned: list[bool] = []

    def add(self, gradients: Gradients) -> None:
        """Add one microbatch's gradients: a tensor of the parameter's shape and dtype, or None, per leaf."""
        if not self._total:
            self._total = list(gradients)
            self._owned = [False] * len(self._total)
            return
        total, owned = self._total, self._owned
        in_place: list[int] = []
        fresh: list[int] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if total[i] is None:
                total[i] = gradient
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

    def take(self, like: tuple[torch.Tensor, ...], seen: set[int]) -> tuple[torch.Tensor, ...]:
        """The total, every leaf its own memory; zeros of the shape of ``like`` where nothing came.

        Args:
            like: the parameters, tensor[...] each.
            seen: addresses of memory handed out already, shared by the stages of a process.
        """
        total = self._total or [None] * len(like)
        owned = self._owned or [False] * len(like)
        result = []
        for value, leaf, own in zip(total, like, owned, strict=True):
            if value is None:
                value = torch.zeros_like(leaf)
            elif not own and not _transformed(value) and _shared(value, seen):
                value = value.clone()
            result.append(value)
        self.clear()
        return tuple(result)

    def clear(self) -> None:
        """Forget everything."""
        self._total, self._owned = [], []


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


def _transformed(tensor: torch.Tensor) -> bool:
    """Whether a torch.func transform outside wraps this tensor: it then has no memory to look at."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
