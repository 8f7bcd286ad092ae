"""Record the operators that a model calls, before they are dispatched: above autograd and autocast.

Values that depend on numbers in the code of the model alone are computed where the model asks for them.

Some functions of torch and Python are changed meanwhile. They are the process's, so `process_lock` is held,
and other threads call the functions as they were.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper, partial, reduce, wraps
from operator import or_
from pathlib import Path
from types import ClassMethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.distributions import Distribution
from torch.fx import Node, map_arg
from torch.overrides import TorchFunctionMode

from ppfunc.stage import StageError
from ppfunc.stage._torch import (
    ASSIGNS_DATA,
    SETS_REQUIRES_GRAD,
    BackwardCFunction,
    CheckpointFunction,
    FakeTensor,
    OpOverload,
    PreDispatchMode,
    TorchDispatchMode,
    check_values,
    is_dtensor,
    is_wrapped,
    saved_tensor_hooks,
    schema,
    storage,
    transforming,
    version,
    with_values,
)
from ppfunc.stage.abstract.evaluation import DATA_DEPENDENT
from ppfunc.stage.device import autocast, kinds
from ppfunc.stage.engines.tracing.graph import (
    TRACED,
    GraphRecorder,
    ancestors,
    is_element,
    named_arguments,
)
from ppfunc.stage.errors import CALLS_MODULE, warn
from ppfunc.stage.operators import draws, flops_of, tensors_in, written
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import filled, tree_flatten

from .call import MODEL

aten = torch.ops.aten
BY_HAND = "write this part as a stage by hand, see ppfunc.stage.stage_from_module"


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
        autocast: the kinds of devices that cast, with their dtypes; see :func:`ppfunc.stage.device.autocast`.
    """

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]


