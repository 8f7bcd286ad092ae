"""Evaluate stages and build their programs, once for every function object and form of its arguments.

A program depends on the user's function, the loss function folded into it, the form of the arguments, what is
frozen, autocast, and the modules that run in it: their mode (training or evaluation), hooks and submodules.
What the function reads from elsewhere keeps the values of the trace, as with ``jax.jit``. Step functions do
not share programs, so that a new one traces the values of its time. The step functions of one trainer do
share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ppfunc.stage import Engine, Outline, Signature, StageError, StageProgram, outline
from ppfunc.stage._torch import without_transforms
from ppfunc.stage.device import autocast
from ppfunc.stage.engines.loss_apart import with_loss_apart
from ppfunc.stage.errors import warn
from ppfunc.stage.modules.module import ModuleStructure
from ppfunc.stage.output import StageFunction
from ppfunc.stage.process import process_lock
from ppfunc.stage.tree import tree_leaves

CACHE_SIZE = 32
"""Most forms of arguments for which a step function keeps what is compiled, and a stage its programs."""

K = TypeVar("K")
V = TypeVar("V")


def keep(cache: OrderedDict[K, V], key: K, value: V) -> None:
    """Add to a bounded cache; the least recently used entry goes."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


class StageCall(NamedTuple):
    """Describe one call of a stage, of which a program is made.

    Args:
        function: the stage with its loss.
        example: ``(params, x, *extras)``: signatures, or trees of tensors.
        name: of the stage, in errors.
        device: on which it computes.
        stage: of the model.
    """

    function: StageFunction
    example: tuple[Any, ...]
    name: str
    device: torch.device
    stage: int = 0

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return a key that is equal for one form of the arguments: signatures, types and strides."""
        trees = [tree for tree in self.example if not isinstance(tree, Signature)]
        tensors = [(type(t), t.stride()) for tree in trees for t in tree_leaves(tree)]
        form = tuple(map(Signature.of, self.example)), tuple(tensors)
        f = self.function
        place = f.last, f.returns_outputs, f.skips, f.frozen
        return id(f.loss_fn), place, form, self.device, autocast()

    @property
    def options(self) -> dict[str, Any]:
        """Return what engines take beside the function and the example."""
        return {"has_aux": True, "name": self.name, "device": self.device}


class _Evaluated(NamedTuple):
    """Hold the evaluation of a stage, valid while its modules are in the modes noted.

    Args:
        function: the one evaluated; kept alive, since keys have its ``id``.
        modules: modes and structure of the modules that ran; None without any.
        trained: which of their own parameters were not frozen.
        outline: the evaluation.
        programs: the program that was built of it, if one was.
    """

    function: StageFunction
    modules: ModuleStructure | None
    trained: list[bool]
    outline: Outline
    programs: list[StageProgram]

    def holds(self) -> bool:
        """Tell whether the modules are as they were."""
        return self.modules is None or (self.modules.same() and self.trained == _trained(self.outline))


def _trained(outline: Outline) -> list[bool]:
    return [p.requires_grad for module in outline.modules for p in module.parameters(recurse=False)]


class StagePrograms:
    """Keeps the evaluations and programs of the stages of a step function, or of a trainer.

    Args:
        engine: builds the programs; or one for each stage of the model.
        loss_engine: builds those of the loss; that of the stage by default, if it can.
        noting: whether evaluations note their calls, for ranks to compare.
    """

    def __init__(
        self, engine: Engine | Sequence[Engine], loss_engine: Engine | None = None, noting: bool = False
    ) -> None:
        self._engine, self._loss_engine, self._noting = engine, loss_engine, noting
        # By function, then by key of the call.
        self._evaluated: dict[int, OrderedDict[Hashable, list[_Evaluated]]] = {}

    def _engine_of(self, call: StageCall) -> Engine:
        return self._engine if callable(self._engine) else self._engine[call.stage]

    def _key(self, call: StageCall) -> Hashable:
        return call.key, id(self._engine_of(call))

    def outline(self, call: StageCall) -> Outline:
        """Evaluate a stage without values, or return the earlier evaluation of an equal one.

        Raises:
            StageError: it cannot be evaluated.
        """
        with without_transforms(), process_lock:
            key, function = self._key(call), call.function
            of_function = self._evaluated.setdefault(id(function.fn), OrderedDict())
            same_form = of_function.get(key, [])
            for evaluated in same_form:
                if evaluated.holds():
                    return evaluated.outline
            evaluation = outline(function, call.example, **call.options, noting=self._noting)
            referred = (*_modules_referred(function.fn), *_modules_referred(function.loss_fn))
            evaluation = evaluation._replace(modules=tuple(dict.fromkeys((*evaluation.modules, *referred))))
            if evaluation.lasts:
                modules = ModuleStructure.of(evaluation.modules, "training") if evaluation.modules else None
                evaluated = _Evaluated(function, modules, _trained(evaluation), evaluation, [])
                keep(of_function, key, [*same_form, evaluated])
            return evaluation

    def program(self, call: StageCall, evaluation: Outline) -> StageProgram:
        """Build the program of a stage, or return that of an equal one.

        Args:
            evaluation: the result of :meth:`outline` for this call.

        Raises:
            StageError: the engine cannot serve it.
            TypeError: the engine returned no :class:`StageProgram`.
        """
        with without_transforms(), process_lock:
            same_form = self._evaluated.get(id(call.function.fn), OrderedDict()).get(self._key(call), [])
            programs = next(
                (evaluated.programs for evaluated in same_form if evaluated.outline is evaluation), []
            )
            if programs:
                return programs[0]
            program = self._build(call, evaluation)
            if not isinstance(program, StageProgram):
                raise TypeError(
                    f"engine: it returned an object of type {type(program).__name__} for {call.name},"
                    " expected a StageProgram"
                )
            if hasattr(program.flat.forward, "recipe"):  # traced: it has no memory of its own
                programs.append(program)
            return program

    def _build(self, call: StageCall, evaluation: Outline) -> StageProgram:
        """Build a program. A loss that the engine cannot serve gets another one, if its stage is served."""
        engine, parts = self._engine_of(call), call[:4]
        loss_engine = None if call.function.loss_fn is None else self._loss_engine
        try:
            if loss_engine is None:
                return engine(call.function, call.example, outline=evaluation, **call.options)
            return with_loss_apart(engine, loss_engine, *parts, evaluation)
        except StageError as error:
            # One that raised may not raise again.
            if loss_engine is not None or call.function.loss_fn is None or not evaluation.lasts:
                raise
            refused = failure = error
        from ppfunc.stage.engines import eager, functional

        for loss_engine in (functional, eager):
            try:
                program = with_loss_apart(engine, loss_engine, *parts, evaluation)
            except StageError as error:
                if error.stage == call.name:
                    break  # it is not the loss
                failure = error
                continue
            other = f"engines.{loss_engine.__name__}"
            warn(
                f"the loss is differentiated by {other}, since the engine of the stages cannot serve it"
                f" ({refused.reason}); say so, loss_engine=ppfunc.{other}"
            )
            return program
        raise failure

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._evaluated.clear()


def _modules_referred(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function refers to, with their submodules: a stage may read their mode without
    calling them.
    """
    for value in _referred(function):
        if isinstance(value, nn.Module):
            yield from value.modules()


def _referred(function: Any) -> Iterator[Any]:
    """Yield the values that a function refers to by name, or the attributes of a callable object."""
    match function:
        case FunctionType():
            yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
            names = set(_names(function.__code__))
            for name in names & function.__globals__.keys():
                value = function.__globals__[name]
                yield value
                if isinstance(value, ModuleType):
                    yield from (vars(value)[inner] for inner in names & vars(value).keys())
        case MethodType():
            yield function.__self__
            yield from _referred(function.__self__)
        case partial():
            yield from (function.func, *function.args, *function.keywords.values())
        case _:
            yield from getattr(function, "__dict__", {}).values()


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, and those that functions within it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
