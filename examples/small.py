"""A small model for the examples of transforms: a residual network in four stages, float64, and its loss
without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

STAGES, MICROBATCHES, BATCH, WIDTH = 4, 8, 4, 16


def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A residual layer: float64[b, d] -> float64[b, d]."""
    return x + torch.tanh(x @ params["w"] + params["b"])


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def parameters(seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """One tree for each stage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / WIDTH**0.5

    return {s: {"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for s in range(STAGES)}


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, float64[m b, d] each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(MICROBATCHES * BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.roll(1, -1).sin()


def model(params: dict[int, dict[str, Tensor]], x: Tensor) -> Tensor:
    """The stages one after the other, without a pipeline."""
    for s in range(STAGES):
        x = stage(params[s], x)
    return x


def total_loss(x: Tensor, targets: Tensor) -> Callable[[dict[int, Any]], Tensor]:
    """The loss of the whole batch as a function of the parameters, without a pipeline."""
    return lambda params: loss_fn(model(params, x), targets)


def disagreement(got: Any, want: Any) -> float:
    """The largest difference of two trees, relative to the largest entry."""
    pairs = list(zip(*map(optree.tree_leaves, (got, want)), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs) / max(b.abs().max().item() for _, b in pairs)
