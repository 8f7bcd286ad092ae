"""Refuse what no program can repeat: writes, draws and lost gradients, which operators show, and draws from
the generators of Python and numpy.
"""

import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from .._torch import (
    ASKS_DEVICE,
    OpOverload,
    TorchDispatchMode,
    dtensor_class,
    is_wrapped,
    schema,
    storage,
    without_modes,
)
from ..errors import StageError, place_of_call
from ..process import process_lock
from .communication import fault_of

aten = torch.ops.aten
T = TypeVar("T")

# Namespaces of the operators that communicate.
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


class LogicalDraws(TorchDispatchMode):
    """Draw into tensors in their logical order, not in that of their memory.

    ``torch.func`` and functionalisation draw into new, contiguous tensors, plain autograd into
    whatever strides an activation has: a dropout mask would depend on the engine.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, effects = kwargs or {}, _effects(func)
        if effects.seeded and effects.writes and not args[0].is_contiguous():
            drawn = func(
                torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs
            )
            return args[0].copy_(drawn)
        return func(*args, **kwargs)


class Purity(LogicalDraws):
    """Watches every operator of a call: counts draws, and raises ``StageError`` before an effect happens.

    Args:
        stage: its name in errors.
        arguments: the tensors that it is given, by their paths.
        abstract: whether they have no values. Nothing is drawn then, so a changed generator was seeded.
        after: the error of an earlier trial. It is raised again before a collective, which other ranks would
            not enter.
    """

    def __init__(
        self,
        stage: str,
        arguments: Iterable[tuple[str, torch.Tensor]],
        abstract: bool = False,
        after: StageError | None = None,
    ) -> None:
        super().__init__()
        self.after = after
        arguments = list(arguments)
        # Below a transform, tensors do not say what is differentiated.
        self.strict = any(is_wrapped(t) for _, t in arguments)
        self.stage, self.abstract, self.draws, self.seeds = stage, abstract, 0, False
        self.arguments = {storage(t): path for path, t in arguments}
        self.made: set[int | None] = {None}
        self.before = torch.default_generator.get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        effects = _effects(func)
        if effects.seeded and draws(func, args, kwargs):
            self.draws += 1
            # Without values nothing is drawn, so that only a stage that seeds has changed the generator.
            with without_modes():
                self.seeds |= self.abstract and not torch.equal(
                    self.before, torch.default_generator.get_state()
                )
        for tensor in written(func, args, kwargs):
            self._require_own(tensor)
        for value in _flat((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._require_no_gradient_lost(func, value)
            elif isinstance(value, torch.Generator):
                raise StageError(
                    self.stage,
                    f"it hands a torch.Generator to an operator{place_of_call()}; the numbers of one of its"
                    " own depend on the order in which microbatches run",
                    "leave it out: the default generator draws, which seed=(seed, step) sets",
                )
        if self.after is not None and (
            is_collective(func) or any(issubclass(kind, dtensor_class()) for kind in types)
        ):
            raise self.after
        if is_collective(func):
            # The reduction comes first, in operators that have one.
            texts = (value for value in _flat((args, kwargs)) if isinstance(value, str))
            if fault := fault_of(func, tensors_in((args, kwargs)), self.strict, next(texts, "sum")):
                raise StageError(self.stage, *fault)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if not effects.view:
            self.made.update(map(storage, tensors_in(results)))
        return results

    def _require_own(self, tensor: torch.Tensor) -> None:
        if (at := storage(tensor)) not in self.made:
            if at in self.arguments:
                place, mend = f"its argument {self.arguments[at]}", "return the new value, or work on a clone"
            else:
                place, mend = (
                    f"{_shape(tensor)} that is not among its arguments",
                    "pass it as state and return the new value",
                )
            raise StageError(self.stage, f"it is not pure: it writes into {place}", mend)

    def _require_no_gradient_lost(self, func: Any, value: torch.Tensor) -> None:
        captured = (
            value.requires_grad
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.is_leaf
            and not is_wrapped(value)
        )
        if not captured or func is aten.detach.default or not torch.is_grad_enabled():
            return
        if (at := storage(value)) not in self.made and at not in self.arguments:
            raise StageError(
                self.stage,
                f"it reads {_shape(value)} that is not among its arguments and requires a gradient, which"
                " would be lost",
                "pass it in params, or detach it",
            )


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether this call draws random numbers.

    Attention with a dropout of zero does not, nor does a backward that is given the seed of its forward.

    >>> draws(torch.ops.aten.rand_like.default, (torch.zeros(2),), {})
    True
    >>> draws(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, (), {"dropout_p": 0.5})
    False
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = schema(func).arguments
    if any(argument.name == "philox_seed" for argument in arguments):
        return False
    for position, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout"):
            if position < len(args):
                return args[position] != 0
            return kwargs.get(argument.name, argument.default_value) != 0
    return True


# Operators that write into running statistics in training without declaring it.
_NORMS = "batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"
_RUNNING_STATISTICS = {getattr(aten, name).default for name in _NORMS}


class _Effects(NamedTuple):
    """Describe the effects of an operator.

    Args:
        writes: positions and names of the arguments that it writes into.
        statistics: whether it writes into running statistics without declaring it.
        seeded: whether it may draw random numbers.
        view: whether its results may be views of its arguments.
    """

    writes: tuple[tuple[int, str], ...] = ()
    statistics: bool = False
    seeded: bool = False
    view: bool = False


@cache
def _effects(func: Any) -> _Effects:
    if not isinstance(func, OpOverload):
        return _Effects()
    arguments = enumerate(schema(func).arguments)
    writes = tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    # The argument of `lift_fresh` is a tensor just made of Python or numpy data.
    view = func is not aten.lift_fresh.default and any(
        result.alias_info is not None for result in schema(func).returns
    )
    return _Effects(writes, func in _RUNNING_STATISTICS, torch.Tag.nondeterministic_seeded in func.tags, view)


def is_collective(func: Any) -> bool:
    """Tell whether an operator communicates, or waits for one that does."""
    return getattr(func, "namespace", "") in _COLLECTIVES


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that a call of an operator writes into."""
    effects = _effects(func)
    values: list[Any] = [args[n] if n < len(args) else kwargs.get(name) for n, name in effects.writes]
    if effects.statistics and args[5]:
        values += args[3:5]
    return list(tensors_in(values))


