"""Operators that write into their arguments without saying so, replaced by those that say it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


HONEST = {aten.native_batch_norm.default: _batch_norm}
"""Decompositions for a trace; the numbers are computed by the same kernels."""

HIDDEN = {aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
"""Operators that have no honest form: a trace with one of them is refused."""
