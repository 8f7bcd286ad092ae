"""Interleave the operators of two programs, a forward and a backward, in one."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

import torch
from torch.fx import Graph, Node

from .cut import Part
from .emit import Recipe
from .operators import constant_name


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """The recipe of a function that takes the arguments of both and returns the results of both; they share no name.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order and spread over those
    of the other.
    """
    both = Graph()
    constants: dict[str, torch.Tensor] = {}
    one, two = (_copied(both, recipe, constants) for recipe in (first, second))
    part = Part(one.arguments + two.arguments, tuple(_in_turn(one, two)), one.results + two.results)
    title = f"{first.title} and {second.title} together"
    settle, compile, warning = first.settle + second.settle, first.compile or second.compile, first.warning + second.warning
    return Recipe(part, first.names + second.names, constants, title, settle, compile, warning)


def _copied(both: Graph, recipe: Recipe, constants: dict[str, torch.Tensor]) -> Part:
    """The part in another graph, where its values have names of their own; its constants join the others."""
    part = recipe.part
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in copies:
            copies[node] = both.node_copy(node, copy)
            if node.op == "get_attr":
                copies[node].target = name = f"constant{len(constants)}"
                constants[name] = recipe.constants[constant_name(node)]
        return copies[node]

    return Part(
        tuple(tuple(map(copy, nodes)) for nodes in part.arguments),
        tuple(map(copy, part.body)),
        tuple(tuple(n and copy(n) for n in nodes) for nodes in part.results),
    )


def _in_turn(one: Part, two: Part) -> Iterator[Node]:
    """Both bodies as one, each operator as far on its way as those beside it are on theirs."""
    bodies = [[((n + 0.5) / len(part.body), which, n, node) for n, node in enumerate(part.body)] for which, part in enumerate((one, two))]
    return (node for *_, node in merge(*bodies, key=lambda entry: entry[:3]))
