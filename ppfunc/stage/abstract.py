"""Abstract evaluation: what a stage returns and how it behaves, learned without computing anything."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

from ._torch import (
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    version,
)
from .errors import StageError
from .example import Example, Leaves, split_aux, stand_ins
from .signature import LeafSignature, Signature, differentiable
from .watch import Generators, Watch

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


class Outline(NamedTuple):
    """What a stage returns and whether it draws random numbers.

    Args:
        y: signature of the output; ``grad=True`` where it depends on a differentiable leaf of the
            parameters or of ``x``.
        aux: signature of the auxiliary output, no leaf of which carries a gradient.
        draws: how many operators drew from a random generator.
        generators: whether it hands a generator to an operator.
        seeds: whether it seeds the generator that it draws from.
        known: whether it always takes the path that was seen.
    """

    y: Signature
    aux: Signature
    draws: int
    generators: bool = False
    seeds: bool = False
    known: bool = True

    @property
    def random(self) -> bool | None:
        """Whether the stage draws random numbers; None where another path than the one seen might."""
        return True if self.draws else None if not self.known else False


def abstract(fn: Callable[..., Any], params: Any, x: Any, *consts: Any) -> Signature:
    """The signature of ``fn(params, x, *consts)``, without computing anything.

    Args:
        fn: a stage.
        params, x, consts: trees of tensors, or signatures.

    Raises:
        StageError: the control flow or the shapes depend on values, the stage changes its arguments, keeps a
            tensor that it makes, or draws from a generator that it does not make.
        TypeError: a leaf is not a tensor.

    >>> f = lambda w, x: {"y": x @ w, "n": x.argmax()}
    >>> print(abstract(f, torch.zeros(2, 3), torch.zeros(5, 2)))
    {'y': float32[5,3], 'n': int64[] no grad}
    """
    return outline(fn, Example.of((params, x, *consts))).y


def outline(fn: Callable[..., Any], example: Example, *, has_aux: bool = False, name: str = "the stage") -> Outline:
    """As :func:`abstract`, with the auxiliary output and with randomness.

    Raises:
        StageError: as :func:`abstract`.
    """

    def observe(watch: Watch) -> Outline:
        try:
            with without_values():
                return _observe(fn, example, example.make(), has_aux, watch)
        finally:
            torch.default_generator.set_state(watch.before)

    try:
        return _judged(observe, name, abstract=True)
    except DATA_DEPENDENT as error:
        raise StageError(name, data_dependence(error), "use the functional engine, which runs any Python") from error


def outline_by_running(
    fn: Callable[..., Any], seen: Example, example: tuple[Any, ...], *, has_aux: bool, name: str
) -> Outline:
    """As :func:`outline`, by running the stage once on zeros: for stages that need values.

    Another path may draw random numbers, so where this one drew none it is not known whether the stage does.
    """

    def observe(watch: Watch) -> Outline:
        return _observe(fn, seen, stand_ins(example, seen.device), has_aux, watch)

    return _judged(observe, name, abstract=False)._replace(known=False)


@contextmanager
def without_values() -> Iterator[None]:
    """Within it, tensors are made without values; one that outlives it can be told, and does not mix with others."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            yield
        finally:
            mode.over, mode.allow_non_fake_inputs = True, False


def data_dependence(error: Exception) -> str:
    """In plain words, why a stage could not be evaluated without values."""
    operator, place = getattr(error, "func", None) or (error.args[0] if error.args else error), _place(error)
    if isinstance(error, UnsupportedOperatorException):
        what = f"what its operator {operator}{place and f'{place},'} returns is not known without values"
        return f"{what} (torch.library.register_fake tells torch)"
    what = f"its control flow or its shapes depend on the values of tensors (operator {operator}{place})"
    return f"{what}, so that it cannot be evaluated abstractly"


def _place(error: Exception) -> str:
    """Where the stage was: the innermost line that is neither of torch nor of this library."""
    files = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f", called at {file.name}:{line}" for file, line in files if not any(map(file.is_relative_to, _LIBRARIES))]
    return own[-1] if own else ""


