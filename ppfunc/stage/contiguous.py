"""Bring tensors into the form in which they cross a boundary: contiguous, without lazy conjugation, waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._torch import awaited


def contiguous(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """The tensors as they would arrive over a wire: in process and between processes give the same bits.

    Args:
        tensors: any tensors; ``None``, the absence of a gradient, stays. Results of functional collectives are waited for.

    >>> contiguous([torch.zeros(2, 3).T])[0].stride()
    (2, 1)
    """
    return tuple(None if t is None else awaited(t).resolve_conj().resolve_neg().contiguous() for t in tensors)
