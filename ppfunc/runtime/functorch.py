"""Transforms of torch.func at work around a step: ``torch.func.grad``, ``vmap`` and the like over a whole pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def transforming() -> bool:
    """Whether a transform is at work.

    >>> torch.func.vmap(lambda x: x + transforming())(torch.zeros(1))
    tensor([1.])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform wraps this tensor: it then has no memory to look at."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def suspended() -> AbstractContextManager[object]:
    """Within, no transform is at work: for what depends on shapes alone, such as building the program of a stage."""
    return temporarily_clear_interpreter_stack()
