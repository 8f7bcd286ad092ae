"""Stages and models that several tests use, and the model in one piece that a pipeline must agree with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Tensor]

# torch's functional all-gather; it has another name since torch 2.12
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that depend on the seed alone, dtype[shape]."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(params: Params, x: Tensor) -> Tensor:
    """A residual perceptron with one hidden layer: [..., d] to the same."""
    return x + F.gelu(x @ params["up"] + params["bias"]) @ params["down"]


def mlp_params(d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    up, down, bias = (normal(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate([(d, 2 * d), (2 * d, d), (2 * d,)]))
    return {"up": up / d**0.5, "down": down / (2 * d) ** 0.5, "bias": bias}


def attention_block(params: Params, x: Tensor, heads: int = 2) -> Tensor:
    """Causal attention and a perceptron with layer norm before: [b, t, d] to the same."""
    b, t, d = x.shape
    h = F.layer_norm(x, (d,), params["g"], params["b"])
    q, k, v = (h @ params["qkv"]).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + F.linear(a, params["o"])
    return x + F.gelu(F.linear(x, params["up"], params["ub"])) @ params["down"]


def attention_params(d: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    shapes = {"g": (d,), "b": (d,), "qkv": (d, 3 * d), "o": (d, d), "up": (2 * d, d), "ub": (2 * d,), "down": (2 * d, d)}
    return {name: normal(*shape, seed=10 * seed + n, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}


def dropout_stage(params: Params, x: Tensor) -> Tensor:
    """A residual layer that drops a quarter: [..., d] to the same."""
    return F.dropout(F.gelu(x @ params["w"]), 0.25) + x


class BatchNormed(nn.Sequential):
    """A layer with running statistics: float64[b, d] to the same."""

    def __init__(self, d: int) -> None:
        super().__init__(nn.Linear(d, d), nn.BatchNorm1d(d), nn.Tanh())
        self.double()


def squared(y: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return (y - target).square().mean()


def reference(
    stages: Sequence[Callable[..., Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    params: Mapping[int, Any],
    batches: Sequence[tuple[Any, Any]],
    weights: Sequence[float] | None = None,
) -> tuple[Tensor, dict[int, Any]]:
    """Loss and gradients of the model in one piece, by plain autograd, one microbatch after the other.

    Args:
        stages: functions ``(params, x) -> y``.
        loss_fn: ``loss(y, target) -> scalar``.
        params: ``{stage: tree}``; floating leaves are differentiated in their own dtype.
        batches: ``(inputs, targets)`` of each microbatch.
        weights: of the losses; ``1 / len(batches)`` each unless given.

    Returns:
        The weighted sum of the losses, and gradients with the structure of ``params``, zeros where there is no dependence.
    """
    weights = weights or [1 / len(batches)] * len(batches)
    leaves, treedef = optree.tree_flatten(dict(params))
    own = [t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in leaves]
    trees = treedef.unflatten(own)
    total = torch.zeros((), dtype=torch.float64)
    for (x, target), weight in zip(batches, weights, strict=True):
        for n, stage in enumerate(stages):
            x = stage(trees[n], x)
        total = total + weight * loss_fn(x, target)
    wanted = [t for t in own if t.requires_grad]
    made = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    return total.detach(), treedef.unflatten(next(made) if t.requires_grad else torch.zeros_like(t) for t in own)
