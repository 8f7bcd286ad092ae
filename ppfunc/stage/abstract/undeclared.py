"""Note the frozen parameters of which a step asks for gradients, since it does not know of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_undeclared: ContextVar[list[str] | None] = ContextVar("undeclared", default=None)


def detached(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Detach a parameter that its module has frozen; note it where a step asks for its gradient."""
    undeclared = _undeclared.get()
    if undeclared is not None and parameter.requires_grad:
        undeclared.append(name)
    return parameter.detach()


@contextmanager
def noting_undeclared() -> Iterator[list[str]]:
    """Collect the names of the parameters that are detached within."""
    names: list[str] = []
    token = _undeclared.set(names)
    try:
        yield names
    finally:
        _undeclared.reset(token)
