"""Replace operators that write into their arguments, though their schemas do not say so, by some whose schemas do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload

aten = torch.ops.aten


def _batch_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool, *rest: float
) -> Any:
    """``native_batch_norm``, which updates ``mean`` and ``var`` in training."""
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, training, *rest)
    if training:
        return aten._native_batch_norm_legit.default(x, w, b, mean, var, training, *rest)
    return aten._native_batch_norm_legit_no_training.default(x, w, b, mean, var, *rest)


def _cudnn_batch_norm(x: Tensor, w: Tensor, b: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool, *rest: float) -> Any:
    """``cudnn_batch_norm``, which updates ``mean`` and ``var`` in training, by the kernels of torch."""
    y, *saved = _batch_norm(x, w, b, mean, var, training, *rest)
    return (y, *(saved if training else (w.new_empty(0), w.new_empty(0))), x.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(
    x: Tensor, gy: Tensor, w: Tensor, mean: Tensor | None, var: Tensor | None, m: Tensor, invstd: Tensor, eps: float, _: Tensor
) -> Any:
    """Its gradient, which autograd asks for in training only."""
    return aten.native_batch_norm_backward(gy, x, w, mean, var, m, invstd, True, eps, [True, True, True])


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
"""Functions that stand for operators in a trace. The numbers of cuDNN's are those of other kernels, equal within rounding."""

HIDDEN = {aten.miopen_batch_norm.default}
"""Operators that have no such form: a trace with one of them is refused."""
