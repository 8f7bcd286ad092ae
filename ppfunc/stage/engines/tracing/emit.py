"""Write parts of a trace as Python functions, for engines and splits: straight-line code on flat tuples.

A whole part may be one function that inductor compiles, for the shapes and strides of the trace. Two programs
may be joined to one, so that operators of one run between a collective of the other and the wait for it.
"""

import builtins
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import groupby
from keyword import iskeyword
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, Node

from ppfunc import _logs

from ..._torch import (
    FakeTensorMode,
    any_autocast,
    binding,
    function_modes,
    inductor,
    onednn_enabled,
    operator_modes,
    switch_onednn,
    transforming,
    vector_options,
    without_function_modes,
)
from ...errors import TRACED_LINES, TRACED_MODULES, ModulePlace
from ...operators import effects_of
from ...program import FlatProgram, Numbers
from .cut import Addition, Block, ProgramBlocks, additions, calls_of, posted_early, waited_late
from .graph import (
    always_equal,
    arguments,
    is_element,
    is_post,
    is_tensor,
    module_of,
)
from .joint import Nodes
from .native import RECORDING, native, table

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
        unread: the paths of the parameters on which nothing depends, of a backward.
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
        """Return the function that adds its first results up, if `_accumulating` has a use for it."""
        recipe = _accumulating(self.recipe, self.additions)
        return None if recipe is None else TracedFunction(recipe)

    @cached_property
    def additions(self) -> tuple[Addition, ...]:
        """Group the first results, as they are added up. A compiled program, one call, has no groups."""
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
        """Return the arguments of the program in C++, unless Python runs it."""
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
        """Write the calls of the body, calls of a region (``meta["within"]``) in the block of its context."""
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
        call = find_call(node)
        texts = [self.value(a) for a in arguments(node)]
        texts += [
            f"**{{{k!r}: {self.value(v)}}}" if iskeyword(k) else f"{k}={self.value(v)}"
            for k, v in node.kwargs.items()
        ]
        if call.method:
            return f"{texts[0]}.{call.method}({', '.join(texts[1:])})"
        name = str(node.target).removesuffix(".default")  # of an operator, aten.mul.Tensor
        name = name.replace(".", "_") if "." in name else ""  # results of operators are named mul, mul_1
        return f"{self.object(call.function, 'op', name)}({', '.join(texts)})"

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

    def object(self, value: Any, prefix: str, name: str = "") -> str:
        """Return the global name of an operator or a constant: ``name``, if it is one that is free."""
        if id(value) not in self.known:
            if not name.isidentifier() or name in self.objects:
                name = f"{prefix}{len(self.objects)}"
            self.known[id(value)], self.objects[name] = name, value
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


# -- what a program calls

# Random operators stay those of torch, so that compiled and plain programs draw the same numbers. What calls
# the kernels in C++ is compiled apart from them, with less optimization: g++ takes two thirds of the time.
_OPTIONS = {"fallback_random": True, "cpp_wrapper_build_separate": True}
_NAMESPACES = ("aten", "prims")  # of the operators that inductor's C++ can call, whatever their arguments


class OperatorCall(NamedTuple):
    """Describe how a program calls an operator."""

    function: Callable[..., Any] | None  # of all arguments, if there is no method
    method: str = ""  # of the first argument


def find_call(node: Node) -> OperatorCall:
    """Return the call of a node, by default of its operator, without the checks of ``OpOverload``."""
    if "call" not in node.meta:
        itself = binding(node.target)
        node.meta["call"] = OperatorCall(torch.enable_grad()(itself) if node.target is RECORDING else itself)
    return node.meta["call"]


# -- parts that inductor compiles


@contextmanager
def without_onednn() -> Iterator[None]:
    """Trace recurrent layers as plain operators.

    Inductor does not know how much those of oneDNN keep for their backward. The context manager of torch sets
    TF32 beside it, and so warns where torch was built without it; torch's tests forbid to set its attribute.
    """
    before = onednn_enabled()
    switch_onednn(False)
    try:
        yield
    finally:
        switch_onednn(before)


