"""Tell which operators of a trace may run again in other stages, and who writes into which memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ppfunc.stage._torch import OpOverload
from ppfunc.stage.abstract.purity import draws
from ppfunc.stage.engines.tracing.operators import is_view, named_arguments
from ppfunc.stage.signature import differentiable

from .trace import Trace


def is_random(node: Node) -> bool:
    """Tell whether the node may draw random numbers.

    Dropout and recurrent layers do so in training, with a rate above zero. Of an operator that is not torch's
    own, the schema does not say what else it does.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return "opaque" in node.meta
    if node.target.namespace not in ("aten", "prims"):
        return True
    arguments = named_arguments(node.target, node.args, node.kwargs)
    switches = ("train", "training", *(["p", "dropout"] if "train" in arguments else []))
    return draws(node.target, node.args, node.kwargs) and all(arguments.get(name, True) for name in switches)


class Effects:
    """Knows the memory of a trace: which nodes make it, and which write into it.

    Args:
        trace: of the model.
        state: names of buffers that belong to the state of a stage.

    Attributes:
        cheap: the nodes that may run again anywhere: nothing random, no parameter, no state, no input that is
            floating, or that the model writes into.
        maker: the node that makes a memory first.
        writers_of: the nodes that write into each memory.
    """

    def __init__(self, trace: Trace, state: Mapping[str, int]) -> None:
        sources = (*trace.params.values(), *trace.buffers.values(), *trace.inputs)
        nodes = (*sources, *trace.nodes)
        self.maker: dict[int, Node] = {}
        self.writers_of: dict[int, list[Node]] = {}
        for node in nodes:
            for at in storages_of(node):
                self.maker.setdefault(at, node)
            for at in node.meta["writes"]:
                self.writers_of.setdefault(at, []).append(node)
        dear = {*trace.params.values(), *(trace.buffers[name] for name in (*state, *trace.replaced))}
        dear |= {
            n
            for n in trace.inputs
            if differentiable(n.meta["value"].dtype) or not self.writers_of.keys().isdisjoint(storages_of(n))
        }
        self.cheap = self._cheap(nodes, dear)

    def writers(self, node: Node) -> list[Node]:
        """List the nodes that write into what this node reads, before it does."""
        return [w for at in node.meta["reads"] for w in self.writers_of.get(at, ()) if w < node]

    def all_writers(self, node: Node) -> list[Node]:
        """List the nodes that write into the memory of this node, at any time."""
        return [w for at in storages_of(node) for w in self.writers_of.get(at, ())]

    def _cheap(self, nodes: Sequence[Node], dear: set[Node]) -> set[Node]:
        """Find the nodes that depend on no ``dear`` one, and share no memory with any."""
        memories: set[int] = set()
        while True:
            before = len(dear), len(memories)
            for node in nodes:
                touched = storages_of(node) | node.meta["writes"] | node.meta["reads"]
                if node not in dear and (
                    is_random(node)
                    or not dear.isdisjoint(node.all_input_nodes)
                    or not memories.isdisjoint(touched)
                ):
                    dear.add(node)
                if node in dear:
                    memories |= storages_of(node) | node.meta["writes"]
            if before == (len(dear), len(memories)):
                return set(nodes) - dear


def storages_of(node: Node) -> frozenset[int]:
    """List the memories of the results of a node."""
    value: Any = node.meta.get("value")
    return frozenset() if value is None or value.storage is None else frozenset([value.storage])


def is_view_or_cast(node: Node) -> bool:
    """Tell whether the node is a view or a cast of one tensor, and no smaller than it."""
    if (
        node.op != "call_function"
        or not isinstance(node.target, OpOverload)
        or len(node.all_input_nodes) != 1
    ):
        return False
    (source,) = node.all_input_nodes
    if (
        "value" not in source.meta
        or "value" not in node.meta
        or not node.meta["region"].grad
        or node.meta["writes"]
    ):
        return False
    smaller = source.meta["value"].nbytes > node.meta["value"].nbytes
    return not smaller and (is_view(node.target) or node.target in _CASTS)


aten = torch.ops.aten
_CASTS = {
    aten.contiguous.default,
    aten._to_copy.default,
    *(getattr(aten.to, name) for name in aten.to.overloads()),
}
