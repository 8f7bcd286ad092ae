"""Seed the random generators of the process for one stage at a time, and restore them after the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ppfunc.stage.process import process_lock

_before: dict[torch.device, torch.Tensor] = {}
_steps = 0


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def preserve_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of the CPU and of ``devices`` when the outermost concurrent step exits."""
    global _steps
    with process_lock:
        _steps += 1
        for device in {torch.device("cpu"), *devices} - _before.keys():
            _before[device] = generator_of(device).get_state()
    try:
        yield
    finally:
        with process_lock:
            _steps -= 1
            while _before and not _steps:
                device, state = _before.popitem()
                generator_of(device).set_state(state)
