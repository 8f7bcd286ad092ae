"""Replay traced functions on tensors without values: they allocate and free, and compute nothing.

A :class:`ppfunc.runtime.paper.ledger.Ledger` notes what is allocated: ``born`` and ``died`` note a storage
that lives within a function alone, ``make`` makes a tensor that the caller gets.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.fx import Node, map_arg

from ...program import FlatProgram
from .cut import Block
from .emit import Recipe, TracedFunction
from .graph import arguments as operands, is_of_forward
from .joint import Nodes
from .lifetimes import calls_of, lives_of, results_of, source


class _Call(NamedTuple):
    """Describe what a call of a traced function makes and frees.

    Args:
        node: its node.
        name, again: of what it makes.
        counted: the storages that it makes without a tensor here: key and bytes.
        made: the nodes among its results that are tensors here.
        freed: keys of storages that nothing uses after it.
        dropped: the arguments, and the tensors made here, that nothing uses after it.
    """

    node: Node
    name: str
    again: bool
    counted: tuple[tuple[Hashable, int], ...]
    made: Nodes
    freed: tuple[Hashable, ...]
    dropped: Nodes


def replayed(program: FlatProgram, notes: Any) -> FlatProgram:
    """Replace the traced functions of a program by replays of them, which compute nothing."""
    functions: Any = (_Replayed(f, notes) if isinstance(f, TracedFunction) else f for f in program)
    return FlatProgram(*functions)


class _Replayed(TracedFunction):
    def __init__(self, traced: TracedFunction, notes: Any) -> None:
        self.recipe, self.results, self.written = traced.recipe, traced.results, None
        self._traced, self._notes = traced, notes

    def fastest(self) -> Callable[..., Any]:
        return self.function

    @property
    def accumulating(self) -> TracedFunction | None:
        other = self._traced.accumulating
        return None if other is None else _Replayed(other, self._notes)

    @property
    def fresh(self) -> bool:
        return self._traced.fresh

    def _write(self) -> Callable[..., Any]:
        return _replay(self.recipe, self._notes)


def _replay(recipe: Recipe, notes: Any) -> Callable[..., Any]:
    """Make a function that allocates and frees as the function of a recipe does."""
    block, (calls, needed) = recipe.block, _calls(recipe)
    sources: dict[Node, Any] = {node: source(node) for call in calls for node in call.made}
    used = {n for call in calls for n in call.dropped} | needed

    def run(*arguments: Any) -> Any:
        values: dict[Node, Any] = {}
        for name, nodes, given in zip(recipe.names, block.arguments, arguments, strict=True):
            settle = name in recipe.settle
            pairs = ((n, t) for n, t in zip(nodes, given, strict=True) if n in used)
            values |= {n: t.contiguous() if settle else t for n, t in pairs}
        del arguments, given, pairs
        values |= {n: _constant(n) for n in needed if n.op == "get_attr"}
        counted: dict[Hashable, Any] = {}
        for call in calls:
            counted |= {key: notes.born(size, call.name, call.again) for key, size in call.counted}
            if call.node.op == "call_method":  # it adds gradients up
                sums, *rest = [map_arg(a, values.__getitem__) for a in operands(call.node)]
                sums.add(*rest)
                del rest
            for node in call.made:
                values[node] = notes.make(node.meta["val"], call.name, values.get(sources[node]))
            for key in call.freed:
                notes.died(counted.pop(key))
            for node in call.dropped:
                del values[node]
        results = [tuple([None if n is None else values[n] for n in row]) for row in block.results]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return run


def _calls(recipe: Recipe) -> tuple[list[_Call], set[Node]]:
    """Find what each call makes, and after which call nothing uses it; and the nodes that are tensors."""
    block, again = recipe.block, recipe.names[0] != "params"  # forward operators in a backward
    body = calls_of(block)
    needed, given = _needed(block, body), {n for row in block.arguments for n in row}
    born: list[list[tuple[Hashable, int]]] = [[] for _ in body]
    ended: list[list[tuple[Hashable, list[Node]]]] = [[] for _ in body]
    for key, life in lives_of(block).items():
        tensors = [n for n in life.members if n in needed or n in given]
        if life.birth >= 0 and not tensors:
            born[life.birth].append((key, life.size))
        if life.end < len(body):
            ended[life.end].append((key, tensors))
    calls = [
        _Call(
            node,
            _name(node),
            again and is_of_forward(node),
            tuple(born[i]),
            tuple(result for _, _, result in results_of(node) if result in needed),
            tuple(key for key, tensors in ended[i] if not tensors),
            tuple(n for _, tensors in ended[i] for n in tensors),
        )
        for i, node in enumerate(body)
    ]
    return calls, needed


def _needed(block: Block, body: Nodes) -> set[Node]:
    """Find the nodes that are returned or added up, and those that they are views of."""
    needed = {n for row in block.results for n in row if n is not None}
    needed |= {a for n in body if n.op == "call_method" for a in n.all_input_nodes}
    for result in reversed(block.body):
        if result in needed and (within := source(result)) is not None:
            needed.add(within)
    return needed


def _name(node: Node) -> str:
    """Name the operator of a call, and the user's line of it, of its forward, or of what it reads.

    Where no line is known, the path of the module is in its place.
    """
    origins = (m for n in (node, *node.all_input_nodes) for m in (n.meta, n.meta.get("reverses", {})))
    return f"{node.target}{next(filter(None, map(_place, origins)), '')}"


def _place(origin: dict[str, Any]) -> str:
    module = origin.get("module")
    return origin.get("place") or (f", called at {module.name}" if module and module.name else "")


def _constant(node: Node) -> torch.Tensor:
    """Stand for a constant, which is there anyway."""
    like = node.meta["val"]
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
