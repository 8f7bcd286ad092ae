"""The cut: which operators of a joint trace belong to F, which to I, which to W."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import Node

from .joint import Joint, Maybe, Nodes
from .operators import ancestors, base, is_call, is_element, is_random, root


class Part(NamedTuple):
    """A stretch of straight-line code.

    Args:
        arguments: its arguments, each a tuple of nodes.
        body: the calls, in order.
        results: what it returns, each a tuple of nodes (``None`` for no gradient).
    """

    arguments: tuple[Nodes, ...]
    body: Nodes
    results: tuple[Maybe, ...]


class Parts(NamedTuple):
    """The programs of a stage as parts of its joint trace.

    Args:
        forward: ``(params, x, consts) -> (outputs, residuals)``.
        backward: ``(residuals, gy) -> (gparams, gx)``.
        backward_input: ``(residuals, gy) -> (gx, rest)``.
        backward_weight: ``(rest,) -> (gparams,)``.
    """

    forward: Part
    backward: Part
    backward_input: Part
    backward_weight: Part


def cut(joint: Joint) -> Parts:
    """Cut by dependency: no operator is in two parts, except views of parameters, which are free.

    * F: what the outputs depend on, and whatever draws random numbers.
    * I: of the rest, what the gradient of ``x`` depends on.
    * W: the remainder, which only gradients of parameters depend on.

    ``backward`` is I and W as one, in the order of the trace: hence bitwise the same.
    """
    order = [n for n in joint.graph.nodes if is_call(n)]
    free = _parameter_views(joint)
    early = _with_elements(ancestors([*joint.outputs, *filter(is_random, order)]))
    wanted = _with_elements(ancestors(joint.gx)) - early
    given = {n for n in joint.graph.nodes if not is_call(n)}
    late = _with_elements(ancestors([*joint.gparams, *joint.gx])) - early - given
    in_order = [n for n in order if n in early], [n for n in order if n in late & wanted], [n for n in order if n in late - wanted]
    return _assemble(joint, in_order, [n for n in order if n in late], free)


def _assemble(joint: Joint, thirds: tuple[list[Node], list[Node], list[Node]], late: list[Node], free: set[Node]) -> Parts:
    forward, inputs, weights = thirds
    gradients = (joint.gparams, joint.gx)
    arguments = (joint.params, joint.x, joint.consts)
    residuals = tuple(n for n in needed(late, [*joint.gparams, *joint.gx], free) if n not in joint.gy)
    rest = needed(weights, joint.gparams, free)
    return Parts(
        Part(arguments, _body(joint, forward, [*joint.outputs, *residuals], free), (joint.outputs, residuals)),
        Part((residuals, joint.gy), _body(joint, late, [*joint.gparams, *joint.gx], free), gradients),
        Part((residuals, joint.gy), _body(joint, inputs, [*joint.gx, *rest], free), (joint.gx, rest)),
        Part((rest,), _body(joint, weights, joint.gparams, free), (joint.gparams,)),
    )


def needed(body: Iterable[Node], results: Iterable[Node | None], free: set[Node]) -> Nodes:
    """What a stretch of code has to be given, in the order in which it is first used."""
    own = set(body)
    found: dict[Node, None] = {}

    def visit(node: Node | None) -> None:
        if node is None or node in own or node.op == "get_attr":
            return
        if node in free:
            visit(base(node))
        else:
            found[node] = None

    for node in body:
        for argument in node.all_input_nodes:
            visit(argument)
    for node in results:
        visit(node)
    return tuple(found)


def _body(joint: Joint, calls: list[Node], results: Iterable[Node | None], free: set[Node]) -> Nodes:
    """The calls with the free views that they need put between them, in the order of the trace."""
    own = set(calls) - free
    uses = {a for n in own for a in n.all_input_nodes} | {n for n in results if n is not None}
    views = {n for n in ancestors(uses & free) if n in free}
    return tuple(n for n in joint.graph.nodes if n in own or n in views)


def _parameter_views(joint: Joint) -> set[Node]:
    """Calls that only look at a parameter in another way: cheaper to repeat than to keep."""
    params = set(joint.params)
    return {n for n in joint.graph.nodes if is_call(n) and base(n) is not None and root(n) in params}


def _with_elements(nodes: set[Node]) -> set[Node]:
    """The nodes, with all results of operators that have several."""
    return nodes | {user for n in nodes for user in n.users if is_element(user)}


def residual_bytes(joint: Joint, residuals: Nodes) -> int:
    """Bytes of the storages of ``residuals``, each counted once, those of parameters not at all."""
    owners = dict.fromkeys(map(root, residuals))
    return sum(n.meta["val"].untyped_storage().nbytes() for n in owners if n not in set(joint.params))
