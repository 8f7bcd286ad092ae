"""Do independent work in several threads of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ppfunc.stage.interrupts import hold_interrupts, let_interrupts

T = TypeVar("T")
R = TypeVar("R")

_MOST = 8  # helpers at a time, in the whole process


class _Helper(threading.Thread):
    """A thread of :func:`in_threads`."""


def in_threads(work: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
    """Do ``work`` for every task, several at a time: hashing and reading leave Python to others.

    ``work`` may call this, too: a large task gets helpers as soon as those around it leave some free.

    Threads are its own: those of ``concurrent.futures`` end before an asynchronous save that the process still waits for.
    """
    if len(tasks) < 2:
        return [work(task) for task in tasks]
    found: dict[int, R] = {}
    left = iter(list(enumerate(tasks)))
    failures: list[BaseException] = []
    helpers: list[_Helper] = []

    def run() -> None:
        try:
            for n, task in left:
                if failures:
                    return
                if n + 1 < len(tasks) and _may_hire():
                    with hold_interrupts():
                        helper = _Helper(target=run)
                        helper.start()
                        helpers.append(helper)
                found[n] = work(task)
        except BaseException as error:
            failures.append(error)

    # A second interrupt waits, too, until all threads have ended: the caller closes the file, and another gets its descriptor.
    with hold_interrupts():
        try:
            with let_interrupts():
                run()
        finally:
            while helpers:
                helpers.pop().join()
    if failures:
        raise failures[0]
    return [found[n] for n in range(len(tasks))]


def _may_hire() -> bool:
    """Tell whether another helper may have a processor: as many as there are, since the thread that is helped may be waiting."""
    return sum(isinstance(thread, _Helper) for thread in threading.enumerate()) < min(os.cpu_count() or 1, _MOST)
