"""Pause the garbage collector while very many values are made: a long schedule, the trace of a model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process; where it is paused already, only the outer pause ends it.

    Values of schedules hold no cycles, and each collection visits every tuple that is alive: a third of the
    time of a pass.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
