"""Evaluate stages and build their programs, once for every function object and form of its arguments.

A program depends on the user's function, the loss function folded into it, the form of the arguments, what is
frozen, autocast, and the modules that run in it: their mode (training or evaluation), hooks and submodules.
What the function reads from elsewhere keeps the values of the trace, as with ``jax.jit``. Step functions do
not share programs, so that a new one traces the values of its time. The step functions of one trainer do
share them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ppfunc.schedule.collector import collector_paused
from ppfunc.stage import Engine, Outline, Signature, StageError, StageProgram, outline
from ppfunc.stage._torch import without_transforms
from ppfunc.stage.abstract.sizes import Numbers, SizeRange
from ppfunc.stage.device import autocast
from ppfunc.stage.engines.loss_apart import with_loss_apart
from ppfunc.stage.errors import warn
from ppfunc.stage.modules.module import structure_watch, unmodified
from ppfunc.stage.output import StageFunction
from ppfunc.stage.process import process_lock
from ppfunc.stage.program import Example, FlatProgram, stage_program
from ppfunc.stage.tree import tree_leaves

CACHE_SIZE = 32
"""Most forms of arguments for which a step function keeps what is compiled, and a stage its programs.

Of a form a stage keeps graphs and code on the host, 0.2 to 0.5 MB per transformer block, or 10 KB with
``dynamic=True``, beside what inductor has compiled. Parameters and constants are kept by reference.
"""

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
    def sizes(self) -> tuple[Signature, ...]:
        """Return the signatures of inputs and extras."""
        return tuple(map(Signature.of, self.example[1:]))

    @property
    def sizeless(self) -> "StageCall":
        """Return what is equal for calls that differ in sizes of inputs and extras alone."""
        no_sizes = [
            replace(tree, leaves=tuple(replace(leaf, shape=(0,) * len(leaf.shape)) for leaf in tree.leaves))
            for tree in self.sizes
        ]
        return self._replace(example=(self.example[0], *no_sizes))

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
        sizes: of its inputs and extras.
        range: holds the sizes among them that are symbols, None without any.
    """

    function: StageFunction
    modules: Callable[[], bool] | None
    trained: list[bool]
    outline: Outline
    programs: list[StageProgram]
    sizes: tuple[Signature, ...]
    range: SizeRange | None = None

    def holds(self) -> bool:
        """Tell whether the modules are as they were."""
        return self.modules is None or (self.modules() and self.trained == _trained(self.outline))

    def of(self, numbers: Numbers, call: StageCall) -> "_Evaluated":
        """Return the evaluation for numbers in the place of symbols, and its program."""
        evaluation, symbolic = numbers(self.outline), self.programs[0]
        example = Example.of(call.example, call.device, targeted=call.function.targeted)
        functions: Any = symbolic.flat
        flat, size = FlatProgram(*(f.at(numbers) for f in functions)), numbers(symbolic.residual_bytes)
        program = stage_program(flat, example, evaluation, has_aux=True, residual_bytes=size)
        return self._replace(outline=evaluation, programs=[program], sizes=call.sizes, range=None)


def _trained(outline: Outline) -> list[bool]:
    return [p.requires_grad for module in outline.modules for p in module.parameters(recurse=False)]


