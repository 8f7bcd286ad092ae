"""Holds back signals where an exception between two lines would tear a step apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def hold_interrupts() -> Iterator[list[int]]:
    """Hold back signals whose handlers are Python functions, which may raise; they act at the exit.

    Yields:
        The numbers of the signals held so far. Stays empty outside the main thread, which alone runs handlers.
    """
    held: list[int] = []
    previous: dict[int, Callable[..., Any]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    previous[number] = handler
                    signal.signal(number, lambda number, frame: held.append(number))
        yield held
    finally:
        _restore(previous)
        for held_back in held:
            signal.raise_signal(held_back)


def _restore(previous: dict[int, Callable[..., Any]]) -> None:
    """Put all handlers back, also where one that is back already raises."""
    try:
        for number, handler in previous.items():
            signal.signal(number, handler)
    except BaseException:
        _restore(previous)
        raise
