"""Refuse an ``autograd.Function`` that computes the gradient of a weight elsewhere than in its backward."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

from .._torch import BackwardCFunction, function_of, results_of
from ..errors import StageError


def require_weight_gradients(
    results: Iterable[torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]], stage: str
) -> None:
    """Raise StageError for a Function that is given a weight, and returns no gradient of it.

    Such a Function leaves the gradient to a later pass of its own, which no step calls. To find out, the
    backward of a user's Function that is given a weight runs once, on zeros. What it fills beside, such as a
    list of its own, keeps what it then put there.

    Args:
        results: what the stage has computed.
        weights: its parameters, with their paths.
    """
    named = {t.grad_fn: path for path, t in weights if t.grad_fn}
    for node in filter(_is_own, _histories([t.grad_fn for t in results if t.grad_fn])):
        sources = (source for source, _ in node.next_functions if source)
        given = [_weight_of(next(sources), named) if needs else "" for needs in node.needs_input_grad]
        for path, gradient in zip(given, _backward(node) if any(given) else (), strict=False):
            if path and gradient is None:
                cls = function_of(node)
                code = inspect.unwrap(cls.backward).__code__
                raise StageError(
                    stage,
                    f"its autograd.Function {cls.__name__} returns no gradient of {path} in its backward"
                    f" ({code.co_filename}:{code.co_firstlineno})",
                    "return it there, without a pass of your own: schedules with I and W compute gradients of"
                    " weights in W; or freeze the parameter (requires_grad_(False))",
                )


def _is_own(node: Any) -> bool:
    """Tell whether a Function of the user's has made a history."""
    return isinstance(node, BackwardCFunction) and not function_of(node).__module__.startswith("torch.")


def _histories(ahead: list[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """Yield histories, and those that they come of, down to ``ends``."""
    seen = set(ahead)
    while ahead:
        yield (node := ahead.pop())
        new = set() if node in ends else {below for below, _ in node.next_functions if below} - seen
        seen |= new
        ahead += new


def _weight_of(source: Any, named: dict[Any, str]) -> str:
    """Name a weight of which a value is made; empty if the value is made of anything else as well."""
    path = ""
    for node in _histories([source], named):
        if node not in named and not any(below for below, _ in node.next_functions):
            return ""
        path = named.get(node, path)
    return path


def _backward(node: Any) -> tuple[Any, ...]:
    """Call the backward of a Function on zeros. An error that it raises is left to the engine."""
    zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in results_of(node))
    try:
        returned = node.apply(*zeros)
    except Exception:
        return ()
    return returned if isinstance(returned, tuple) else (returned,)
