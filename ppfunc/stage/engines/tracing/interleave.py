"""Interleave the operators of two programs, a forward and a backward, in one."""

from collections.abc import Iterator
from heapq import merge

import torch
from torch.fx import Graph, Node

from .cut import Block
from .recipe import Recipe, copied


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """Join two functions that share no name: one that takes the arguments of both and returns both results.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order and
    spread over those of the other.
    """
    both = Graph()
    constants: dict[str, torch.Tensor] = {}
    one, two = (copied(both, recipe, constants) for recipe in (first, second))
    block = Block(one.arguments + two.arguments, tuple(_in_turn(one, two)), one.results + two.results)
    title = f"{first.title} and {second.title} together"
    settle, compile, warning = (
        first.settle + second.settle,
        first.compile or second.compile,
        first.warning + second.warning,
    )
    return Recipe(block, first.names + second.names, constants, title, settle, compile, warning)


def _in_turn(one: Block, two: Block) -> Iterator[Node]:
    """Merge both bodies, each operator as far on its way as those beside it are on theirs."""
    bodies = [
        [((n + 0.5) / len(block.body), which, n, node) for n, node in enumerate(block.body)]
        for which, block in enumerate((one, two))
    ]
    return (node for *_, node in merge(*bodies, key=lambda entry: entry[:3]))
