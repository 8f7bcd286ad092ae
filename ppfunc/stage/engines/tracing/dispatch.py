"""Find what a program calls: for each operator one of torch's own bindings, which are faster than operator
objects; or for a whole part one function that inductor compiles, for the shapes and strides of the trace.

The bindings make a step of stages of width 64 faster by 1.18 to 1.23, at width 256 by nothing
(``tests/benchmarks/stage_time.py``).
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Node, map_arg

from ..._torch import (
    BINDINGS,
    METHODS,
    FakeTensorMode,
    TorchDispatchMode,
    below_autograd,
    binding,
    inductor,
    onednn_enabled,
    schema,
    switch_onednn,
    vector_options,
)
from .cut import Block
from .graph import comparable, is_dense, is_tensor, module_of, named_arguments

# It returns what its backward needs only in grad mode, outside of which programs run.
RECORDING = torch.ops.aten.mkldnn_rnn_layer.default
_FOUND: "dict[Hashable, OperatorCall]" = {}

# Random operators stay those of torch, so that compiled and plain programs draw the same numbers. What calls
# the kernels in C++ is compiled apart from them, with less optimization: g++ takes two thirds of the time.
_OPTIONS = {"fallback_random": True, "cpp_wrapper_build_separate": True}
_NAMESPACES = ("aten", "prims")  # of the operators that inductor's C++ can call, whatever their arguments


class OperatorCall(NamedTuple):
    """Describe how a program calls an operator."""

    function: Callable[..., Any] | None  # of all arguments, if there is no method
    method: str = ""  # of the first argument
    spread: bool = False  # whether the last argument, a list of numbers, is given as that many arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is not None:
            return self.function(*args, **kwargs)
        rest = (*args[1:-1], *args[-1]) if self.spread else args[1:]
        return getattr(args[0], self.method)(*rest, **kwargs)


def find_call(node: Node) -> OperatorCall:
    """Find a binding that calls the operator of ``node`` and nothing else, by default the operator itself.

    An operator object converts its arguments in a slow general way (about 1 us a call); a binding
    has a parser made for it. That a binding does the same is seen, not assumed: it is called once, and
    what it dispatches must be this very call. Calls whose arguments have the same types share the finding.
    """
    if "call" not in node.meta:
        numbers: dict[Node, int] = {}
        kind = (node.target, _kind(node.args, numbers), _kind(tuple(node.kwargs.items()), numbers))
        if kind not in _FOUND:
            _FOUND[kind] = _find(node)
        node.meta["call"] = _FOUND[kind]
    return node.meta["call"]


def _kind(value: Any, numbers: dict[Node, int]) -> Hashable:
    """Describe what the parser of a binding looks at: types, ranks, lengths, which arguments are the same."""
    if isinstance(value, Node):
        same, t = numbers.setdefault(value, len(numbers)), value.meta["val"]
        if not (is_tensor(value) and is_dense(value)):
            return ("other", same, type(t))
        return ("tensor", same, t.dim(), t.dtype, t.device.type, t.is_conj(), t.is_neg())
    if isinstance(value, (list, tuple)):
        return (type(value), *(_kind(v, numbers) for v in value))
    return (str, value) if isinstance(value, str) else (type(value),)


def _find(node: Node) -> OperatorCall:
    if node.target is RECORDING:
        return OperatorCall(torch.enable_grad()(binding(node.target)))
    # A tensor that requires no gradient can stand for a number, if it has no axis.
    tensors = {n: t if (t := n.meta["val"]).dim() else t.detach() for n in node.all_input_nodes}
    args, kwargs = map_arg((node.args, node.kwargs), tensors.__getitem__)
    itself = OperatorCall(binding(node.target))
    wanted = _dispatched(itself, args, kwargs, node)
    return next(
        (call for call in _candidates(node) if wanted and _dispatched(call, args, kwargs, node) == wanted),
        itself,
    )


def _candidates(node: Node) -> Iterator[OperatorCall]:
    name = schema(node.target).name.split("::")[1]
    if hasattr(METHODS, name) and node.args and isinstance(node.args[0], Node):
        if len(node.args) > 1 and isinstance(node.args[-1], (list, tuple)) and not node.kwargs:
            yield OperatorCall(None, name, spread=True)
        yield OperatorCall(None, name)
    for module in BINDINGS:
        if hasattr(module, name):
            yield OperatorCall(getattr(module, name))


def _dispatched(
    call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any], node: Node
) -> list[Any] | None:
    """List the operators that a call comes down to, and run none.

    Returns:
        None if it refuses its arguments.
    """
    with _Observe(node.meta["val"]) as seen, below_autograd():
        try:
            call(*args, **kwargs)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError):
            return None
    return seen.calls


class _Observe(TorchDispatchMode):
    """Notes calls in a form that can be compared, and returns a known result instead of computing one."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default and args[0] is self.result:
            return self.result  # factories detach what they return, where somebody else holds it too
        self.calls.append((func, comparable([*named_arguments(func, args, kwargs or {}).values()])))
        return self.result


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
    whole = {n.target for n in block.body if _is_random(n.target)} & decompositions.keys()
    for op in whole - lowerings.keys():
        # Left to itself, inductor refuses to where CI is set.
        make_fallback(op, warn=False, override_decomp=True)
    ours = {op: f for op, f in decompositions.items() if not _is_random(op)} if whole else None
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
    return compile_fx(module, examples, config_patches=options, decompositions=ours), inputs, outputs


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
