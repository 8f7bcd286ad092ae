"""Draw the same random numbers whichever engine runs a stage."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ._torch import OpOverload, TorchDispatchMode, schema


class LogicalDraws(TorchDispatchMode):
    """Draw into tensors in their logical order, not in that of their memory.

    ``torch.func`` and functionalisation draw into new, contiguous tensors, plain autograd into
    whatever strides an activation has: a dropout mask would depend on the engine.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator; one that draws in place fills a tensor in its logical order."""
    if _draws_in_place(func) and not args[0].is_contiguous():
        drawn = func(torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs)
        return args[0].copy_(drawn)
    return func(*args, **kwargs)


@cache
def _draws_in_place(func: Any) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags and schema(func).is_mutable
