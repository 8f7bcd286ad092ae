"""Tell which tensors share memory, and copy results whose memory anything else uses, so that they belong to the caller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add, gt

import torch

from ppfunc.stage.layout import distributed, layout_of, local

from .functorch import transformed, transforming


class Owned:
    """Copies a tensor unless it is the only one that uses its memory.

    Args:
        arguments: tensors of the caller, whose memory results must not share; looked at before the first result that may.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        self._arguments = arguments
        self._taken: set[int] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._taken is None:
            self._taken = {t.untyped_storage().data_ptr() for t in self._arguments if not transformed(t)}
        if (layout := layout_of(tensor)) is not None:
            return distributed(self(local(tensor)), layout)
        if transformed(tensor):
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        # A scalar may be the weight of the microbatch itself, which later steps use again.
        if tensor._is_view() or not whole or address in self._taken or tensor.ndim == 0:
            return tensor.clone()
        self._taken.add(address)
        return tensor


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the first element of a tensor to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (1 + last) if tensor.numel() else 0


def sharing(tensors: Sequence[torch.Tensor], extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The numbers of tensors that have a byte in common, in pairs that connect all of them.

    Args:
        extents: of each tensor.
    """
    if transforming():  # what is transformed has no memory to look at
        hidden = [transformed(tensor) for tensor in tensors]
        addresses = [0 if hides else tensor.data_ptr() for tensor, hides in zip(tensors, hidden, strict=True)]
        extents = [0 if hides else n for n, hides in zip(extents, hidden, strict=True)]
    else:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    # Where nothing overlaps, each tensor ends before the next begins.
    if not any(map(gt, sorted(map(add, addresses, extents)), sorted(addresses)[1:])):
        return
    group: list[int] = []
    reach = 0
    for address, number in sorted(zip(addresses, range(len(tensors)), strict=True)):
        if address >= reach:
            yield from _sharing(group, tensors)
            group = []
        group += [number] if extents[number] else []
        reach = max(reach, address + extents[number])
    yield from _sharing(group, tensors)


def _sharing(group: Sequence[int], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """The pairs of one group of tensors, ascending by address."""
    firsts: dict[int, int] = {}
    for number in group:
        first = firsts.setdefault(tensors[number].data_ptr(), number)
        if first != number:
            yield first, number
    if len(firsts) < 2:
        return
    # Strided views may lie between each other: mark on a map of the memory who uses it.
    start, stop = min(firsts), max(tensors[number].data_ptr() + extent(tensors[number]) for number in group)
    unit = math.gcd(*(address - start for address in firsts), *(tensors[number].itemsize for number in group))
    users = torch.zeros((stop - start) // unit, dtype=torch.int32, device="cpu")
    for mark, number in enumerate(group, start=1):
        tensor = tensors[number]
        parts = tensor.itemsize // unit
        strides = (*(stride * parts for stride in tensor.stride()), 1)
        used = users.as_strided((*tensor.shape, parts), strides, (tensor.data_ptr() - start) // unit)
        yield from ((group[other - 1], number) for other in used.unique().tolist() if other)
        used.fill_(mark)
