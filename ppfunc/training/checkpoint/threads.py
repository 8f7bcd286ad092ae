"""Run independent tasks in several threads: hashing and reading release the interpreter's lock."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ppfunc.stage.process import hold_interrupts

T = TypeVar("T")
R = TypeVar("R")

helpers_left = threading.Semaphore(min(os.cpu_count() or 1, 8))  # of the whole process


def in_threads(work: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
    """Run ``work`` on every task, several at a time, and return the results in order.

    ``work`` may call this itself: a large task gets the helpers that others leave. Threads of
    ``concurrent.futures`` do not serve: they end before an asynchronous save that the process waits for.
    """
    results: dict[int, R] = {}
    todo = iter(list(enumerate(tasks)))
    failures: list[BaseException] = []
    helpers: list[threading.Thread] = []

    def run() -> None:
        try:
            for n, task in todo:
                if failures:
                    return
                if n + 1 < len(tasks) and helpers_left.acquire(blocking=False):
                    helper = threading.Thread(target=help_out)
                    helper.start()
                    helpers.append(helper)
                results[n] = work(task)
        except BaseException as error:
            failures.append(error)

    def help_out() -> None:
        run()
        helpers_left.release()

    run()
    with hold_interrupts():  # the caller closes the file, and another gets its descriptor
        for helper in helpers:  # which may hire others meanwhile
            helper.join()
    if failures:
        raise failures[0]
    return [results[n] for n in range(len(tasks))]
