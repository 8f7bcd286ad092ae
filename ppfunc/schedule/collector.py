"""Pause the garbage collector while a schedule of a million instructions is walked."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # new objects after a pause, of which a collection is worth saving


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process; where it is paused already, only the outer pause ends it.

    Values of schedules hold no cycles, and each collection visits every tuple that is alive: a third of the
    time of a pass. Where many were made, what is alive in the end counts as old, so that the next collections
    do not visit it either. Not where few were: cycles that have ended before would count as old, too, and
    whoever makes steps in a loop would never be rid of them.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        try:
            # What the caller has frozen stays so.
            if enabled and gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
        finally:  # also where an interrupt comes
            if enabled:
                gc.enable()
