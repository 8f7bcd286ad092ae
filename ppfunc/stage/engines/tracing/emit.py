"""Write parts of a trace as Python functions, for engines and splits: straight-line code on flat tuples."""

import builtins
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from itertools import groupby
from keyword import iskeyword
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, Node

from ..._torch import (
    any_autocast,
    function_modes,
    operator_modes,
    transforming,
    without_function_modes,
)
from ...abstract.sizes import Numbers
from ...errors import TRACED_LINES, TRACED_MODULES, ModulePlace
from ...program import FlatProgram
from .cut import Block, ProgramBlocks, posted_early
from .dispatch import OperatorCall, compiled, find_call
from .graph import always_equal, arguments, is_element, is_post
from .lifetimes import Addition, additions, calls_of
from .native import native, table

_writing = threading.RLock()  # one thread at a time


class Recipe(NamedTuple):
    """Hold all that a traced function is written from: a part of a trace, and names."""

    block: Block
    names: tuple[str, ...]  # of the arguments
    title: str  # name of the function, and of its place in a traceback
    settle: tuple[str, ...] = ()  # names of the arguments whose tensors may come with any strides
    compile: bool = False  # whether the body is one function compiled by inductor


class TracedFunction:
    """A function made of a part of a trace, whose docstring is its source.

    Its code is written at the first call: a W that is never called costs nothing.

    Attributes:
        results: nodes of what it returns, None for no gradient.
        written: the function itself, None until it is written.
        unread: of a backward, the paths of the parameters on which nothing depends.
    """

    unread: tuple[str, ...] = ()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.results = recipe, recipe.block.results
        self.written: Callable[..., Any] | None = None
        self._native: Callable[..., Any] | Literal[False] | None = False if recipe.compile else None
        self._casts = any("within" in n.meta for n in recipe.block.body)  # traced with autocast on
        for node in () if recipe.compile else recipe.block.body:
            if not is_element(node):
                find_call(node)  # now, since transforms and modes may be active at the first call

    def __call__(self, *arguments: Any) -> Any:
        return self.fastest()(*arguments)

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function itself, a call of which drops each argument after its last use."""
        if self.written is None:
            with _writing:
                self.written = self.written or self._write()
        return self.written

    def fastest(self) -> Callable[..., Any]:
        """Return the function that runs now: the one in C++ if it is there, and nobody looks at operators.

        It has the same bits. It empties each tuple among its arguments to which nothing else refers: give it
        them one by one, not as a tuple that is kept (``f(*arguments)``).
        """
        function = self.function
        if function_modes():  # under which the stage was traced
            return partial(_below_modes, function)
        if self._native is None:
            self._native = native(self.table)
        if self._native and not (operator_modes() or transforming()):
            # Those of other programs are made between their operators, which C++ does not.
            return self._native if self._casts or not any_autocast() else function
        return function

    @cached_property
    def accumulating(self) -> "TracedFunction | None":
        """Return the function that adds its first results up, see `_accumulating`; None without use."""
        recipe = _accumulating(self.recipe, self.additions)
        return None if recipe is None else TracedFunction(recipe)

    @cached_property
    def additions(self) -> tuple[Addition, ...]:
        """Group the first results, as they are added up; none of a compiled program, which is one call."""
        return () if self.recipe.compile else tuple(additions(self.recipe.block))

    @property
    def fresh(self) -> bool:
        """Tell whether nothing else lies in the memory of the first results, as far as that is known."""
        return bool(self.additions) and all(each.fresh for each in self.additions)

    def at(self, numbers: Numbers) -> "TracedFunction":
        """Return the function for these numbers in the place of symbols."""
        return _Numbered(self, numbers)

    @cached_property
    def rows(self) -> tuple[Any, ...] | None:
        """Keep the table for other numbers in the place of its symbols."""
        return self.table()

    def table(self) -> tuple[Any, ...] | None:
        """Return the arguments of the program in C++, None where Python runs it."""
        return table(self.recipe.block, self.recipe.names, self.recipe.title, self.recipe.settle)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]  # written at the first call
        return self.function.__doc__

    def _write(self) -> Callable[..., Any]:
        return write(self.recipe)


def _below_modes(function: Callable[..., Any], *arguments: Any) -> Any:
    with without_function_modes():
        return function(*arguments)


class _Numbered(TracedFunction):
    """A traced function with numbers in the place of symbols: written once for all of them.

    Its recipe is made when it is asked for, which running it does not.
    """

    def __init__(self, symbolic: TracedFunction, numbers: Numbers) -> None:
        self.written, self._symbolic, self._numbers = None, symbolic, numbers
        self.results, self.unread = symbolic.results, symbolic.unread
        self._native, self._casts = None, symbolic._casts

    @cached_property
    def recipe(self) -> Recipe:  # type: ignore[override]
        recipe = self._symbolic.recipe
        return recipe._replace(block=recipe.block.copied(Graph(), self._numbers))

    @cached_property
    def accumulating(self) -> TracedFunction | None:
        other = self._symbolic.accumulating
        return other and other.at(self._numbers)

    @property
    def additions(self) -> tuple[Addition, ...]:
        return self._symbolic.additions

    def table(self) -> tuple[Any, ...] | None:
        return self._numbers(self._symbolic.rows)

    def _write(self) -> Callable[..., Any]:
        symbolic = self._symbolic.function
        scope = symbolic.__globals__
        scope = scope | {k: self._numbers(v) for k, v in scope.items() if isinstance(v, torch.SymInt)}
        made = FunctionType(symbolic.__code__, scope, symbolic.__name__)
        made.__doc__ = symbolic.__doc__
        return made


def write(recipe: Recipe) -> Callable[..., Any]:
    """Write the function of a recipe. Its docstring is its source."""
    block, title, writer = recipe.block, recipe.title, _Writer(recipe.block)
    writer.unpack(recipe.names, recipe.settle)
    if recipe.compile and block.body:
        writer.call_compiled(*compiled(block))
    else:
        writer.calls()
    source = writer.source(title, recipe.names)
    scope = writer.objects | {TRACED_LINES: writer.places, TRACED_MODULES: writer.modules}
    exec(builtins.compile(source, f"<{title}>", "exec"), scope)  # the source was written right here
    function = scope[title.split()[-1]]
    function.__doc__ = source
    return function


class _Writer:
    """Writes one function."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.sizes: dict[Hashable, torch.SymInt] = {}
        self.places: dict[int, str] = {}  # by line of the source, that of the user which it comes from
        self.modules: dict[int, ModulePlace] = {}  # likewise
        # The call that uses a value last.
        self.last: dict[Node, Node | None] = {a: n for n in block.body for a in n.all_input_nodes}
        # What is returned stays.
        self.last.update((n, None) for results in block.results for n in results if n is not None)

    def unpack(self, names: tuple[str, ...], settle: tuple[str, ...]) -> None:
        for name, nodes in zip(names, self.block.arguments, strict=True):
            used = [n for n in nodes if n in self.last]
            if used:
                self.lines.append(f"{', '.join(self.target(n) for n in nodes)}, = {name}")
            self.lines.append(f"del {name}")
            for node in used if name in settle else ():
                lazy = ".resolve_conj()" if node.meta["val"].is_complex() else ""
                self.lines.append(f"{node.name} = {node.name}{lazy}.contiguous()")

    def calls(self) -> None:
        """Write the calls of the body, those of a region (``meta["within"]``) in the block of its context."""
        operators = (n for n in self.block.body if not is_element(n))
        for within, nodes in groupby(operators, key=lambda n: n.meta.get("within")):
            if within is not None:
                self.lines.append(f"with {self.object(within, 'region')}():")
            start = len(self.lines)
            for node in nodes:
                self.call(node)
            if within is not None:
                self.lines[start:] = [f"    {line}" for line in self.lines[start:]]

    def target(self, node: Node | None) -> str:
        return node.name if node in self.last else "_"

    def call(self, node: Node) -> None:
        text, targets, end = self.expression(node), [self.target(node)], ""
        if elements := {n.args[1]: n for n in node.users if is_element(n)}:
            targets, end = [self.target(elements.get(i)) for i in range(node.meta["results"])], ","
        self.lines.append(f"{', '.join(targets)}{end} = {text}")
        if place := node.meta.get("place"):
            self.places[len(self.lines) + 1] = place.removeprefix(", called at ")
        if module := node.meta.get("module"):
            self.modules[len(self.lines) + 1] = module
        dead = [n.name for n in node.all_input_nodes if self.last.get(n) is node and n.op != "get_attr"]
        if "_" in targets:
            dead.append("_")
        if dead:
            self.lines.append(f"del {', '.join(dead)}")

    def call_compiled(
        self, function: Callable[..., Any], inputs: tuple[Node, ...], outputs: tuple[Node, ...]
    ) -> None:
        arguments, results = ", ".join(n.name for n in inputs), "".join(f"{n.name}, " for n in outputs)
        within = self.block.body[0].meta.get("within")
        region = "" if within is None else f"with {self.object(within, 'region')}(): "
        self.lines.append(f"{region}{results}= {self.object(function, 'op')}({arguments})")

    def expression(self, node: Node) -> str:
        """Write a call."""
        call, args = find_call(node), arguments(node)
        texts = [self.value(a) for a in args]
        if call.spread:
            texts[-1:] = map(self.value, args[-1])
        texts += [
            f"**{{{k!r}: {self.value(v)}}}" if iskeyword(k) else f"{k}={self.value(v)}"
            for k, v in node.kwargs.items()
        ]
        if call.method:
            return f"{texts[0]}.{call.method}({', '.join(texts[1:])})"
        return f"{self.object(call.function, 'op')}({', '.join(texts)})"

    def value(self, value: Any) -> str:
        """Write an argument."""
        if isinstance(value, Node):
            return self.object(value.meta["constant"], "const") if value.op == "get_attr" else value.name
        if isinstance(value, torch.SymInt):
            return self.object(self.sizes.setdefault(always_equal(value), value), "size")
        if isinstance(value, (list, tuple)):
            return f"({''.join(self.value(v) + ', ' for v in value)})"
        plain = (
            value is None
            or type(value) in (bool, int, str)
            or (type(value) is float and math.isfinite(value))
        )
        return repr(value) if plain else self.object(value, "const")

    def object(self, value: Any, prefix: str) -> str:
        """Return the global name of an operator or a constant."""
        if id(value) not in self.known:
            self.known[id(value)] = name = f"{prefix}{len(self.objects)}"
            self.objects[name] = value
        return self.known[id(value)]

    def source(self, title: str, names: tuple[str, ...]) -> str:
        body = [*self.lines, f"return {', '.join(map(self.value, self.block.results))}"]
        return f"def {title.split()[-1]}({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in body)


