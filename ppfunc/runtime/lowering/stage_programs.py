"""Evaluate stages and build their programs, once for every function object and form of its arguments.

A program depends on the user's function, the loss function folded into it, the form of the arguments, what is
frozen, what torch holds beside them (autocast), and the values that both functions read from elsewhere, see
`ppfunc.stage.abstract.captures`. Step functions do not share programs. The step functions of one trainer do.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from ppfunc import _logs
from ppfunc.schedule.collector import collector_paused
from ppfunc.stage import Engine, Outline, Signature, StageError, StageProgram, outline
from ppfunc.stage._torch import without_transforms
from ppfunc.stage.abstract.captures import State, Watch, ambient, changes, reads
from ppfunc.stage.abstract.output import StageFunction
from ppfunc.stage.errors import warn
from ppfunc.stage.modules import set_by_calls, unmodified
from ppfunc.stage.process import process_lock
from ppfunc.stage.program import Example, FlatProgram, Numbers, SizeRange, stage_program
from ppfunc.stage.tree import tree_leaves

from ..values.arguments import digest

_tracing = _logs.room("tracing")
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
        name: name of the stage, in errors.
        device: device on which it computes.
        stage: number of the stage in the model.
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
        place = f.last, f.receivers, f.returns_outputs, f.skips, f.frozen, f.carries, f.ends, f.weightless
        return id(f.loss_fn), place, form, self.device, ambient()

    @property
    def sizes(self) -> tuple[Signature, ...]:
        """Return the signatures of inputs and extras."""
        return tuple(map(Signature.of, self.example[1:]))

    @property
    def sizeless(self) -> "StageCall":
        """Return the call with all sizes of inputs and extras replaced by 0."""
        no_sizes = [
            replace(tree, leaves=tuple(replace(leaf, shape=(0,) * len(leaf.shape)) for leaf in tree.leaves))
            for tree in self.sizes
        ]
        return self._replace(example=(self.example[0], *no_sizes))

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of an engine."""
        return {"has_aux": True, "name": self.name, "device": self.device}


class _Evaluated(NamedTuple):
    """Hold the evaluation of a stage for the values that it reads from elsewhere.

    Args:
        function: the one evaluated; kept alive, since keys have its ``id``.
        trained: flags of the parameters of its modules: False for a frozen parameter.
        outline: the evaluation.
        programs: the program that was built of it, if one was.
        sizes: signatures of its inputs and extras.
        range: holds the sizes among them that are symbols, None without any.
    """

    function: StageFunction
    trained: list[bool]
    outline: Outline
    programs: list[StageProgram]
    sizes: tuple[Signature, ...]
    range: SizeRange | None = None

    def holds(self) -> bool:
        """Tell whether the modules train the same parameters as before."""
        return self.trained == _trained(self.outline)

    def of(self, numbers: Numbers, call: StageCall) -> "_Evaluated":
        """Return the evaluation for numbers in the place of symbols, and its program."""
        evaluation, symbolic = numbers(self.outline), self.programs[0]
        example = Example.of(call.example, call.device, targeted=call.function.targeted)
        functions: Any = symbolic.flat
        flat = FlatProgram(*(f.at(numbers) for f in functions))
        program = stage_program(flat, example, evaluation, has_aux=True)
        return self._replace(outline=evaluation, programs=[program], sizes=call.sizes, range=None)


def _trained(outline: Outline) -> list[bool]:
    return [p.requires_grad for module in outline.modules for p in module.parameters(recurse=False)]


