"""The names of ``torch.cuda`` and ``torch.accelerator`` for a simulated accelerator, while a test runs.

``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` ask the guard; so do the classes of
``torch.cuda`` here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from functools import cache, partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import guard
from .device import Device, Mark
from .graphs import Graph, Pool
from .operators import OWN, Operators

_MOST = 8  # devices of a process
_GENERIC = (  # of torch.accelerator: those that do not ask the guard
    "Graph empty_cache empty_host_cache memory_allocated max_memory_allocated reset_peak_memory_stats"
).split()
_current: Device | None = None
_operators: Operators | None = None


def device() -> Device:
    """Return the simulated device of this process."""
    if _current is None:
        raise RuntimeError("no accelerator is simulated here; use the fixture")
    return _current


def _index(given: Any) -> int:
    if given is None or isinstance(given, int):
        return device().index if given is None or given < 0 else given
    index = torch.device(given).index
    return device().index if index is None else index


class _Event:
    """What an event of torch points to."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.times: list[int] = []  # nanoseconds


_events: dict[int, _Event] = {}


def _elapsed(start: int, end: int) -> int:
    """Return the nanoseconds between two events."""
    if not (_events[start].times and _events[end].times):
        raise RuntimeError("CUDA error: device not ready: both events must be completed")
    return _events[end].times[0] - _events[start].times[0]


def _answers() -> dict[str, Any]:
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
        "elapsed": lambda start, end, _: _elapsed(start, end),
        "synchronize_event": synchronize_event,
        "synchronize_stream": synchronize_stream,
        "synchronize_device": lambda index, *_: synchronize(index),
        "query_stream": lambda i, s, _: device().poll("stream", device().mark(device().stream(i, s))),
        "capturing": lambda i, s, _: _current is not None and _current.stream(i, s).graph is not None,
    }


def set_device(given: Any) -> None:
    device().index = _index(given)


def synchronize(given: Any = None) -> None:
    gpu = device()
    if not gpu.omits("host wait"):
        gpu.wait("device", *(gpu.mark(stream) for stream in gpu.streams(_index(given))))


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if not given:
            index = _index(device)
            given = {"stream_id": _current.new_stream(index).id, "device_index": index, "device_type": 1}
        return super().__new__(cls, **given)


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end: torch.Event) -> float:
        return _elapsed(self.event_id, end.event_id) / 1e6  # that of torch.Event takes no subclass


def _stream(index: int, id: int) -> Stream:
    return Stream(stream_id=id, device_index=index, device_type=1)


def current_stream(given: Any = None) -> Stream:
    stream = device().current(_index(given))
    return _stream(stream.device, stream.id)


def set_stream(stream: torch.Stream) -> None:
    device().set_current(device().stream(stream.device_index, stream.stream_id))


def _exchange_device(index: int) -> int:
    before = device().index
    if index >= 0:
        device().index = index
    return before


_pools: dict[tuple[int, int], Pool] = {}


def pool_handle() -> tuple[int, int]:
    handle = 0, len(_pools) + 1
    _pools[handle] = Pool()
    return handle


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Graph | None = None
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._pool = pool or pool_handle()
        self._graph = Graph(device(), _pools[self._pool], capture_error_mode)
        self._graph.begin()

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return self._pool


class AcceleratorGraph(CUDAGraph):
    """``torch.accelerator.Graph``."""

    def __init__(
        self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default"
    ) -> None:
        super().__init__(keep_graph)
        self.graph_pool = pool
        self.capture_error_mode = "global" if capture_error_mode == "default" else capture_error_mode

    def capture_begin(self) -> None:
        super().capture_begin(self.graph_pool, self.capture_error_mode)

    def __enter__(self) -> None:
        synchronize()
        self.capture_begin()

    def __exit__(self, *exception: Any) -> None:
        self.capture_end()


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
) -> Iterator[None]:
    """``torch.cuda.graph``."""
    synchronize()
    with torch.cuda.stream(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


@cache
def install() -> None:
    """Take the place of the device in torch: once, before the first backward of the process."""
    import torch._dynamo.trace_rules

    # Reads the names of torch.cuda once, and would refuse two that are one function.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    guard.install(_answers())
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_serve, "CUDA")
    for name in OWN:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        own.impl(name, lambda *args, _op=op, **kwargs: _serve(_op, *args, **kwargs), "CUDA")
    _libraries.extend((every, own))


_libraries: list[Any] = []


def _serve(op: Any, *args: Any, **kwargs: Any) -> Any:
    device()
    return _operators(op, *args, **kwargs)


def _resize(storage: torch.UntypedStorage, gpu: Device, size: int) -> None:
    gpu.memory.resize(storage, size)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _cuda(gpu: Device, generators: tuple[torch.Generator, ...]) -> dict[str, Any]:
    """Make the names of ``torch.cuda``."""
    properties = {
        "name": "simulated",
        "total_memory": 2**34,
        "multi_processor_count": 1,
        "major": 9,
        "minor": 0,
    }

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_is_compiled": lambda: True,
        "device_count": lambda: gpu.count,
        "current_device": lambda: gpu.index,
        "set_device": set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda given=None: _stream(_index(given), 0),
        "set_stream": set_stream,
        "synchronize": synchronize,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[gpu.index].manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda given="cuda": generators[_index(given)].get_state(),
        "set_rng_state": lambda state, given="cuda": generators[_index(given)].set_state(state) and None,
        "initial_seed": lambda: generators[gpu.index].initial_seed(),
        "graph_pool_handle": pool_handle,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "is_current_stream_capturing": lambda: gpu.current().graph is not None,
        "empty_cache": _nothing,
        "memory_allocated": lambda given=None: gpu.memory.now(_index(given)),
        "max_memory_allocated": lambda given=None: gpu.memory.peak[_index(given)],
        "reset_peak_memory_stats": lambda given=None: gpu.memory.reset_peak(_index(given)),
        "get_device_capability": lambda given=None: (9, 0),
        "get_device_properties": lambda given=None: SimpleNamespace(**properties, uuid=_index(given)),
        "is_bf16_supported": lambda *_, **__: True,
    }


@contextlib.contextmanager
def simulated(**options: Any) -> Iterator[Device]:
    """Simulate an accelerator, with the options of ``Device``; the names of torch are as before after it."""
    global _current, _operators
    install()
    gpu = Device(**options)
    with contextlib.ExitStack() as stack:
        _current = gpu
        generators = tuple(torch.Generator(f"cuda:{index}") for index in range(gpu.count))
        _operators = Operators(gpu, generators)
        stack.callback(_end)
        names = _cuda(gpu, generators)
        stack.enter_context(mock.patch.multiple(torch.cuda, **names))
        generic = {**names, "Graph": AcceleratorGraph, "empty_host_cache": _nothing}
        known = {name: generic[name] for name in _GENERIC if hasattr(torch.accelerator, name)}
        stack.enter_context(mock.patch.multiple(torch.accelerator, **known))
        resize = partialmethod(_resize, gpu)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        yield gpu


def _end() -> None:
    global _current, _operators
    gc.collect()
    _current.close()
    _current = _operators = None
