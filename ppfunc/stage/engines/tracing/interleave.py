"""Join two programs, so that operators of one run between a collective of the other and the wait for it."""

from collections.abc import Iterator

from torch.fx import Graph, Node

from .cut import Block, waited_late
from .emit import Recipe
from .graph import is_post
from .joint import Nodes


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
