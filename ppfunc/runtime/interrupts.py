"""Hold back signals where an exception between two lines would tear a step apart."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

Handler = Callable[[int, Any], Any]

# The functions behind those of the module, whose enums take 10 us of every step.
_set, _get = (getattr(sys.modules["_signal"], name) for name in ("signal", "getsignal"))
_SIGNALS = sorted(set(map(int, signal.valid_signals())) & set(range(32)))
_LATER = 0.05  # seconds for a result to reach the caller


class Signals(Protocol):
    """The signals of one thread whose handlers are Python functions, which may raise."""

    def handlers(self) -> dict[int, Handler]: ...

    def get(self, number: int) -> Any: ...

    def set(self, number: int, handler: Handler) -> None: ...

    def send_later(self, number: int) -> None:
        """Send this thread a signal, once its functions have returned what they are about to return."""
        ...


class ProcessSignals:
    """Signals of this process. Only the main thread runs handlers; in other threads nothing is held."""

    def handlers(self) -> dict[int, Handler]:
        if threading.get_ident() != threading.main_thread().ident:
            return {}
        return {number: handler for number in _SIGNALS if callable(handler := _get(number))}

    def get(self, number: int) -> Any:
        return _get(number)

    def set(self, number: int, handler: Handler) -> None:
        _set(number, handler)

    def send_later(self, number: int) -> None:
        # To the main thread itself, which a signal that the timer's thread receives would not wake from its sleep.
        timer = threading.Timer(_LATER, signal.pthread_kill, (threading.main_thread().ident, number))
        timer.daemon = True
        timer.start()


PROCESS = ProcessSignals()


class _Held:
    """The handlers of a thread while signals are held back.

    Args:
        signals: of this thread.

    Attributes:
        acting: whether signals act at once.
        kept: whether they are held until the exit, whatever lies between.
        handlers: those that were set before, by number.
        pending: numbers of the signals that came meanwhile, each once; the last acts first.
    """

    __slots__ = ("acting", "handlers", "kept", "pending", "signals")

    def __init__(self, signals: Signals) -> None:
        self.signals, self.acting, self.kept = signals, False, False
        self.handlers: dict[int, Handler] = {}
        self.pending: dict[int, None] = {}

    def handle(self, number: int, frame: Any) -> None:
        if self.acting:
            try:
                self.handlers[number](number, frame)
            except BaseException:
                self.acting = False  # what is raised is handled in peace
                raise
        else:
            self.pending[number] = None

    def release(self) -> None:
        if not self.kept:
            self.acting = True
            while self.pending and self.acting:
                self.handle(self.pending.popitem()[0], sys._getframe())

    def end(self) -> None:
        """Put all handlers back but those that were changed meanwhile, then let all act that were held, also where one raises."""
        try:
            for number, handler in self.handlers.items():
                if self.signals.get(number) == self.handle:
                    self.signals.set(number, handler)
            self.acting, self.kept = True, False  # for those who have kept a handler to call it
            self.release()
        except BaseException:
            self.end()
            raise


class _Thread(threading.local):
    held: _Held | None = None


_thread = _Thread()


class hold_interrupts:
    """Delay signals until exit, except inside :class:`let_interrupts`. Only signals with Python handlers are delayed.

    The first that raises an exception holds back those that follow.

    Args:
        later: where the body has not raised, they act a moment after the exit instead, when its result has reached the caller.
        signals: of this thread.
    """

    __slots__ = ("_before", "_held", "_later", "_signals")

    def __init__(self, later: bool = False, signals: Signals = PROCESS) -> None:
        self._later, self._signals = later, signals
        self._before: tuple[bool, bool] | None = None  # of the one around this

    def __enter__(self) -> Self:
        held = _thread.held
        if held is None:
            held = _Held(self._signals)
            try:
                for number, handler in self._signals.handlers().items():
                    held.handlers[number] = handler
                    self._signals.set(number, held.handle)
            except BaseException:
                held.end()
                raise
            _thread.held = held
        else:
            self._before, held.acting = (held.acting, held.kept), False
        self._held = held
        return self

    def keep(self) -> None:
        """Let none act before the exit."""
        self._held.kept = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        held = self._held
        if self._before is not None:
            acting, held.kept = self._before
            if acting:
                held.release()
            return
        _thread.held = None
        while kind is None and self._later and held.pending:
            held.signals.send_later(held.pending.popitem()[0])
        held.end()


class let_interrupts:
    """Let signals act that are held back in this thread, those too that have come before."""

    __slots__ = ("_acting", "_held")

    def __enter__(self) -> None:
        self._held = held = _thread.held
        if held is not None:
            self._acting = held.acting
            held.release()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held is not None:
            self._held.acting = self._acting and kind is None


def keep_holding() -> None:
    """Let none act before the outermost :class:`hold_interrupts`, or the step that runs, has ended."""
    if _thread.held is not None:
        _thread.held.kept = True
