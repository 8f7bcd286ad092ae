"""Carry the losses of stages as bytes between ranks, and sum them in the order of the stages, so that every rank has the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import reduce

import torch

from .transport import LossPart


def bytes_of(losses: torch.Tensor, stage: int, parts: Mapping[int, LossPart]) -> bytes:
    """The bytes of the losses of a stage; of their sum where no other stage has any, for which the others need not wait."""
    leaf = parts[stage].leaf
    assert (losses.shape, losses.dtype) == (leaf.shape, leaf.dtype), (losses.shape, losses.dtype, leaf)
    return _bytes(losses.sum(0) if len(parts) == 1 else losses)


def size_of(stage: int, parts: Mapping[int, LossPart]) -> int:
    """How many bytes :func:`bytes_of` gives for a stage."""
    leaf = parts[stage].leaf
    return leaf.nbytes // leaf.shape[0] if len(parts) == 1 else leaf.nbytes


def summed(gathered: Mapping[int, bytes], parts: Mapping[int, LossPart], device: torch.device) -> bytes:
    """The bytes of the sum over the microbatches of all stages, made on a device; none where there is no loss."""
    if len(parts) == 1:
        return gathered[min(parts)]
    losses = [_tensor(gathered[stage], part.leaf.shape, part.leaf.dtype) for stage, part in sorted(parts.items())]
    return _bytes(torch.cat(losses).to(device).sum(0)) if losses else b""


def sum_from(data: bytes, parts: Mapping[int, LossPart], device: torch.device) -> torch.Tensor | None:
    """The sum whose bytes a rank has made by :func:`summed`, on a device; None where there is no loss."""
    leaves = [part.leaf for part in parts.values()]
    return _tensor(data, leaves[0].shape[1:], reduce(torch.promote_types, (leaf.dtype for leaf in leaves))).to(device) if leaves else None


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _tensor(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")
