"""Stages and models that several tests use, and the model in one piece that a pipeline must agree with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

import ppfunc as pp
from ppfunc.schedule import Schedule
from ppfunc.stage import Signature
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves

Params = dict[str, Tensor]

# torch's functional all-gather; it has another name since torch 2.12
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that depend on the seed alone, dtype[shape]."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def new_trainer(
    stages: Any,
    loss_fn: Any,
    schedule: Any,
    optimizer: Any,
    mesh: Any = None,
    *,
    axes: Any = None,
    transport: Any = None,
    clip: float | None = None,
    norm_type: float | None = None,
    scale: Any = None,
    precision: Any = None,
    shard: str = "none",
    **options: Any,
) -> pp.Trainer:
    """Make a trainer of options by name, as parameters of tests.

    Args:
        mesh, axes, shard: of a transport, which the trainer closes; without data ranks nothing is cut.
        clip, norm_type: of a chain with the optimizer.
        scale: of the precision.
    """
    if clip is not None or norm_type is not None:
        by = pp.optim.clip_by_global_norm(math.inf if clip is None else clip, norm_type or 2.0)
        optimizer = pp.optim.chain(by, optimizer)
    if scale is not None:
        precision = replace(precision or pp.Precision(), scale=scale)
    made = None
    if mesh is not None or axes is not None:
        cut = shard if getattr(axes, "data", None) else "none"
        transport = made = pp.P2P(mesh=mesh, axes=axes, shard=cut)
    try:
        return pp.Trainer(stages, loss_fn, schedule, optimizer, transport, precision=precision, **options)
    except BaseException:
        if made is not None:
            made.close()
        raise


def remembered(engine: Any) -> Any:
    """An engine that remembers the programs of a process: for tests of what goes on between ranks, with
    stages that read nothing from elsewhere.
    """
    programs: dict[Any, pp.stage.StageProgram] = {}

    def built(fn: Any, example: tuple[Any, ...], **request: Any) -> pp.stage.StageProgram:
        key = fn, tuple(map(Signature.of, example)), request["device"]
        if key not in programs:
            programs[key] = engine(fn, example, **request)
        return programs[key]

    return built


traced_once = remembered(pp.engines.graph)


def mlp(params: Params, x: Tensor) -> Tensor:
    """A residual perceptron with one hidden layer: [..., d] to the same."""
    return x + F.gelu(x @ params["up"] + params["bias"]) @ params["down"]


def mlp_params(d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Params:
    up, down, bias = (
        normal(*shape, seed=seed + n, dtype=dtype)
        for n, shape in enumerate([(d, 2 * d), (2 * d, d), (2 * d,)])
    )
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
    shapes = {
        "g": (d,),
        "b": (d,),
        "qkv": (d, 3 * d),
        "o": (d, d),
        "up": (2 * d, d),
        "ub": (2 * d,),
        "down": (2 * d, d),
    }
    return {
        name: normal(*shape, seed=10 * seed + n, dtype=dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }


def dropout_stage(params: Params, x: Tensor) -> Tensor:
    """A residual layer that drops a quarter: [..., d] to the same."""
    return F.dropout(F.gelu(x @ params["w"]), 0.25) + x


class BatchNormed(nn.Sequential):
    """A layer with running statistics: float64[b, d] to the same."""

    def __init__(self, d: int) -> None:
        super().__init__(nn.Linear(d, d), nn.BatchNorm1d(d), nn.Tanh())
        self.double()


def dense(params: Params, x: Tensor) -> Tensor:
    """A layer without a bias: [..., d] to the same."""
    return torch.tanh(x @ params["w"])


def slow(params: Any, x: Tensor) -> Tensor:
    time.sleep(0.01)
    return dense(params, x)


def affine(params: Params, x: Tensor) -> Tensor:
    """A layer: [..., d] to the same."""
    return torch.tanh(x @ params["w"] + params["b"])


def problem(
    stages: int | Schedule = 2,
    m: int = 4,
    seed: int = 0,
    *,
    b: int = 3,
    d: int = 4,
    leaves: str = "w",
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[int, Params], Tensor, Tensor]:
    """Parameters by stage of :func:`dense`, or with leaves ``"wb"`` of :func:`affine`, inputs and targets.

    Args:
        stages: of the model; or a schedule, which has as many, and its microbatches.
        m, b, d: microbatches, rows of each, and their width.
    """
    if isinstance(stages, Schedule):
        stages, m = len(set(stages.model_stages)), stages.microbatches
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    shapes = {"w": (d, d), "b": (d,)}
    params = {s: {name: draw(*shapes[name]) for name in leaves} for s in range(stages)}
    return params, draw(m * b, d), draw(m * b, d)


def same_bits(one: Any, other: Any) -> bool:
    """Tell whether the leaves of two trees that this process holds have the same values."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(local(a), local(b)) for a, b in pairs)


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
        The weighted sum of the losses, and gradients with the structure of ``params``, zeros where there is
        no dependence.
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
    return total.detach(), treedef.unflatten(
        next(made) if t.requires_grad else torch.zeros_like(t) for t in own
    )
