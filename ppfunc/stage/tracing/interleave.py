"""Interleave the operators of two programs, a forward and a backward, in one."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

import torch
from torch.fx import Graph, Node

from .cut import Part
from .emit import Recipe, copied


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """The recipe of a function that takes the arguments of both and returns the results of both; they share no name.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order and spread over those
    of the other.
    """
    both = Graph()
    constants: dict[str, torch.Tensor] = {}
    one, two = (copied(both, recipe, constants) for recipe in (first, second))
    part = Part(one.arguments + two.arguments, tuple(_in_turn(one, two)), one.results + two.results)
    title = f"{first.title} and {second.title} together"
    settle, compile, warning = first.settle + second.settle, first.compile or second.compile, first.warning + second.warning
    return Recipe(part, first.names + second.names, constants, title, settle, compile, warning)


def _in_turn(one: Part, two: Part) -> Iterator[Node]:
    """Both bodies as one, each operator as far on its way as those beside it are on theirs."""
    bodies = [[((n + 0.5) / len(part.body), which, n, node) for n, node in enumerate(part.body)] for which, part in enumerate((one, two))]
    return (node for *_, node in merge(*bodies, key=lambda entry: entry[:3]))
