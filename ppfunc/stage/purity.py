"""What a stage does besides returning something: it draws random numbers, reaches outside its arguments, keeps what it makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode

from ._torch import FakeTensor, OpOverload, TorchDispatchMode, is_wrapped, schema, without_modes
from .errors import StageError
from .signature import LeafSignature


class Watch(TorchDispatchMode):
    """Sees every operator that a stage calls: random ones, those that reach outside the arguments, and what outlives the call."""

    def __init__(self, stage: str, abstract: bool) -> None:
        super().__init__()
        self.stage, self.abstract, self.draws, self.generators, self.seeds = stage, abstract, 0, False, False
        self.before = torch.default_generator.get_state()
        self.made: list[weakref.ref[torch.Tensor]] = []

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if draws(func, args, kwargs):
            self.draws += 1
            # Without values nothing is drawn, so that only a stage that seeds has changed the generator.
            self.seeds |= self.abstract and not self._generator_is_as_before()
        given = optree.tree_leaves((args, kwargs))
        self.require_values(given)
        self.generators |= any(isinstance(g, torch.Generator) for g in given)
        if func is not torch.ops.aten.detach.default:
            arguments = schema(func).arguments
            for argument, value in (*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments)):
                if _captured(value):
                    self._judge(value, argument.alias_info is not None and argument.alias_info.is_write)
        made = func(*args, **kwargs)
        self.note(optree.tree_leaves(made))
        return made

    def _generator_is_as_before(self) -> bool:
        with without_modes():
            return torch.equal(self.before, torch.default_generator.get_state())

    def note(self, tensors: Iterable[Any]) -> None:
        """Remember tensors without values, which must not outlive the evaluation."""
        self.made += [weakref.ref(t) for t in tensors if isinstance(t, FakeTensor)]

    def require_values(self, given: Iterable[Any]) -> None:
        """Raise if a tensor among these is of an evaluation that is over."""
        for value in given:
            if isinstance(value, FakeTensor) and getattr(value.fake_mode, "over", False):
                reason = f"it reads a tensor without values ({_told(value)}), left in a cache by an earlier evaluation of shapes"
                raise StageError(self.stage, reason, _ANEW)

    def require_nothing_kept(self) -> None:
        """Raise if a tensor without values is still there."""
        if kept := _alive(self.made):
            reason = f"it keeps a tensor beyond its call ({_told(kept[-1])}); what is there now has no values"
            attribute = "where it is an attribute of a module, make the stage by stage_from_module"
            raise StageError(self.stage, reason, f"{attribute}; else {_ANEW}; what you want to see of a stage can be a metric")

    def _judge(self, value: torch.Tensor, written: bool) -> None:
        """Raise if using this tensor, which is not among the arguments, is not pure."""
        if written and self.abstract:
            reason, instead = "it is not pure: it writes into {}", "pass it as state and return the new value"
        elif value.requires_grad and value.is_leaf and torch.is_grad_enabled():
            reason, instead = "it reads {} and requires a gradient, which would be lost", "pass it in params, or detach it"
        else:
            return
        sizes = "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
        raise StageError(self.stage, reason.format(f"{sizes} that is not among its arguments"), instead)


class Generators(TorchFunctionMode):
    """Sees the generators that are given to functions, as the objects that the stage has: operators get wrappers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Generator]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [weakref.ref(g) for g in optree.tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
        return func(*args, **(kwargs or {}))

    def foreign(self) -> bool:
        """Whether one has outlived the call, and is not one that a step seeds; or none was seen."""
        return not self.seen or not {torch.default_generator, *torch.cuda.default_generators}.issuperset(_alive(self.seen))


_ANEW = "compute it anew in every call; or, where it is a cache, empty it, and fill it by a call of the stage on tensors of these shapes"


def _told(tensor: torch.Tensor) -> str:
    return str(LeafSignature(tuple(tensor.shape), tensor.dtype, False)).removesuffix(" no grad")


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    """What is still there, in order, cycles that nobody reaches aside."""
    if any(r() is not None for r in references):
        gc.collect()
    return [found for r in references if (found := r()) is not None]


def _captured(value: Any) -> bool:
    """Whether this is a plain tensor from outside: neither fake nor wrapped by a transform."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and not is_wrapped(value)


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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
