"""Record the operators that a model calls, before they are dispatched: above autograd and autocast."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.fx import Node, map_arg

from ppfunc.stage import StageError
from ppfunc.stage._torch import (
    BackwardCFunction,
    FakeTensor,
    TorchDispatchMode,
    is_dtensor,
    is_wrapped,
    schema,
    storage,
    transforming,
    version,
)
from ppfunc.stage.abstract.evaluation import DATA_DEPENDENT
from ppfunc.stage.device import autocast, kinds
from ppfunc.stage.engines.tracing.graph import TRACED, GraphRecorder, ancestors, is_element
from ppfunc.stage.errors import place_of_call, warn
from ppfunc.stage.operators import tensors_in, written
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import filled, tree_flatten

from ._torch import CheckpointFunction, PreDispatchMode, saved_tensor_hooks, with_values
from .known import by_numbers, known_values

aten = torch.ops.aten
MODEL = "the model"
BY_HAND = "write this part as a stage by hand, see ppfunc.stage.stage_from_module"
_ENTRY = str(Path(__file__).with_name("trace.py"))


class Value(NamedTuple):
    """Describe a tensor at the time when it was made. Later operators may change it in place.

    Args:
        shape, stride, dtype: strides in elements.
        storage: identity of its memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int | None

    @property
    def nbytes(self) -> int:
        """Count the bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Region(NamedTuple):
    """Describe the ambient state in which an operator is called.

    Args:
        grad: whether its gradient is recorded.
        autocast: which is on, see :func:`ppfunc.stage.device.autocast`.
    """

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


@contextmanager
def within(region: Region, ambient: Region | None = None) -> Iterator[None]:
    """Call operators in a region. Where it equals the ambient one, nothing is switched."""
    with ExitStack() as stack:
        if ambient is None or region.grad != ambient.grad:
            stack.enter_context(torch.set_grad_enabled(region.grad))
        wanted, around = dict(region.autocast), dict(ambient.autocast) if ambient is not None else {}
        for kind in kinds():
            dtype = wanted.get(kind)
            if ambient is None or dtype != around.get(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


class Recording(GraphRecorder, PreDispatchMode):
    """Records the operators that this thread calls, each with the stage that it belongs to.

    Args:
        mapped: whether they are to run within a ``vmap``.

    Attributes:
        graph: ``meta`` of a node has ``value`` (a `Value`, of one tensor), ``stage``, ``region`` (a
            `Region`), ``reads`` and ``writes`` (the storages of its arguments, and of those that it writes
            into), ``place`` (the line that called it), and ``opaque`` for a function with a backward of its
            own.
        stage: the stage of the operators to come.
        operators: how many there are.
        asked: the inputs on whose values the form of a result depends, where it could not be traced.
        cuts: how many there were at each call of ``torch.distributed.pipelining.pipe_split()``.
    """

    def __init__(self, mapped: bool) -> None:
        super().__init__(MODEL, _ENTRY, BY_HAND)
        self.mapped = mapped
        self.stage = 0
        self.operators = 0
        self.cuts: list[int] = []
        self.asked: set[Node] = set()
        self._thread = threading.get_ident()
        self._writers: dict[int, list[Node]] = {}  # by the memory that they write into
        self._alive: list[Any] = []  # so that no identity is used twice
        self._functions: set[int] = set()  # identities of the histories that kept functions made
        self._inside = False
        self._warned = False

    @property
    def here(self) -> bool:
        """Tell whether this thread is recorded now, outside of functions with a backward of their own."""
        return threading.get_ident() == self._thread and not self._inside

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor: a new constant for an unknown one."""
        history = tensor.grad_fn
        if isinstance(history, BackwardCFunction) and id(history) not in self._functions:
            name = type(history).__name__.removesuffix("Backward")
            raise StageError(
                MODEL,
                f"its autograd.Function {name} is called by a reference taken earlier{calling_place()}, so"
                " that its backward is not seen",
                f"write {name}.apply where it is called",
            )
        return super().node(tensor)

    @property
    def region(self) -> Region:
        """Return the ambient state of now."""
        return Region(torch.is_grad_enabled(), autocast())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if transforming() or any(map(is_wrapped, tensors_in((args, kwargs)))):
            with _Below(self):  # the operators of a vmap in the model, after batching
                return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator and make its node."""
        self.require_operator(func)
        if func.namespace == "pippy":
            return self.cuts.append(self.operators)
        if func.namespace == "prim" or (func is aten.detach_.default and not args[0].requires_grad):
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if others := {type(t).__name__ for t in tensors if type(t) not in TRACED and not is_dtensor(t)}:
            raise StageError(
                MODEL,
                f"it computes with tensors of the types {', '.join(sorted(others))}{calling_place()}, which"
                " are not traced",
                BY_HAND,
            )
        nodes = [self.node(t) for t in tensors]
        if func is aten.lift_fresh.default:
            nodes[0].meta["known"] = True  # numbers in the code of the model
            func = aten.lift_fresh_copy.default
        writes = storages(written(func, args, kwargs))
        try:
            result = self._whole(func, args, kwargs)
        except DATA_DEPENDENT:
            if (result := self._on_known(func, args, kwargs, nodes)) is None:
                # What selects are integers and flags, where there are some.
                selecting = [n for n in nodes if not differentiable(n.meta["value"].dtype)]
                self.asked = {n for n in ancestors(selecting or nodes) if n.op == "placeholder"}
                raise
            return result
        if schema(func).returns and next(tensors_in(result), None) is None and not schema(func).is_mutable:
            return result  # a number, known without values
        if not self.mapped:  # a tensor made of numbers is not mapped, and takes no mapped values
            func, args, kwargs = by_numbers(func, args, kwargs, result)
        node = self.add(func, self.with_nodes(args), self.with_nodes(kwargs), result)
        self._note(node, storages(tensors_in((args, kwargs))), writes)
        return result

    def call_function(self, apply: Callable[..., Any], cls: type[Function], args: Any, kwargs: Any) -> Any:
        """Call an ``autograd.Function`` as one operator."""
        if cls is CheckpointFunction:
            self._warn_of_checkpoint()
            return args[0](*args[2:])
        leaves, treedef = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(leaves[i] for i in places)
        if any(map(is_wrapped, tensors)) and cls.__module__.startswith("torch."):
            return cls.forward(*args, **kwargs)  # of a vmap: an index in the mask function of flex attention
        for i in places:
            leaves[i] = None

        def call(*tensors: torch.Tensor) -> Any:
            args, kwargs = treedef.unflatten(filled(leaves, places, tensors))
            return apply(*args, **kwargs)

        call.__name__ = cls.__name__
        nodes = tuple(map(self.node, tensors))
        versions = [version(t) for t in tensors]
        result = self._whole(call, tensors, {})
        results = list(tensors_in(result))
        if versions != [version(t) for t in tensors] or any(a is b for a in tensors for b in results):
            raise StageError(
                MODEL,
                f"its autograd.Function {cls.__name__} writes into its arguments, or returns"
                f" one{calling_place()}",
                "return new tensors, or a clone",
            )
        node = self.add(call, nodes, {}, result, f"v_{cls.__name__}")
        node.meta["opaque"] = True
        self._note(node, storages(tensors))
        return result

    def _whole(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what is recorded as one operator; keep the histories of its results, which belong to it."""
        inside, self._inside = self._inside, True
        try:
            result = call(*args, **kwargs)
        finally:
            self._inside = inside
        for tensor in tensors_in((result, args, kwargs)):
            if isinstance(tensor.grad_fn, BackwardCFunction):
                self._functions.add(id(tensor.grad_fn))
                self._alive.append(tensor.grad_fn)
        return result

    def _require_constant(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) and not getattr(tensor.fake_mode, "over", False):
            raise StageError(
                MODEL,
                f"it reads a tensor of shape {tuple(tensor.shape)} that no operator seen here has"
                f" made{calling_place()}",
                f"take detach() for .data, torch.func.grad for torch.autograd.grad, or {BY_HAND}",
            )
        super()._require_constant(tensor)
        if tensor.requires_grad:
            raise StageError(
                MODEL,
                f"it reads a tensor of shape {tuple(tensor.shape)} that requires a gradient and is no"
                f" parameter{calling_place()}",
                "register it as a parameter of the module, or detach it",
            )

    def _know(self, node: Node, tensor: torch.Tensor) -> Node:
        node.meta["value"] = Value(tuple(tensor.shape), tensor.stride(), tensor.dtype, storage(tensor))
        node.meta["laid"] = is_dtensor(tensor)
        self._alive += [tensor.untyped_storage()] if tensor.layout is torch.strided else []
        if is_element(node):
            self._note(node, storages([tensor]))
        elif node.op != "call_function":
            self._note(node)
        return super()._know(node, tensor)

    def _note(
        self, node: Node, reads: frozenset[int] = frozenset(), writes: frozenset[int] = frozenset()
    ) -> None:
        """Note what a node reads and writes, and where it is called."""
        node.meta |= {"stage": self.stage, "region": self.region, "reads": reads, "writes": writes}
        for memory in writes:
            self._writers.setdefault(memory, []).append(node)
        if node.op == "call_function":
            self.operators += 1
            node.meta |= self.origin()
            if saved_tensor_hooks() is not None:
                self._warn_of_checkpoint()

    def _on_known(self, func: Any, args: Any, kwargs: Any, nodes: list[Node]) -> Any:
        """Call an operator that needs values on known ones. The tensors that it returns are constants.

        Returns:
            Its result; None where values are not known.
        """
        values = known_values(nodes, self._writers, autocast())
        if values is None:
            return None
        args, kwargs = map_arg((self.with_nodes(args), self.with_nodes(kwargs)), values.__getitem__)
        with with_values(), torch.no_grad():
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self.node(tensor).meta["known"] = True
        return result

    def _warn_of_checkpoint(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "the model uses torch.utils.checkpoint, or other hooks on saved tensors, which are not kept"
                " by the stages of a split: gradients are the same, memory is not saved; use"
                " engine=ppfunc.engines.graph(remat=...), or none of them"
            )


class _Below(TorchDispatchMode):
    """Records the operators that a torch.func transform inside the model comes down to."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recording.call(func, args, kwargs or {})


def calling_place() -> str:
    """Return the innermost line of the model, as ``", called at file:line"``; empty if unknown."""
    return place_of_call(_ENTRY)


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """List the memories of tensors. Sparse ones have none."""
    return frozenset(at for at in map(storage, tensors) if at is not None)
