"""Guard what all threads of a process share: state of torch, by a lock; signals, whose handlers would tear a
step apart; the generators of Python and numpy.
"""

import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch

from .errors import StageError, place_of_call

T = TypeVar("T")

Handler = Callable[[int, Any], Any]

process_lock = threading.RLock()
"""Held while a stage is traced, while a module is called with other tensors than its own, and while
generators are seeded.
"""

# The functions behind those of the module, whose enums take 10 us of every step.
_set, _get = (getattr(sys.modules["_signal"], name) for name in ("signal", "getsignal"))
_SIGNALS = sorted(set(map(int, signal.valid_signals())) & set(range(32)))


class _Thread(threading.local):
    held: "hold_interrupts | None" = None


this_thread = _Thread()
"""In ``held`` the outermost :class:`hold_interrupts` of this thread."""


class hold_interrupts:
    """Delay signals with Python handlers to the exit, or to :func:`act_on_interrupts`, whichever comes first.

    Only the outermost one counts. Only the main thread runs handlers; in other threads nothing is delayed.
    Stages are evaluated and traced within it: a handler that computes would be traced with them, and one that
    raises may abort the process, since torch evaluates without values by Python that it calls from C++.

    A signal is handled by the handler that was there when it came. What that raises at the exit takes the
    result of the body.

    Attributes:
        to_exit: delay all signals to the exit: :func:`act_on_interrupts` does nothing.
        pending: handlers of signals that have come, by number; the last acts first.
    """

    __slots__ = ("_handlers", "pending", "to_exit")

    def __init__(self) -> None:
        self.to_exit = False
        self._handlers: dict[int, tuple[Handler, Handler]] = {}  # before, and in its place
        self.pending: dict[int, Handler] = {}

    def __enter__(self) -> None:
        if this_thread.held is not None:
            return
        this_thread.held = self
        try:
            if threading.get_ident() == threading.main_thread().ident:
                for number in _SIGNALS:
                    if callable(handler := _get(number)):
                        self._handlers[number] = handler, partial(receive, handler)
                        _set(number, self._handlers[number][1])
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if this_thread.held is not self:
            return
        try:
            for number, (before, in_place) in self._handlers.items():
                if _get(number) is in_place:  # else it was changed meanwhile
                    _set(number, before)
        finally:  # a handler that is back may raise; those that stay act at once
            this_thread.held = None
            _act(self.pending)


def receive(handler: Handler, number: int, frame: Any) -> None:
    """Handle a signal of this thread now, or when it is no longer delayed."""
    held = this_thread.held
    if held is None:
        handler(number, frame)
    else:
        held.pending[number] = handler


def act_on_interrupts() -> None:
    """Handle the signals that this thread delays. If a handler raises, the others wait for the exit."""
    held = this_thread.held
    if held is not None and held.pending and not held.to_exit:
        try:
            _act(held.pending)
        except BaseException:
            held.to_exit = True
            raise


def keep_holding() -> None:
    """Delay signals to the exit of the outermost :class:`hold_interrupts`."""
    if this_thread.held is not None:
        this_thread.held.to_exit = True


def _act(pending: dict[int, Handler]) -> None:
    """Handle signals, all of them, also where one raises."""
    if pending:
        number, handler = pending.popitem()
        try:
            # Not the frame that the signal has come in: a traceback would keep its communicators open.
            handler(number, sys._getframe())
        finally:
            _act(pending)


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


# Of the states: torch's compiler restores what it has read.
_NO_DRAWS = ("getstate", "setstate", "get_state", "set_state")


def _draw_functions() -> Iterator[tuple[ModuleType, str]]:
    """List the functions that use the generators of ``random``, and of ``numpy.random`` if imported."""
    numpy = sys.modules.get("numpy.random")
    for module, kind in ((random, "Random"), *([] if numpy is None else [(numpy, "RandomState")])):
        for name, function in vars(module).items():
            of_generator = isinstance(getattr(function, "__self__", None), getattr(module, kind))
            if of_generator and name not in _NO_DRAWS:
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
            and function.__name__ not in _NO_DRAWS
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
