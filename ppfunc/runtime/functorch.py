"""Tell whether a transform of torch.func is at work around a step."""

from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from ppfunc.stage._torch import innermost_transform, is_wrapped, unwrapped, without_transforms


def transforming() -> bool:
    """Whether a transform is at work.

    >>> torch.func.vmap(lambda x: x + transforming())(torch.zeros(1))
    tensor([1.])
    """
    return innermost_transform() is not None


def transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform wraps this tensor: it then has no memory to look at."""
    return is_wrapped(tensor)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor without the transforms that wrap it, with all rows where one maps it.

    >>> torch.func.vmap(lambda x: x + values(x).sum())(torch.ones(2))
    tensor([3., 3.])
    """
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def is_transformed_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a DTensor is within the wrappers of transforms, or is given to a step under one."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return isinstance(tensor, DTensor)


def suspended() -> AbstractContextManager[object]:
    """Within, no transform is at work: for what depends on shapes alone, such as building the program of a stage."""
    return without_transforms()
