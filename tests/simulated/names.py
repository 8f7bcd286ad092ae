"""The names of ``torch.cuda`` and ``torch.accelerator`` for a simulated accelerator, while a test runs.

``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` ask the guard; so do the classes of
``torch.cuda`` here.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import cache, partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import guard
from .answers import answers, device, elapsed, index_of, new_stream, set_device, synchronize, use
from .device import Device
from .operators import OWN, Operators

_GENERIC = (  # of torch.accelerator: those that do not ask the guard
    "empty_cache empty_host_cache memory_allocated max_memory_allocated reset_peak_memory_stats"
).split()
_operators: Operators | None = None


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if not given:
            stream = new_stream(index_of(device))
            given = {"stream_id": stream.id, "device_index": stream.device, "device_type": 1}
        return super().__new__(cls, **given)


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end: torch.Event) -> float:
        return elapsed(self.event_id, end.event_id) / 1e6  # that of torch.Event takes no subclass


def _stream(index: int, id: int) -> Stream:
    return Stream(stream_id=id, device_index=index, device_type=1)


def current_stream(given: Any = None) -> Stream:
    stream = device().current(index_of(given))
    return _stream(stream.device, stream.id)


def set_stream(stream: torch.Stream) -> None:
    device().set_current(device().stream(stream.device_index, stream.stream_id))


def _exchange_device(index: int) -> int:
    before = device().index
    if index >= 0:
        device().index = index
    return before


@cache
def install() -> None:
    """Take the place of the device in torch: once, before the first backward of the process."""
    import torch._dynamo.trace_rules

    # Reads the names of torch.cuda once, and would refuse two that are one function.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    guard.install(answers())
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
        "default_stream": lambda given=None: _stream(index_of(given), 0),
        "set_stream": set_stream,
        "synchronize": synchronize,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[gpu.index].manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda given="cuda": generators[index_of(given)].get_state(),
        "set_rng_state": lambda state, given="cuda": generators[index_of(given)].set_state(state) and None,
        "initial_seed": lambda: generators[gpu.index].initial_seed(),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": _nothing,
        "memory_allocated": lambda given=None: gpu.memory.now(index_of(given)),
        "max_memory_allocated": lambda given=None: gpu.memory.peak[index_of(given)],
        "reset_peak_memory_stats": lambda given=None: gpu.memory.reset_peak(index_of(given)),
        "get_device_capability": lambda given=None: (9, 0),
        "get_device_properties": lambda given=None: SimpleNamespace(**properties, uuid=index_of(given)),
        "is_bf16_supported": lambda *_, **__: True,
    }


@contextlib.contextmanager
def simulated(**options: Any) -> Iterator[Device]:
    """Simulate an accelerator, with the options of ``Device``; the names of torch are as before after it."""
    global _operators
    install()
    gpu = Device(**options)
    with contextlib.ExitStack() as stack:
        use(gpu)
        generators = tuple(torch.Generator(f"cuda:{index}") for index in range(gpu.count))
        _operators = Operators(gpu, generators)
        stack.callback(_end)
        names = _cuda(gpu, generators)
        stack.enter_context(mock.patch.multiple(torch.cuda, **names))
        generic = {**names, "empty_host_cache": _nothing}
        known = {name: generic[name] for name in _GENERIC if hasattr(torch.accelerator, name)}
        stack.enter_context(mock.patch.multiple(torch.accelerator, **known))
        resize = partialmethod(_resize, gpu)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        yield gpu


def _end() -> None:
    global _operators
    gc.collect()
    device().close()
    use(None)
    _operators = None
