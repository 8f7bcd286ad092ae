"""Holds back signals where an exception between two lines would tear a step apart."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# The functions behind those of the module, whose enums take 10 us of every step.
_set, _get = (getattr(sys.modules["_signal"], name) for name in ("signal", "getsignal"))
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


class hold_interrupts:
    """Hold back signals whose handlers are Python functions, which may raise; they act at the exit.

    Only the main thread runs handlers, so elsewhere there is nothing to hold.

    Args:
        later: where the body has not raised, they act so many seconds after the exit instead, when its result has reached
            those who are to have it.
    """

    def __init__(self, later: float = 0.0) -> None:
        self._later = later
        self._held: list[int] = []
        self._previous: dict[int, Callable[..., Any]] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    handler = _get(number)
                    if callable(handler):
                        self._previous[number] = handler
                        _set(number, self._hold)
            except BaseException:
                self._restore()
                raise

    def _hold(self, number: int, frame: object) -> None:
        self._held.append(number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while kind is None and self._later and self._held:
            timer = threading.Timer(self._later, signal.raise_signal, (self._held.pop(),))
            timer.daemon = True
            timer.start()
        self._restore()
        for number in self._held:
            signal.raise_signal(number)

    def _restore(self) -> None:
        """Put all handlers back, also where one that is back already raises."""
        try:
            for number, handler in self._previous.items():
                _set(number, handler)
        except BaseException:
            self._restore()
            raise
