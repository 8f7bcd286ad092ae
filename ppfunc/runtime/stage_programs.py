"""Keep abstract evaluations and programs of stages, for all steps that run the same function on the same forms.

A program depends on the user's function, the loss folded into it, the form of the arguments, the engine, autocast
and the mode (training or evaluation) of the modules that run in it. It is kept as long as the function lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from types import CellType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch

from ppfunc.stage import Engine, Loss, Outline, Signature, Stage, StageProgram, outline
from ppfunc.stage.output import canonical
from ppfunc.stage.tree import tree_leaves

from .functorch import suspended
from .rng import process_lock

_MOST = 64  # evaluations and programs that are kept of one function


class StageFunction(NamedTuple):
    """A stage with its loss, in the form that engines take.

    Args:
        fn: the user's function.
        variant: what was added to it; hashable.
        call: ``(params, x, *extras) -> ((y, skips, loss), (outputs, metrics, state))``.
    """

    fn: Stage
    variant: tuple[Hashable, ...]
    call: Callable[..., Any]

    @classmethod
    def of(cls, fn: Stage, *, last: bool, loss_fn: Loss | None, return_outputs: bool, skips: tuple[int, ...]) -> StageFunction:
        """The stage as it stands in a chain; see :func:`ppfunc.stage.output.canonical`."""
        variant = (last, loss_fn, return_outputs and last, skips)
        call = canonical(fn, last=last, loss_fn=loss_fn, return_outputs=return_outputs, skips=skips, targeted=last and loss_fn is not None)
        return cls(fn, variant, call)


class _Found(NamedTuple):
    """Something made for a stage, valid while what it has captured is the same.

    Args:
        modes: of the modules that ran in it.
        captured: values that the function read from its closure.
        made: an outline or a program.
    """

    outline: Outline
    modes: tuple[bool, ...]
    captured: tuple[Any, ...]
    made: Any


_FOUND: WeakKeyDictionary[Callable[..., Any], dict[Hashable, list[_Found]]] = WeakKeyDictionary()


def autocast() -> tuple[Hashable, ...]:
    """Which autocast is on, by kind of device."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def modes(outline: Outline) -> tuple[bool, ...]:
    """Whether each module that ran in a stage is in training mode now."""
    return tuple(module.training for module in outline.modules)


def outline_of(function: StageFunction, example: tuple[Any, ...], name: str, device: torch.device) -> Outline:
    """Evaluate a stage abstractly, or return what an equal one gave.

    Raises:
        StageError: it cannot be evaluated.
    """

    def make() -> tuple[Outline, Outline]:
        found = outline(function.call, example, has_aux=True, name=name, device=device)
        return found, found

    return _shared(function, ("outline", _form(example), device), make)


def program_of(
    function: StageFunction, example: tuple[Any, ...], known: Outline, engine: Engine, name: str, device: torch.device
) -> StageProgram:
    """Build the program of a stage, or return that of an equal one.

    Raises:
        StageError: the engine cannot serve it.
        TypeError: the engine returned something else than a program.
    """

    def make() -> tuple[Outline, StageProgram]:
        program = engine(function.call, example, has_aux=True, name=name, device=device, outline=known)
        if not isinstance(program, StageProgram):
            raise TypeError(f"engine: it returned an object of type {type(program).__name__} for {name}, expected a StageProgram")
        return known, program

    return _shared(function, (cast(Hashable, engine), _form(example), device), make)


def forget(fn: Stage) -> None:
    """Drop everything that is kept of a user's function."""
    _FOUND.pop(fn, None)


def _shared(function: StageFunction, key: tuple[Hashable, ...], make: Callable[[], tuple[Outline, Any]]) -> Any:
    with suspended(), process_lock:
        try:
            by_key = _FOUND.setdefault(function.fn, {})
            found = by_key.setdefault((function.variant, *key, autocast()), [])
        except TypeError:  # a function, or a loss function, that cannot be hashed or referenced weakly
            return make()[1]
        captured = _captured(function.fn)
        for entry in found:
            if entry.modes == modes(entry.outline) and len(entry.captured) == len(captured) and all(map(is_, entry.captured, captured)):
                return entry.made
        known, made = make()
        if _lets_go(made):
            found.append(_Found(known, modes(known), captured, made))
            while sum(map(len, by_key.values())) > _MOST:
                by_key.pop(next(iter(by_key)))
        return made


def _form(example: tuple[Any, ...]) -> Hashable:
    """The key of an evaluation: signatures of its example, and the types and strides of tensors."""
    tensors = [t for tree in example if not isinstance(tree, Signature) for t in tree_leaves(tree)]
    return tuple(map(Signature.of, example)), tuple((type(t), t.stride()) for t in tensors)


def _captured(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """The values that a function reads from its closure, its attributes and its module, one level deep.

    They are compared by identity: a function that finds another number there is evaluated again.
    """
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or () if _is_filled(c)]
    code, attributes = getattr(fn, "__code__", None), list(getattr(fn, "__dict__", {}).values())
    read = [fn.__globals__[name] for name in code.co_names if name in fn.__globals__] if code else []
    return tuple(value for value in (*cells, *attributes, *read) if value is not fn)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _lets_go(made: Any) -> bool:
    """Whether keeping this does not keep the function alive: of programs, those that were traced."""
    return isinstance(made, Outline) or hasattr(made.flat.forward, "recipe")
