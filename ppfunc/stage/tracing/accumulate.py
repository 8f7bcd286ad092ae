"""Let a program add its gradients up while it runs, so that each is freed before the next are made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from .cut import Part
from .emit import Recipe, copied
from .fast_dispatch import OperatorCall
from .operators import root

_TOGETHER = 2**20  # bytes of gradients that are added up at once: one by one, small ones take longer


def accumulating(recipe: Recipe) -> Recipe | None:
    """The recipe of a function that adds the first results up instead of returning them.

    Equivalent to, for a backward::

        def backward_accumulating(residuals, gy, into):
            gparams, gx = backward(residuals, gy)
            sums, microbatch = into
            sums.add(gparams, numbers, microbatch)      # in parts, each as soon as its gradients are made, which are then freed
            return gx

    Returns:
        None where nothing would be freed earlier: for a compiled program, which is one call, and for few bytes of gradients.
    """
    groups = [] if recipe.compile else list(_groups(recipe.part))
    if len(groups) < 2:
        return None
    graph, constants = Graph(), dict[str, torch.Tensor]()
    part = copied(graph, recipe, constants)
    gradients, *rest = part.results
    into = sums, microbatch = graph.placeholder("sums"), graph.placeholder("microbatch")
    body: list[Node] = []
    for (start, _), (end, numbers) in pairwise([(0, ()), *groups]):
        given = tuple(gradients[n] for n in numbers)
        addition = graph.create_node("call_method", "add", (sums, given, numbers, microbatch))
        addition.meta["call"] = OperatorCall(None, "add")
        body += [*part.body[start:end], addition]
    body += part.body[end:]
    changed = Part((*part.arguments, into), tuple(body), tuple(rest))
    title = f"{recipe.title}_accumulating"
    return recipe._replace(part=changed, names=(*recipe.names, "into"), constants=constants, title=title)


def _groups(part: Part) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The leaves whose gradients are added up together, after how many operators: as soon as they hold enough memory that is freed."""
    body, held = set(part.body), set[Node]()
    waiting = [n for n, node in enumerate(part.results[0]) if node is not None and node not in body]
    made: dict[Node, list[int]] = {}
    for n, node in enumerate(part.results[0]):
        if node in body:
            made.setdefault(node, []).append(n)
    end = 0
    for count, node in enumerate(part.body, start=1):
        if node in made:
            waiting, end = waiting + made[node], count
            held |= {root(node)} & body
            if sum(n.meta["val"].untyped_storage().nbytes() for n in held) >= _TOGETHER:
                yield end, tuple(sorted(waiting))
                waiting = []
                held.clear()
    if waiting:
        yield end, tuple(sorted(waiting))