def _flat(values: Any) -> Iterator[Any]:
    """Iterate over arguments or results of operators, which nest tuples, lists and dictionaries alone."""
    inside = values.values() if isinstance(values, dict) else values
    for value in inside if isinstance(values, (tuple, list, dict)) else (values,):
        if isinstance(value, (tuple, list, dict)):
            yield from _flat(value)
        else:
            yield value


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among the arguments or results of an operator."""
    return (value for value in _flat(values) if isinstance(value, torch.Tensor))


def _shape(tensor: torch.Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"a tensor of shape {tuple(tensor.shape)}"


# -- draws from the generators of Python and numpy, which no seed of a step reaches

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def without_foreign_draws(call: Callable[[], T], name: str, *, repeatable: bool = True) -> T:
    """Return ``call()``, which evaluates a stage; raise if it draws from Python's or numpy's generator.

    What is not seen: draws from a generator of one's own, and by a function that was imported from
    ``numpy.random`` by its name.

    Args:
        call: evaluates the stage. It has no effects; it may be called twice, and the second result is
            returned.
        name: how errors call the stage.
        repeatable: whether it may be called twice. If so, draws are watched in the second call only, which is
            made if the generators have changed: watching takes time. Another thread may have changed them.

    Raises:
        StageError: it draws from the generator of ``random``, or of ``numpy.random``.
    """
    if repeatable:
        before = _states()
        result = call()
        if _states() == before:
            return result
    with _draws_seen() as seen:
        result = call()
    if seen:
        raise StageError(
            name,
            f"it draws from the generator of {seen[0]}, whose numbers depend on the order in which"
            " microbatches run",
            "draw by torch, whose generator seed=(seed, step) sets, or give the numbers as inputs",
        )
    return result


def _draw_functions() -> Iterator[tuple[ModuleType, str]]:
    """List the functions that use the generators of ``random``, and of ``numpy.random`` if imported."""
    numpy = sys.modules.get("numpy.random")
    for module, kind in ((random, "Random"), *([] if numpy is None else [(numpy, "RandomState")])):
        for name, function in vars(module).items():
            of_generator = isinstance(getattr(function, "__self__", None), getattr(module, kind))
            if of_generator and name not in ("getstate", "get_state"):
                yield module, name


def _states() -> bytes:
    """Return the states of both generators, to compare."""
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), numpy and numpy.get_state(legacy=False)))


def _by_torch(frame: FrameType | None) -> bool:
    """Tell whether torch draws for itself: the innermost frame outside ``random`` and this module."""
    while frame is not None and frame.f_code.co_filename in (random.__file__, __file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


@contextmanager
def _draws_seen() -> Iterator[list[str]]:
    """List the calls by which this thread draws.

    A profile function sees those of ``random`` by whatever name they are called, unless a profiler is at
    work. It does not see numpy's, so the functions of both modules are replaced as well. Draws of torch for
    its own names do not count.
    """
    this, seen, generator = threading.get_ident(), list[str](), getattr(random.random, "__self__", None)

    def note(frame: Any, event: str, function: Any) -> None:
        draw = (
            event == "c_call"
            and getattr(function, "__self__", None) is generator
            and function.__name__ != "getstate"
        )
        if draw and not _by_torch(frame):
            seen.append(f"random ({function.__name__}{place_of_call()})")

    def noting(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == this and not _by_torch(sys._getframe(1)):
                seen.append(f"{what}{place_of_call()})")
            return original(*args, **kwargs)

        return noted

    with process_lock:
        originals = [(module, name, getattr(module, name)) for module, name in _draw_functions()]
        for module, name, original in originals:
            setattr(module, name, noting(original, f"{module.__name__} ({name}"))
        alone = sys.getprofile() is None
        if alone:
            sys.setprofile(note)
        try:
            yield seen
        finally:
            if alone:
                sys.setprofile(None)
            for module, name, original in originals:
                setattr(module, name, original)
