"""Record the operators that a model calls, before they are dispatched: above autograd and autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from ppfunc.stage import StageError
from ppfunc.stage._torch import FakeTensor, OpOverload, TorchDispatchMode, innermost_transform, is_wrapped, schema, storage, version
from ppfunc.stage.abstract import DATA_DEPENDENT
from ppfunc.stage.errors import place_of_call, warn
from ppfunc.stage.purity import NoValuesError
from ppfunc.stage.tracing.operators import ELEMENT
from ppfunc.stage.tree import tree_flatten, tree_unflatten

from ._torch import BackwardCFunction, CheckpointFunction, PreDispatchMode, saved_tensor_hooks, with_values
from .known import known_values
from .operators import by_numbers, replaced, storages, tensors_of, written

aten = torch.ops.aten
MODEL = "the model"
_ENTRY = str(Path(__file__).with_name("trace.py"))
_TRACED = {torch.Tensor, torch.nn.Parameter, FakeTensor}
BY_HAND = "write this part as a stage by hand, see ppfunc.stage.stage_from_module"


class Value(NamedTuple):
    """One tensor at the time when it was made, which later operators may change in place.

    Args:
        shape, stride, dtype: its form, strides in elements.
        storage: identity of its memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Region(NamedTuple):
    """The ambient state in which an operator is called.

    Args:
        grad: whether its gradient is recorded.
        autocast: ``(on, dtype)`` of each kind of device, see `autocast`.
    """

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


KINDS = ("cpu", "cuda")
"""The kinds of devices whose autocast is kept."""


def autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on, and its dtype, of every kind of device."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS)