class StagePrograms:
    """Keeps the evaluations and programs of the stages of a step function, or of a trainer.

    Args:
        engine: builds the programs; or one for each stage of the model.
        compared: whether other ranks, or copies of stages, run the same: evaluations note their calls for it.
    """

    def __init__(self, engine: Engine | Sequence[Engine], compared: bool = False) -> None:
        self._engine, self.compared = engine, compared
        self.evaluations = 0  # so many were made
        self.dynamic = any(map(_is_dynamic, [engine] if callable(engine) else engine))
        self._watches: dict[int, Watch] = {}
        # By function, then by key of the call.
        self._evaluated: dict[int, OrderedDict[Hashable, list[_Evaluated]]] = {}

    def _engine_of(self, call: StageCall) -> Callable[..., StageProgram]:
        return self._engine if callable(self._engine) else self._engine[call.stage]

    def _key(self, call: StageCall) -> Hashable:
        states = (state for _, state in self.states(call.function))
        return call.key, id(self._engine_of(call)), *states

    def states(self, function: StageFunction) -> Iterator[tuple[Watch, State]]:
        """Yield the watch of the values that a stage and its loss read from elsewhere, and their state."""
        for fn in filter(None, (function.fn, function.loss_fn)):
            read = reads(fn)
            if id(read) not in self._watches:
                self._watches[id(read)] = Watch(read)
            watch = self._watches[id(read)]
            yield watch, watch.state()

    def changes(self, call: StageCall) -> Iterator[tuple[str, str]]:
        """Yield names of the functions that other ranks run too, and their changes since the first step."""
        whole = reads(call.function.fn) is not call.function.fn
        names = "the model" if whole else f"stage {call.stage}", "the loss"
        for name, (watch, state) in zip(names, self.states(call.function), strict=False):
            if watch.first is not None and (self.compared or (whole and name == "the model")):
                told = [text for text in changes(watch.first, state) if ".training =" not in text]
                yield name, f"{', '.join(told[:3])} ({digest(repr(told))})" if told else ""

    def outline(self, call: StageCall) -> Outline:
        """Evaluate a stage without values, or return the earlier evaluation of an equal call.

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
                key = self._key(call)  # the evaluation may have found more that is read
                keep(of_function, key, [*same_form[1 - CACHE_SIZE :], evaluated])
                if dynamic:
                    keep(of_function, alike, [evaluated] if known is None else known)
            return evaluated.outline

    @collector_paused()
    def _evaluate(self, call: StageCall, range: SizeRange | None = None) -> _Evaluated:
        self.evaluations += 1
        function = call.function
        watches = [watch for watch, _ in self.states(function)]
        with _logs.timed(_tracing.debug, "%s: evaluated without values", call.name):
            evaluation = outline(
                function, call.example, **call.options, noting=self.compared, watches=watches
            )
        found = chain.from_iterable(watch.found.values() for watch in watches)
        every = (*evaluation.modules, *(m for _, m in found if isinstance(m, torch.nn.Module)))
        evaluation = evaluation._replace(modules=tuple(dict.fromkeys(every)))
        stale = {name for module in every for name in set_by_calls.get(module, ())}
        for watch, reader in zip(watches, (call.name, "the loss"), strict=False):
            watch.require_none_stale(stale, reader)
        return _Evaluated(function, _trained(evaluation), evaluation, [], call.sizes, range)

    def _numbered(self, call: StageCall, known: list[_Evaluated]) -> _Evaluated | None:
        """Evaluate a stage, and build its program, by the program for sizes that are symbols.

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
        """Build the program of a stage, or return the program of an equal call.

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
            engine = self._engine_of(call)
            engine = partial(engine, dynamic=False) if _is_dynamic(engine) else engine
            with _logs.timed(_tracing.info, "%s: made into programs", call.name):
                program = engine(call.function, call.example, outline=evaluation, **call.options)
            if not isinstance(program, StageProgram):
                raise TypeError(
                    f"engine: it returned an object of type {type(program).__name__} for {call.name},"
                    " expected a StageProgram"
                )
            if hasattr(program.flat.forward, "recipe"):  # traced: it has no memory of its own
                programs.append(program)
            return program

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._evaluated.clear()


def _is_dynamic(engine: Engine) -> bool:
    return getattr(engine, "dynamic", False)