def compiled(
    block: Block,
) -> tuple[Callable[..., Any], tuple[torch.fx.Node, ...], tuple[torch.fx.Node, ...]]:
    """Compile the body of a part as one function.

    Returns:
        The function, the nodes of its arguments, and those of its results.

    The shapes and strides of a trace are fixed. A call does not look for a program by them; inductor asserts
    them. C++ calls torch's operators on the CPU. Equal programs are compiled once per machine, by what
    inductor keeps on disk. Those with random operators that it would decompose are compiled once per process.
    """
    body = set(block.body)
    inputs = tuple(
        dict.fromkeys(
            a for n in block.body for a in n.all_input_nodes if a not in body and a.op != "get_attr"
        )
    )
    outputs = tuple(dict.fromkeys(n for results in block.results for n in results if n in body))
    assert all(map(is_tensor, outputs))
    compile_fx, decompositions, lowerings, make_fallback, ShapeEnv = inductor()
    # Random operators stay whole, too.
    whole = {n.target for n in block.body if effects_of(n.target).seeded} & decompositions.keys()
    for op in whole - lowerings.keys():
        # Left to itself, inductor refuses to where CI is set.
        make_fallback(op, warn=False, override_decomp=True)
    ours = {op: f for op, f in decompositions.items() if not effects_of(op).seeded} if whole else None
    # Without an environment for symbolic shapes, which stays empty, inductor keeps nothing on disk. It finds
    # what it keeps by a key that leaves decompositions out, so it may only where they are its own.
    with FakeTensorMode(shape_env=None if whole else ShapeEnv(), static_shapes=True):
        examples = [  # in one mode for all: the arguments may come from two traces
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for v in (n.meta["val"] for n in inputs)
        ]
    graph = torch.fx.Graph()
    graph.output(Block((inputs,), block.body, (outputs,)).copied(graph).results[0])
    module = module_of(graph)
    for node in graph.nodes:
        node.meta.clear()  # it is of the mode of its trace
    plain = all(getattr(n.target, "namespace", "aten") in _NAMESPACES for n in block.body)
    here = plain and all(v.device.type == "cpu" for v in examples)
    options = _OPTIONS | vector_options() | {"cpp_wrapper": here}
    with _logs.timed(_logs.room("tracing").info, "inductor compiled %d operators", len(block.body)):
        program = compile_fx(module, examples, config_patches=options, decompositions=ours)
    return program, inputs, outputs


# -- two programs as one


def interleave(first: Recipe, second: Recipe) -> Recipe:
    """Join two functions that share no name: one that takes the arguments of both and returns both results.

    Equivalent to ``lambda *a: (*first(*a[:n]), *second(*a[n:]))``, the operators of each in their order:
    those of one between a collective of the other and the wait for it, without collectives in turn.
    """
    both = Graph()
    one, two = first.block.copied(both), second.block.copied(both)
    body = waited_late(_in_turn(one.body, two.body))
    block = Block(one.arguments + two.arguments, tuple(body), one.results + two.results)
    return Recipe(
        block,
        first.names + second.names,
        f"{first.title} and {second.title} together",
        first.settle + second.settle,
        first.compile or second.compile,
    )


def _in_turn(one: Nodes, two: Nodes) -> list[Node]:
    """Merge both bodies, which communicate in turn; the second begins, as a backward has less to do before::

        one:        a  post         b  post         c
        two:  post           d  post         e

    The order of the collectives follows from their numbers alone: ranks whose stages differ in other
    operators begin them in the same order.
    """
    counts = [sum(map(is_post, body)) for body in (one, two)]
    turns = sorted(((k + 0.5) / n, -which) for which, n in enumerate(counts) for k in range(n))
    owners = [-which for _, which in turns]
    keyed = [*_keyed(one, 0, owners), *_keyed(two, 1, owners)]
    return [node for _, node in sorted(keyed, key=lambda entry: entry[0])]


def _keyed(body: Nodes, which: int, owners: list[int]) -> Iterator[tuple[tuple[float, ...], Node]]:
    """Yield the calls of a body with their places, given whose each collective of the merged program is.

    A place is a tuple to sort by: the number of a collective; 0 for that collective, 1 or 2 for calls behind
    it; how far the call is between two collectives of its body, from 0 to 1; and its body. Calls between two
    collectives are spread evenly behind those of the other body in between, or stay behind the first if there
    are none.
    """
    start, ends = 0, [n for n, node in enumerate(body) if is_post(node)]
    mine = [turn for turn, owner in enumerate(owners) if owner == which]
    for last, turn, end in zip((-1, *mine), (*mine, len(owners)), (*ends, len(body)), strict=True):
        gaps, size = range(last + 1, turn) or [last], end - start
        for n, node in enumerate(body[start:end]):
            gap = gaps[n * len(gaps) // size]
            yield (gap, 2 if gap == last else 1, (n + 0.5) / size, which), node
        if end < len(body):
            yield (turn, 0), body[end]
        start = end + 1
