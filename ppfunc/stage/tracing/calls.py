"""The quickest way to call an operator from Python: torch's own bindings, where they do exactly the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node, map_arg

from .._torch import BINDINGS, METHODS, TorchDispatchMode, binding, schema
from ..abstract import quiet
from .operators import is_dense, is_tensor, layout

RECORDING = {torch.ops.aten.mkldnn_rnn_layer.default}
"""Operators that return what their backward needs only in grad mode; programs run outside of it."""

_FOUND: WeakKeyDictionary[Graph, dict[Hashable, Call]] = WeakKeyDictionary()


class Call(NamedTuple):
    """How to call.

    Args:
        function: a function of all arguments, if ``method`` is empty.
        method: a method of the first argument.
        spread: whether the last argument, a list of numbers, is given as that many arguments.
    """

    function: Callable[..., Any] | None
    method: str = ""
    spread: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is not None:
            return self.function(*args, **kwargs)
        rest = (*args[1:-1], *args[-1]) if self.spread else args[1:]
        return getattr(args[0], self.method)(*rest, **kwargs)


def quickest(node: Node) -> Call:
    """A binding that calls the operator of ``node`` and nothing else, else the operator itself.

    An operator object converts its arguments by a slow general way (about 1 us a call); a binding
    has a parser made for it. That a binding does the same is not assumed but seen: it is called
    once on the fake tensors of the trace, and what it dispatches must be this very call. Calls of one
    trace with like arguments share what was seen.
    """
    if "quickest" not in node.meta:
        numbers: dict[Node, int] = {}
        kind = (node.target, _kind(node.args, numbers), _kind(tuple(node.kwargs.items()), numbers))
        found = _FOUND.setdefault(node.graph, {})
        if kind not in found:
            found[kind] = _find(node)
        node.meta["quickest"] = found[kind]
    return node.meta["quickest"]


def _kind(value: Any, numbers: dict[Node, int]) -> Hashable:
    """All that a binding could see of an argument; which of the arguments are the same is part of it."""
    if isinstance(value, Node):
        t = value.meta["val"]
        same = numbers.setdefault(value, len(numbers))
        return (type(t), same, t.device, *layout(value)) if is_tensor(value) and is_dense(value) else id(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_kind(v, numbers) for v in value))
    return (type(value), repr(value))


def _find(node: Node) -> Call:
    if node.target in RECORDING:
        return Call(torch.enable_grad()(binding(node.target)))
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    itself = Call(binding(node.target))
    wanted = _dispatches(itself, args, kwargs)
    return next((call for call in _candidates(node) if wanted and _dispatches(call, args, kwargs) == wanted), itself)


def _candidates(node: Node) -> Iterator[Call]:
    name = schema(node.target).name.split("::")[1]
    if hasattr(METHODS, name) and node.args and isinstance(node.args[0], Node):
        if len(node.args) > 1 and isinstance(node.args[-1], (list, tuple)) and not node.kwargs:
            yield Call(None, name, spread=True)
        yield Call(None, name)
    for home in BINDINGS:
        if hasattr(home, name):
            yield Call(getattr(home, name))


def _dispatches(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """What operators a call comes down to; ``None`` if it refuses."""
    with _Record(args) as record, torch.no_grad(), quiet():
        try:
            call(*args, **kwargs)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):
            return None
    return record.calls


class _Record(TorchDispatchMode):
    """Records calls in a form that can be compared: tensors are numbered as they appear."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.seen: list[torch.Tensor] = []
        self.plain(args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            names = [a.name for a in schema(func).arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            every = [given.get(a.name, a.default_value) for a in schema(func).arguments]
            self.calls.append((func, self.plain(every)))
        return func(*args, **(kwargs or {}))

    def plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = [i for i, t in enumerate(self.seen) if t is value]
            if not known:
                self.seen.append(value)
            return ("tensor", known[0] if known else len(self.seen) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(map(self.plain, value))
        return (type(value), repr(value))