class StagePrograms:
    """Keeps the evaluations and programs of the stages of a step function, or of a trainer.

    Args:
        engine: builds the programs; or one for each stage of the model.
        loss_engine: builds those of the loss; that of the stage by default, if it can.
        compared: whether other ranks, or copies of stages, run the same: evaluations note their calls for it.
    """

    def __init__(
        self, engine: Engine | Sequence[Engine], loss_engine: Engine | None = None, compared: bool = False
    ) -> None:
        self._engine, self._loss_engine, self.compared = engine, loss_engine, compared
        self.evaluations = 0  # so many were made
        self.dynamic = any(map(_is_dynamic, [engine] if callable(engine) else engine))
        if loss_engine is not None and self.dynamic:
            raise ValueError(
                "engine: got graph(dynamic=True) and a loss_engine, which has programs of one size; leave out"
                " one of them"
            )
        # By function, then by key of the call.
        self._evaluated: dict[int, OrderedDict[Hashable, list[_Evaluated]]] = {}

    def _engine_of(self, call: StageCall) -> Callable[..., StageProgram]:
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
            dynamic = _is_dynamic(self._engine_of(call))
            alike = "sizes", self._key(call.sizeless) if dynamic else None
            known = of_function.get(alike)  # empty for a stage that cannot vary
            evaluated = (known and self._numbered(call, known)) or self._evaluate(call)
            if evaluated.outline.lasts:
                keep(of_function, key, [*same_form, evaluated])
                if dynamic:
                    keep(of_function, alike, [evaluated] if known is None else known)
            return evaluated.outline

    @collector_paused()
    def _evaluate(self, call: StageCall, range: SizeRange | None = None) -> _Evaluated:
        self.evaluations += 1
        function = call.function
        evaluation = outline(function, call.example, **call.options, noting=self.compared)
        referred = (*_modules_referred(function.fn), *_modules_referred(function.loss_fn))
        evaluation = evaluation._replace(modules=tuple(dict.fromkeys((*evaluation.modules, *referred))))
        modules = structure_watch(evaluation.modules, "training") if evaluation.modules else None
        return _Evaluated(function, modules, _trained(evaluation), evaluation, [], call.sizes, range)

    def _numbered(self, call: StageCall, known: list[_Evaluated]) -> _Evaluated | None:
        """Evaluate a stage, and build its program, by those for sizes that are symbols.

        Args:
            known: evaluations of calls that differ in sizes alone; with one more afterwards, if none was for
                these sizes; with none, if the stage cannot vary.

        Returns:
            None for sizes that do not vary.
        """
        for one in reversed(known):
            if one.range is not None and one.holds() and (numbers := one.range.numbers(call.sizes)):
                return one.of(numbers, call)
        lengths = SizeRange(known[-1].sizes, call.sizes)
        if not lengths.symbols:
            return None
        symbolic = call._replace(example=(call.example[0], *lengths.trees))
        try:
            with unmodified(*known[-1].outline.modules) as same:
                one = self._evaluate(symbolic, lengths)
                engine = self._engine_of(call)
                program = engine(
                    call.function, symbolic.example, outline=one.outline, dynamic=False, **call.options
                )
                if not same():
                    raise StageError(call.name, "it changes an attribute of a module", "")
        except StageError as error:
            evaluated = self._evaluate(call)  # raises what has nothing to do with symbols
            known.clear()
            warn(
                f"{call.name} is traced for one form of its arguments, not for sizes that vary:"
                f" {error.reason}; leave out dynamic=True, or mend that"
            )
            return evaluated
        one.programs.append(program)
        known[:] = [*known[1 - CACHE_SIZE :], one]
        numbers = lengths.numbers(call.sizes)
        assert numbers is not None, "the sizes of a trace decide as it has"
        return one.of(numbers, call)

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
            programs = next((one.programs for one in same_form if one.outline is evaluation), [])
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
        engine = partial(engine, dynamic=False) if _is_dynamic(engine) else engine
        asked = None if call.function.loss_fn is None else self._loss_engine

        def build(loss_engine: Engine | None) -> StageProgram:
            if loss_engine is None:
                return engine(call.function, call.example, outline=evaluation, **call.options)
            return with_loss_apart(engine, loss_engine, *parts, evaluation)

        try:
            return build(asked)
        except StageError as error:
            if asked is not None or call.function.loss_fn is None or not evaluation.lasts:
                raise
            refused = failure = error
        from ppfunc.stage.engines import eager, functional

        for loss_engine in (None, functional, eager):
            try:
                program = build(loss_engine)
            except StageError as error:
                if loss_engine is not None and error.stage == call.name:
                    break  # it is not the loss
                failure = error
                continue
            if loss_engine is None:
                raise refused  # something raised, and does not again: the next call tries anew
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


def _is_dynamic(engine: Engine) -> bool:
    return getattr(engine, "dynamic", False)


def _modules_referred(function: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that a function refers to, and theirs, whose mode may be read without a call."""
    for value in _referred(function):
        if isinstance(value, torch.nn.Module):
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
