"""Write tensors of the host as bytes, for a store, and read them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

_POISON = 255  # bytes of it are NaN in every floating dtype


def form(tensor: Tensor) -> str:
    """Name dtype and number of elements: what both ends of a message have to agree on."""
    return f"{_name(tensor)}[{tensor.numel()}]"


def forms(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(form, tensors))


def packed(what: str, tensors: Sequence[Tensor]) -> bytes:
    """Write tensors, and what they are for."""
    head = json.dumps([what, [[_name(t), t.numel() * t.itemsize] for t in tensors]])
    return b"\n".join([head.encode(), b"".join(_bytes(t).numpy().tobytes() for t in tensors)])


def unpacked(data: bytes) -> tuple[str, list[Tensor]]:
    """Read what was packed: flat tensors."""
    head, _, body = data.partition(b"\n")
    what, parts = json.loads(head)
    tensors = []
    for name, size in parts:
        part, body = bytearray(body[:size]), body[size:]
        dtype = getattr(torch, name)
        tensors.append(torch.frombuffer(part, dtype=dtype) if size else torch.empty(0, dtype=dtype))
    return what, tensors


def poison(host: Tensor) -> None:
    """Write bytes that nobody has computed."""
    _bytes(host).fill_(_POISON)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(host: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, whose strides of axes of one element say nothing."""
    return host.detach().as_strided((host.numel(),), (1,)).view(torch.uint8)
