"""Keep abstract evaluations and programs of stages, for all steps that run the same function on the same forms.

A program depends on the user's function, the loss function folded into it, what both read from elsewhere, the form of
the arguments, the engine, autocast, and the mode (training or evaluation) of the modules that run in it. It is kept as
long as the user's function lives, and keeps nothing of the user's alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

import torch

from ppfunc.stage import Engine, Loss, Outline, Signature, Stage, StageProgram, outline
from ppfunc.stage.module import frozen_below
from ppfunc.stage.output import canonical
from ppfunc.stage.process import process_lock
from ppfunc.stage.tree import tree_leaves

from .fingerprint import Fingerprint, fingerprint, modules_read
from .functorch import suspended

_MOST = 64  # evaluations and programs that are kept of one function


class StageFunction(NamedTuple):
    """A stage with its loss, in the form that engines take.

    Args:
        fn: the user's function.
        loss_fn: the user's loss function, for a last stage.
        variant: what else is added to the function.
        call: ``(params, x, *extras) -> ((y, skips, loss), (outputs, metrics, state))``.
    """

    fn: Stage
    loss_fn: Loss | None
    variant: tuple[Hashable, ...]
    call: Callable[..., Any]

    @classmethod
    def of(cls, fn: Stage, *, last: bool, loss_fn: Loss | None, return_outputs: bool, skips: tuple[int, ...]) -> StageFunction:
        """The stage as it stands in a chain; see :func:`ppfunc.stage.output.canonical`."""
        variant = (last, return_outputs and last, skips)
        call = canonical(fn, last=last, loss_fn=loss_fn, return_outputs=return_outputs, skips=skips, targeted=last and loss_fn is not None)
        return cls(fn, loss_fn, variant, call)

    def key(self, example: tuple[Any, ...], device: torch.device) -> tuple[Hashable, ...]:
        """Equal for stages with one function, on one form of its arguments: signatures, types and strides; and on what is frozen."""
        tensors = [t for tree in example if not isinstance(tree, Signature) for t in tree_leaves(tree)]
        form = tuple(map(Signature.of, example)), tuple((type(t), t.stride()) for t in tensors)
        return id(self.fn), id(self.loss_fn), self.variant, form, device, autocast(), tuple(frozen_below(self.fn))


class _Kept(NamedTuple):
    """An outline or a program of a stage, valid while what it was made of is the same.

    Args:
        engine: that made the program, None for an outline.
        loss_fn: the loss function that is folded in; None for none.
        modules: those that ran in the stage, and the mode of each.
        read: fingerprint of both functions, without what they change themselves, such as counters of calls.
        made: an outline without its modules, or a program.
    """

    engine: Engine | None
    loss_fn: Callable[[], Loss | None] | None
    modules: tuple[tuple[ref[torch.nn.Module], bool], ...]
    read: Fingerprint
    made: Any

    def holds(self, function: StageFunction, engine: Engine | None, read: Fingerprint) -> bool:
        """Whether it serves this function now."""
        modules = ((module(), mode) for module, mode in self.modules)
        same = self.engine is engine and (function.loss_fn if self.loss_fn is None else self.loss_fn()) is function.loss_fn
        return (
            same
            and all(m is not None and m.training == mode for m, mode in modules)
            and all(read.get(name) == part for name, part in self.read.items())
        )


_KEPT: WeakKeyDictionary[Callable[..., Any], dict[Hashable, list[_Kept]]] = WeakKeyDictionary()


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
        found = found._replace(modules=tuple(dict.fromkeys((*found.modules, *modules_read(function.fn, function.loss_fn)))))
        return found, found._replace(modules=())

    kept = _shared(function, None, function.key(example, device), make)
    modules = (module() for module, _ in kept.modules)
    return cast(Outline, kept.made)._replace(modules=tuple(m for m in modules if m is not None))


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

    return cast(StageProgram, _shared(function, engine, function.key(example, device), make).made)


def forget(fn: Stage) -> None:
    """Drop everything that is kept of a user's function."""
    with suppress(TypeError):  # a function of which nothing can be kept
        _KEPT.pop(fn, None)


def _shared(function: StageFunction, engine: Engine | None, key: tuple[Hashable, ...], make: Callable[[], tuple[Outline, Any]]) -> _Kept:
    with suspended(), process_lock:
        read = fingerprint(function.fn, function.loss_fn)
        try:
            by_key = _KEPT.setdefault(function.fn, {})
        except TypeError:  # a function that cannot be hashed, or referenced weakly
            by_key = {}
        for kept in by_key.get(key, ()):
            if read is not None and kept.holds(function, engine, read):
                return kept
        known, made = make()
        after = fingerprint(function.fn, function.loss_fn)
        stays = None if read is None or after is None else {path: part for path, part in read.items() if after.get(path) == part}
        loss = None if function.loss_fn is None else _weakly(function.loss_fn)
        fresh = _Kept(engine, loss, tuple((ref(module), module.training) for module in known.modules), stays or {}, made)
        if known.lasts and stays is not None and _lets_go(made) and (loss is None or loss() is not None):
            by_key.setdefault(key, []).append(fresh)
            while sum(map(len, by_key.values())) > _MOST:
                by_key.pop(next(iter(by_key)))
        return fresh


def _weakly(value: Any) -> Callable[[], Any]:
    """A reference that does not keep a value alive; to nothing, where there is no such reference."""
    try:
        return ref(value)
    except TypeError:
        return lambda: None


def _lets_go(made: Any) -> bool:
    """Whether keeping this does not keep the function alive: of programs, those that were traced."""
    return isinstance(made, Outline) or hasattr(made.flat.forward, "recipe")
