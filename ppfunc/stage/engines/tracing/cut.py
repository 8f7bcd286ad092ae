"""Cut a joint trace into the operators of F, of I and of W, and order those of each."""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf
from typing import NamedTuple

from torch.fx import Graph, Node, map_arg

from ...abstract.sizes import Numbers
from ...errors import StageError, other_engine
from .graph import (
    ancestors,
    base,
    is_call,
    is_dense,
    is_element,
    is_of_forward,
    is_post,
    is_random,
    is_wait,
    operator_of,
    root,
)
from .joint import Joint, Maybe, Nodes


class Block(NamedTuple):
    """Describe a stretch of straight-line code."""

    arguments: tuple[Nodes, ...]
    body: Nodes  # the calls, in order
    results: tuple[Maybe, ...]  # None for no gradient

    def copied(self, graph: Graph, numbers: Numbers | None = None) -> "Block":
        """Copy the code into another graph under names of its own, with numbers in the place of symbols."""
        copies: dict[Node, Node] = {}
        for node in chain(*self.arguments):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copy(node: Node) -> Node:
            if node not in copies:
                args, kwargs = map_arg((node.args, node.kwargs), copy)
                # Its arguments may be symbols: torch warns of those in a new node.
                copies[node] = made = graph.create_node(node.op, node.target, name=node.name)
                made.args, made.kwargs, made.meta = args, kwargs, dict(node.meta)
            return copies[node]

        block = Block(
            tuple(tuple(map(copy, nodes)) for nodes in self.arguments),
            tuple(map(copy, self.body)),
            tuple(tuple(n and copy(n) for n in nodes) for nodes in self.results),
        )
        if numbers is not None:
            for node in copies.values():
                node.args, node.kwargs = numbers(node.args), numbers(node.kwargs)
                node.meta["val"] = numbers(node.meta.get("val"))
        return block


class ProgramBlocks(NamedTuple):
    """Hold the parts of a joint trace, one per field of :class:`~ppfunc.stage.program.FlatProgram`."""

    forward: Block
    backward: Block
    backward_input: Block
    backward_weight: Block

    @property
    def residuals(self) -> Nodes:
        return self.backward.arguments[0]


def cut(
    joint: Joint, again: Iterable[Node] = (), twice: Iterable[Node] = (), ahead: Iterable[Node] = ()
) -> ProgramBlocks:
    """Cut by dependency: every operator in one part, save for views of parameters, which are free.

    * F: what the outputs depend on, and whatever draws random numbers or communicates in the forward.
    * I: of the rest, what the gradient of ``x`` depends on.
    * W: the remainder, which only gradients of parameters depend on.

    A check of the backward is in I where that has what it looks at, else in W.

    ``backward`` is I and W as one, in the order of the trace: hence bitwise the same. Of ``again``, operators
    of F, no result is kept: where the backward needs them they are computed once more, right before they are
    used, by I if it needs them or they are ``ahead``, else by W. Of ``twice``, operators of I, no result is
    handed to W, which computes them itself.
    """
    calls, early = set(filter(is_call, joint.graph.nodes)), early_nodes(joint)
    free = parameter_views(joint)
    late = (calls - early) | set(again) | free
    outputs, gparams, gx = joint.results
    gradients, checks = [*gparams, *gx], joint.checks
    whole, inputs = _closure([*gradients, *checks], late), _closure([*gx, *ahead], late)
    inputs |= {n for n in checks if _closure(n.all_input_nodes, late) <= inputs}
    weights = _closure([*gparams, *checks], late - (inputs - free - set(twice)))
    residuals = tuple(n for n in _needed(whole, gradients) if n not in joint.gy)
    rest = _needed(weights, gparams)

    def block(arguments: tuple[Nodes, ...], body: set[Node], results: tuple[Maybe, ...]) -> Block:
        return Block(arguments, tuple(_in_order(body, results)), results)

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


def _in_order(body: set[Node], results: tuple[Maybe, ...]) -> Iterator[Node]:
    """Yield calls of the backward in the order of the trace, those of the forward right before their use."""
    late = sorted(n for n in body if not is_of_forward(operator_of(n)))
    todo, done = [*late, *(n for nodes in results for n in nodes if n is not None)][::-1], set[Node]()
    while todo:
        node = todo[-1]
        missing = [a for a in node.all_input_nodes if a in body and a not in done]
        if missing and node not in done:
            todo += sorted(missing, reverse=True)
            continue
        todo.pop()
        if node in body and node not in done:
            done.add(node)
            yield node


def posted_early(body: Nodes) -> Nodes:
    """Order the calls of a program: each collective as soon as its input is computed, its wait at the use.

    Behind a collective come first the calls that run beside it: those that do not need it, and that the next
    one does not need, such as gradients of parameters. Collectives and random operators keep their orders,
    which ranks share. A call moves past one collective at most, so that memory lives little longer.
    """
    inside, drawn, posts = set(body), list[Node](), 0
    needs, before = dict[Node, list[Node]](), dict.fromkeys(body, inf)
    behind: dict[Node, int] = {}  # how many collectives stand before a call
    after: dict[Node, int] = {}  # the last collective that a call needs, counted from 1; 0 for none
    for node in body:
        needs[node] = [a for a in node.all_input_nodes if a in inside]
        if is_random(node):
            needs[node] += drawn
            drawn = [node]
        behind[node] = posts
        posts += is_post(node)
        after[node] = posts if is_post(node) else max((after[a] for a in needs[node]), default=0)
    for node in reversed(body):  # the first collective that needs a call
        first = after[node] if is_post(node) else before[node]
        before.update({argument: min(before[argument], first) for argument in needs[node]})

    def place(node: Node) -> tuple[int, int]:
        last = behind[node]
        if is_post(node):
            return last, 2
        needs_last = after[node] == last
        return (last, 1) if needs_last and before[node] == last + 1 else (last + needs_last, 0)

    return tuple(waited_late(sorted(body, key=place)))


def waited_late(body: Iterable[Node]) -> Iterator[Node]:
    """Yield the calls in their order, each wait right before the first use of its result, or at the end."""
    waits: dict[Node, bool] = {}
    for node in body:
        for argument in node.all_input_nodes:
            if waits.pop(argument, False):
                yield argument
        if is_wait(node):
            waits[node] = True
        else:
            yield node
    yield from waits


def residual_bytes(joint: Joint, residuals: Nodes, name: str) -> int:
    """Count the bytes of the storages of ``residuals``, each once, without those of parameters.

    Raises:
        StageError: one is sparse.
    """
    owners = set(map(root, residuals)) - set(joint.params)
    if not all(map(is_dense, owners)):
        raise StageError(
            name,
            "its backward needs a sparse tensor that its forward makes, whose size is not known without"
            " values",
            f'use graph(remat="full"), which makes it again, or {other_engine("functional")}',
        )
    return sum(n.meta["val"].untyped_storage().nbytes() for n in owners)
