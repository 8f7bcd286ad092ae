"""What all threads of a process share: its random generators, seeded for one stage at a time and put back after the steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

alone = threading.RLock()
"""Held by the thread that traces a stage, or runs one that draws: what torch changes for it is the whole process's."""

_before: dict[torch.device, torch.Tensor] = {}
_steps = 0


def generator_of(device: torch.device) -> torch.Generator:
    """What the operators of a device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@contextmanager
def put_back(devices: Iterable[torch.device]) -> Iterator[None]:
    """After this step, or the last of those that run at the same time, the generators are as they were before."""
    global _steps
    with alone:
        _steps += 1
        for device in {torch.device("cpu"), *devices} - _before.keys():
            _before[device] = generator_of(device).get_state()
    try:
        yield
    finally:
        with alone:
            _steps -= 1
            while _before and not _steps:
                device, state = _before.popitem()
                generator_of(device).set_state(state)
