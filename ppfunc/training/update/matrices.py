"""Put matrices together whose parts ranks hold, each on one rank, for a function of whole matrices."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ppfunc.runtime.ports.protocols import Collective

Leaves = Mapping[int, torch.Tensor]


class CutMatrices(NamedTuple):
    """Name the leaves whose matrices, of their last two dimensions, are cut over the ranks of an axis.

    Args:
        axis: its name.
        ranks: of the axis; None for one that the transport does not know.
        cuts: by number of the leaf, the dimension that is cut, and its length over all ranks.
        sizes: by number of the leaf, the elements of all of it, equal on every rank of all axes.
    """

    axis: str
    ranks: Collective | None
    cuts: dict[int, tuple[int, int]]
    sizes: dict[int, int]


def on_matrices(
    fn: Callable[[torch.Tensor], torch.Tensor], leaves: Leaves, axes: Sequence[CutMatrices]
) -> Leaves:
    """Apply a function to the whole matrices of which each rank has these parts.

    Equivalent to, for every leaf, which is gathered on one rank of each axis only::

        part of this rank (fn(whole leaf))

    Leaves are dealt to the ranks of an axis by size. All of them call this with their parts of the same
    leaves.

    Args:
        fn: of one leaf, which may be a stack of matrices; returns a tensor of the same form.
        leaves: by number, of one dtype.
        axes: the first is that which cut last.

    Raises:
        ValueError: the transport does not know an axis.
    """
    if not axes:
        return {n: fn(leaf) for n, leaf in leaves.items()}
    (axis, ranks, cuts, elements), *others = axes
    if ranks is None:
        raise ValueError(
            f"params: got matrices in parts over the axis {axis!r}, which are updated whole, and a transport"
            f" without it; pass ppfunc.P2P(mesh=mesh, axes=ppfunc.Axes('pp', model={axis!r}))"
        )
    whole = {n: _with_length(leaf.shape, *cuts[n]) for n, leaf in leaves.items() if n in cuts}
    if not whole:
        return on_matrices(fn, leaves, others)
    like, dealt = next(iter(leaves.values())), deal({n: elements[n] for n in whole}, ranks.size)
    mine = dealt[ranks.index]
    sizes = {n: [part_length(cuts[n][1], ranks.size, rank) for rank in range(ranks.size)] for n in mine}

    def exchange(
        sent: list[list[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each rank; return those of these shapes that each sends to this one."""
        flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in chain(*sent))])
        lengths = [list(map(math.prod, each)) for each in shapes]
        sends = [sum(t.numel() for t in each) for each in sent]
        received, wait = ranks.all_to_all(flat, list(map(sum, lengths)), sends)
        wait()
        pieces = iter(received.split([*chain(*lengths)]))
        return [[next(pieces).view(*shape) for shape in each] for each in shapes]

    parts = exchange(
        [[leaves[n] for n in numbers] for numbers in dealt],
        [[_with_length(whole[n], cuts[n][0], sizes[n][rank]) for n in mine] for rank in range(ranks.size)],
    )
    joined = {n: torch.cat(column, cuts[n][0]) for n, *column in zip(mine, *parts, strict=True)}
    del parts
    results = on_matrices(fn, {n: leaf for n, leaf in leaves.items() if n not in whole} | joined, others)
    split = {n: results[n].split(sizes[n], cuts[n][0]) for n in mine}
    back = exchange(
        [[split[n][rank] for n in mine] for rank in range(ranks.size)],
        [[leaves[n].shape for n in numbers] for numbers in dealt],
    )
    return {**results, **dict(zip(chain(*dealt), chain(*back), strict=True))}


def deal(sizes: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Deal things of these sizes to ranks, the largest first, each to the rank that has least.

    >>> deal({0: 1, 1: 5, 2: 3, 3: 3}, 2)
    [[1, 0], [2, 3]]
    """
    dealt, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for n in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        dealt[rank].append(n)
        loads[rank] += sizes[n]
    return dealt


def part_length(length: int, ranks: int, rank: int) -> int:
    """Return how much of a dimension a rank has, cut as ``torch.chunk`` does.

    >>> [part_length(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    each = -(-length // ranks)
    return max(0, min(each, length - rank * each))


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return *shape[:dim], length, *shape[dim + 1 :]
