"""Order the operators of a program so that others run between a collective and the wait for it."""

from collections.abc import Iterable, Iterator
from math import inf

from torch.fx import Node

from ...abstract.purity import is_collective
from .joint import Nodes
from .operators import is_random, is_wait


def is_post(node: Node) -> bool:
    """Tell whether the operator of the node begins a collective."""
    return is_collective(node.target) and not is_wait(node)


def posted_early(body: Nodes) -> Nodes:
    """Order the calls of a program: each collective as soon as its input is computed, its wait at the use.

    Behind a collective come first the calls that neither it nor the next one needs, such as gradients of
    parameters, and those that do not need it. Collectives keep their order, which ranks share, and random
    operators theirs. A call moves past one collective at most, so that memory lives little longer.
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
