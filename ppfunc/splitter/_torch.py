"""Private and unstable names of torch by which a model is recorded before its operators are dispatched.

``tests/test_torch_names.py`` says which of them another torch than 2.13 has not.
"""

from typing import Any

import torch

# The torch.func transforms that are active, and their kinds.
from torch._C._functorch import TransformType, get_interpreter_stack

# Modes of the key `PreDispatch`, which sees operators above autograd and autocast, need the dispatcher of
# Python.
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily

# The class of modes that the key `PreDispatch` takes.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

# The function by which reentrant checkpoints hide their region.
from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction

# Computes with values during a trace.
with_values = unset_fake_temporarily

# Raises where one of the values of a tensor is false: what the checks of torch come to.
check_values = torch._check_tensor_all_with


class PreDispatchMode(ProxyTorchDispatchMode):
    """Sees every operator before autograd and autocast do: dropout and attention are one operator."""

    def __init__(self) -> None:
        no_tracer: Any = None
        super().__init__(no_tracer, "fake", pre_dispatch=True)


def saved_tensor_hooks() -> Any:
    """Return the innermost hooks on saved tensors, None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def vmapped() -> bool:
    """Tell whether a ``vmap`` is active: an unmapped tensor cannot be written into by a mapped one."""
    return any(transform.key() == TransformType.Vmap for transform in get_interpreter_stack() or ())
