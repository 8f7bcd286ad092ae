"""Compute normalisation by torch's decompositions.

The forward derivatives of ``layer_norm`` and, in training, of ``batch_norm`` and ``instance_norm`` take the
mean and the variance of the input for constants when they are differentiated themselves (torch 2.13):
gradients through them are wrong, without an error. Those of their decompositions are exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange

from .._torch import DECOMPOSITIONS, require_batch, require_spatial

_LAYER = DECOMPOSITIONS[torch.ops.aten.native_layer_norm.default]
_BATCH = DECOMPOSITIONS[torch.ops.aten._native_batch_norm_legit.no_stats]


class DecomposedNorms(torch.overrides.TorchFunctionMode):
    """Compute normalisation by decompositions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _DECOMPOSED.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    return _LAYER(input, list(normalized_shape), weight, bias, eps)[0]


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    require_batch(input.size())
    if running_mean is not None or running_var is not None:
        # For its effect on the running statistics, which have no derivative.
        F.batch_norm(input.detach(), running_mean, running_var, None, None, training, momentum, eps)
    return _BATCH(input, weight, bias, training, momentum, eps)[0]


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if running_mean is not None or running_var is not None:
        raise NotImplementedError(
            "instance norm with running statistics has no second derivatives here; set"
            " track_running_stats=False"
        )
    require_spatial(input.size())
    b = len(input)
    scale, shift = (None if t is None else t.repeat(b) for t in (weight, bias))
    y = _BATCH(rearrange(input, "b c ... -> 1 (b c) ..."), scale, shift, True, momentum, eps)[0]
    return rearrange(y, "1 (b c) ... -> b c ...", b=b)


_DECOMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.layer_norm: _layer_norm,
    F.layer_norm: _layer_norm,
    torch.batch_norm: lambda x, weight, bias, mean, var, *rest: _batch_norm(
        x, mean, var, weight, bias, *rest[:3]
    ),
    F.batch_norm: _batch_norm,
    torch.instance_norm: lambda x, weight, bias, mean, var, *rest: _instance_norm(
        x, mean, var, weight, bias, *rest[:3]
    ),
    F.instance_norm: _instance_norm,
}
