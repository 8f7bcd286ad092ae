"""Refuse writes into memory that a call has not made, and reads of tensors without values."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ._torch import ASSIGNS_DATA, FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode, is_wrapped, schema, storage, without_modes
from .communication import fault_of, is_collective
from .errors import StageError
from .interrupts import interrupt_here
from .signature import LeafSignature

aten = torch.ops.aten


class LogicalDraws(TorchDispatchMode):
    """Draw into tensors in their logical order, not in that of their memory.

    ``torch.func`` and functionalisation draw into new, contiguous tensors, plain autograd into
    whatever strides an activation has: a dropout mask would depend on the engine.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, effects = kwargs or {}, _effects(func)
        interrupt_at(func)
        if effects.seeded and effects.writes and not args[0].is_contiguous():
            drawn = func(torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        return func(*args, **kwargs)


class Purity(LogicalDraws):
    """Sees every operator of a call: counts draws, and raises ``StageError`` before an effect happens.

    ``arguments`` are the tensors that it is given, by their paths; an ``abstract`` call has no values, so that seeding can be
    told from drawing. A trial ``after`` an error raises that at a collective, for which other ranks would not come.
    """

    def __init__(
        self, stage: str, arguments: Iterable[tuple[str, torch.Tensor]], abstract: bool = False, after: StageError | None = None
    ) -> None:
        super().__init__()
        self.after = after
        arguments = list(arguments)
        self.strict = any(is_wrapped(t) for _, t in arguments)  # below a transform, tensors do not tell what is differentiated
        self.stage, self.abstract, self.draws, self.generators, self.seeds = stage, abstract, 0, False, False
        self.arguments = {storage(t): path for path, t in arguments}
        self.made: set[int | None] = {None}
        self.before = torch.default_generator.get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        effects = _effects(func)
        if effects.seeded and draws(func, args, kwargs):
            self.draws += 1
            # Without values nothing is drawn, so that only a stage that seeds has changed the generator.
            with without_modes():
                self.seeds |= self.abstract and not torch.equal(self.before, torch.default_generator.get_state())
        for tensor in effects.written(args, kwargs):
            self._require_own(tensor)
        for value in _flat((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._require_no_gradient_lost(func, value)
            else:
                self.generators |= isinstance(value, torch.Generator)
        if self.after is not None and (is_collective(func) or any(issubclass(kind, DTensor) for kind in types)):
            raise self.after
        if is_collective(func):
            texts = (value for value in _flat((args, kwargs)) if isinstance(value, str))  # the reduction of one that has some comes first
            if fault := fault_of(func, tensors_in((args, kwargs)), self.strict, next(texts, "sum")):
                raise StageError(self.stage, *fault)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if not effects.view:
            self.made.update(map(storage, tensors_in(made)))
        return made

    def _require_own(self, tensor: torch.Tensor) -> None:
        if (at := storage(tensor)) not in self.made:
            if at in self.arguments:
                place, mend = f"its argument {self.arguments[at]}", "return the new value, or work on a clone"
            else:
                place, mend = f"{_shape(tensor)} that is not among its arguments", "pass it as state and return the new value"
            raise StageError(self.stage, f"it is not pure: it writes into {place}", mend)

    def _require_no_gradient_lost(self, func: Any, value: torch.Tensor) -> None:
        captured = value.requires_grad and type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_leaf and not is_wrapped(value)
        if not captured or func is aten.detach.default or not torch.is_grad_enabled():
            return
        if (at := storage(value)) not in self.made and at not in self.arguments:
            reason = f"it reads {_shape(value)} that is not among its arguments and requires a gradient, which would be lost"
            raise StageError(self.stage, reason, "pass it in params, or detach it")


class SeenFunctions(TorchFunctionMode):
    """Sees what operators do not: assignments to ``data``, and generators as the objects that the stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.assigns = False
        self.seen: dict[int, torch.Generator] = {}  # torch 2.11 has no weak references to them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.assigns |= func == ASSIGNS_DATA
        self.seen |= {id(g): g for g in (*args, *kwargs.values()) if isinstance(g, torch.Generator)}
        return func(*args, **kwargs)

    def foreign(self) -> bool:
        """Whether a generator has outlived the call, and is not one that a step seeds; or none was seen. Asked once: it lets go of them."""
        foreign = not self.seen
        while self.seen:
            _, generator = self.seen.popitem()
            outlived = sys.getrefcount(generator) > 2  # by this name, and by the argument here
            foreign |= outlived and generator not in (torch.default_generator, *torch.cuda.default_generators)
        return foreign


class Evaluation(FakeTensorMode):
    """Makes tensors without values; raises :class:`NoValuesError` where they mix with those of another, or with values after its end."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        foreign = [t for t in tensors if isinstance(t, FakeTensor) and t.fake_mode is not self]
        if self.over and not all(isinstance(t, FakeTensor) for t in tensors):
            foreign += [t for t in tensors if isinstance(t, FakeTensor)]
        if foreign:
            raise NoValuesError(foreign[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class NoValuesError(RuntimeError):
    """A tensor of an abstract evaluation was read outside of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(str(LeafSignature.of(tensor)).removesuffix(" no grad"))

    def told(self, stage: str) -> StageError:
        """The error of the stage that read it."""
        reason = f"it reads a tensor without values ({self}), left by an earlier abstract evaluation"
        mend = "recompute it in each call; if it is a cache, clear it, and warm it up by calling the stage on real tensors of these shapes"
        attribute = "where it is an attribute of a module, make the stage by stage_from_module"
        return StageError(stage, reason, f"{mend}; {attribute}")


def require_values(tensors: Iterable[Any], stage: str) -> None:
    """Raise for a fake tensor of an evaluation that is over."""
    for t in tensors:
        if isinstance(t, FakeTensor) and getattr(t.fake_mode, "over", False):
            raise NoValuesError(t).told(stage)


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws from a random generator; attention with a dropout of zero does not.

    >>> draws(torch.ops.aten.rand_like.default, (torch.zeros(2),), {})
    True
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return given != 0
    return True


def interrupt_at(func: Any) -> None:
    """Let interrupts act before an operator; not before those that torch calls where it must not raise, as in what autograd saves."""
    if isinstance(func, OpOverload) and func.namespace != "prim" and func is not aten.detach.default:
        interrupt_here()


# Operators that write into running statistics in training without declaring it.
_RUNNING_STATISTICS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}


class _Effects(NamedTuple):
    """The effects of an operator: where it writes, whether it may draw, whether its results may be views of its arguments."""

    writes: tuple[tuple[int, str], ...] = ()
    statistics: bool = False
    seeded: bool = False
    view: bool = False

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors that a call with these arguments writes into."""
        values: list[Any] = [args[n] if n < len(args) else kwargs.get(name) for n, name in self.writes]
        if self.statistics and args[5]:
            values += args[3:5]
        return tensors_in(values)


@cache
def _effects(func: Any) -> _Effects:
    if not isinstance(func, OpOverload):
        return _Effects()
    arguments = enumerate(schema(func).arguments)
    writes = tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    # The argument of `lift_fresh` is a tensor just made of Python or numpy data.
    view = func is not aten.lift_fresh.default and any(result.alias_info is not None for result in schema(func).returns)
    return _Effects(writes, func in _RUNNING_STATISTICS, torch.Tag.nondeterministic_seeded in func.tags, view)


def _flat(values: Any) -> Iterator[Any]:
    """Iterate over arguments or results of operators, which nest tuples, lists and dictionaries alone."""
    if isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _flat(value)
    else:
        yield values


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    return (value for value in _flat(values) if isinstance(value, torch.Tensor))


def _shape(tensor: torch.Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"a tensor of shape {tuple(tensor.shape)}"
