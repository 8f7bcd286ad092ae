"""Handle state of torch that is no argument: random generators, autocast and transforms around a step."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ppfunc.stage._torch import innermost_transform, is_wrapped, unwrapped
from ppfunc.stage.device import generator_of, kinds
from ppfunc.stage.process import process_lock

_before: dict[torch.device, torch.Tensor] = {}
_steps = 0


@contextmanager
def preserve_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of the CPU and of ``devices`` when the outermost concurrent step exits."""
    global _steps
    with process_lock:
        new = {torch.device("cpu"), *devices} - _before.keys()
        # Counted last: a device whose state cannot be read leaves nothing behind.
        _before.update({device: generator_of(device).get_state() for device in new})
        _steps += 1
    try:
        yield
    finally:
        with process_lock:
            _steps -= 1
            if not _steps:
                states = dict(_before)
                _before.clear()
                for device, state in states.items():
                    generator_of(device).set_state(state)


def autocast() -> tuple[Hashable, ...]:
    """Return which autocast is on, by kind of device."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind)
    )


def transforming() -> bool:
    """Tell whether a transform of torch.func is at work.

    >>> torch.func.vmap(lambda x: x + transforming())(torch.zeros(1))
    tensor([1.])
    """
    return innermost_transform() is not None


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor without the transforms that wrap it, with all rows where one maps it.

    >>> torch.func.vmap(lambda x: x + values(x).sum())(torch.ones(2))
    tensor([3., 3.])
    """
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor
