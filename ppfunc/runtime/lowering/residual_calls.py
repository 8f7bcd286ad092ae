"""Make calls that take residuals out of the way between a forward and its backward: their parameters, or all
to another device.
"""

from typing import Any, NamedTuple

import torch

from ..execution.buffers import Buffers, Key
from ..transport.protocols import Call
from .lowered import LoweredStage


class Held(NamedTuple):
    """View of a parameter among residuals, by its number: the parameter itself may be freed meanwhile."""

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
        numbers = {
            t.untyped_storage().data_ptr(): n for n, t in enumerate(buffers.params[model_stage]) if t.numel()
        }
        saved = _tensors(
            buffers,
            key,
            f"the parameters of stage {model_stage} cannot be freed between forward and backward",
            "whole parameters",
        )
        places = [numbers.get(t.untyped_storage().data_ptr()) if t.numel() else None for t in saved]
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


def move_residuals(low: LoweredStage, key: Key, target: torch.device) -> Call | None:
    """Move residuals to ``target``; parameters, held by reference, stay where they are."""
    if low.device.type == "cpu":
        return None
    model_stage = low.model_stage

    def move(buffers: Buffers) -> None:
        saved = _tensors(
            buffers,
            key,
            f"the residuals of stage {model_stage} cannot be moved",
            "a schedule without OFFLOAD",
        )
        stay = {t.untyped_storage().data_ptr() for t in buffers.params[model_stage]}
        buffers.residuals[key] = tuple(
            [t if t.untyped_storage().data_ptr() in stay else t.to(target, non_blocking=True) for t in saved]
        )

    return move


def _tensors(buffers: Buffers, key: Key, fault: str, mend: str) -> tuple[Any, ...]:
    """Return the residuals; raise TypeError unless all are tensors."""
    saved = buffers.residuals[key]
    if not all(isinstance(t, torch.Tensor) for t in saved):
        raise TypeError(
            f"{fault}: its engine keeps something else than tensors; use the graph engine without"
            f" cuda_graphs=True, or {mend}"
        )
    return saved
