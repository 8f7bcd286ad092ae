"""Cut a joint trace into the operators of F, of I and of W."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch.fx import Node

from ...errors import StageError
from .joint import Joint, Maybe, Nodes
from .operators import ancestors, base, is_call, is_dense, is_element, root


class Block(NamedTuple):
    """Describe a stretch of straight-line code."""

    arguments: tuple[Nodes, ...]
    body: Nodes  # the calls, in order
    results: tuple[Maybe, ...]  # None for no gradient


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
    gradients = [*joint.gparams, *joint.gx]
    whole, inputs = _closure(gradients, late), _closure(joint.gx, late)
    weights = _closure(joint.gparams, late - (inputs - free))
    residuals = tuple(n for n in _needed(whole, gradients) if n not in joint.gy)
    rest = _needed(weights, joint.gparams)

    def block(arguments: tuple[Nodes, ...], body: set[Node], results: tuple[Maybe, ...]) -> Block:
        return Block(arguments, tuple(_in_order(body, body - early, results)), results)

    forward = tuple(n for n in joint.graph.nodes if n in early & calls)
    return ProgramBlocks(
        Block((joint.params, joint.x, joint.extras), forward, (joint.outputs, residuals)),
        block((residuals, joint.gy), whole, (joint.gparams, joint.gx)),
        block((residuals, joint.gy), inputs, (joint.gx, rest)),
        block((rest,), weights, (joint.gparams,)),
    )


def early_nodes(joint: Joint) -> set[Node]:
    """Find what has to be there before a cotangent comes: arguments, F and its operators with effects."""
    arguments = {n for n in joint.graph.nodes if not is_call(n)}
    return arguments | _with_elements(ancestors([*joint.outputs, *joint.effects]))


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
