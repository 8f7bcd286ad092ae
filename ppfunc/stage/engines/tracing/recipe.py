"""Collect all that a function written from a part of a trace is made of."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from .cut import Block
from .operators import constant_name


class Recipe(NamedTuple):
    """Hold all that a traced function is written from: a part of a trace, with names and constants."""

    block: Block
    names: tuple[str, ...]  # of the arguments
    constants: dict[str, torch.Tensor]  # of ``get_attr`` nodes
    title: str  # name of the function, and of its place in a traceback
    settle: tuple[str, ...] = ()  # names of the arguments whose tensors may come with any strides
    compile: bool = False  # whether the body is one function compiled by inductor
    warning: str = ""  # given when the function is first called


def copied(graph: Graph, recipe: Recipe, constants: dict[str, torch.Tensor]) -> Block:
    """Copy a part into another graph under names of its own. Its constants join the others."""
    block = recipe.block
    copies: dict[Node, Node] = {}
    for node in chain(*block.arguments):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy(node: Node) -> Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)
            if node.op == "get_attr":
                copies[node].target = name = f"constant{len(constants)}"
                constants[name] = recipe.constants[constant_name(node)]
        return copies[node]

    return Block(
        tuple(tuple(map(copy, nodes)) for nodes in block.arguments),
        tuple(map(copy, block.body)),
        tuple(tuple(n and copy(n) for n in nodes) for nodes in block.results),
    )
