"""Pause the garbage collector while a schedule of a million instructions is walked."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_MANY = 100_000  # new objects after a pause, of which a collection is worth saving

_lock = Lock()
_paused = 0
_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process until the last of the threads that are in here has left.

    Values of schedules hold no cycles, and each collection visits every tuple that is alive: a third of the
    time of a pass. Where many were made, what is alive in the end counts as old, so that the next collections
    do not visit it either. Not where few
    were: cycles that have ended before would count as old, too, and whoever makes steps in a loop would never
    be rid of them.
    """
    global _paused, _enabled
    entered = False
    try:
        with _lock:
            if not _paused:
                _enabled = gc.isenabled()
                gc.disable()
            _paused += 1
            entered = True
        yield
    finally:
        with _lock:
            _paused -= entered
            if not _paused and _enabled:
                try:
                    if (
                        gc.get_count()[0] > _MANY and not gc.get_freeze_count()
                    ):  # what the caller has frozen stays so
                        gc.freeze()
                        gc.unfreeze()
                finally:  # also where an interrupt comes
                    gc.enable()
