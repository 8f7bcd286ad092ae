"""Handle devices, mostly accelerators, as torch calls them: streams, events, generators, pinned memory.

``torch.accelerator`` serves every kind of them. What it lacks is in the module of the kind, such as
``torch.cuda``, which is named here alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ._torch import is_wrapped
from .process import process_lock


def available() -> bool:
    """Tell whether there is an accelerator here."""
    return torch.accelerator.is_available()


def kinds() -> tuple[str, ...]:
    """List the kinds of device that compute: the CPU, then the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return which autocast is on, by kind of device."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind)
    )


def accelerates(device: torch.device) -> bool:
    """Tell whether a device runs asynchronously: the host only queues operations on its stream."""
    return device.type not in ("cpu", "meta")


def unique_name(device: torch.device) -> str | None:
    """Return the UUID of a device, unique among all hosts.

    Returns:
        None for a kind of device without UUIDs.
    """
    if not accelerates(device):
        return None
    name = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    return None if name is None else str(name)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current device of this thread."""
    return torch.accelerator.device_index(device.index) if accelerates(device) else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if accelerates(device):
        torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Make a stream; as a context manager it is the current stream of this thread."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread gives work to a device."""
    return torch.accelerator.current_stream(device)


def record_event(device: torch.device, timing: bool = False) -> torch.Event:
    """Record an event on the current stream of a device."""
    event = torch.Event(device=device, enable_timing=timing)
    event.record(current_stream(device))
    return event


def record_sleeping_event(device: torch.device) -> Any:
    """Record an event for which a thread sleeps; while it waits for another kind, it keeps a core busy."""
    with on_device(device):
        event = torch.get_device_module(device).Event(blocking=True)  # of which torch.Event knows nothing
        event.record()
    return event


class SideStreams(dict[torch.device, torch.Stream]):
    """Holds a stream of its own for every device, made when it is first used."""

    def __missing__(self, device: torch.device) -> torch.Stream:
        return self.setdefault(device, torch.Stream(device=device))


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. The host waits only for a copy to the host.

    A tensor on the host is copied to pinned memory first: copies from other memory block the host.
    """
    if tensor.device.type == "cpu" and accelerates(device) and not is_wrapped(tensor):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=accelerates(device))


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to pinned memory. The copy is complete when an event recorded now is done.

    It has no gaps there: one with gaps, such as a part of a larger tensor, would be copied by the host.
    """
    if not accelerates(tensor.device):
        return tensor
    there = torch.empty_like(tensor, device="cpu", pin_memory=True)
    if there.stride() != tensor.stride():
        tensor = torch.empty_like(tensor).copy_(tensor)
    return there.copy_(tensor, non_blocking=True)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if not accelerates(device):
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


_before: dict[torch.device, torch.Tensor] = {}
_preserving = 0


@contextmanager
def preserve_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of the CPU and of ``devices`` when the outermost concurrent caller exits."""
    global _preserving
    with process_lock:
        new = {torch.device("cpu"), *devices} - _before.keys()
        # Counted last: a device whose state cannot be read leaves nothing behind.
        _before.update({device: generator_of(device).get_state() for device in new})
        _preserving += 1
    try:
        yield
    finally:
        with process_lock:
            _preserving -= 1
            if not _preserving:
                states = dict(_before)
                _before.clear()
                for device, state in states.items():
                    generator_of(device).set_state(state)