def programs(blocks: ProgramBlocks, name: str, compile: bool, unread: tuple[str, ...]) -> FlatProgram:
    """Write the parts of a trace of a stage as functions; ``unread`` is an attribute of the backward."""

    def make(
        block: Block, function: str, names: tuple[str, ...], settle: tuple[str, ...] = ()
    ) -> TracedFunction:
        if any(map(is_post, block.body)):
            block = block._replace(body=posted_early(block.body))
        return TracedFunction(Recipe(block, names, f"{name} {function}", settle, compile))

    backward = make(blocks.backward, "backward", ("residuals", "gy"), ("gy",))
    backward.unread = unread
    return FlatProgram(
        make(blocks.forward, "forward", ("params", "x", "extras"), ("x", "extras")),
        backward,
        make(blocks.backward_input, "backward_input", ("residuals", "gy"), ("gy",)),
        make(blocks.backward_weight, "backward_weight", ("rest",)),
    )


def _accumulating(recipe: Recipe, groups: Sequence[Addition]) -> Recipe | None:
    """Change a function to add its first results up instead of returning them.

    Equivalent to, for a backward::

        def backward_accumulating(residuals, gy, into):
            gparams, gx = backward(residuals, gy)
            sums, microbatch, totals = into
            sums.add(gparams, numbers, microbatch, fresh)
            return gx

    In C++ they are added to ``totals`` instead, where that holds tensors: without Python between operators.
    The gradients are added in parts, each as soon as it is complete, and freed then.

    Returns:
        None where all are added up together, at the end.
    """
    if not groups or (len(groups) == 1 and groups[0].after == len(calls_of(recipe.block))):
        return None
    graph = Graph()
    block = recipe.block.copied(graph)
    gradients, *rest = block.results
    into = sums, microbatch, _ = [graph.placeholder(name) for name in ("sums", "microbatch", "totals")]
    added: dict[int, list[Node]] = {}
    for after, numbers, fresh in groups:
        ready = tuple(gradients[n] for n in numbers)
        addition = graph.create_node("call_method", "add", (sums, ready, numbers, microbatch, fresh))
        addition.meta["call"] = OperatorCall(None, "add")
        added.setdefault(after, []).append(addition)
    body = [*added.get(0, ())]
    for count, node in enumerate(calls_of(block), 1):
        body += [node, *(n for n in node.users if is_element(n)), *added.get(count, ())]
    changed = Block((*block.arguments, tuple(into)), tuple(body), tuple(rest))
    title = f"{recipe.title}_accumulating"
    return recipe._replace(block=changed, names=(*recipe.names, "into"), title=title)
