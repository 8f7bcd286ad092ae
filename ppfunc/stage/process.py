"""Serialise what changes state of the process, and delay signals, whose handlers would tear a step apart."""

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

Handler = Callable[[int, Any], Any]

process_lock = threading.RLock()
"""Held while a stage is traced, while a module is called with other tensors than its own, and while
generators are seeded.
"""

# The functions behind those of the module, whose enums take 10 us of every step.
_set, _get = (getattr(sys.modules["_signal"], name) for name in ("signal", "getsignal"))
_SIGNALS = sorted(set(map(int, signal.valid_signals())) & set(range(32)))
_LATER = 0.05  # seconds for a result to reach the caller


class _Thread(threading.local):
    held: "hold_interrupts | None" = None


this_thread = _Thread()
"""In ``held`` the outermost :class:`hold_interrupts` of this thread."""


class hold_interrupts:
    """Delay signals with Python handlers to the exit, or to :func:`act_on_interrupts`, whichever comes first.

    Only the outermost one counts. Only the main thread runs handlers; in other threads nothing is delayed.
    Stages are evaluated and traced within it: a handler that computes would be traced with them, and one that
    raises may abort the process, since torch evaluates without values by Python that it calls from C++.

    Args:
        later: sends a signal anew. Where the body has not raised, signals are sent by it at the exit, so that
            the result of the body reaches the caller before a handler raises. By default handlers run at the
            exit.

    Attributes:
        to_exit: delay all signals to the exit: :func:`act_on_interrupts` does nothing.
        pending: handlers of signals that have come, by number; the last acts first.
    """

    __slots__ = ("_handlers", "_later", "pending", "to_exit")

    def __init__(self, later: Callable[[int], None] | None = None) -> None:
        self._later, self.to_exit = later, False
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
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if this_thread.held is not self:
            return
        try:
            for number, (before, in_place) in self._handlers.items():
                if _get(number) is in_place:  # else it was changed meanwhile
                    _set(number, before)
        finally:  # a handler that is back may raise; those that stay act at once
            this_thread.held = None
            while kind is None and self._later is not None and self.pending:
                self._later(self.pending.popitem()[0])
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


def send_later(number: int) -> None:
    """Send a signal to the main thread, a moment from now.

    To that thread itself, since one that another thread receives does not wake it from a sleep.
    """
    timer = threading.Timer(_LATER, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    timer.start()


def _act(pending: dict[int, Handler]) -> None:
    """Handle signals, all of them, also where one raises."""
    if pending:
        number, handler = pending.popitem()
        try:
            # Not the frame that the signal has come in: a traceback would keep its communicators open.
            handler(number, sys._getframe())
        finally:
            _act(pending)
