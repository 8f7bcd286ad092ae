"""Order the operators of programs so that others run between a collective and the wait for it.

`posted_early` does so within one program, `interleave` in one program made of two.
"""

from collections.abc import Iterable, Iterator
from math import inf

from torch.fx import Graph, Node

from .cut import Block
from .emit import Recipe
from .graph import is_post, is_random, is_wait
from .joint import Nodes


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


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """Join two functions that share no name: one that takes the arguments of both and returns both results.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order:
    those of one between a collective of the other and the wait for it, without collectives in turn.
    """
    both = Graph()
    one, two = first.block.copied(both), second.block.copied(both)
    body = waited_late(_in_turn(one.body, two.body))
    block = Block(one.arguments + two.arguments, tuple(body), one.results + two.results)
    return Recipe(
        block,
        first.names + second.names,
        f"{first.title} and {second.title} together",
        first.settle + second.settle,
        first.compile or second.compile,
        first.warning + second.warning,
    )


def _in_turn(one: Nodes, two: Nodes) -> list[Node]:
    """Merge both bodies, which communicate in turn; the second begins, as a backward has less to do before::

        one:        a  post         b  post         c
        two:  post           d  post         e

    The order of the collectives follows from their numbers alone: ranks whose stages differ in other
    operators begin them in the same order.
    """
    counts = [sum(map(is_post, body)) for body in (one, two)]
    turns = sorted(((k + 0.5) / n, -which) for which, n in enumerate(counts) for k in range(n))
    owners = [-which for _, which in turns]
    keyed = [*_keyed(one, 0, owners), *_keyed(two, 1, owners)]
    return [node for _, node in sorted(keyed, key=lambda entry: entry[0])]


def _keyed(body: Nodes, which: int, owners: list[int]) -> Iterator[tuple[tuple[float, ...], Node]]:
    """Yield the calls of a body with their places, given whose each collective of the merged program is.

    A place is a tuple to sort by: the number of a collective; 0 for that collective, 1 or 2 for calls behind
    it; how far the call is between two collectives of its body, from 0 to 1; and its body. Calls between two
    collectives are spread evenly behind those of the other body in between, or stay behind the first if there
    are none.
    """
    start, ends = 0, [n for n, node in enumerate(body) if is_post(node)]
    mine = [turn for turn, owner in enumerate(owners) if owner == which]
    for last, turn, end in zip((-1, *mine), (*mine, len(owners)), (*ends, len(body)), strict=True):
        gaps, size = range(last + 1, turn) or [last], end - start
        for n, node in enumerate(body[start:end]):
            gap = gaps[n * len(gaps) // size]
            yield (gap, 2 if gap == last else 1, (n + 0.5) / size, which), node
        if end < len(body):
            yield (turn, 0), body[end]
        start = end + 1
