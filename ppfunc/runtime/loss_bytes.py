"""Carry the losses of stages as bytes between ranks, and sum them in the order of the stages, so that every rank has the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import reduce

import torch

from ppfunc.stage import LeafSignature

from .transport import LossPart


def bytes_of(tensor: torch.Tensor, leaf: LeafSignature) -> bytes:
    """The bytes of the losses of a stage, which have this form."""
    assert (tensor.shape, tensor.dtype) == (leaf.shape, leaf.dtype), (tensor.shape, tensor.dtype, leaf)
    return _bytes(tensor)


def summed(gathered: Mapping[int, bytes], parts: Mapping[int, LossPart], device: torch.device) -> bytes:
    """The bytes of the sum over the microbatches of all stages, made on a device; none where there is no loss."""
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
