"""Run threads one at a time, in an order and a virtual time that a seed decides."""

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import Any, NamedTuple


class RankResult(NamedTuple):
    """How a function ended: its value, or the exception that it raised."""

    value: Any
    error: BaseException | None


@dataclass(slots=True)
class _Task:
    """A thread that waits until ``ready()``, in vain from ``deadline`` on."""

    function: Callable[[], Any]
    ready: Callable[[], bool] = lambda: True
    deadline: float = inf
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    result: RankResult | None = None


class Scheduler:
    """Owns the threads of a simulation and its clock.

    One thread runs at a time, until it waits. Then the seed chooses among those that are ready and the next
    event; time passes by events, and by deadlines where nothing else can happen.

    Args:
        seed: decides every choice.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0  # seconds
        self.over = False  # whether only threads are left that wait for nothing but this
        self._tasks: list[_Task] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []  # those to come: when, number, what
        self._numbers = count()
        self._finished = threading.Semaphore(0)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[RankResult]:
        """Call every function in a thread of its own, until all have ended."""
        self.over, self._tasks = False, [_Task(function) for function in functions]
        threads = [threading.Thread(target=self._live, args=(task,), daemon=True) for task in self._tasks]
        for thread in threads:
            thread.start()
        self._hand_on()
        self._finished.acquire()
        for thread in threads:
            thread.join()
        results = [task.result for task in self._tasks if task.result is not None]
        self._tasks = []
        return results

    def _live(self, task: _Task) -> None:
        task.turn.acquire()
        try:
            task.result = RankResult(task.function(), None)
        except BaseException as error:
            task.result = RankResult(None, error)
        self._hand_on()

    def wait(self, number: int, ready: Callable[[], bool] = lambda: True, deadline: float = inf) -> None:
        """Let others run until ``ready()``, or until nothing can happen before ``deadline``. Called by thread
        ``number``.

        Raises:
            RuntimeError: there is no such thread, since ``run`` does not run.
        """
        if number >= len(self._tasks):
            raise RuntimeError(
                "got an operation outside a run; make it in a function that Simulated.run calls"
            )
        task = self._tasks[number]
        task.ready, task.deadline = ready, deadline
        self._hand_on()
        task.turn.acquire()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let an event happen in so many seconds."""
        heapq.heappush(self.events, (self.now + seconds, next(self._numbers), event))

    def _hand_on(self) -> None:
        chosen = self._choose()
        (self._finished if chosen is None else chosen.turn).release()

    def _choose(self) -> _Task | None:
        """Choose the thread that runs next; None once all have ended."""
        while alive := [task for task in self._tasks if task.result is None]:
            ready = [task for task in alive if task.ready()]
            first = min(alive, key=lambda task: inf if task in ready else task.deadline)
            deadline = inf if first in ready else first.deadline
            event_is_next = bool(self.events) and self.events[0][0] <= deadline
            if ready or event_is_next:
                chosen = self.random.choice([*ready, *[None] * event_is_next])
                if chosen is not None:
                    return chosen
                self.now, _, event = heapq.heappop(self.events)
                event()
            elif deadline < inf:
                self.now = deadline
                return first
            else:
                assert not self.over
                self.over = True
        return None
