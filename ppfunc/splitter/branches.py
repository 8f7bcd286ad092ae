"""Record ``torch.cond`` and ``while_loop`` as one operator, whose functions are traces of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage._torch import storage
from ppfunc.stage.abstract.evaluation import (
    COND,
    DATA_DEPENDENT,
    PYTHON,
    WHILE,
    Handlers,
    cond,
    while_loop,
)
from ppfunc.stage.tree import tree_flatten

from .known import call_again
from .record import MODEL, Recording, Region, within


@dataclass(frozen=True)
class Branch:
    """One function of an operator.

    Args:
        places: the nodes of its arguments, and of the tensors that it reads from elsewhere.
        numbers: which of the tensors that all functions of the operator get these are.
        nodes: its operators.
        leaves: of its result, nodes or values of Python.
        ambient: the region in which it is called.
    """

    places: tuple[Node, ...]
    numbers: Sequence[int]
    nodes: tuple[Node, ...]
    leaves: tuple[Any, ...]
    ambient: Region

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        values: dict[Node, Any] = dict(zip(self.places, (tensors[n] for n in self.numbers), strict=True))
        for node in self.nodes:
            with within(node.meta["region"], self.ambient):
                values[node] = call_again(node, values)
        return [values[leaf] if isinstance(leaf, Node) else leaf for leaf in self.leaves]


def recorded_in(recording: Recording) -> Handlers:
    """Return handlers that record branches and loops, unless what decides is known."""

    def branch(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
        try:
            return cond(pred, true_fn, false_fn, operands)
        except DATA_DEPENDENT:
            if not recording.here:
                raise
        leaves, treedef = tree_flatten(operands)

        def of(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *tensors: function(*treedef.unflatten(tensors))

        branches, read, example = _record(recording, [of(true_fn), of(false_fn)], leaves)

        def call(pred: torch.Tensor, *tensors: torch.Tensor) -> Any:
            true, false = branches
            return cond(pred, true, false, tensors)

        return _whole(recording, "cond", call, (pred, *leaves, *read), example)

    def loop(cond_fn: Any, body_fn: Any, carried: Any, more: Any) -> Any:
        try:
            return while_loop(cond_fn, body_fn, carried, more)
        except DATA_DEPENDENT:
            if not recording.here:
                raise
        operands = [*carried]
        branches, read, example = _record(recording, [body_fn, cond_fn], operands)

        def call(*tensors: torch.Tensor) -> Any:
            body, goes_on = branches
            inner = tensors[len(operands) :]
            return while_loop(lambda *x: goes_on(*x)[0], body, list(tensors[: len(operands)]), inner)

        return tuple(_whole(recording, "while_loop", call, (*operands, *read), example))

    return {**PYTHON, COND: branch, WHILE: loop}


def _record(
    recording: Recording, functions: Sequence[Callable[..., Any]], operands: Sequence[torch.Tensor]
) -> tuple[list[Branch], list[torch.Tensor], Any]:
    """Record functions of the same tensors.

    Returns:
        The branches, the tensors that any of them reads from elsewhere, and the result of the first, without
        values.
    """
    traced = [_branch(recording, function, operands) for function in functions]
    read = list({id(t): t for _, elsewhere, _ in traced for t in elsewhere}.values())
    at = {id(t): len(operands) + n for n, t in enumerate(read)}
    branches = [
        replace(branch, numbers=[*range(len(operands)), *(at[id(t)] for t in elsewhere)])
        for branch, elsewhere, _ in traced
    ]
    return branches, read, traced[0][2]


def _branch(
    recording: Recording, function: Callable[..., Any], operands: Sequence[torch.Tensor]
) -> tuple[Branch, list[torch.Tensor], Any]:
    with recording.apart() as read:
        places = [recording.place(t, f"operands{n}") for n, t in enumerate(operands)]
        ambient = recording.region
        result = function(*operands)
        leaves, _ = tree_flatten(result)
        named = tuple(recording.node(t) if isinstance(t, torch.Tensor) else t for t in leaves)
        nodes = tuple(recording.graph.nodes)
        places += [recording.node(t) for t in read]
    outside = {storage(t) for t in (*operands, *read)}
    for node in nodes:
        if not outside.isdisjoint(node.meta["writes"]):
            raise StageError(
                MODEL,
                f"a function of its cond or while_loop writes into an argument{node.meta['place']}",
                "return the new value, or work on a clone",
            )
    body = tuple(n for n in nodes if n.op != "placeholder")
    return Branch(tuple(places), (), body, named, ambient), list(read), result


def _whole(
    recording: Recording, name: str, call: Callable[..., Any], tensors: tuple[Any, ...], example: Any
) -> Any:
    """Add one operator, whose results are new tensors."""
    leaves, treedef = tree_flatten(example)

    def fresh(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in call(*tensors))

    def outline(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in leaves)

    fresh.__name__, fresh.outline = name, outline  # type: ignore[attr-defined]
    return treedef.unflatten(recording.call_whole(fresh, tensors))
