"""Limits of time for tests, which hold on a busy machine."""

from __future__ import annotations

import os
import time


def busy() -> float:
    """Return how many times longer work may take now than on an idle machine, at least 1."""
    start = time.process_time()
    sum(range(10**6))
    loop = (time.process_time() - start) / 0.02  # an idle machine takes 10 to 20 ms
    return max(1.0, loop) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
