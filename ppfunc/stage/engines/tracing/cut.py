"""Cut a joint trace into the operators of F, of I and of W, and choose what the backward computes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

import optree
import torch
from torch.fx import Graph, Node

from ..._torch import OpOverload
from ...abstract.purity import is_collective
from ...errors import StageError
from .graph import (
    ancestors,
    arguments,
    base,
    is_call,
    is_dense,
    is_element,
    is_random,
    is_tensor,
    is_wait,
    root,
)
from .joint import Joint, Maybe, Nodes

Remat = Literal["none", "full"] | Callable[[OpOverload], bool] | int
"""``"none"`` keeps what the backward needs; ``"full"`` keeps the inputs alone; a predicate names the
operators whose results are computed again; a number is the most bytes that may be kept."""

_HALVINGS = 20
_COMMUNICATED = 1000.0  # units of work per number that a collective writes


class Block(NamedTuple):
    """Describe a stretch of straight-line code."""

    arguments: tuple[Nodes, ...]
    body: Nodes  # the calls, in order
    results: tuple[Maybe, ...]  # None for no gradient

    def copied(self, graph: Graph) -> Block:
        """Copy the code into another graph under names of its own."""
        copies: dict[Node, Node] = {}
        for node in chain(*self.arguments):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copy(node: Node) -> Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        return Block(
            tuple(tuple(map(copy, nodes)) for nodes in self.arguments),
            tuple(map(copy, self.body)),
            tuple(tuple(n and copy(n) for n in nodes) for nodes in self.results),
        )


class ProgramBlocks(NamedTuple):
    """Hold the parts of a joint trace, one per field of :class:`~ppfunc.stage.program.FlatProgram`."""

    forward: Block
    backward: Block
    backward_input: Block
    backward_weight: Block

    @property
    def residuals(self) -> Nodes:
        return self.backward.arguments[0]


def cut(joint: Joint, again: Iterable[Node] = ()) -> ProgramBlocks:
    """Cut by dependency: every operator in one part, save for views of parameters, which are free.

    * F: what the outputs depend on, and whatever draws random numbers or communicates in the forward.
    * I: of the rest, what the gradient of ``x`` depends on.
    * W: the remainder, which only gradients of parameters depend on.

    ``backward`` is I and W as one, in the order of the trace: hence bitwise the same. Of ``again``, operators
    of F, no result is kept: where the backward needs them they are computed once more, by I if it needs them,
    else by W.
    """
    calls, early = set(filter(is_call, joint.graph.nodes)), early_nodes(joint)
    free = parameter_views(joint)
    late = (calls - early) | set(again) | free
    outputs, gparams, gx = joint.results
    gradients = [*gparams, *gx]
    whole, inputs = _closure(gradients, late), _closure(gx, late)
    weights = _closure(gparams, late - (inputs - free))
    residuals = tuple(n for n in _needed(whole, gradients) if n not in joint.gy)
    rest = _needed(weights, gparams)

    def block(arguments: tuple[Nodes, ...], body: set[Node], results: tuple[Maybe, ...]) -> Block:
        return Block(arguments, tuple(_in_order(body, body - early, results)), results)

    forward = tuple(n for n in joint.graph.nodes if n in early & calls)
    return ProgramBlocks(
        Block((joint.params, joint.x, joint.extras), forward, (outputs, residuals)),
        block((residuals, joint.gy), whole, (gparams, gx)),
        block((residuals, joint.gy), inputs, (gx, rest)),
        block((rest,), weights, (gparams,)),
    )


def early_nodes(joint: Joint) -> set[Node]:
    """Find what has to be there before a cotangent comes: arguments, F and its operators with effects."""
    arguments = {n for n in joint.graph.nodes if n.op in ("placeholder", "get_attr")}
    return arguments | _with_elements(ancestors([*joint.results[0], *joint.effects]))


def parameter_views(joint: Joint) -> set[Node]:
    """Find calls that only view a parameter: cheaper to repeat than to keep."""
    params = set(joint.params)
    return {n for n in joint.graph.nodes if is_call(n) and base(n) is not None and root(n) in params}


def _closure(results: Iterable[Node | None], inside: set[Node]) -> set[Node]:
    """Find the nodes in ``inside`` that ``results`` depend on, with all outputs of each operator."""
    return _with_elements(ancestors([n for n in results if n in inside], inside))


def _with_elements(nodes: set[Node]) -> set[Node]:
    return nodes | {user for n in nodes for user in n.users if is_element(user)}


def _needed(body: set[Node], results: Iterable[Node | None]) -> Nodes:
    """List the nodes outside ``body`` that it or the results read, in order, without constants."""
    used = [a for n in body for a in n.all_input_nodes] + [n for n in results if n is not None]
    return tuple(sorted({n for n in used if n not in body and n.op != "get_attr"}))


def _in_order(body: set[Node], first: set[Node], results: tuple[Maybe, ...]) -> Iterator[Node]:
    """Yield the calls of ``first`` in the order of the trace, every other one right before it is needed."""
    done: set[Node] = set()

    def visit(node: Node) -> Iterator[Node]:
        if node in body and node not in done:
            done.add(node)
            for argument in sorted(node.all_input_nodes):
                yield from visit(argument)
            yield node

    for node in [*sorted(first), *(n for nodes in results for n in nodes if n is not None)]:
        yield from visit(node)


def residual_bytes(joint: Joint, residuals: Nodes, name: str) -> int:
    """Count the bytes of the storages of ``residuals``, each once, without those of parameters.

    Raises:
        StageError: one is sparse.
    """
    owners = set(map(root, residuals)) - set(joint.params)
    if not all(map(is_dense, owners)):
        reason = (
            "its backward needs a sparse tensor that its forward makes, whose size is not known without"
            " values"
        )
        raise StageError(
            name, reason, 'use the functional engine, or graph(remat="full"), which makes it again'
        )
    return sum(n.meta["val"].untyped_storage().nbytes() for n in owners)


def cut_for(joint: Joint, remat: Remat, name: str) -> ProgramBlocks:
    """Cut the trace so that the backward computes again what ``remat`` says.

    Results of random operators are always kept. No operator runs more than twice.

    Raises:
        StageError: even with everything computed again more bytes are kept than allowed.

    References:
        Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; for the minimum cut,
        He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware, MLSys 2023.
    """
    if isinstance(remat, int) and not isinstance(remat, bool):
        return _within(joint, remat, name)
    if remat == "none":
        return cut(joint)
    if remat == "full":
        return cut(joint, _repeatable(joint))
    if not callable(remat):
        raise ValueError(
            f'got remat={remat!r}, expected "none", "full", a predicate on operators, or a number of bytes'
        )
    return cut(joint, {n for n in _repeatable(joint) if is_call(root(n)) and remat(_operator(root(n)))})


def _operator(node: Node) -> OpOverload:
    """Return the operator that makes the result of a node: for a wait, the collective."""
    while is_element(node) or is_wait(node):
        node = arguments(node)[0]
    assert isinstance(node.target, OpOverload)
    return node.target


def _repeatable(joint: Joint) -> set[Node]:
    """Find the calls of F that may run again: all but random ones and their results."""
    calls = filter(is_call, early_nodes(joint))
    return {n for n in calls if not is_random(arguments(n)[0] if is_element(n) else n)}


def _within(joint: Joint, budget: int, name: str) -> ProgramBlocks:
    """Find the cheapest cut that keeps at most ``budget`` bytes.

    For a price per byte, the set that is best to compute again is a minimum cut; the price is raised until
    the bytes fit.
    """
    blocks = cut(joint)
    if residual_bytes(joint, blocks.residuals, name) <= budget:
        return blocks
    repeated = _chooser(joint)
    least = cut(joint, repeated(1e6))
    size = residual_bytes(joint, least.residuals, name)
    if size > budget:
        reason = f"it may keep {budget} bytes, but needs {size} with everything computed again"
        raise StageError(name, reason, "allow more, or split the stage")
    low, high, best = -6.0, 6.0, least
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        blocks = cut(joint, repeated(10.0**middle))
        if residual_bytes(joint, blocks.residuals, name) <= budget:
            high, best = middle, blocks
        else:
            low = middle
    return best


def _chooser(joint: Joint) -> Callable[[float], set[Node]]:
    """Make a function that chooses the nodes to compute again at a price, in work per kept byte.

    In the flow network every node is a pair of vertices. Cutting ``in -> out`` keeps the result, at the price
    of its bytes. Leaving ``in`` on the side of the backward computes it again, at the price of its work, for
    which all it needs must be there.
    """
    import networkx as nx  # takes as long to import as the rest of this package
    from networkx.algorithms.flow import boykov_kolmogorov

    repeatable, free, early = (
        _repeatable(joint),
        parameter_views(joint) | set(joint.params),
        early_nodes(joint),
    )
    nodes, demands = [n for n in joint.graph.nodes if n in early], cut(joint).residuals

    def price_of(node: Node, price: float) -> float:
        if node in free:
            return 0.0
        owns_memory = is_tensor(node) and base(node) is None and is_dense(node)
        return price * node.meta["val"].untyped_storage().nbytes() if owns_memory else math.inf

    def repeated(price: float) -> set[Node]:
        network = nx.DiGraph()
        for position, node in enumerate(nodes):
            # What is kept from the beginning is kept longest. The small difference in price also
            # lets equal layers be told apart: without it all of them are repeated, or none.
            network.add_edge(
                (node, "in"),
                (node, "out"),
                capacity=price_of(node, price * (1.1 - 0.1 * position / len(nodes))),
            )
            network.add_edge(
                "forward", (node, "in"), capacity=_work(node) if node in repeatable else math.inf
            )
            network.add_edges_from(((argument, "out"), (node, "in")) for argument in node.all_input_nodes)
        network.add_edges_from(((node, "out"), "backward") for node in demands)
        _, (_, side) = nx.minimum_cut(network, "forward", "backward", flow_func=boykov_kolmogorov)
        return {n for n in repeatable if (n, "in") in side}

    return repeated


def _work(node: Node) -> float:
    """Estimate the work of a call: its multiplications and additions, or a few units per number written.

    A collective counts many per number.
    """
    if is_element(node) or base(node) is not None:
        return 0.0
    from torch.utils.flop_counter import flop_registry

    written = sum(t.numel() for t in optree.tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor))
    count = flop_registry.get(_operator(node).overloadpacket)
    shapes = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    each = _COMMUNICATED if is_collective(_operator(node)) else 8.0
    return each * written + (count(*shapes[0], **shapes[1], out_val=node.meta["val"]) if count else 0)