@contextmanager
def within(region: Region, ambient: Region) -> Iterator[None]:
    """Call operators in a region. Where it equals the ambient one, nothing is switched."""
    wanted, around = dict(region.autocast), dict(ambient.autocast)
    with ExitStack() as stack:
        if region.grad != ambient.grad:
            stack.enter_context(torch.set_grad_enabled(region.grad))
        for kind in kinds():
            if (dtype := wanted.get(kind)) != around.get(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
        yield


class Recording(GraphRecorder, PreDispatchMode):
    """Records the operators that this thread calls.

    Args:
        mapped: whether they are to run within a ``vmap``.
        forwards: the code of the methods ``forward`` of the modules, which some models call past all hooks.

    Attributes:
        graph: ``meta`` of a node has ``value`` (a `Value`, of one tensor), ``grad`` (whether gradients flow
            through it), ``region`` (a `Region`), ``reads``
            and ``writes`` (the storages of its arguments, and of those that it writes into), ``place`` (the
            line that called it), ``flops`` (the elements that it makes, multiplications and additions), and
            ``opaque`` for a function with a backward of its own. ``stage`` is 0 until the trace is cut.
        operators: the number of operators.
        starts: the number of operators before the first in each module, by identity of the module.
        asked: the inputs on whose values the form of a result depends, where it could not be traced.
        cuts: the numbers of operators before the calls of ``torch.distributed.pipelining.pipe_split()``.
    """

    def __init__(self, mapped: bool, forwards: Iterable[Any] = ()) -> None:
        super().__init__(MODEL, str(Path(__file__).with_name("trace.py")), BY_HAND)
        self.mapped = mapped
        self.operators = 0
        self.starts: dict[int, int] = {}
        self.cuts: list[int] = []
        self._calls = {CALLS_MODULE, *forwards}
        self._counter = _Counter()
        self.asked: set[Node] = set()
        self._thread = threading.get_ident()
        self._writers: dict[int, list[Node]] = {}  # by the memory that they write into
        self._alive: list[Any] = []  # so that no identity is used twice
        self._functions: set[int] = set()  # identities of the histories that kept functions made
        self._inside = False
        self._warned = False
        self.carried: frozenset[int] = frozenset()  # memory of the cache that the model gets
        self._old: set[Node] = set()  # what was in that memory before it was overwritten

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
                f"its autograd.Function {name} is called by a reference taken earlier{self.called_at()}, so"
                " that its backward is not seen",
                f"write {name}.apply where it is called",
            )
        return super().node(tensor)

    def origins(self, asked: Sequence[Node]) -> Iterator[Node]:
        """Yield the nodes that tensors depend on, with these, and with all that writes into their memory."""
        seen, writers = set[Node](), self._writers
        todo = [*asked, *(w for node in asked for w in writers.get(node.meta["value"].storage, ()))]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                yield node
                todo += node.all_input_nodes
                todo += [w for memory in node.meta["reads"] for w in writers.get(memory, ()) if w < node]

    def known_values(self, asked: Sequence[Node]) -> dict[Node, Any] | None:
        """Replay the operators that values depend on: a mask of ``torch.ones`` is known, an input is not.

        Operators called under another autocast are not replayed.

        Args:
            asked: the nodes of tensors, which count with all that has been written into their memory.

        Returns:
            The values of ``asked``, and of the nodes that they depend on; None if one of these is an input, a
            parameter, a buffer, or random.
        """
        needed, ambient = set[Node](), autocast()
        for node in self.origins(asked):
            if not (node.meta.get("known") if node.op == "get_attr" else _replayable(node, ambient)):
                return None
            needed.add(node)
        values: dict[Node, Any] = {}
        with with_values(), torch.no_grad():
            for node in sorted(needed):
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                target: Any = node.target
                constant = node.op == "get_attr"
                values[node] = node.meta["constant"].clone() if constant else target(*args, **kwargs)
        return values

    def reach(self, marks: Mapping[Node, int], goes: Callable[[Node], bool]) -> Callable[[Node], int]:
        """Follow the marks of nodes, bits, from operator to operator.

        Args:
            marks: the marks of some nodes.
            goes: whether marks of what an operator reads are marks of its result.

        Returns:
            A function of a node: the marks of its value, with all that is written into its memory.
        """
        found, written = dict[Node, int](), dict[int | None, int]()

        def marked(node: Node) -> int:
            value = node.meta.get("value")
            return found[node] | (written.get(value.storage, 0) if value else 0)

        for node in self.graph.nodes:
            read = map(marked, node.all_input_nodes if goes(node) else ())
            found[node] = reduce(or_, read, marks.get(node, 0))
            for memory in node.meta["writes"]:
                written[memory] = written.get(memory, 0) | found[node]
        return marked

    def numbers(self, tensor: torch.Tensor) -> Any:
        """List the integers of a tensor that the model has made of numbers in its code.

        Returns:
            The integers; None for other tensors.
        """
        node = self.node(tensor)
        values = None if differentiable(tensor.dtype) else self.known_values([node])
        with with_values():
            return values and [int(number) for number in values[node].flatten()]

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
                f"it computes with tensors of the types {', '.join(sorted(others))}{self.called_at()}, which"
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
        if not self._old.isdisjoint(nodes):
            raise StageError(
                MODEL,
                f"it reads a view of its cache after it has written into the cache{self.called_at()}",
                f"read it before, or {BY_HAND}",
            )
        if func is aten.copy_.default and self._overwrites_carry(*args[:2]):
            # The old value may be needed for gradients.
            made = (n for n in self.graph.nodes if "value" in n.meta)
            self._old |= {n for n in made if n.meta["value"].storage in writes}
            func, args, kwargs, writes = aten.clone.default, args[1:2], {}, frozenset()
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
                f" one{self.called_at()}",
                "return new tensors, or a clone",
            )
        node = self.add(call, nodes, {}, result, f"v_{cls.__name__}")
        node.meta["opaque"] = True
        self._note(node, storages(tensors))
        return result

    def _whole(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that is recorded as one operator, and keep the histories of its results."""
        inside, self._inside = self._inside, True
        try:
            with self._counter:
                result = call(*args, **kwargs)
        finally:
            self._inside = inside
        for tensor in tensors_in((result, args, kwargs)):
            if isinstance(tensor.grad_fn, BackwardCFunction):
                self._functions.add(id(tensor.grad_fn))
                self._alive.append(tensor.grad_fn)
        return result

    def _overwrites_carry(self, to: torch.Tensor, new: torch.Tensor) -> bool:
        """Tell whether a copy gives a whole tensor of the cache a new value of its own form."""
        return (
            storage(to) in self.carried
            and to.is_contiguous()
            and to.untyped_storage().nbytes() == to.numel() * to.itemsize
            and (to.shape, to.dtype, to.device) == (new.shape, new.dtype, new.device)
        )

    def _require_constant(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) and not getattr(tensor.fake_mode, "over", False):
            raise StageError(
                MODEL,
                f"it reads a tensor of shape {tuple(tensor.shape)} that no operator seen here has"
                f" made{self.called_at()}",
                f"take detach() for .data, torch.func.grad for torch.autograd.grad, or {BY_HAND}",
            )
        super()._require_constant(tensor)
        if tensor.requires_grad:
            raise StageError(
                MODEL,
                f"it reads a tensor of shape {tuple(tensor.shape)} that requires a gradient and is no"
                f" parameter{self.called_at()}",
                "register it as a parameter of the module, or detach it",
            )

    def _know(self, node: Node, tensor: torch.Tensor) -> Node:
        node.meta["value"] = Value(tuple(tensor.shape), tensor.stride(), tensor.dtype, storage(tensor))
        node.meta |= {"laid": is_dtensor(tensor), "grad": tensor.requires_grad}
        self._alive += [tensor.untyped_storage()] if tensor.layout is torch.strided else []
        if is_element(node):
            self._note(node, storages([tensor]))
        elif node.op != "call_function":
            self._note(node)
        return super()._know(node, tensor)

    def _note(
        self, node: Node, reads: frozenset[int] = frozenset(), writes: frozenset[int] = frozenset()
    ) -> None:
        """Note the memory that a node reads and writes, and the place of its call."""
        node.meta |= {"stage": 0, "region": Region(torch.is_grad_enabled(), autocast())}
        node.meta |= {"reads": reads, "writes": writes}
        for memory in writes:
            self._writers.setdefault(memory, []).append(node)
        if node.op == "call_function":
            self._note_modules()
            self.operators += 1
            made = torch.Size(node.meta["value"].shape).numel() if "value" in node.meta else 0
            node.meta |= self.origin() | {"flops": made + self._counter.taken()}
            if saved_tensor_hooks() is not None:
                self._warn_of_checkpoint()

    def _note_modules(self) -> None:
        """Note the modules whose calls run now, before their first operator."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename != self.entry:
            if frame.f_code in self._calls:
                self.starts.setdefault(id(frame.f_locals.get("self")), self.operators)
            frame = frame.f_back

    def _on_known(self, func: Any, args: Any, kwargs: Any, nodes: list[Node]) -> Any:
        """Call an operator that needs values on known values. The tensors that it returns are constants.

        Returns:
            The result; None where values are not known.
        """
        values = self.known_values(nodes)
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


class _Counter(TorchDispatchMode):
    """Counts multiplications and additions, of a DTensor the counts of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count += flops_of(getattr(func, "overloadpacket", func), args, kwargs or {}, result)
        return result

    def taken(self) -> int:
        """Return the count, and begin again."""
        count, self._count = self._count, 0
        return count


class _Below(TorchDispatchMode):
    """Records the operators that a torch.func transform inside the model comes down to."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recording.call(func, args, kwargs or {})


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """List the memories of tensors. Sparse ones have none."""
    return frozenset(at for at in map(storage, tensors) if at is not None)


def _replayable(node: Node, autocast: Any) -> bool:
    if node.op != "call_function" or node.meta["region"].autocast != autocast:
        return False
    return is_element(node) or (
        isinstance(node.target, OpOverload) and not draws(node.target, node.args, node.kwargs)
    )


# Operators that look at the form of an argument alone, with those that make the same of numbers.
_FACTORIES = {
    aten.empty_like.default: aten.empty.memory_format,
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def by_numbers(func: OpOverload, args: Any, kwargs: Any, result: Any) -> tuple[OpOverload, Any, Any]:
    """Replace a call that reads a tensor for its form alone: a mask of ``ones_like(h)`` needs no ``h``.

    Returns:
        The operator and its arguments, unchanged if values are read.
    """
    if func in _FACTORIES and result.layout is torch.strided and result.is_contiguous():
        arguments = named_arguments(func, args, kwargs)
        value = [arguments["fill_value"]] if "fill_value" in arguments else []
        return (
            _FACTORIES[func],
            (list(result.shape), *value),
            {"dtype": result.dtype, "device": result.device},
        )
    if func in (aten.expand_as.default, aten.view_as.default):
        changed = aten.expand.default if func is aten.expand_as.default else aten.view.default
        return changed, (args[0], list(result.shape)), {}
    if func is aten.type_as.default or (func is aten.to.other and len(args) == 2 and not kwargs):
        return aten.to.dtype, (args[0], result.dtype), {}
    return func, args, kwargs


# -- functions of torch and Python that are changed meanwhile

# Functions that no operator records: owner, name, effect on the model, replacement.
_UNSEEN = (
    (torch, "manual_seed", "seeds the default random generator", "leave that out"),
    (torch.random, "manual_seed", "seeds the default random generator", "leave that out"),
    *(
        (
            torch.Tensor,
            name,
            f"puts a hook onto the gradient of a tensor ({name})",
            "write an autograd.Function",
        )
        for name in ("register_hook", "register_post_accumulate_grad_hook")
    ),
)


@contextmanager
def changed(recording: Recording) -> Iterator[None]:
    """Change the functions of torch that a recorded model calls.

    * Each ``autograd.Function`` becomes one operator, with its own backward.
    * What no operator records is refused: seeds, hooks onto a gradient.
    * Checks of values are skipped: ``torch._check``, and of distributions' arguments.
    * Functions that ``torch.compile`` has made are called as the Python that they were made of.
    """

    def apply(original: Callable[..., Any], cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        bound = partial(original, cls)
        return recording.call_function(bound, cls, args, kwargs) if recording.here else bound(*args, **kwargs)

    def refuse(what: str, mend: str, *_: Any, **__: Any) -> Any:
        raise StageError(
            MODEL, f"it {what}{recording.called_at()}, which is not traced", f"{mend}, or {BY_HAND}"
        )

    with _AssignedAttributes(recording.called_at), ExitStack() as stack:
        stack.enter_context(_replaced(Function, "apply", apply))
        stack.enter_context(_replaced(torch, check_values.__name__, lambda *_, **__: None))
        for owner, name, what, mend in _UNSEEN:
            stack.enter_context(_replaced(owner, name, partial(refuse, what, mend)))
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and its import is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _AssignedAttributes(TorchFunctionMode):
    """Sees assignments to attributes of tensors, which are no operators.

    ``requires_grad`` may be asked of a value that has a gradient, such as a view of an input, where torch
    takes leaves alone; ``data`` is refused.
    """

    def __init__(self, called_at: Callable[[], str]) -> None:
        super().__init__()
        self._called_at = called_at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == ASSIGNS_DATA:
            raise StageError(
                MODEL,
                f"it assigns to the data of a tensor{self._called_at()}, which is not traced",
                f"make a new tensor, or {BY_HAND}",
            )
        known = func == SETS_REQUIRES_GRAD and args[1] and args[0].grad_fn is not None
        return None if known else func(*args, **(kwargs or {}))


@contextmanager
def caches_emptied(values: Iterable[Any]) -> Iterator[None]:
    """Empty the caches (``functools.lru_cache``) among these that are filled: with tensors without values."""
    misses = {cache: cache.cache_info().misses for cache in values if isinstance(cache, _lru_cache_wrapper)}
    try:
        yield
    finally:
        for cache, before in misses.items():
            if cache.cache_info().misses != before:
                cache.cache_clear()


@contextmanager
def _replaced(owner: Any, name: str, replace: Callable[..., Any]) -> Iterator[None]:
    """Have this thread call ``replace(original, *args)`` for a function of a class or a module."""
    this, held = threading.get_ident(), vars(owner)[name]
    of_class = isinstance(held, classmethod | ClassMethodDescriptorType)  # of Python, or of C

    def original(*args: Any, **kwargs: Any) -> Any:
        return held.__get__(None, args[0])(*args[1:], **kwargs) if of_class else held(*args, **kwargs)

    @wraps(getattr(owner, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        return (partial(replace, original) if threading.get_ident() == this else original)(*args, **kwargs)

    setattr(owner, name, classmethod(call) if of_class else call)
    try:
        yield
    finally:
        setattr(owner, name, held)
