"""Normalisation in plain arithmetic, because torch differentiates its derivative along a direction wrongly.

The forward derivatives of ``layer_norm`` and, in training, of ``batch_norm`` and ``instance_norm`` take
the mean and the variance of the input for constants when they are differentiated themselves (torch
2.13): gradients through them are wrong, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainNorms(TorchFunctionMode):
    """Within, normalisation is computed in plain arithmetic."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    y = _normalised(input, range(-len(normalized_shape), 0), eps)[0]
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(input.dtype)


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not training:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    y, mean, variance = _normalised(input, [0, *range(2, input.ndim)], eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        running_mean.lerp_(mean.detach().flatten().to(running_mean.dtype), momentum)
        running_var.lerp_((variance.detach() * count / (count - 1)).flatten().to(running_var.dtype), momentum)
    return _scaled(y, weight, bias).to(input.dtype)


def _functional_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not use_input_stats:
        return torch.instance_norm(
            input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
        )
    if running_mean is not None or running_var is not None:
        raise NotImplementedError("instance norm that keeps running statistics has no second derivatives here; set track_running_stats=False")
    return _scaled(_normalised(input, range(2, input.ndim), eps)[0], weight, bias).to(input.dtype)


def _functional_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return _instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps)


def _normalised(x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The input with mean 0 and variance 1 along ``axes``, its mean and its variance; in float32 at least."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = x.mean(tuple(axes), keepdim=True)
    variance = (x - mean).square().mean(tuple(axes), keepdim=True)
    return (x - mean) * (variance + eps).rsqrt(), mean, variance


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Weight and bias along the axis of channels, [b, channel, ...]."""
    shape = (-1, *(1,) * (y.ndim - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


_PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.layer_norm: _layer_norm,
    F.layer_norm: _layer_norm,
    torch.batch_norm: _batch_norm,
    F.batch_norm: _functional_batch_norm,
    torch.instance_norm: _instance_norm,
    F.instance_norm: _functional_instance_norm,
}
