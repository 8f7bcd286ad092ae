"""What the simulation needs of torch, part by part: the first that fails tells what of torch has moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from . import guard, names


@cache
def broken() -> str | None:
    """Return what of torch the simulation does not fit, or None. Runs each part once in a process."""
    for name, part in PARTS.items():
        try:
            part()
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return None


def _compiles() -> None:
    guard.build()


def _memory() -> None:
    with names.simulated():
        made = torch.empty(3, 2, device="cuda:1")
        assert made.device == torch.device("cuda", 1), f"it is on {made.device}"
        assert names.device().host_view(made).isnan().all(), "it holds no NaN"


def _operators() -> None:
    with names.simulated():
        a = torch.arange(6.0, device="cuda").view(2, 3)
        assert (a @ a.T + 1)[1].tolist() == [15.0, 51.0], "the numbers differ"


def _streams() -> None:
    with names.simulated() as gpu:
        stream = torch.Stream("cuda")
        with stream:
            assert torch.accelerator.current_stream() == stream, "a stream is not made current"
        stream.wait_stream(torch.accelerator.current_stream())
        assert gpu.orders, "a wait does not reach the simulation"


def _events() -> None:
    with names.simulated():
        first, second = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        first.record()
        second.record()
        second.synchronize()
        assert second.query(), "it was waited for, and is not done"
        assert first.elapsed_time(second) > 0, "no time has passed"


def _autograd() -> None:
    with names.simulated(), torch.cuda.stream(torch.cuda.Stream()):
        here = torch.cuda.current_stream()
        seen = []
        w = torch.ones(3, device="cuda", requires_grad=True)
        loss = (w * 2).sum()
        loss.grad_fn.register_hook(lambda *_: seen.append(torch.cuda.current_stream()))
        loss.backward()
        assert seen == [here], "the backward runs on another stream than the forward"


def _pinned() -> None:
    with names.simulated():
        assert torch.ones(3).pin_memory().is_pinned(), "memory is not pinned"


def _generators() -> None:
    with names.simulated():
        generator = torch.Generator("cuda")
        state = generator.get_state()
        first = torch.rand(3, device="cuda", generator=generator)
        generator.set_state(state)
        assert torch.equal(first, torch.rand(3, device="cuda", generator=generator)), "a draw is not repeated"


PARTS: dict[str, Callable[[], None]] = {
    "the headers of the device guard, the hooks or generators": _compiles,
    "the registry of guards, the hooks, or the fallback of the vacant key": names.install,
    "DLPack of a device": _memory,
    "dispatch of operators": _operators,
    "torch.Stream and torch.accelerator": _streams,
    "torch.Event": _events,
    "threads and streams of autograd": _autograd,
    "pinned memory": _pinned,
    "torch.Generator": _generators,
}
