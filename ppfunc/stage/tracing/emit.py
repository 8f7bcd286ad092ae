"""Write parts of a trace as Python functions: straight-line code on flat tuples."""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .compiled import compiled
from .cut import Part
from .fast_dispatch import find_call
from .operators import arguments, constant_name, is_element

_writing = threading.RLock()  # one thread at a time


class Recipe(NamedTuple):
    """All that a function is made of.

    Args:
        part: what to compute.
        names: names of the arguments.
        constants: the tensors of ``get_attr`` nodes.
        title: name of the function, and of its place in a traceback.
        settle: names of the arguments whose tensors may come with any strides.
        compile: whether the body is one function compiled by inductor.
    """

    part: Part
    names: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    title: str
    settle: tuple[str, ...] = ()
    compile: bool = False


def emit(recipe: Recipe) -> TracedFunction:
    """Make a function of a part of a trace. Every value is let go right after its last use.

    Returns:
        The function, which carries its ``recipe``; its docstring is its source.
    """
    return TracedFunction(recipe)


class TracedFunction:
    """A function of a program. It owns its code, written at the first call: who never calls W does not pay for it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._function: Callable[..., Any] | None = None
        for node in () if recipe.compile else recipe.part.body:
            if not is_element(node):
                find_call(node)  # now, since transforms and modes may be active at the first call

    def __call__(self, *arguments: Any) -> Any:
        return (self._function or self._written())(*arguments)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # written at the first call
        return self._written().__doc__

    def _written(self) -> Callable[..., Any]:
        with _writing:
            if self._function is None:
                self._function = _write(self.recipe)
        return self._function


def _write(recipe: Recipe) -> Callable[..., Any]:
    """Write the function and make it."""
    part, title, writer = recipe.part, recipe.title, _Writer(recipe.part, recipe.constants)
    writer.unpack(recipe.names, recipe.settle)
    if recipe.compile and part.body:
        writer.call_compiled(*compiled(part, recipe.constants))
    else:
        for node in part.body:
            writer.call(node)
    source = writer.source(title, recipe.names)
    scope = dict(writer.objects)
    exec(builtins.compile(source, f"<{title}>", "exec"), scope)  # the source was written right here
    function = scope[title.split()[-1]]
    function.__doc__ = source
    return function


class _Writer:
    """Writes one function."""

    def __init__(self, part: Part, constants: dict[str, torch.Tensor]) -> None:
        self.part, self.constants = part, constants
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.names: dict[Node, str] = {}
        self.last = _last_uses(part)

    def unpack(self, names: tuple[str, ...], settle: tuple[str, ...]) -> None:
        for name, nodes in zip(names, self.part.arguments, strict=True):
            used = [self.bind(n) if n in self.last else "_" for n in nodes]
            if any(n in self.last for n in nodes):
                self.lines.append(f"{', '.join(used)}, = {name}")
            self.lines.append(f"del {name}")
            if name in settle:
                for node in nodes:
                    if node in self.last:
                        lazy = ".resolve_conj()" if node.meta["val"].is_complex() else ""
                        self.lines.append(f"{self.names[node]} = {self.names[node]}{lazy}.contiguous()")

    def bind(self, node: Node) -> str:
        self.names[node] = node.name
        return node.name

    def call(self, node: Node) -> None:
        if is_element(node):
            return
        text = self.expression(node)
        elements = {n.args[1]: n for n in node.users if is_element(n) and n in self.last}
        if any(map(is_element, node.users)):
            count = len(node.meta["val"])
            target = ", ".join(self.bind(elements[i]) if i in elements else "_" for i in range(count)) + ","
        else:
            target = self.bind(node) if node in self.last else "_"
        self.lines.append(f"{target} = {text}")
        gone = [self.names[n] for n in dict.fromkeys(node.all_input_nodes) if self.last.get(n) is node and n.op != "get_attr"]
        if "_" in target.split(", ") or target in ("_", "_,"):
            gone.append("_")
        if gone:
            self.lines.append(f"del {', '.join(gone)}")

    def call_compiled(self, function: Callable[..., Any], inputs: tuple[Node, ...], outputs: tuple[Node, ...]) -> None:
        given = ", ".join(self.names[n] for n in inputs)
        taken = "".join(self.bind(n) + ", " for n in outputs)
        self.lines.append(f"{taken}= {self.object(function, 'op')}({given})")

    def expression(self, node: Node) -> str:
        """The call as source."""
        how = find_call(node)
        args = arguments(node)
        given = [self.value(a) for a in args]
        if how.spread:
            given[-1:] = map(self.value, args[-1])
        named = [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        if how.method:
            return f"{given[0]}.{how.method}({', '.join(given[1:] + named)})"
        return f"{self.object(how.function, 'op')}({', '.join(given + named)})"

    def value(self, value: Any) -> str:
        """An argument as source."""
        if isinstance(value, Node):
            if value.op == "get_attr":
                return self.object(self.constants[constant_name(value)], "const")
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"({''.join(self.value(v) + ', ' for v in value)})"
        plain = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
        return repr(value) if plain else self.object(value, "const")

    def object(self, value: Any, prefix: str) -> str:
        """The global name of an operator or a constant."""
        if id(value) not in self.known:
            self.known[id(value)] = name = f"{prefix}{len(self.objects)}"
            self.objects[name] = value
        return self.known[id(value)]

    def source(self, title: str, names: tuple[str, ...]) -> str:
        results = [self.tuple(nodes) for nodes in self.part.results]
        body = [*self.lines, f"return {', '.join(results)}"]
        return f"def {title.split()[-1]}({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in body)

    def tuple(self, nodes: Iterable[Node | None]) -> str:
        return f"({''.join(('None' if n is None else self.value(n)) + ', ' for n in nodes)})"


def _last_uses(part: Part) -> dict[Node, Node | None]:
    """By which call every value is used last; ``None`` for what is returned."""
    last: dict[Node, Node | None] = {}
    for node in part.body:
        for argument in node.all_input_nodes:
            last[argument] = node
    for results in part.results:
        last.update((n, None) for n in results if n is not None)
    return last
