"""Carry losses between ranks as texts. Sum them in the order of the stages: all ranks get the same bits."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from ppfunc.stage.device import upload

from ..call.results import shape_of_sum, sum_up
from ..transport.protocols import LossPart


def to_text(losses: torch.Tensor) -> str:
    """Return the bytes of a tensor as hexadecimal digits."""
    losses = losses.detach().cpu().contiguous()
    return ctypes.string_at(losses.data_ptr(), losses.nbytes).hex()


def sum_texts(gathered: Sequence[str], parts: Mapping[int, LossPart]) -> list[str]:
    """Sum the losses of all stages over their microbatches. Return the text of the sum, if any.

    Args:
        gathered: ``stage:losses`` of each stage.
    """
    texts = dict(text.split(":") for text in gathered)
    losses = [_read(texts[str(n)], part.leaf.shape, part.leaf.dtype) for n, part in sorted(parts.items())]
    return [to_text(sum_up(losses, parts))] if losses else []


def read_sum(
    texts: Sequence[str], parts: Mapping[int, LossPart], device: torch.device
) -> torch.Tensor | None:
    """Return on a device the sum whose text :func:`sum_texts` has returned; None without losses."""
    leaves = [part.leaf for part in parts.values()]
    if not leaves:
        return None
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    return upload(_read(texts[0], shape_of_sum(parts), dtype), device)


def _read(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not text:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).view(shape)
