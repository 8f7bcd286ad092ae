"""Take residuals out of the way between a forward and its backward: their parameters, or all to another
device, or all but the inputs, from which they are computed again.

The functions are calls of a program once all arguments but the buffers are bound.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ppfunc.stage._torch import address
from ppfunc.stage.device import SideStreams, accelerates, current_stream, download, record_event, upload

from ..lowering.lowered import LoweredStage
from ..ports.protocols import Call
from ..values.buffers import Buffers, Key
from .calls import input_tags


class Held(NamedTuple):
    """Name a view of a parameter among residuals, so that the parameter itself may be freed meanwhile."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def release_params(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Drop the parameters among the residuals, so that RESHARD can free them.

    Raises:
        TypeError: the engine keeps other objects than tensors.
    """
    params = buffers.params[low.model_stage]
    numbers = {address(t): n for n, t in enumerate(params) if t.numel()}
    fault = f"the parameters of stage {low.model_stage} cannot be freed between forward and backward"
    saved = _tensors(buffers, key, fault, "whole parameters")
    places = [numbers.get(address(t)) if isinstance(t, torch.Tensor) and t.numel() else None for t in saved]
    buffers.residuals[key] = tuple(
        [
            t if n is None else Held(n, t.shape, t.stride(), t.storage_offset())
            for t, n in zip(saved, places, strict=True)
        ]
    )


def restore_params(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Put the parameters back where :func:`release_params` has dropped them."""
    params, saved = buffers.params[low.model_stage], buffers.residuals[key]
    buffers.residuals[key] = tuple(
        [
            params[t.number].as_strided(t.shape, t.stride, t.offset) if isinstance(t, Held) else t
            for t in saved
        ]
    )


class Moving(NamedTuple):
    """Hold residuals on their way to another device.

    Args:
        resting: all of them, with None for those that have moved.
        moving: copies of those that move, by their place in ``resting``.
        done: the event after which the copies are complete.
    """

    resting: tuple[Any, ...]
    moving: dict[int, torch.Tensor]
    done: torch.Event


def begin_offload(low: LoweredStage, key: Key, streams: SideStreams, buffers: Buffers) -> None:
    """Begin to copy residuals to the host while the device computes; :func:`offload` waits for the copies.

    Parameters, held by reference, stay where they are, and so do residuals on the host.
    """
    fault = f"the residuals of stage {low.model_stage} cannot be moved"
    saved = _tensors(buffers, key, fault, "a schedule without OFFLOAD")
    device, beside = low.device, streams[low.device]
    stay = {address(t) for t in buffers.params[low.model_stage]}
    moving = {
        n: t
        for n, t in enumerate(saved)
        if isinstance(t, torch.Tensor) and accelerates(t.device) and address(t) not in stay
    }
    beside.wait_stream(current_stream(device))
    with beside:
        copies = {n: download(t) for n, t in moving.items()}
        done = record_event(device)
    buffers.residuals[key] = Moving(saved, copies, done)


def offload(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Let the device wait for the copies on the host, and free what they were made of."""
    saved, copies, done = buffers.residuals[key]
    done.wait(current_stream(low.device))
    resting = tuple([None if n in copies else t for n, t in enumerate(saved)])
    buffers.residuals[key] = Moving(resting, copies, done)


def fetch(low: LoweredStage, key: Key, streams: SideStreams, buffers: Buffers) -> None:
    """Begin to move residuals back; :func:`await_residuals` waits for them."""
    (resting, moving, _), device, beside = buffers.residuals[key], low.device, streams[low.device]
    beside.wait_stream(current_stream(device))
    with beside:
        back = {n: upload(t, device) for n, t in moving.items()}
        buffers.residuals[key] = Moving(resting, back, record_event(device))


def await_residuals(low: LoweredStage, key: Key, buffers: Buffers) -> None:
    """Let the device wait for residuals that are on their way back."""
    (resting, moving, done), here = buffers.residuals[key], current_stream(low.device)
    done.wait(here)
    for t in moving.values():
        t.record_stream(here)
    buffers.residuals[key] = tuple([moving.get(n, t) for n, t in enumerate(resting)])


def checkpointed(low: LoweredStage, key: Key, forward: Call, buffers: Buffers) -> None:
    """Keep the inputs and the state of a forward in place of its residuals, for :func:`recompute`."""
    x = tuple([t for tag in input_tags(low, key) for t in buffers.values[tag]])
    inputs = x + buffers.state.get(low.model_stage, ())
    forward(buffers)
    buffers.residuals[key] = inputs


def recompute(
    low: LoweredStage, key: Key, forward: Callable[[], Callable[..., Any]], buffers: Buffers
) -> None:
    """Run a forward again from what :func:`checkpointed` has kept; only its residuals are new.

    Args:
        forward: gets the function of the program.
    """
    count = sum(len(e.leaves) for e in low.sources)
    inputs, extras = buffers.residuals.pop(key), buffers.extras.get(key, ())
    arguments = buffers.params[low.model_stage], inputs[:count], extras + inputs[count:]
    buffers.residuals[key] = forward()(*arguments)[1]


def _tensors(buffers: Buffers, key: Key, fault: str, mend: str) -> tuple[Any, ...]:
    """Return the residuals; raise TypeError unless all are tensors, or views of parameters."""
    saved = buffers.residuals[key]
    if not all(isinstance(t, torch.Tensor | Held) for t in saved):
        raise TypeError(
            f"{fault}: its engine keeps values other than tensors; use the graph engine, or {mend}"
        )
    return saved
