"""Compute values that a model asks for while it is traced, if they come of numbers in its code alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node, map_arg

from ppfunc.stage._torch import OpOverload
from ppfunc.stage.abstract.purity import draws
from ppfunc.stage.engines.tracing.operators import constant_name, is_element

from ._torch import with_values


def known_values(
    asked: Sequence[Node],
    writers: Mapping[int, Sequence[Node]],
    constants: Mapping[str, torch.Tensor],
    autocast: Any,
) -> dict[Node, Any] | None:
    """Replay the operators that values depend on: a mask of ``torch.ones`` is known, an input is not.

    Args:
        asked: the nodes of tensors, which count with all that has been written into their memory.
        writers: the nodes that write into each memory.
        constants: what ``get_attr`` nodes name.
        autocast: that of now; operators called under another one are not replayed.

    Returns:
        The values of ``asked``, and of the nodes that they come of; None where one of these depends on an
        input, a parameter, a buffer, or random numbers.
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
            value = call_again(node, values, constants)
            values[node] = value.clone() if node.op == "get_attr" else value
    return values


def _replayable(node: Node, autocast: Any) -> bool:
    if node.op != "call_function" or node.meta["region"].autocast != autocast:
        return False
    return is_element(node) or (
        isinstance(node.target, OpOverload) and not draws(node.target, node.args, node.kwargs)
    )


def call_again(node: Node, values: Mapping[Node, Any], constants: Mapping[str, torch.Tensor]) -> Any:
    """Call the operator of a node on the values of its arguments; return that of a constant."""
    if node.op == "get_attr":
        return constants[constant_name(node)]
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)
