"""Find tensors that share memory, and refuse parameters of two stages that share it and are not tied."""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import add, gt
from typing import Any

import torch
from torch import Tensor

from ppfunc.stage import Signature
from ppfunc.stage._torch import is_wrapped, transforming
from ppfunc.stage.layout import local
from ppfunc.stage.signature import differentiable, leaf_names
from ppfunc.stage.tree import tree_leaves

from ..call.forms import extent
from ..execution.buffers import Leaves
from .ties import Tied


def require_declared(
    params: Mapping[int, Leaves],
    forms: Mapping[int, Signature],
    extents: Sequence[int],
    tied: Tied,
    primal: str = "",
) -> None:
    """Raise ValueError for parameters of two stages that share memory and are not tied.

    Each would get a part of the gradient. Leaves of one stage may share memory, as under ``torch.func.grad``,
    unless one of them is tied.

    Args:
        forms: of the parameters.
        extents: of all leaves, bytes from the first element to the last.
        primal: how the names of parameters proper begin.
    """
    leaves = [leaf for stage in forms for leaf in params[stage]]
    names: list[tuple[int, str]] = []
    for one, other in sharing(leaves, extents):
        names = names or [
            (stage, name) for stage, signature in forms.items() for name in leaf_names(signature)
        ]
        groups = [{name for name, group in tied if names[n] in group} for n in (one, other)]
        proper = all(names[n][1].startswith(primal) and differentiable(leaves[n].dtype) for n in (one, other))
        if proper and not groups[0] & groups[1] and (names[one][0] != names[other][0] or any(groups)):
            (a, first), (b, second) = sorted((names[one], names[other]))
            mend = "give each a copy of its own"
            same = (Tensor.size, Tensor.stride, Tensor.data_ptr)
            if all(read(leaves[one]) == read(leaves[other]) for read in same):
                declared = f"tied={{'name': [({a}, {first!r}), ({b}, {second!r})]}}"
                mend = f"declare it, {declared}, to get the sum of both gradients at each, or {mend}"
            raise ValueError(f"params[{a}] {first!r} and params[{b}] {second!r} share memory; {mend}")


def require_declared_trees(params: Mapping[int, Any], tied: Tied) -> None:
    """Apply :func:`require_declared` to trees as a caller gives them, which may have no values yet."""
    leaves = {stage: tuple(local(leaf) for leaf in tree_leaves(tree)) for stage, tree in params.items()}
    extents = [0 if leaf.is_meta else extent(leaf) for tree in leaves.values() for leaf in tree]
    require_declared(leaves, {stage: Signature.of(tree) for stage, tree in params.items()}, extents, tied)


def sharing(tensors: Sequence[torch.Tensor], extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Find tensors that have a byte in common, as pairs of numbers that connect all of them.

    Args:
        extents: of each tensor.
    """
    if transforming():  # what is transformed has no memory to look at
        hidden = [is_wrapped(tensor) for tensor in tensors]
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
    """Find the pairs of one group of tensors, ascending by address."""
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
        units = tensor.itemsize // unit
        strides = (*(stride * units for stride in tensor.stride()), 1)
        used = users.as_strided((*tensor.shape, units), strides, (tensor.data_ptr() - start) // unit)
        yield from ((group[other - 1], number) for other in used.unique().tolist() if other)
        used.fill_(mark)
