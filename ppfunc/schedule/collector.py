"""Pause the garbage collector while very many values are made: a long schedule, the trace of a model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # new objects after a pause, of which a collection is worth saving


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process; where it is paused already, only the outer pause ends it.

    Values of schedules hold no cycles, and each collection visits every tuple that is alive: a third of the
    time of a pass. If the body has made many objects, those alive at its end count as old, so that the next
    collections skip them. If it has made few, they do not: dead cycles of earlier code would count as old as
    well, and a loop over steps would never free them.
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
