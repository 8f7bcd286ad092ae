"""Count what a process does with NCCL: communicators that live, and what torch or NCCL may not survive."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Any

from .clocks import caller_place


class Census:
    """What a process has done with NCCL.

    Args:
        abort_takes: seconds of an abort.
    """

    def __init__(self, abort_takes: float = 0.0) -> None:
        self.abort_takes = abort_takes
        self.communicators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = 0
        self.dropped: list[str] = []
        self.faults: list[str] = []

    def alive(self) -> list[str]:
        """List communicators that have connected and were not ended; those that were dropped, too."""
        return self.dropped + sorted(str(one) for one in self.communicators if one.alive)

    def fault(self, text: str) -> None:
        """Note what torch, or NCCL, does not survive for certain, with its place in ppfunc."""
        self.faults.append(f"{text} ({caller_place() or 'outside of ppfunc'})")


current = Census()


def new(abort_takes: float = 0.0) -> Census:
    """Begin to count anew."""
    global current
    current = Census(abort_takes)
    return current


@atexit.register
def _report_at_exit() -> None:
    if alive := current.alive():
        print(f"simulated NCCL: communicators alive at exit: {', '.join(alive)}", file=sys.stderr, flush=True)
