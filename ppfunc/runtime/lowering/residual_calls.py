"""Make calls that take residuals out of the way between a forward and its backward: their parameters, or all
to another device, or all but the inputs, from which they are computed again.
"""

from typing import Any, NamedTuple

import torch

from ppfunc.stage._torch import address
from ppfunc.stage.device import SideStreams, accelerates, current_stream, download, record_event, upload
from ppfunc.stage.program import FlatProgram, LossResiduals

from ..execution.buffers import Buffers, Key
from ..transport.protocols import Call
from .calls import fastest, input_tags
from .lowered import LoweredStage


class Held(NamedTuple):
    """Name a view of a parameter among residuals, so that the parameter itself may be freed meanwhile."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def release_params(low: LoweredStage, key: Key) -> Call:
    """Drop the parameters among the residuals, so that RESHARD can free them.

    Raises:
        TypeError: the engine keeps other objects than tensors.
    """
    model_stage = low.model_stage

    def release(buffers: Buffers) -> None:
        numbers = {address(t): n for n, t in enumerate(buffers.params[model_stage]) if t.numel()}
        saved = _tensors(
            buffers,
            key,
            f"the parameters of stage {model_stage} cannot be freed between forward and backward",
            "whole parameters",
        )
        places = [
            numbers.get(address(t)) if isinstance(t, torch.Tensor) and t.numel() else None for t in saved
        ]
        buffers.residuals[key] = tuple(
            [
                t if n is None else Held(n, t.shape, t.stride(), t.storage_offset())
                for t, n in zip(saved, places, strict=True)
            ]
        )

    return release


def restore_params(low: LoweredStage, key: Key) -> Call:
    """Put the parameters back where :func:`release_params` has dropped them."""
    model_stage = low.model_stage

    def restore(buffers: Buffers) -> None:
        params, saved = buffers.params[model_stage], buffers.residuals[key]
        buffers.residuals[key] = tuple(
            [
                params[t.number].as_strided(t.shape, t.stride, t.offset) if isinstance(t, Held) else t
                for t in saved
            ]
        )

    return restore


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


def begin_offload(low: LoweredStage, key: Key, streams: SideStreams) -> Call:
    """Begin to copy residuals to the host while the device computes; :func:`offload` waits for the copies.

    Parameters, held by reference, stay where they are, and so do residuals on the host.
    """
    model_stage, device = low.model_stage, low.device
    fault, mend = f"the residuals of stage {model_stage} cannot be moved", "a schedule without OFFLOAD"

    def begin(buffers: Buffers) -> None:
        saved, beside = _tensors(buffers, key, fault, mend), streams[device]
        stay = {address(t) for t in buffers.params[model_stage]}
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

    return begin


def offload(low: LoweredStage, key: Key) -> Call:
    """Let the device wait for the copies on the host, and free what they were made of."""
    device = low.device

    def run_offload(buffers: Buffers) -> None:
        saved, copies, done = buffers.residuals[key]
        done.wait(current_stream(device))
        resting = tuple([None if n in copies else t for n, t in enumerate(saved)])
        buffers.residuals[key] = Moving(resting, copies, done)

    return run_offload


def fetch(low: LoweredStage, key: Key, streams: SideStreams) -> Call:
    """Begin to move residuals back; :func:`await_residuals` waits for them."""
    device = low.device

    def run_fetch(buffers: Buffers) -> None:
        (resting, moving, _), beside = buffers.residuals[key], streams[device]
        beside.wait_stream(current_stream(device))
        with beside:
            back = {n: upload(t, device) for n, t in moving.items()}
            buffers.residuals[key] = Moving(resting, back, record_event(device))

    return run_fetch


def await_residuals(low: LoweredStage, key: Key) -> Call:
    """Let the device wait for residuals that are on their way back."""
    device = low.device

    def run_await(buffers: Buffers) -> None:
        (resting, moving, done), here = buffers.residuals[key], current_stream(device)
        done.wait(here)
        for t in moving.values():
            t.record_stream(here)
        buffers.residuals[key] = tuple([moving.get(n, t) for n, t in enumerate(resting)])

    return run_await


def checkpointed(low: LoweredStage, key: Key, forward: Call) -> Call:
    """Keep the inputs and the state of a forward in place of its residuals, for :func:`recompute`."""
    model_stage, tags = low.model_stage, input_tags(low, key)

    def run_checkpointed(buffers: Buffers) -> None:
        x = tuple([t for tag in tags for t in buffers.values[tag]])
        inputs = x + buffers.state.get(model_stage, ())
        forward(buffers)
        buffers.residuals[key] = inputs

    return run_checkpointed


def recompute(low: LoweredStage, program: FlatProgram, key: Key) -> Call:
    """Run a forward again from what :func:`checkpointed` has kept; only its residuals are new."""
    model_stage, function = low.model_stage, fastest(program.forward)
    count = sum(len(e.leaves) for e in low.sources)

    def run_recompute(buffers: Buffers) -> None:
        inputs, extras = buffers.residuals.pop(key), buffers.extras.get(key, ())
        arguments = buffers.params[model_stage], inputs[:count], extras + inputs[count:]
        buffers.residuals[key] = function()(*arguments)[1]

    return run_recompute


def _tensors(buffers: Buffers, key: Key, fault: str, mend: str) -> tuple[Any, ...]:
    """Return the residuals; raise TypeError unless all are tensors, or views of parameters."""
    saved = buffers.residuals[key]
    if not all(isinstance(t, torch.Tensor | Held | LossResiduals) for t in saved):
        raise TypeError(
            f"{fault}: its engine keeps values other than tensors; use the graph engine without"
            f" cuda_graphs=True, or {mend}"
        )
    return saved
