"""Refuse writes into memory that a call has not made, and reads of tensors without values."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .._torch import (
    ASSIGNS_DATA,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    UnsupportedOperatorException,
    dtensor_class,
    is_wrapped,
    schema,
    storage,
    without_modes,
)
from ..device import generators
from ..errors import StageError
from ..signature import LeafSignature
from .communication import fault_of, is_collective

aten = torch.ops.aten


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
        abstract: whether they have no values. Seeding can then be told from drawing.
        after: an error of an earlier trial, raised at a collective: other ranks would not come to it.
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
                self.seeds |= self.abstract and not torch.equal(
                    self.before, torch.default_generator.get_state()
                )
        for tensor in written(func, args, kwargs):
            self._require_own(tensor)
        for value in _flat((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._require_no_gradient_lost(func, value)
            else:
                self.generators |= isinstance(value, torch.Generator)
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
            reason = (
                f"it reads {_shape(value)} that is not among its arguments and requires a gradient, which"
                " would be lost"
            )
            raise StageError(self.stage, reason, "pass it in params, or detach it")


class SeenFunctions(TorchFunctionMode):
    """Watches what operators do not see: assignments to ``data``, and generators as the stage's objects."""

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
        """Tell, once, whether a generator that no step seeds outlived the call, or none was seen at all."""
        foreign = not self.seen
        while self.seen:
            _, generator = self.seen.popitem()
            outlived = sys.getrefcount(generator) > 2  # by this name, and by the argument here
            foreign |= outlived and generator not in generators()
        return foreign


class Evaluation(FakeTensorMode):
    """Makes tensors without values, which raise :class:`NoValuesError` outside of it.

    They mix neither with those of another evaluation, nor with values after its end.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        mixed = self.over and len(fakes) < len(tensors)
        for fake in fakes:
            if mixed or fake.fake_mode is not self:
                raise NoValuesError(fake)
        if not isinstance(func, OpOverload):
            rule = func.python_key_table.get(FakeTensorMode)
            if rule is None:
                raise UnsupportedOperatorException(func)
            return rule(self, *args, **kwargs)
        if func is aten._grouped_mm.default and args[0].dtype in _GROUPED:
            with self:
                return _grouped_mm(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


# The dtypes of the real kernel. The abstract one of torch refuses all but bfloat16, and does not pad rows.
_GROUPED = torch.bfloat16, torch.float16, torch.float32


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Make the result of a product of groups, whose rows begin at multiples of 16 bytes."""
    dtype = out_dtype or a.dtype
    groups = ([len(a)] if offs is None else [len(offs)]) if a.ndim == b.ndim else []
    rows, columns = a.shape[-2], b.shape[-1]
    width = columns + -columns % (16 // dtype.itemsize)
    strides = [rows * width, width, 1][-2 - len(groups) :]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=a.device)


class NoValuesError(RuntimeError):
    """A tensor of an abstract evaluation was read outside of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(str(LeafSignature.of(tensor)).removesuffix(" no grad"))

    def of_stage(self, stage: str) -> StageError:
        """Return the error of the stage that read it."""
        reason = f"it reads a tensor without values ({self}), left by an earlier abstract evaluation"
        mend = (
            "recompute it in each call; if it is a cache, clear it, and warm it up by calling the stage on"
            " real tensors of these shapes"
        )
        attribute = "where it is an attribute of a module, make the stage by stage_from_module"
        return StageError(stage, reason, f"{mend}; {attribute}")


def require_values(tensors: Iterable[Any], stage: str) -> None:
    """Raise for a fake tensor of an evaluation that is over."""
    for t in tensors:
        if isinstance(t, FakeTensor) and getattr(t.fake_mode, "over", False):
            raise NoValuesError(t).of_stage(stage)


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether this call draws random numbers; attention with a dropout of zero does not.

    >>> draws(torch.ops.aten.rand_like.default, (torch.zeros(2),), {})
    True
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(schema(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            if position < len(args):
                return args[position] != 0
            return kwargs.get(argument.name, argument.default_value) != 0
    return True


# Operators that write into running statistics in training without declaring it.
_RUNNING_STATISTICS = {
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}


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


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that a call of an operator writes into."""
    effects = _effects(func)
    values: list[Any] = [args[n] if n < len(args) else kwargs.get(name) for n, name in effects.writes]
    if effects.statistics and args[5]:
        values += args[3:5]
    return list(tensors_in(values))


def _flat(values: Any) -> Iterator[Any]:
    """Iterate over arguments or results of operators, which nest tuples, lists and dictionaries alone."""
    if isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _flat(value)
    else:
        yield values


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among the arguments or results of an operator."""
    return (value for value in _flat(values) if isinstance(value, torch.Tensor))


def _shape(tensor: torch.Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"a tensor of shape {tuple(tensor.shape)}"
