"""Fuse operators that tracing took apart, where one gives the same bits."""

from __future__ import annotations

import torch
from torch.fx import Node

from .joint import Joint
from .operators import arguments, is_call, is_dense

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def fuse(joint: Joint) -> None:
    """Put ``linear`` together again, and let sums drop their dimensions themselves."""
    for node in list(joint.graph.nodes):
        if is_call(node):
            _fuse_linear(node)
            _fuse_sum(node)
            _fuse_draw(node)


def _fuse_linear(node: Node) -> None:
    """``addmm(b, x, w.t())`` and ``mm(x, w.t())`` are ``linear``, which is one call for all three."""
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, transposed = arguments(node)
        fits = bias.meta["val"].dim() == 1
    elif node.target is aten.mm.default:
        (x, transposed), bias, fits = arguments(node), None, True
    else:
        return
    if not (fits and is_call(transposed) and transposed.target is aten.t.default and is_dense(transposed) and is_dense(x)):
        return
    weight = arguments(transposed)[0]
    if weight.meta["val"].dim() == 2:
        node.target, node.args = aten.linear.default, (x, weight) if bias is None else (x, weight, bias)


def _fuse_sum(node: Node) -> None:
    """``sum(x, dims, keepdim=True).view(...)`` without these dimensions is ``sum(x, dims)``."""
    if node.target not in _RESHAPES or not is_call(total := arguments(node)[0]):
        return
    if total.target is not aten.sum.dim_IntList or len(total.args) != 3 or total.kwargs or len(total.users) > 1:
        return
    x, dims, keep = arguments(total)
    rank = x.meta["val"].dim()
    left = [n for i, n in enumerate(x.meta["val"].shape) if i not in {d % rank for d in dims}]
    if keep and dims and list(node.meta["val"].shape) == left:
        node.target, node.args = aten.sum.dim_IntList, (x, dims)


def _fuse_draw(node: Node) -> None:
    """``bernoulli(empty_like(x), p)`` looks at nothing but the shape and the dtype: ``bernoulli(x, p)``."""
    if node.target is aten.bernoulli.p and is_call(empty := arguments(node)[0]) and empty.target is aten.empty_like.default:
        shape_of = arguments(empty)[0]
        a, b = shape_of.meta["val"], node.meta["val"]
        if a.dtype == b.dtype and a.stride() == b.stride():
            node.args = (shape_of, *node.args[1:])
