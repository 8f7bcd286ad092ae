"""Write the operators of a stage as one Python function: straight-line code on a flat tuple."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from ppfunc.stage.tracing.operators import constant_name, is_element

from .record import KINDS, Region


def emit(
    body: Sequence[Node], arguments: Sequence[Node], results: Sequence[Node], constants: Mapping[str, Any], ambient: Region, title: str
) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Make a function that calls the operators of ``body`` in turn. Every value is let go right after its last use.

    Args:
        body: the nodes, in order.
        arguments: the nodes whose values it is given.
        results: the nodes whose values it returns.
        constants: what ``get_attr`` nodes name.
        ambient: the region in which it is called; operators of others are called in theirs.
        title: its name in tracebacks.

    Returns:
        The function; its docstring is its source.
    """
    scope: dict[str, Any] = {}
    last = {source: node for node in body for source in node.all_input_nodes}
    lines = [f"{', '.join(f'v_{n.name}' for n in arguments)}, = values", "del values"] if arguments else []
    for region, nodes in groupby(body, key=lambda n: ambient if is_element(n) else n.meta["region"]):
        indent = ""
        if region != ambient:
            lines.append(f"with {_bind(scope, partial(within, region, ambient))}():")
            indent = "    "
        for node in nodes:
            call = _call(node, constants, scope)
            lines.append(f"{indent}v_{node.name} = {call}")
            dead = [
                f"v_{n.name}" for n in (*node.all_input_nodes, node) if n not in results and n.op != "get_attr" and last.get(n, n) is node
            ]
            if dead:
                lines.append(f"{indent}del {', '.join(dict.fromkeys(dead))}")
    returned = "".join(f"{_text(n, constants, scope)}, " for n in results)
    source = "\n    ".join(["def run(values):", *lines, f"return ({returned})"]) + "\n"
    exec(builtins.compile(source, f"<{title}>", "exec"), scope)  # the source was written right here
    run: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]] = scope["run"]
    run.__doc__ = source
    return run


def _call(node: Node, constants: Mapping[str, Any], scope: dict[str, Any]) -> str:
    arguments = [_text(a, constants, scope) for a in node.args]
    if is_element(node):
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [f"{name}={_text(value, constants, scope)}" for name, value in node.kwargs.items()]
    return f"{_bind(scope, node.target)}({', '.join(arguments)})"


def _text(value: Any, constants: Mapping[str, Any], scope: dict[str, Any]) -> str:
    """An argument as the text of Python."""
    match value:
        case Node(op="get_attr"):
            return _bind(scope, constants[constant_name(value)])
        case Node():
            return f"v_{value.name}"
        case list():
            return f"[{', '.join(_text(v, constants, scope) for v in value)}]"
        case tuple():
            return f"({''.join(_text(v, constants, scope) + ', ' for v in value)})"
        case None | bool() | int() | str():
            return repr(value)
        case float() if math.isfinite(value):
            return repr(value)
    return _bind(scope, value)


def _bind(scope: dict[str, Any], value: Any) -> str:
    """The name of an object in the scope of the function."""
    name = f"o{id(value)}"
    scope[name] = value
    return name


@contextmanager
def within(region: Region, ambient: Region | None = None) -> Iterator[None]:
    """Call operators in a region, where that differs from the ambient one."""
    with ExitStack() as stack:
        stack.enter_context(
            torch.set_grad_enabled(region.grad) if ambient is None else torch.no_grad() if not region.grad else nullcontext()
        )
        for at, (kind, (on, dtype)) in enumerate(zip(KINDS, region.autocast, strict=True)):
            if ambient is None or (on, dtype) != ambient.autocast[at]:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on))
        yield
