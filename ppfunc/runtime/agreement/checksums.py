"""Compare tensors by their bits: here, or between ranks by checksums that the device computes."""

import torch
from torch import Tensor

_GOLDEN, _MIX, _LOW = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 2**32 - 1
_PIECE = 2**17  # words that are mixed at a time, while they are in the cache


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Sum the bits of a tensor, 8 bytes at a time, each mixed with its position: int64[] on its device.

    It finds other values and another order, not another shape or dtype.

    References:
        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014, for the constants.
    """
    flat = bits(tensor.detach())
    tail = flat.numel() % 8
    head, rest = flat[: flat.numel() - tail], flat[flat.numel() - tail :]
    words = (head if head.storage_offset() % 8 == 0 else head.clone()).view(torch.int64)
    total = _mixed(torch.cat([rest, rest.new_zeros(8 - tail)]).view(torch.int64), words.numel())
    for start in range(0, words.numel(), _PIECE):
        total += _mixed(words[start : start + _PIECE], start)
    return total


def _mixed(words: Tensor, start: int) -> Tensor:
    """Sum words, each mixed with its position, modulo 2**64."""
    mixed = torch.arange(start + 1, start + 1 + words.numel(), device=words.device).mul_(_GOLDEN).add_(words)
    mixed ^= (mixed >> 32) & _LOW
    mixed *= _MIX
    mixed ^= (mixed >> 32) & _LOW
    return mixed.sum()


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8[bytes]: a view where it is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Compare the bits of two tensors of one shape, dtype and device: bool[] there, which none waits for."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(one.itemsize, torch.int64)
    return (bits(one).view(word) != bits(other).view(word)).any()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and device have the same shape and bits."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))