class Recording(PreDispatchMode):
    """A graph of the operators that this thread calls within it, each with the stage that it belongs to.

    Attributes:
        graph: the operators in order. ``meta`` of a node has ``value`` (a `Value`, or a list of them), ``stage``,
            ``region`` (a `Region`), ``reads`` and ``writes`` (the storages of its arguments, and of those that it writes
            into), ``position`` (its place in the graph) and ``place`` (the line that called it).
        constants: what ``get_attr`` nodes name: tensors that are neither inputs nor made within.
        stage: that of the operators to come.
        operators: how many there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.stage = 0
        self.operators = 0
        self._thread = threading.get_ident()
        # Held weakly: of a new tensor that somebody else holds, torch returns a copy.
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._writers: dict[int, list[Node]] = {}  # by the memory that they write into
        self._alive: list[Any] = []  # so that no identity is used twice
        self._functions: set[int] = set()  # identities of the histories that functions made which are kept
        self._inside = False
        self._warned = False

    @property
    def here(self) -> bool:
        """Whether this thread is recorded, and is not within a function that is kept."""
        return threading.get_ident() == self._thread and not self._inside

    def place(self, tensor: torch.Tensor, name: str) -> Node:
        """Make ``tensor`` an input of the graph."""
        node = self.graph.placeholder(name)
        self._finish(node, tensor, frozenset())
        return node

    def node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor; a new constant for one that is not known."""
        self._require_own_backward(tensor)
        if (known := self._nodes.get(tensor)) is not None:
            return known
        if isinstance(tensor, FakeTensor):
            if getattr(tensor.fake_mode, "over", False):
                raise NoValuesError(tensor).told(MODEL)
            reason = f"it reads a tensor of shape {tuple(tensor.shape)} that no operator seen here has made{calling_place()}"
            raise StageError(MODEL, reason, f"take detach() for .data, torch.func.grad for torch.autograd.grad, or {BY_HAND}")
        if tensor.requires_grad:
            reason = f"it reads a tensor of shape {tuple(tensor.shape)} that requires a gradient and is no parameter{calling_place()}"
            raise StageError(MODEL, reason, "register it as a parameter of the module, or detach it")
        name = f"constant{len(self.constants)}"
        self.constants[name] = tensor
        self._finish(self.graph.create_node("get_attr", name), tensor, frozenset())
        return self._nodes[tensor]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if innermost_transform() is not None or any(map(is_wrapped, tensors_of((args, kwargs)))):
            with _Below(self):  # the operators of a vmap in the model, after batching
                return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator and make its node."""
        if not isinstance(func, OpOverload):
            raise StageError(MODEL, f"it uses {func}, an operator on functions{calling_place()}", BY_HAND)
        if func is aten.copy.default:  # of functional traces: it has no derivative
            return self.call(aten.expand.default, (self.call(aten.to.dtype, (args[1], args[0].dtype), {}), list(args[0].shape)), {})
        given = tensors_of((args, kwargs))
        if func.namespace == "prim" or (func is aten.detach_.default and not args[0].requires_grad):
            return func(*args, **kwargs)
        if not _TRACED.issuperset(map(type, given)):
            kinds = ", ".join(sorted({type(t).__name__ for t in given} - {t.__name__ for t in _TRACED}))
            raise StageError(MODEL, f"it computes with tensors of the types {kinds}{calling_place()}, which are not traced", BY_HAND)
        nodes = [self.node(t) for t in given]
        if func is aten.lift_fresh.default:
            nodes[0].meta["known"] = True  # numbers in the code of the model
        writes = storages(written(func, args, kwargs))
        try:
            made = func(*args, **kwargs)
        except DATA_DEPENDENT:
            if (made := self._on_known(func, args, kwargs)) is None:
                raise
            return made
        if not tensors_of(made) and not schema(func).is_mutable:
            return made  # a number, known without values
        target, args, kwargs = by_numbers(func, args, kwargs, made)
        node = self.graph.create_node("call_function", target, self._with_nodes(args), self._with_nodes(kwargs))
        self._finish(node, made, storages(tensors_of((args, kwargs))), writes)
        return made

    def call_function(self, apply: Callable[..., Any], cls: type[Function], args: Any, kwargs: Any) -> Any:
        """Call an ``autograd.Function`` as one operator."""
        if cls is CheckpointFunction:
            self._warn_of_checkpoint()
            return args[0](*args[2:])
        leaves, treedef = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = tuple(leaves[i] for i in places)
        for i in places:
            leaves[i] = None

        def call(*tensors: torch.Tensor) -> Any:
            filled = list(leaves)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            args, kwargs = tree_unflatten(treedef, filled)
            return apply(*args, **kwargs)

        call.__name__ = cls.__name__
        return self.call_whole(call, given)

    def call_whole(self, call: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> Any:
        """Call a function as one operator."""
        nodes = tuple(map(self.node, given))
        versions = [version(t) for t in given]
        self._inside = True
        try:
            made = call(*given)
        finally:
            self._inside = False
        results = tensors_of(made)
        if versions != [version(t) for t in given] or any(a is b for a in given for b in results):
            reason = f"its autograd.Function {call.__name__} writes into its arguments, or returns one{calling_place()}"
            raise StageError(MODEL, reason, "return new tensors, or a clone")
        self._functions.update(id(t.grad_fn) for t in results)
        self._alive += [t.grad_fn for t in results]
        node = self.graph.create_node("call_function", call, nodes)
        node.meta["opaque"] = True
        self._finish(node, made, storages(list(given)))
        return made

    def _finish(self, node: Node, made: Any, reads: frozenset[int], writes: frozenset[int] = frozenset()) -> None:
        """Fill in what is known of a node, and remember its results."""
        node.meta |= {"stage": self.stage, "region": Region(torch.is_grad_enabled(), autocast()), "reads": reads, "writes": writes}
        node.meta["position"] = len(self.graph.nodes)
        for memory in writes:
            self._writers.setdefault(memory, []).append(node)
        if node.op == "call_function":
            self.operators += 1
            node.meta["place"] = calling_place()
            if saved_tensor_hooks() is not None:
                self._warn_of_checkpoint()
        if isinstance(made, torch.Tensor):
            node.meta["value"] = Value(tuple(made.shape), made.stride(), made.dtype, storage(made))
            self._nodes[made] = node
            self._alive += [] if made.layout is not torch.strided else [made.untyped_storage()]
            return
        for index, part in enumerate(made) if isinstance(made, list | tuple) else ():
            if isinstance(part, torch.Tensor):
                element = self.graph.create_node("call_function", ELEMENT, (node, index))
                self._finish(element, part, storages([part]))

    def _on_known(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """The result of an operator that needs values, of such as are known; None where they are not. Its tensors are constants."""
        given = tensors_of((args, kwargs))
        nodes = [self.node(t) for t in given]
        values = known_values(nodes, self._writers, self.constants, autocast())
        if values is None:
            return None
        by = {id(t): values[node] for t, node in zip(given, nodes, strict=True)}
        with with_values(), torch.no_grad():
            made = func(*replaced(args, by), **replaced(kwargs, by))
        for tensor in tensors_of(made):
            self.node(tensor).meta["known"] = True
        return made

    def _require_own_backward(self, tensor: torch.Tensor) -> None:
        history = tensor.grad_fn
        if isinstance(history, BackwardCFunction) and id(history) not in self._functions:
            name = type(history).__name__.removesuffix("Backward")
            reason = (
                f"its autograd.Function {name} is called by a reference taken earlier{calling_place()}, so that its backward is not seen"
            )
            raise StageError(MODEL, reason, f"write {name}.apply where it is called")

    def _warn_of_checkpoint(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "the model uses torch.utils.checkpoint, or other hooks on saved tensors, which are not kept by the stages of a split: "
                "gradients are the same, memory is not saved; use engine=ppfunc.stage.graph(remat=...), or none of them"
            )

    def _with_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._with_nodes, value))
        return {k: self._with_nodes(v) for k, v in value.items()} if isinstance(value, dict) else value


class _Below(TorchDispatchMode):
    """Records what the operators of a torch.func transform inside the model come down to."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recording.call(func, args, kwargs or {})


def calling_place() -> str:
    """The innermost line of the model, as ``", called at file:line"``, that is of no library; empty if there is none."""
    return place_of_call(_ENTRY)
