"""Refuse an ``autograd.Function`` that computes the gradient of a weight elsewhere than in its backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._torch import function_of, results_of
from ..errors import StageError
from ..modules.structure import CONTAINERS, restored

_DEEP = 4  # levels of objects below a function in which a container is looked for


def require_weight_gradients(
    functions: Iterable[Any], weights: Iterable[tuple[str, torch.Tensor]], stage: str
) -> None:
    """Raise StageError for a Function that is given a weight, and returns no gradient of it.

    Such a Function leaves the gradient to a later pass of its own, which no step calls. The backward of a
    Function that is given weights runs once, on zeros; lists and dictionaries that it knows are restored.

    Args:
        functions: the histories that Functions have made in the stage.
        weights: the parameters of the stage with their paths, likewise.
    """
    named = {t.grad_fn: path for path, t in weights if t.grad_fn is not None}
    for node in functions:
        needed = (i for i, needs in enumerate(node.needs_input_grad) if needs)
        sources = (source for source, _ in node.next_functions if source is not None)
        own = {
            i: paths
            for i, source in zip(needed, sources, strict=False)
            if (paths := _of_weights(source, named))
        }
        returned = _backward(node) if own else ()
        for i, paths in own.items():
            if i < len(returned) and returned[i] is None:
                cls = function_of(node)
                code = inspect.unwrap(cls.backward).__code__
                raise StageError(
                    stage,
                    f"its autograd.Function {cls.__name__} returns no gradient of {paths[0]} in its backward"
                    f" ({code.co_filename}:{code.co_firstlineno})",
                    "return it there, without a pass of your own: schedules with I and W compute gradients of"
                    " weights in W; or freeze the parameter (requires_grad_(False))",
                )


def _of_weights(source: Any, named: dict[Any, str]) -> list[str]:
    """List the weights of which alone a value is made; none if it is made of anything else."""
    found, ahead, seen = [], [source], {source}
    while ahead:
        node = ahead.pop()
        if node in named:
            found.append(named[node])
            continue
        before = {s for s, _ in node.next_functions if s is not None}
        if not before:
            return []
        ahead += before - seen
        seen |= before
    return found


def _backward(node: Any) -> tuple[Any, ...]:
    """Call the backward of a Function on zeros. An error that it raises is left to the engine."""
    with restored(_containers([*vars(node).values(), *_known_to(function_of(node).backward)])):
        try:
            returned = node.apply(
                *(torch.zeros(shape, dtype=dtype, device=d) for shape, dtype, d in results_of(node))
            )
        except Exception:
            return ()
    return returned if isinstance(returned, tuple) else (returned,)


def _known_to(function: Any) -> Iterator[Any]:
    """Yield the values that a function refers to."""
    known = inspect.getclosurevars(inspect.unwrap(function))
    yield from (*known.nonlocals.values(), *known.globals.values())


def _containers(values: list[Any]) -> list[Any]:
    """List the containers among values, and in them, in classes, modules and objects, a few levels deep."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for _ in range(_DEEP):
        below: list[Any] = []
        for value in values:
            if id(value) in seen or inspect.ismodule(value) or isinstance(value, torch.Tensor):
                continue
            seen.add(id(value))
            if type(value) in CONTAINERS:
                found[id(value)] = value
                below += value.values() if isinstance(value, dict) else value
            elif isinstance(value, nn.Module):
                below += [vars(part) for part in value.modules()]
            else:
                below += getattr(value, "__dict__", {}).values()
        values = below
    return [*found.values()]
