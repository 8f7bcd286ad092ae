"""The streams of all simulated devices, and which are current in a thread."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .clocks import Clock


class Task(NamedTuple):
    """An operation that is queued."""

    number: int
    what: str
    run: Callable[[], Any]
    ready: Callable[[], bool] | None


class Stream:
    """A queue of operations of a device, run in order."""

    def __init__(self, device: int, id: int, weight: float) -> None:
        self.device, self.id, self.weight = device, id, weight
        self.tasks: deque[Task] = deque()
        self.issued = self.done = 0  # numbers of operations
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return f"stream {self.id} of cuda:{self.device}"


class Mark(NamedTuple):
    """What was issued on a stream until some moment."""

    stream: Stream
    number: int
    clock: Clock


class Streams:
    """Makes streams, and keeps for each thread its current device and the current stream of each.

    Args:
        count: of devices.
        seed: of how late each stream is.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.random = count, random.Random(seed)
        self.lock = threading.RLock()
        self._streams: dict[tuple[int, int], Stream] = {}
        self._local = threading.local()

    def stream(self, device: int, id: int) -> Stream:
        with self.lock:
            if (device, id) not in self._streams:
                # Far from equal, so that some streams are late by much.
                self._streams[device, id] = Stream(device, id, self.random.random() ** 4 + 1e-3)
            return self._streams[device, id]

    def new_stream(self, device: int) -> Stream:
        with self.lock:
            return self.stream(device, 1 + max((id for _, id in self._streams), default=0))

    def streams(self, device: int) -> list[Stream]:
        with self.lock:
            return [s for s in self._streams.values() if s.device == device]

    @property
    def index(self) -> int:
        """The current device of this thread."""
        return getattr(self._local, "index", 0)

    @index.setter
    def index(self, index: int) -> None:
        if not 0 <= index < self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {self.count}")
        self._local.index = index

    def current(self, device: int | None = None) -> Stream:
        """Return the current stream of this thread."""
        index = self.index if device is None or device < 0 else device
        return self._current().get(index) or self.stream(index, 0)

    def set_current(self, stream: Stream) -> None:
        self._current()[stream.device] = stream

    def _current(self) -> dict[int, Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        return self._local.streams
