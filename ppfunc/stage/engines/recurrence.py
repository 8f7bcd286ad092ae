"""Compute recurrent layers on CUDA by torch's own kernels: the derivatives of cuDNN's cannot be traced.

``torch.func`` does not take those of LSTM and GRU either: the functional engine refuses such stages.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class WithoutCudnn(TorchFunctionMode):
    """Compute recurrent layers, and nothing else, without cuDNN."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", None) not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))


def recurrence(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return the mode in which a stage computes on CUDA that runs ``modules``."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    return WithoutCudnn() if recurrent else nullcontext()
