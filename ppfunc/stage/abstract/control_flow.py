"""Call torch's operators that take functions as the Python that they equal.

``torch.cond``, ``while_loop``, ``scan`` and ``flex_attention`` compile themselves when they are called.
Neither abstract evaluation nor a transform of ``torch.func`` goes with that::

    cond(p, f, g, x)        f(*x) if p else g(*x)
    while_loop(p, f, x)     while p(*x): x = f(*x)
    scan(f, c, xs)          for x in xs: c, y = f(c, x), and the stack of y
    flex_attention          its scores as a matrix
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .._torch import flex_scores
from ..tree import tree_flatten, tree_leaves, tree_map

Handlers = Mapping[str, Callable[..., Any]]
"""By the name of the function that torch would compile."""


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    """Call one of two functions."""
    return (true_fn if pred else false_fn)(*operands)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any) -> Any:
    """Call a function as long as another one says so."""
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


def scan(combine_fn: Callable[..., Any], init: Any, xs: Any) -> tuple[Any, Any]:
    """Call a function along the first axis of ``xs``, with what it has returned before."""
    carry, rows = init, []
    for slices in zip(*(x.unbind() for x in xs), strict=True):
        carry, row = combine_fn(*tree_flatten(carry)[0], *slices)
        rows.append(row)
    columns = zip(*map(tree_leaves, rows), strict=True)
    stacked = iter([torch.stack(column) for column in columns])
    return carry, tree_map(lambda _: next(stacked), rows[0])


WHILE, COND = "_while_loop_op_wrapper", "_cond_op_wrapper"
PYTHON: Handlers = {
    COND: cond,
    WHILE: while_loop,
    "run_flattened_scan": scan,
    "_flex_attention_hop_wrapper": flex_scores,
}


_handlers: ContextVar[Handlers | None] = ContextVar("handlers", default=None)
_replaced: list[Any] = []  # what torch.compile was when each user came; the first is torch's own
_lock = threading.Lock()


def _compile(model: Any = None, *args: Any, **options: Any) -> Any:
    """Stand for ``torch.compile`` while some thread calls a stage, for that thread alone."""
    name = getattr(model, "__name__", "") if getattr(model, "__module__", "").startswith("torch.") else ""
    handler = (_handlers.get() or {}).get(name)
    return (_replaced or [torch.compile])[0](model, *args, **options) if handler is None else handler


@contextmanager
def in_python(handlers: Handlers = PYTHON) -> Iterator[None]:
    """Call operators that take functions by handlers."""
    token = _handlers.set(handlers)
    with _lock:
        _replaced.append(torch.compile)
        torch.compile = _compile
    try:
        yield
    finally:
        with _lock:
            torch.compile = _replaced.pop()
        _handlers.reset(token)
