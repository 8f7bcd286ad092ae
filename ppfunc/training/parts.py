"""Give a shard the bits that its elements get in the whole, where kernels round by the place of an element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .protocols import ShardOf

Kernel = Callable[..., None]
"""``kernel(params, grads, *states, step, *, lr, grad_scale, found_inf)``, in place, on lists of tensors of one device and dtype."""

_VECTORS = 64  # elements: a multiple of all vectors
_TRIALS = 256


def vector_width(kernel: Kernel, columns: int, dtype: torch.dtype) -> int:
    """How many elements a kernel works on at once on the CPU; 1 where it rounds those that are left over like the others.

    Found by trial, since the machine and the build of torch decide it.
    """
    generator = torch.Generator().manual_seed(0)
    size = 2 * _VECTORS - 1

    def run(padding: int) -> Tensor:
        lists = [[torch.cat([own, own.new_zeros(padding)]) for own in column] for column in values]
        kernel(*lists, torch.tensor(3.0, device="cpu"), lr=0.1, grad_scale=None, found_inf=None)
        return torch.stack([leaf[:size] for column in (lists[0], *lists[2:]) for leaf in column])

    values = [list(torch.rand(_TRIALS, size, generator=generator, device="cpu").to(dtype).unbind()) for _ in range(columns)]
    differing = (run(0) != run(1)).any(0).nonzero()
    first = int(differing[0]) if len(differing) else size
    return next(width for width in (1, 2, 4, 8, 16, 32, 64) if size - size % width <= first)


def as_columns(parts: Sequence[ShardOf], dtypes: Sequence[torch.dtype]) -> list[ShardOf]:
    """The places of leaves, complex ones as pairs of reals."""
    return [p._replace(shape=(*p.shape, 2)) if dtype.is_complex else p for p, dtype in zip(parts, dtypes, strict=True)]


def run_on_parts(
    kernel: Kernel, columns: Sequence[Sequence[Tensor]], parts: Sequence[ShardOf], width: int, *args: Any, **options: Any
) -> None:
    """Run a kernel so that each element of a shard gets the bits that it gets in the whole.

    The kernels of the CPU round the elements behind the last vector of a leaf in another way. Which these are differs between
    the whole and its shards: those elements are computed again, in vectors or one by one as in the whole.

    Args:
        columns: the parameters, their gradients, and their states; row-major, of one dtype, on the CPU.
        parts: the place of every leaf, in the shape of the columns.
        width: elements of a vector.
    """
    vectors, singles = zip(*(_misplaced(part, width) for part in parts), strict=True)
    if not any(vectors) and not any(singles):
        return kernel(*columns, *args, **options)
    joint, alone = ([(n, torch.tensor(at, device="cpu")) for n, at in enumerate(places) if at] for places in (vectors, singles))
    filling = columns[0][0].new_zeros(-sum(map(len, vectors)) % _VECTORS)
    flats = [torch.cat([*(column[n].view(-1)[at] for n, at in joint), filling]) for column in columns]
    few = [[column[n].view(-1)[at] for n, at in alone] for column in columns]
    kernel(*([*column, flat, *own] for column, flat, own in zip(columns, flats, few, strict=True)), *args, **options)
    for k, column in enumerate(columns):
        if k != 1:  # the gradients
            found = (*flats[k].split([*(len(at) for _, at in joint), len(filling)])[:-1], *few[k])
            for (n, at), values in zip((*joint, *alone), found, strict=True):
                column[n].view(-1)[at] = values


@lru_cache(maxsize=4096)
def _misplaced(part: ShardOf, width: int) -> tuple[list[int], list[int]]:
    """Elements of a shard that are left over there and in a vector in the whole, and all that are left over in the whole."""
    own = tuple(size // part.ranks if d == part.dim else size for d, size in enumerate(part.shape))
    size, whole = math.prod(own), math.prod(part.shape)
    here = range(size - size % width, size)
    there = [at for flat in range(whole - whole % width, whole) if (at := _local(part, own, flat)) is not None]
    return ([], []) if there == list(here) else ([at for at in here if at not in there], there)


def _local(part: ShardOf, own: tuple[int, ...], flat: int) -> int | None:
    """The number of an element in the shard, from that in the whole, both row-major; None for one of another rank.

    >>> [_local(ShardOf((2, 4), dim=1, ranks=2, place=1), (2, 2), flat) for flat in range(8)]
    [None, None, 0, 1, None, None, 2, 3]
    """
    found, stride = 0, 1
    for d in reversed(range(len(own))):
        flat, index = divmod(flat, part.shape[d])
        index -= part.place * own[d] if d == part.dim else 0
        if not 0 <= index < own[d]:
            return None
        found, stride = found + index * stride, stride * own[d]
    return found
