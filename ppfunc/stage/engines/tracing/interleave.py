"""Interleave the operators of two programs, a forward and a backward, in one."""

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from .cut import Block
from .joint import Nodes
from .posts import is_post, waited_late
from .recipe import Recipe, copied


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """Join two functions that share no name: one that takes the arguments of both and returns both results.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order:
    those of one between a collective of the other and the wait for it, without collectives in turn.
    """
    both = Graph()
    constants: dict[str, torch.Tensor] = {}
    one, two = (copied(both, recipe, constants) for recipe in (first, second))
    body = waited_late(_in_turn(one.body, two.body))
    block = Block(one.arguments + two.arguments, tuple(body), one.results + two.results)
    title = f"{first.title} and {second.title} together"
    settle, compile, warning = (
        first.settle + second.settle,
        first.compile or second.compile,
        first.warning + second.warning,
    )
    return Recipe(block, first.names + second.names, constants, title, settle, compile, warning)


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

    A place is the number of the collective that a call follows or is; 0 for itself, then 1 or 2; how far the
    call is on its way between two collectives of its body; and its body. Calls between two of them are spread
    evenly over the collectives of the other body in between, each behind one. Without any, they follow the
    first.
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
