"""Limits of time for tests, which hold on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def busy() -> float:
    """Return how many times longer work may take now than on an idle machine, at least 1."""
    start = time.process_time()
    sum(range(10**6))
    loop = (time.process_time() - start) / 0.02  # an idle machine takes 10 to 20 ms
    return max(1.0, loop) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def caught(
    call: Callable[..., Any], *args: Any, keep: list[Exception] | None = None, **named: Any
) -> tuple[str | None, str, float]:
    """Return the class and text of what a call raises, and the seconds it took; ``keep`` keeps it alive."""
    start = time.perf_counter()
    try:
        call(*args, **named)
    except Exception as error:
        if keep is not None:
            keep.append(error)
        return type(error).__name__, str(error), time.perf_counter() - start
    return None, "", time.perf_counter() - start
