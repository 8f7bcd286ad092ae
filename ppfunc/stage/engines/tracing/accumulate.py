"""Let a program add its gradients up while it runs, so that each is freed before the next are made."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from .cut import Block
from .fast_dispatch import OperatorCall
from .operators import root
from .recipe import Recipe, copied

_TOGETHER = 2**20  # bytes of gradients that are added up at once: one by one, small ones take longer


def accumulating(recipe: Recipe) -> Recipe | None:
    """Change a function to add its first results up instead of returning them.

    Equivalent to, for a backward::

        def backward_accumulating(residuals, gy, into):
            gparams, gx = backward(residuals, gy)
            sums, microbatch = into
            sums.add(gparams, numbers, microbatch)      # in parts, each as soon as its gradients are made,
            which are then freed return gx

    Returns:
        None where nothing would be freed earlier: for a compiled program, which is one call, and for few
        bytes of gradients.
    """
    groups = [] if recipe.compile else list(_groups(recipe.block))
    if len(groups) < 2:
        return None
    graph, constants = Graph(), dict[str, torch.Tensor]()
    block = copied(graph, recipe, constants)
    gradients, *rest = block.results
    into = sums, microbatch = graph.placeholder("sums"), graph.placeholder("microbatch")
    body: list[Node] = []
    for (start, _), (end, numbers) in pairwise([(0, ()), *groups]):
        ready = tuple(gradients[n] for n in numbers)
        addition = graph.create_node("call_method", "add", (sums, ready, numbers, microbatch))
        addition.meta["call"] = OperatorCall(None, "add")
        body += [*block.body[start:end], addition]
    body += block.body[end:]
    changed = Block((*block.arguments, into), tuple(body), tuple(rest))
    title = f"{recipe.title}_accumulating"
    return recipe._replace(block=changed, names=(*recipe.names, "into"), constants=constants, title=title)


def _groups(block: Block) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Group the leaves whose gradients are added up together, as soon as that frees enough memory.

    Yields:
        How many operators come before, and the leaves.
    """
    body, held = set(block.body), set[Node]()
    waiting = [n for n, node in enumerate(block.results[0]) if node is not None and node not in body]
    leaves_of: dict[Node, list[int]] = {}
    for n, node in enumerate(block.results[0]):
        if node in body:
            leaves_of.setdefault(node, []).append(n)
    end = 0
    for count, node in enumerate(block.body, start=1):
        if node in leaves_of:
            waiting, end = waiting + leaves_of[node], count
            held |= {root(node)} & body
            if sum(n.meta["val"].untyped_storage().nbytes() for n in held) >= _TOGETHER:
                yield end, tuple(sorted(waiting))
                waiting = []
                held.clear()
    if waiting:
        yield end, tuple(sorted(waiting))
