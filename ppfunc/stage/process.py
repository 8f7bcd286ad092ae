"""Guard the state that all threads of a process share: torch's, by a lock; signals, whose handlers would tear
a step apart; the generators of Python and numpy.
"""

import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .errors import StageError

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


def without_foreign_draws(call: Callable[[], T], name: str, *, repeatable: bool = True) -> T:
    """Return ``call()``, which evaluates a stage; raise if it draws from Python's or numpy's generator.

    Draws from a generator of one's own are not seen. A stage that seeds the generator before it draws has the
    same numbers in every call.

    Args:
        call: evaluates the stage. It has no effects.
        name: the name of the stage in errors.
        repeatable: whether it may be called twice, where a generator has changed: another thread may have
            drawn from it, or torch in its first call. The second result is returned.

    Raises:
        StageError: the generator of ``random``, or of ``numpy.random``, changes in the call.
    """
    changed = list[str]()
    for _ in range(1 + repeatable):
        before = _states()
        result = call()
        changed = [module for module, state in _states().items() if before.get(module) != state]
        if not changed:
            return result
    raise StageError(
        name,
        f"it draws from the generator of {changed[0]}, whose numbers depend on the order in which"
        " microbatches run",
        "draw by torch, whose generator seed=(seed, step) sets, or give the numbers as inputs; where another"
        " thread draws, let it wait while stages are traced",
    )


def _states() -> dict[str, bytes]:
    """Return the states of both generators, to compare, by module."""
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy.random"):
        states["numpy.random"] = numpy.get_state(legacy=False)
    return {module: pickle.dumps(state) for module, state in states.items()}
