"""Make calls that take residuals out of the way between a forward and its backward: their parameters, or all to another device."""

from typing import Any, NamedTuple

import torch

from .buffers import Buffers, Key
from .lowered import LoweredStage
from .transport import Call


class Held(NamedTuple):
    """A view of a parameter among residuals, by the number of the parameter: the tensor itself may be freed meanwhile."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def release_params(low: LoweredStage, key: Key) -> Call:
    """Let go of the parameters among the residuals, so that RESHARD can free them.

    Raises:
        TypeError: the engine keeps something else than tensors.
    """
    model = low.model

    def release(buffers: Buffers) -> None:
        numbers = {t.untyped_storage().data_ptr(): n for n, t in enumerate(buffers.params[model]) if t.numel()}
        saved = _tensors(buffers, key, f"the parameters of stage {model} cannot be freed between forward and backward", "whole parameters")
        places = [numbers.get(t.untyped_storage().data_ptr()) if t.numel() else None for t in saved]
        buffers.residuals[key] = tuple(
            [t if n is None else Held(n, t.shape, t.stride(), t.storage_offset()) for t, n in zip(saved, places, strict=True)]
        )

    return release


def restore_params(low: LoweredStage, key: Key) -> Call:
    """Put the parameters back where :func:`release_params` has let go of them."""
    model = low.model

    def restore(buffers: Buffers) -> None:
        params, saved = buffers.params[model], buffers.residuals[key]
        buffers.residuals[key] = tuple(
            [params[t.number].as_strided(t.shape, t.stride, t.offset) if isinstance(t, Held) else t for t in saved]
        )

    return restore


def move_residuals(low: LoweredStage, key: Key, target: torch.device) -> Call | None:
    """Move residuals to ``target``; parameters, held by reference, stay where they are."""
    if low.device.type == "cpu":
        return None
    model = low.model

    def move(buffers: Buffers) -> None:
        saved = _tensors(buffers, key, f"the residuals of stage {model} cannot be moved", "a schedule without OFFLOAD")
        stay = {t.untyped_storage().data_ptr() for t in buffers.params[model]}
        buffers.residuals[key] = tuple([t if t.untyped_storage().data_ptr() in stay else t.to(target, non_blocking=True) for t in saved])

    return move


def _tensors(buffers: Buffers, key: Key, fault: str, mend: str) -> tuple[Any, ...]:
    """The residuals; TypeError where the engine keeps something else than tensors."""
    saved = buffers.residuals[key]
    if not all(isinstance(t, torch.Tensor) for t in saved):
        raise TypeError(f"{fault}: its engine keeps something else than tensors; use the graph engine without cuda_graphs=True, or {mend}")
    return saved
