"""Clean up a joint trace without changing a bit of any result."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Node

from .joint import Joint
from .operators import ancestors, arguments, base, is_call, is_dense, is_effect, is_tensor, layout, root

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def clean(joint: Joint) -> Joint:
    """Remove copies that nobody needs, views of views, duplicates and dead operators from a joint trace.

    Duplicates are merged within the forward and within the backward, never between them: what a
    stage chose to compute again in its backward (checkpointing) stays computed again.
    """
    joint = _replace(joint, _forwarded(joint))
    _shorten_views(joint)
    for late in (False, True):
        joint = _replace(joint, _duplicates(joint, late))
    _fuse(joint)
    _drop_dead(joint)
    return joint


def _replace(joint: Joint, instead: dict[Node, Node]) -> Joint:
    """Put other nodes in the place of nodes, in the graph and in the lists of results."""

    def final(node: Any) -> Any:
        while node in instead:
            node = instead[node]
        return node

    for node in instead:
        node.replace_all_uses_with(final(node), propagate_meta=False)
    outputs, gparams, gx = (tuple(map(final, nodes)) for nodes in (joint.outputs, joint.gparams, joint.gx))
    return joint._replace(outputs=outputs, gparams=gparams, gx=gx)


def _forwarded(joint: Joint) -> dict[Node, Node]:
    """Find nodes whose value is that of an earlier node: copies, and views that change nothing."""
    instead: dict[Node, Node] = {}
    for node in filter(is_call, joint.graph.nodes):
        if node.target in _COPIES and _same_layout(node, node.args[0]):
            instead[node] = node.args[0]
            continue
        below = base(node) if is_tensor(node) else None
        while below is not None and not (is_tensor(below) and layout(below) == layout(node)):
            below = base(below)
        if below is not None:
            instead[node] = below
    return instead


def _same_layout(node: Node, source: Node) -> bool:
    """Tell whether a copy has the strides of its source. A constant has no more uses: any strides will do."""
    if source.op == "get_attr":
        return True
    a, b = node.meta["val"], source.meta["val"]
    return (
        a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _shorten_views(joint: Joint) -> None:
    """Make a reshape of a reshape of something contiguous one reshape.

    It may copy: some kernels return other strides than they do without values (batch norm of a transposed
    tensor on the CPU).
    """
    for node in joint.graph.nodes:
        if is_call(node) and node.target in _RESHAPES:
            below = node.args[0]
            while is_call(below) and below.target in _RESHAPES and below.args[0].meta["val"].is_contiguous():
                below = below.args[0]
            node.target, node.args = aten.reshape.default, (below, *node.args[1:])


def _duplicates(joint: Joint, late: bool) -> dict[Node, Node]:
    """Find nodes that compute what an earlier node of the same half computes."""
    forward = ancestors(joint.outputs)
    instead: dict[Node, Node] = {}
    seen: dict[Hashable, Node] = {}
    for node in filter(is_call, joint.graph.nodes):
        if (node in forward) == late or is_effect(node):
            continue
        node.args = torch.fx.map_arg(node.args, lambda n: instead.get(n, n))
        node.kwargs = torch.fx.map_arg(node.kwargs, lambda n: instead.get(n, n))
        key = _key(node)
        if key in seen:
            instead[node] = seen[key]
        elif key is not None:
            seen[key] = node
    return instead


def _key(node: Node) -> Hashable:
    """Return a key that is equal for nodes that compute the same; None if unknown."""
    if "empty" in str(node.target):
        return None
    if is_tensor(node) and base(node) is not None:
        return ("view of", root(node), layout(node))
    try:
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _freeze(value: Any) -> Any:
    """Make arguments hashable; tell ``1`` from ``1.0`` and ``True``, and ``0.0`` from ``-0.0``."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return value if isinstance(value, Node) else (type(value), repr(value), value)


def _fuse(joint: Joint) -> None:
    """Put ``linear`` together again, and let sums drop their dimensions themselves."""
    for node in list(joint.graph.nodes):
        if is_call(node):
            _fuse_linear(node)
            _fuse_sum(node)
            _fuse_draw(node)


def _fuse_linear(node: Node) -> None:
    """Replace ``addmm(b, x, w.t())`` and ``mm(x, w.t())`` by ``linear``: one call instead of two."""
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, transposed = arguments(node)
        fits = bias.meta["val"].dim() == 1
    elif node.target is aten.mm.default:
        (x, transposed), bias, fits = arguments(node), None, True
    else:
        return
    if not (
        fits
        and is_call(transposed)
        and transposed.target is aten.t.default
        and is_dense(transposed)
        and is_dense(x)
    ):
        return
    weight = arguments(transposed)[0]
    if weight.meta["val"].dim() == 2:
        node.target, node.args = aten.linear.default, (x, weight) if bias is None else (x, weight, bias)


def _fuse_sum(node: Node) -> None:
    """Replace ``sum(x, dims, keepdim=True)``, viewed without these dimensions, by ``sum(x, dims)``."""
    if node.target not in _RESHAPES or not is_call(total := arguments(node)[0]):
        return
    if (
        total.target is not aten.sum.dim_IntList
        or len(total.args) != 3
        or total.kwargs
        or len(total.users) > 1
    ):
        return
    x, dims, keep = arguments(total)
    rank = x.meta["val"].dim()
    left = [n for i, n in enumerate(x.meta["val"].shape) if i not in {d % rank for d in dims}]
    if keep and dims and list(node.meta["val"].shape) == left:
        node.target, node.args = aten.sum.dim_IntList, (x, dims)


def _fuse_draw(node: Node) -> None:
    """Replace ``bernoulli(empty_like(x), p)``, which reads shape and dtype alone, by ``bernoulli(x, p)``."""
    if (
        node.target is aten.bernoulli.p
        and is_call(empty := arguments(node)[0])
        and empty.target is aten.empty_like.default
    ):
        shape_of = arguments(empty)[0]
        a, b = shape_of.meta["val"], node.meta["val"]
        if a.dtype == b.dtype and a.stride() == b.stride():
            node.args = (shape_of, *node.args[1:])


def _drop_dead(joint: Joint) -> None:
    alive = ancestors(joint.results)
    for node in reversed(list(joint.graph.nodes)):
        if node not in alive and node.op != "placeholder":
            joint.graph.erase_node(node)
