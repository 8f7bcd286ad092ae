"""Answer what the guard asks, by the device that is simulated now: streams, events, what is current."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from .device import Device
from .streams import Mark, Stream

_MOST = 8  # devices of a process
_current: Device | None = None


def use(gpu: Device | None) -> None:
    """Simulate a device from now on; None ends it."""
    global _current
    _current = gpu


def device() -> Device:
    """Return the simulated device of this process."""
    if _current is None:
        raise RuntimeError("no accelerator is simulated here; use the fixture")
    return _current


def index_of(given: Any) -> int:
    if given is None or isinstance(given, int):
        return device().index if given is None or given < 0 else given
    index = torch.device(given).index
    return device().index if index is None else index


def new_stream(index: int) -> Stream:
    return device().new_stream(index)


class _Event:
    """What an event of torch points to."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.times: list[int] = []  # nanoseconds


_events: dict[int, _Event] = {}


def elapsed(start: int, end: int) -> int:
    """Return the nanoseconds between two events, which the host must know to be done."""
    first, second = _events[start], _events[end]
    if not (device().knows(first.mark) and device().knows(second.mark)):
        raise RuntimeError("CUDA error: device not ready: both events must be completed")
    return second.times[0] - first.times[0]


def answers() -> dict[str, Any]:
    """Make the functions that the guard calls."""
    numbers = itertools.count(1)

    def record(number: int, index: int, stream: int) -> int:
        number = number or next(numbers)
        event, there = _events.setdefault(number, _Event()), device().stream(index, stream)
        event.times = times = []
        event.mark = device().issue(there, "event", lambda: times.append(time.perf_counter_ns()))
        return number

    def block(number: int, index: int, stream: int) -> None:
        mark = _events[number].mark
        if mark is not None and not device().omits("wait"):
            device().order(mark, device().stream(index, stream))

    def exchange(index: int, stream: int) -> int:
        if _current is None:
            return 0
        before = _current.current(index).id
        _current.set_current(_current.stream(index, stream))
        return before

    def synchronize_event(number: int, *_: int) -> None:
        if not device().omits("host wait"):
            device().wait("event", _events[number].mark)

    def synchronize_stream(index: int, stream: int, _: int) -> None:
        if not device().omits("host wait"):
            device().wait("stream", device().mark(device().stream(index, stream)))

    return {
        "count": lambda *_: _MOST if _current is None else _current.count,
        "get_device": lambda *_: 0 if _current is None else _current.index,
        "set_device": lambda index, *_: _current and set_device(index),
        "get_stream": lambda index, *_: 0 if _current is None else _current.current(index).id,
        "exchange_stream": lambda index, stream, _: exchange(index, stream),
        "new_stream": lambda index, *_: device().new_stream(index).id,
        "record": record,
        "block": block,
        "query": lambda number, *_: device().poll("event", _events[number].mark),
        "destroy": lambda number, *_: _events.pop(number, None) and 0,
        "elapsed": lambda start, end, _: elapsed(start, end),
        "synchronize_event": synchronize_event,
        "synchronize_stream": synchronize_stream,
        "synchronize_device": lambda index, *_: synchronize(index),
        "query_stream": lambda i, s, _: device().poll("stream", device().mark(device().stream(i, s))),
        "capturing": lambda *_: False,
    }


def set_device(given: Any) -> None:
    device().index = index_of(given)


def synchronize(given: Any = None) -> None:
    gpu = device()
    if not gpu.omits("host wait"):
        gpu.wait("device", *(gpu.mark(stream) for stream in gpu.streams(index_of(given))))
