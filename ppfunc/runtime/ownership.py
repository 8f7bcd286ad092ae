"""Copy results whose memory anything else uses, so that they belong to the caller."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ppfunc.stage.layout import distributed, layout_of, local

from .functorch import transformed


class Owned:
    """Copies a tensor unless it is the only one that uses its memory.

    Args:
        arguments: tensors of the caller, whose memory results must not share.
    """

    def __init__(self, arguments: Iterable[torch.Tensor] = ()) -> None:
        self._taken = {t.untyped_storage().data_ptr() for t in arguments if not transformed(t)}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if (layout := layout_of(tensor)) is not None:
            return distributed(self(local(tensor)), layout)
        if transformed(tensor):
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        # A scalar may be the weight of the microbatch itself, which later steps use again.
        if tensor._is_view() or not whole or address in self._taken or tensor.ndim == 0:
            return tensor.clone()
        self._taken.add(address)
        return tensor
