"""Carry losses between ranks as bytes. Sum them in the order of the stages: all ranks get the same bits."""

import ctypes
from collections.abc import Mapping
from functools import reduce

import torch

from ppfunc.stage.device import upload

from ..transport.protocols import LossPart


def to_bytes(losses: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    losses = losses.detach().cpu().contiguous()
    return ctypes.string_at(losses.data_ptr(), losses.nbytes)


def sum_bytes(gathered: Mapping[int, bytes], parts: Mapping[int, LossPart]) -> bytes:
    """Sum the losses of all stages over their microbatches. Return the bytes of the sum."""
    losses = [
        _from_bytes(gathered[stage], part.leaf.shape, part.leaf.dtype)
        for stage, part in sorted(parts.items())
    ]
    return to_bytes(torch.cat(losses).sum(0)) if losses else b""


def sum_of(data: bytes, parts: Mapping[int, LossPart], device: torch.device) -> torch.Tensor | None:
    """Return on a device the sum whose bytes :func:`sum_bytes` has returned; None without losses."""
    leaves = [part.leaf for part in parts.values()]
    if not leaves:
        return None
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    return upload(_from_bytes(data, leaves[0].shape[1:], dtype), device)


def _from_bytes(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not data:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
