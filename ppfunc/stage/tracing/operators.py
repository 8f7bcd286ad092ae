"""Tell the nodes of a trace apart: calls, views, random operators, constants."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from .._torch import FUNCTIONAL_COLLECTIVES, OpOverload, schema
from ..communication import is_collective
from ..purity import draws

ELEMENT = operator.getitem
"""Target of the nodes that take one result of an operator with several."""


def arguments(node: Node) -> tuple[Any, ...]:
    """The arguments of a call; which types they have follows from the operator, and fx does not say."""
    return node.args


def constant_name(node: Node) -> str:
    """The name of the constant that a ``get_attr`` node stands for."""
    assert isinstance(node.target, str)
    return node.target


def is_call(node: Node) -> bool:
    """Whether the node calls an operator, or takes one of its results."""
    return node.op == "call_function"


def is_element(node: Node) -> bool:
    """Whether the node takes one result of an operator with several."""
    return node.target is ELEMENT


def is_tensor(node: Node) -> bool:
    """Whether the node is one tensor, not several."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_dense(node: Node) -> bool:
    """Whether the tensor of the node has strides and a storage."""
    return node.meta["val"].layout is torch.strided


def is_random(node: Node) -> bool:
    """Whether the operator of the node draws random numbers."""
    return isinstance(node.target, OpOverload) and draws(node.target, node.args, node.kwargs)


def is_of_forward(node: Node) -> bool:
    """Whether the operator of the node was called in the forward."""
    return "place" in node.meta


def is_effect(node: Node) -> bool:
    """Whether the operator of the node does more than make its result: it moves a generator on, or the other ranks wait for it."""
    return is_random(node) or (is_collective(node.target) and not is_wait(node))


def is_wait(node: Node) -> bool:
    """Whether all that the operator of the node does is to wait for a collective."""
    return node.target is FUNCTIONAL_COLLECTIVES.wait_tensor.default


def is_mutable(node: Node) -> bool:
    """Whether the operator of the node writes into its arguments."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def base(node: Node) -> Node | None:
    """The node of which ``node`` is a view, ``None`` if it is its own storage."""
    if is_element(node):
        return base(arguments(node)[0])
    viewed = isinstance(node.target, OpOverload) and is_view(node.target) and node.args[0]
    return viewed if isinstance(viewed, Node) else None  # it may be a complex number, which autograd conjugates as it does tensors


def is_view(target: OpOverload) -> bool:
    """Whether all that the operator does is to look at its first argument in another way.

    >>> is_view(torch.ops.aten.t.default), is_view(torch.ops.aten.mm.default)
    (True, False)
    """
    results = schema(target).returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def root(node: Node) -> Node:
    """The node that owns the storage of ``node``."""
    while (below := base(node)) is not None:
        node = below
    return node


def layout(node: Node) -> Any:
    """The key that is equal for views of one storage that are the same tensor; unique for sparse tensors, which have no strides."""
    t = node.meta["val"]
    if not is_dense(node):
        return node
    return (t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())


def ancestors(nodes: Iterable[Node | None], inside: set[Node] | None = None) -> set[Node]:
    """The nodes and all that they depend on, without leaving ``inside``."""
    seen: set[Node] = set()
    todo = [n for n in nodes if n is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes if inside is None else [n for n in node.all_input_nodes if n in inside]
    return seen
