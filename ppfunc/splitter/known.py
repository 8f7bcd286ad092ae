"""Compute values that depend on numbers in the code of a model alone.

A model may ask for such values while it is traced. A call that reads a tensor for its form alone is replaced
by one on numbers, so that its value is known as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node, map_arg

from ppfunc.stage._torch import OpOverload
from ppfunc.stage.engines.tracing.graph import is_element, named_arguments
from ppfunc.stage.operators import draws

from ._torch import with_values

aten = torch.ops.aten


def known_values(
    asked: Sequence[Node], writers: Mapping[int, Sequence[Node]], autocast: Any
) -> dict[Node, Any] | None:
    """Replay the operators that values depend on: a mask of ``torch.ones`` is known, an input is not.

    Args:
        asked: the nodes of tensors, which count with all that has been written into their memory.
        writers: the nodes that write into each memory.
        autocast: the current state; operators called under another one are not replayed.

    Returns:
        The values of ``asked``, and of the nodes that they depend on; None if one of these is an input, a
        parameter, a buffer, or random.
    """
    needed: set[Node] = set()
    todo = [*asked, *(writer for node in asked for writer in writers.get(node.meta["value"].storage, ()))]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        if not (node.meta.get("known") if node.op == "get_attr" else _replayable(node, autocast)):
            return None
        needed.add(node)
        todo += node.all_input_nodes
        todo += [w for memory in node.meta["reads"] for w in writers.get(memory, ()) if w < node]
    values: dict[Node, Any] = {}
    with with_values(), torch.no_grad():
        for node in sorted(needed):
            value = call_again(node, values)
            values[node] = value.clone() if node.op == "get_attr" else value
    return values


def _replayable(node: Node, autocast: Any) -> bool:
    if node.op != "call_function" or node.meta["region"].autocast != autocast:
        return False
    return is_element(node) or (
        isinstance(node.target, OpOverload) and not draws(node.target, node.args, node.kwargs)
    )


def call_again(node: Node, values: Mapping[Node, Any]) -> Any:
    """Call the operator of a node on the values of its arguments; return that of a constant."""
    if node.op == "get_attr":
        return node.meta["constant"]
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)


# Operators that look at the form of an argument alone, with those that make the same of numbers.
_FACTORIES = {
    aten.empty_like.default: aten.empty.memory_format,
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def by_numbers(func: OpOverload, args: Any, kwargs: Any, result: Any) -> tuple[OpOverload, Any, Any]:
    """Replace a call that reads a tensor for its form alone: a mask of ``ones_like(h)`` needs no ``h``.

    Returns:
        The operator and its arguments, unchanged if values are read.
    """
    if func in _FACTORIES and result.layout is torch.strided and result.is_contiguous():
        arguments = named_arguments(func, args, kwargs)
        value = [arguments["fill_value"]] if "fill_value" in arguments else []
        return (
            _FACTORIES[func],
            (list(result.shape), *value),
            {"dtype": result.dtype, "device": result.device},
        )
    if func in (aten.expand_as.default, aten.view_as.default):
        changed = aten.expand.default if func is aten.expand_as.default else aten.view.default
        return changed, (args[0], list(result.shape)), {}
    if func is aten.type_as.default or (func is aten.to.other and len(args) == 2 and not kwargs):
        return aten.to.dtype, (args[0], result.dtype), {}
    return func, args, kwargs
