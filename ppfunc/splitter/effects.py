"""Tell which operators of a trace may run again in other stages, and which memory each of them writes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ppfunc.stage._torch import OpOverload, schema
from ppfunc.stage.purity import draws

from .trace import Trace

# Operators that draw, and are made of others, so that they do not have the tag that tells it.
_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers, or may."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return "opaque" in node.meta
    name = schema(node.target).name.partition("::")[2]
    given = dict(zip([a.name for a in schema(node.target).arguments], node.args, strict=False)) | node.kwargs
    if name.removesuffix("_") in _DROPOUTS:
        return bool(given["train"] and given["p"])
    if name in _RECURRENT:
        return bool(given["train"] and given["dropout"])
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p"))
    if name in ("rrelu", "rrelu_"):
        return bool(given.get("training"))
    return draws(node.target, node.args, node.kwargs)


class Effects:
    """The memory of a trace: who makes it, who writes into it.

    Args:
        trace: of the model.
        state: names of buffers that belong to the state of a stage.

    Attributes:
        order: the position of every node.
        cheap: the nodes that may run again anywhere: nothing random, no parameter, no state, no input that is floating, or
            that the model writes into.
        maker: the node that makes a memory first.
    """

    def __init__(self, trace: Trace, state: Mapping[str, int]) -> None:
        self.trace = trace
        sources = (*trace.params.values(), *trace.buffers.values(), *trace.inputs)
        nodes = (*sources, *trace.nodes)
        self.order = {node: i for i, node in enumerate(nodes)}
        self.maker: dict[int, Node] = {}
        self._writers: dict[int, list[Node]] = {}
        for node in nodes:
            for at in storages_of(node):
                self.maker.setdefault(at, node)
            for at in node.meta["writes"]:
                self._writers.setdefault(at, []).append(node)
        dear = {*trace.params.values(), *(trace.buffers[name] for name in (*state, *trace.replaced))}
        dear |= {n for n in trace.inputs if _carries(n) or not self._writers.keys().isdisjoint(storages_of(n))}
        self.cheap = self._cheap(nodes, dear)

    def writers(self, node: Node) -> list[Node]:
        """The nodes that write into what this node reads, before it does."""
        return [w for at in node.meta["reads"] for w in self._writers.get(at, ()) if self.order[w] < self.order[node]]

    def all_writers(self, node: Node) -> list[Node]:
        """The nodes that write into the memory of this node, at any time."""
        return [w for at in storages_of(node) for w in self._writers.get(at, ())]

    def written(self) -> dict[int, list[Node]]:
        """The writers of every memory that is written into."""
        return self._writers

    def _cheap(self, nodes: Sequence[Node], dear: set[Node]) -> set[Node]:
        """All nodes but those that depend on ``dear`` ones, or share a memory with such."""
        memories: set[int] = set()
        while True:
            before = len(dear), len(memories)
            for node in nodes:
                touched = storages_of(node) | node.meta["writes"] | node.meta["reads"]
                if node not in dear and (is_random(node) or not dear.isdisjoint(node.all_input_nodes) or not memories.isdisjoint(touched)):
                    dear.add(node)
                if node in dear:
                    memories |= storages_of(node) | node.meta["writes"]
            if before == (len(dear), len(memories)):
                return set(nodes) - dear


def _carries(node: Node) -> bool:
    """Whether a gradient may go to an input."""
    dtype = node.meta["value"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def storages_of(node: Node) -> frozenset[int]:
    """The memories of the results of a node."""
    value: Any = node.meta.get("value")
    return frozenset() if value is None or value.storage is None else frozenset([value.storage])


def is_view_or_cast(node: Node) -> bool:
    """Whether the node looks at one tensor in another way, or in another precision, and its result is no smaller."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or len(node.all_input_nodes) != 1:
        return False
    (source,) = node.all_input_nodes
    if "value" not in source.meta or "value" not in node.meta or not node.meta["region"].grad or node.meta["writes"]:
        return False
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema(node.target).returns)
    smaller = source.meta["value"].nbytes > node.meta["value"].nbytes
    return not smaller and (views or node.target in _CASTS)


aten = torch.ops.aten
_CASTS = {aten.contiguous.default, aten._to_copy.default, *(getattr(aten.to, name) for name in aten.to.overloads())}
