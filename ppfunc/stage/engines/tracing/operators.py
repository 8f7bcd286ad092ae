"""Tell the nodes of a trace apart: calls, views, random operators, constants."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ..._torch import FUNCTIONAL_COLLECTIVES, OpOverload, schema
from ...abstract.purity import draws, is_collective

aten = torch.ops.aten
ELEMENT = operator.getitem
"""Target of the nodes that take one result of an operator with several."""


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a call as ``Any``: their types depend on the operator."""
    return node.args


def constant_name(node: Node) -> str:
    """Return the name of the constant that a ``get_attr`` node stands for."""
    assert isinstance(node.target, str)
    return node.target


def is_call(node: Node) -> bool:
    """Tell whether the node calls an operator, or takes one of its results."""
    return node.op == "call_function"


def is_element(node: Node) -> bool:
    """Tell whether the node takes one result of an operator with several."""
    return node.target is ELEMENT


def is_tensor(node: Node) -> bool:
    """Tell whether the node is one tensor, not several."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_dense(node: Node) -> bool:
    """Tell whether the tensor of the node has strides and a storage."""
    return node.meta["val"].layout is torch.strided


def is_random(node: Node) -> bool:
    """Tell whether the operator of the node draws random numbers."""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)


def is_of_forward(node: Node) -> bool:
    """Tell whether the operator of the node was called in the forward."""
    return "place" in node.meta


def is_effect(node: Node) -> bool:
    """Tell whether an operator does more than make its result: draws, keeps ranks waiting, or raises."""
    return is_random(node) or is_check(node) or (is_collective(node.target) and not is_wait(node))


def is_check(node: Node) -> bool:
    """Tell whether an operator returns nothing and writes nothing: it raises where values are wrong."""
    return isinstance(node.target, OpOverload) and not schema(node.target).returns and not is_mutable(node)


def is_wait(node: Node) -> bool:
    """Tell whether the operator of the node only waits for a collective."""
    return node.target is FUNCTIONAL_COLLECTIVES.wait_tensor.default


def is_mutable(node: Node) -> bool:
    """Tell whether the operator of the node writes into its arguments."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def base(node: Node) -> Node | None:
    """Return the node of which ``node`` is a view, None if it is its own storage."""
    if is_element(node):
        return base(arguments(node)[0])
    viewed = isinstance(node.target, OpOverload) and is_view(node.target) and node.args[0]
    return (
        viewed if isinstance(viewed, Node) else None
    )  # it may be a complex number, which autograd conjugates as it does tensors


def is_view(target: OpOverload) -> bool:
    """Tell whether an operator only views its first argument.

    >>> is_view(torch.ops.aten.t.default), is_view(torch.ops.aten.mm.default)
    (True, False)
    """
    results = schema(target).returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def root(node: Node) -> Node:
    """Return the node that owns the storage of ``node``."""
    while (below := base(node)) is not None:
        node = below
    return node


def layout(node: Node) -> Any:
    """Return a key that is equal for views of one storage that are the same tensor.

    Sparse tensors have no strides: their keys are unique.
    """
    t = node.meta["val"]
    if not is_dense(node):
        return node
    return (t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())


def ancestors(nodes: Iterable[Node | None], inside: set[Node] | None = None) -> set[Node]:
    """Find the nodes and all that they depend on, without leaving ``inside``."""
    seen: set[Node] = set()
    todo = [n for n in nodes if n is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += (
                node.all_input_nodes if inside is None else [n for n in node.all_input_nodes if n in inside]
            )
    return seen


def named_arguments(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the schema, with defaults."""
    defaults = {a.name: a.default_value for a in schema(func).arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


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
    if func is aten.lift_fresh.default:
        return aten.lift_fresh_copy.default, args, kwargs
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
