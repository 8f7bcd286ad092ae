"""Memory given on: which results may be written over an argument that nothing reads afterwards.

Large temporaries cost more than their arithmetic where the allocator has to ask for fresh
pages. The bits do not change: it is the same operator, with another place for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from .cut import Part
from .operators import base, is_dense, is_element, is_tensor

aten = torch.ops.aten

# Operators whose result is certainly memory of its own.
_FRESH = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.mm.default,
    aten.linear.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.gelu_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
}
# Views in all but their schema.
_SAME_MEMORY = {aten._unsafe_view.default, aten._reshape_alias.default}


def _in_place(method: str) -> Callable[[Node, int, Callable[..., str], Callable[..., str]], str]:
    """How a commutative operator is written over either of its arguments."""
    return lambda node, taken, value, _: f"{value(node.args[taken])}.{method}({value(node.args[1 - taken])})"


def _gelu_backward(node: Node, taken: int, value: Callable[..., str], call: Callable[..., str]) -> str:
    gradient, x = map(value, node.args)
    approximate = node.kwargs.get("approximate", "none")
    return f"{call(aten.gelu_backward.grad_input, 'op')}({gradient}, {x}, approximate={approximate!r}, grad_input={gradient})"


# Which arguments may be written over, and how.
_WRITERS = {
    aten.add.Tensor: ((0, 1), _in_place("add_")),
    aten.mul.Tensor: ((0, 1), _in_place("mul_")),
    aten.gelu_backward.default: ((0,), _gelu_backward),
}


def donations(part: Part) -> dict[Node, int]:
    """For every call whose result may take the memory of an argument, the position of that argument."""
    order = {node: n for n, node in enumerate(part.body)}
    last = _last_readings(part, order)
    found: dict[Node, int] = {}
    for node in part.body:
        for position in _candidates(node):
            argument = node.args[position]
            owner = _owner(argument)
            alone = [_owner(n) for n in node.all_input_nodes].count(owner) == 1
            fresh = owner in order and _producer(owner).target in _FRESH
            if alone and fresh and last[owner] == order[node] and _fits(argument, node):
                found[node] = position
                break
    return found


def written_over(node: Node, position: int, value: Callable[..., str], call: Callable[..., str]) -> str:
    """The call as source, its result in the memory of the argument at ``position``."""
    return _WRITERS[node.target][1](node, position, value, call)


def _candidates(node: Node) -> Iterator[int]:
    """The positions of arguments that the operator could write over."""
    positions, _ = _WRITERS.get(node.target, ((), None))
    plain = not set(node.kwargs) - {"approximate"} and len(node.args) == 2
    for position in positions if plain else ():
        if all(isinstance(a, Node) and is_tensor(a) for a in node.args):
            yield position


def _fits(argument: Node, node: Node) -> bool:
    """Whether the argument is exactly as large as the result, and laid out like it."""
    a, r = argument.meta["val"], node.meta["val"]
    return (
        is_dense(argument)
        and is_dense(node)
        and a.dtype == r.dtype
        and a.dtype.is_floating_point
        and a.shape == r.shape
        and a.stride() == r.stride()
        and a.is_contiguous()
        and a.device == r.device
    )


def _owner(node: Node) -> Node:
    """The node whose memory ``node`` shows."""
    while True:
        below = node.args[0] if node.target in _SAME_MEMORY else base(node)
        if below is None:
            return node
        node = below


def _producer(owner: Node) -> Node:
    return owner.args[0] if is_element(owner) else owner


def _last_readings(part: Part, order: dict[Node, int]) -> dict[Node, int]:
    """When each memory is read last, through whichever view; after the end where it is returned."""
    last: dict[Node, int] = {}
    for node in part.body:
        for argument in node.all_input_nodes:
            last[_owner(argument)] = order[node]
    for results in part.results:
        last.update((_owner(n), len(order)) for n in results if n is not None)
    return last
