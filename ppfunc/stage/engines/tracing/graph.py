"""Build a graph of the operators that a function calls, and tell its nodes apart."""

import operator
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch import FakeTensor, OpOverload, expression, schema
from ...abstract.evaluation import NoValuesError
from ...errors import Names, StageError, module_of_call, place_of_call
from ...operators import draws, is_collective

TRACED = {torch.Tensor, torch.nn.Parameter, FakeTensor}
"""The classes of tensors whose operators are recorded."""
ELEMENT = operator.getitem
"""Target of the nodes that take one result of an operator with several."""


class GraphRecorder:
    """Builds a graph of operators. A subclass is also a dispatch mode, which sees the calls.

    Args:
        owner: names the recorded function in errors.
        entry: the file below which the user's code is called.
        mend: the mend of an operator that cannot be recorded.

    Attributes:
        graph: the operators, in the order of their calls. ``meta["results"]`` of one that returns several
            results is their number. ``meta["constant"]`` of a ``get_attr`` node is a tensor that is neither
            an input nor made within.
    """

    supports_higher_order_operators = True

    def __init__(self, owner: str, entry: str, mend: str) -> None:
        super().__init__()
        self.owner, self.entry, self.mend = owner, entry, mend
        self.graph = Graph()
        # Held weakly: of a new tensor that somebody else holds, torch returns a copy.
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._names: Names = {}

    def place(self, tensor: torch.Tensor, name: str) -> Node:
        """Make a tensor an input of the graph."""
        return self._know(self.graph.placeholder(name), tensor)

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor: a new constant for an unknown one."""
        known = self._nodes.get(tensor)
        if known is not None:
            return known
        self._require_constant(tensor)
        constant = self.graph.create_node("get_attr", "constant")
        constant.meta["constant"] = tensor
        return self._know(constant, tensor)

    def with_nodes(self, value: Any) -> Any:
        """Replace the tensors in the arguments of an operator by their nodes.

        Of numbers that are no integers, and depend on sizes, the value counts: other sizes are traced anew.
        """

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.SymFloat | torch.SymBool):
                return float(value) if isinstance(value, torch.SymFloat) else bool(value)
            return self.node(value) if isinstance(value, torch.Tensor) else value

        return map_aggregate(value, replaced)

    def add(self, target: Any, args: Any, kwargs: Any, result: Any, name: str | None = None) -> Node:
        """Add a call, and a node for each tensor among several results.

        Args:
            target: the operator.
            args, kwargs: the arguments, with nodes for tensors.
            result: the result of the call.
            name: the name of the node.
        """
        node = call_node(self.graph, target, args, kwargs, name)
        if isinstance(result, torch.Tensor):
            return self._know(node, result)
        results = result if isinstance(result, list | tuple) else ()
        node.meta["results"] = len(results)
        for index, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                self._know(self.graph.create_node("call_function", ELEMENT, (node, index)), tensor)
        return node

    def called_at(self) -> str:
        """Return the innermost line of the user, as ``", called at file:line"``; empty if unknown."""
        return place_of_call(self.entry)

    def origin(self) -> dict[str, Any]:
        """Return the ``meta`` that says where an operator is called: ``place``, a line, and ``module``."""
        return {"place": self.called_at(), "module": module_of_call(self.entry, self._names)}

    def require_operator(self, func: Any) -> None:
        """Raise for an operator that takes functions."""
        if not isinstance(func, OpOverload):
            raise StageError(
                self.owner, f"it uses {func}, an operator on functions{self.called_at()}", self.mend
            )

    def _require_constant(self, tensor: torch.Tensor) -> None:
        """Raise if an unknown tensor has no values."""
        if isinstance(tensor, FakeTensor):
            raise NoValuesError(tensor).of_stage(self.owner)

    def _know(self, node: Node, tensor: torch.Tensor) -> Node:
        self._nodes[tensor] = node
        return node


def call_node(graph: Graph, target: Any, args: Any, kwargs: Any, name: str | None) -> Node:
    """Add a call, whose arguments may be symbols: torch warns of those in a new node."""
    node = graph.create_node("call_function", target, name=name)
    node.args, node.kwargs = args, kwargs
    return node


def module_of(graph: Graph) -> GraphModule:
    """Make a module of a graph that holds its constants."""
    constants = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = node.name
            constants[node.name] = node.meta["constant"]
    return GraphModule(constants, graph)


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a call as ``Any``: their types depend on the operator."""
    return node.args


def is_call(node: Node) -> bool:
    """Tell whether the node calls an operator, or takes a result of it."""
    return node.op == "call_function"


def is_element(node: Node) -> bool:
    """Tell whether the node takes one result of an operator with several."""
    return node.target is ELEMENT


def operator_of(node: Node) -> Node:
    """Return the node of the operator that makes the result."""
    return arguments(node)[0] if is_element(node) else node


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
    return is_random(node) or is_check(node) or is_post(node)


def is_check(node: Node) -> bool:
    """Tell whether an operator returns nothing and writes nothing: it raises where values are wrong."""
    return isinstance(node.target, OpOverload) and not schema(node.target).returns and not is_mutable(node)


def is_post(node: Node) -> bool:
    """Tell whether the operator of the node begins a collective."""
    return is_collective(node.target) and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Tell whether the operator of the node only waits for a collective."""
    return is_collective(node.target) and "::wait_tensor" in schema(node.target).name


def is_mutable(node: Node) -> bool:
    """Tell whether the operator of the node writes into its arguments."""
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def base(node: Node) -> Node | None:
    """Return the node of which ``node`` is a view, unless it is its own storage."""
    if is_element(node):
        return base(arguments(node)[0])
    viewed = isinstance(node.target, OpOverload) and is_view(node.target) and node.args[0]
    # It may be a complex number, which autograd conjugates as it does tensors.
    return viewed if isinstance(viewed, Node) else None


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
    numbers = (tuple(t.shape), t.stride(), t.storage_offset())
    return (t.dtype, *map(always_equal, numbers), t.is_conj(), t.is_neg())


def always_equal(value: Any) -> Hashable:
    """Return a key of sizes, or tuples of them, that is equal where the sizes are always equal."""
    return map_aggregate(value, lambda v: expression(v) if isinstance(v, torch.SymInt) else v)


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


def comparable(value: Any) -> Hashable:
    """Make arguments hashable: tensors by identity; ``1`` apart from ``1.0``, and ``0.0`` from ``-0.0``."""
    if isinstance(value, (list, tuple)):
        return tuple(map(comparable, value))
    if isinstance(value, dict):
        return tuple((k, comparable(v)) for k, v in sorted(value.items()))
    if isinstance(value, Node):
        return value
    return (type(value), id(value) if isinstance(value, torch.Tensor) else repr(value))


def named_arguments(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the schema, with defaults."""
    defaults = {a.name: a.default_value for a in schema(func).arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs
