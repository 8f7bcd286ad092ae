"""Random numbers that are the same whichever engine runs a stage."""

from __future__ import annotations

from typing import Any

import torch

from ._torch import OpOverload, TorchDispatchMode, schema


class SettledDraws(TorchDispatchMode):
    """Within it, numbers drawn into a tensor follow its logical order, not that of its memory.

    ``torch.func`` and functionalisation draw into new, contiguous tensors, plain autograd into
    whatever strides an activation has: a dropout mask would depend on the engine.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
        if random and schema(func).is_mutable and not args[0].is_contiguous():
            drawn = func(torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        return func(*args, **kwargs)
