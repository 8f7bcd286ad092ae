"""Map functions of trees along a leading axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..signature import flatten
from ..tree import tree_flatten, tree_leaves


def batched(fn: Callable[..., Any], args: Sequence[Any], axes: Sequence[bool], randomness: str = "error") -> Any:
    """``fn`` once per entry of a leading axis: :func:`torch.func.vmap` for any trees.

    Args:
        fn: a pure function of trees of tensors.
        args: its arguments.
        axes: for each argument, whether its leaves have the axis; ``fn`` gets the others whole, every time.
        randomness: as of ``torch.func.vmap``.

    Returns:
        The results, beside each other in a new leading axis.

    >>> batched(lambda x, y: {"sum": x + y}, (torch.arange(3), torch.tensor(1)), (True, False))
    {'sum': tensor([1, 2, 3])}
    """
    leaves, treedef = tree_flatten(tuple(args))
    along = [0 if axis else None for axis, arg in zip(axes, args, strict=True) for _ in tree_leaves(arg)]
    structure: list[Any] = []

    def run(*inside: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, y_def = flatten(fn(*treedef.unflatten(inside)), "y")
        structure.append(y_def)
        return y

    if 0 not in along:
        raise ValueError(
            "got nothing with a leading axis to go along: a stage of an ensemble without parameters cannot be the first; "
            "join it with the next"
        )
    try:
        y = torch.func.vmap(run, tuple(along), randomness=randomness)(*leaves)
    except RuntimeError as error:
        if "randomness flag" in str(error):
            error.add_note('it draws random numbers: pass randomness="different" or "same" to pp.ensemble or pp.per_sample_grad')
        raise
    return structure[0].unflatten(y)