def _judged(observe: Callable[[Watch], Outline], name: str, *, abstract: bool) -> Outline:
    """What is observed of a stage that keeps nothing, and draws from no generator that it does not make in each call."""
    watch = Watch(name, abstract)
    found = observe(watch)
    watch.require_nothing_kept()
    if found.generators:
        with Generators() as given:
            observe(Watch(name, abstract))
        if given.foreign():
            raise StageError(
                name,
                "it draws from a torch.Generator of its own, whose numbers depend on the order in which microbatches run",
                "draw from the default generator, which seed=(seed, step) settles",
            )
    return found


def _observe(
    fn: Callable[..., Any], example: Example, tensors: tuple[Leaves, Leaves, Leaves], has_aux: bool, watch: Watch
) -> Outline:
    wanted = (
        tuple(differentiable(leaf.dtype) for leaf in example.params.leaves),
        tuple(leaf.grad for leaf in example.x.leaves),
        (False,) * len(tensors[2]),
    )
    name = watch.stage
    with torch.enable_grad():
        # Clones, so that a stage may try to change its arguments and be told so in our words.
        groups = tuple(
            tuple(t.requires_grad_(g).clone() for t, g in zip(group, flags, strict=True))
            for group, flags in zip(tensors, wanted, strict=True)
        )
        trees = (
            example.params.unflatten(groups[0]),
            example.x.unflatten(groups[1]),
            *example.unflatten_consts(groups[2]),
        )
        watch.note(groups[1] + groups[2])  # the parameters may stay: layers keep lists of theirs
        with watch:
            out = _call(fn, trees, example, name, watch.abstract)
        (y, y_def), (aux, aux_def) = split_aux(out, has_aux, name)
    watch.require_values(y + aux)
    _require_unchanged(example, trees, groups, name)
    return Outline(
        Signature(y_def, tuple(_leaf(t, t.requires_grad) for t in y)),
        Signature(aux_def, tuple(_leaf(t, False) for t in aux)),
        watch.draws,
        watch.generators,
        watch.seeds,
    )


def _call(fn: Callable[..., Any], trees: tuple[Any, ...], example: Example, name: str, abstract: bool) -> Any:
    """``fn(*trees)``; what it raises becomes an error that says what it was given."""
    try:
        with quiet():
            return fn(*trees)
    except (StageError, *DATA_DEPENDENT):
        raise
    except Exception as error:
        given = [f"x = {example.x}", *(f"const {i} = {c}" for i, c in enumerate(example.consts))]
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        zeros = "" if abstract else ", zeros everywhere, by which an engine that does not trace learns what it returns"
        reason = f"it raised {type(error).__name__}: {error}{notes}; it was given {', '.join(given)}{zeros}"
        raise StageError(name, reason, "mend what raised this, or what the stage is given: x is what the stage before it returns") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging, with its whole traceback, an error that we raise in our words."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def call_named(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """``fn(*args)``; an exception out of it gets a note that names the stage."""
    try:
        return fn(*args)
    except Exception as error:
        error.add_note(f"raised in {name}")
        raise


def _leaf(t: torch.Tensor, grad: bool) -> LeafSignature:
    return LeafSignature(tuple(t.shape), t.dtype, grad and differentiable(t.dtype))


def _require_unchanged(example: Example, trees: tuple[Any, ...], groups: tuple[Leaves, ...], name: str) -> None:
    """Raise if the stage wrote into its arguments, or replaced something in their containers."""
    names = ("params", "x", *(f"const {i}" for i in range(len(example.consts))))
    before = iter([*groups[0], *groups[1], *groups[2]])
    for what, tree, signature in zip(names, trees, (example.params, example.x, *example.consts), strict=True):
        mine = [next(before) for _ in signature.leaves]
        leaves, treedef = optree.tree_flatten(tree)
        written = [path for path, t in zip(signature.paths, mine, strict=True) if version(t)]
        same = treedef == signature.treedef and all(a is b for a, b in zip(leaves, mine, strict=True))
        if written or not same:
            place = what + (written[0] if written else "")
            how = "writes into" if written else "replaces entries of"
            raise StageError(
                name, f"it is not pure: it {how} its argument {place}", "return the new value, or work on a clone"
            )
