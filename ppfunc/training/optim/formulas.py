"""Write optimizers as formulas: pure functions of one leaf, which autograd and torch.func know.

A formula is ``formula(p, g, *states, step, lr, weight_decay) -> (p, *states)``, where ``step`` counts updates
from 1. Its tensors are real, in float32 or wider.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

Formula = Callable[..., tuple[Tensor | None, ...]]


def adamw(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update by Adam with decoupled weight decay."""
    mean, square, direction = _adam(g, mean, square, step, betas, eps)
    return p - lr * weight_decay * p - lr * direction, mean, square


def lamb(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update along Adam's direction, as far as a share ``lr`` of the norm of the leaf."""
    mean, square, direction = _adam(g, mean, square, step, betas, eps)
    direction = direction + weight_decay * p
    of_leaf, of_direction = _norm(p), _norm(direction)
    trusted = (of_leaf > 0) & (of_direction > 0)
    ratio = torch.where(trusted, of_leaf / torch.where(trusted, of_direction, 1.0), 1.0)
    return p - lr * ratio * direction, mean, square


def sgd(
    p: Tensor, g: Tensor, *buffers: Tensor,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    momentum: float, dampening: float, nesterov: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update by stochastic gradient descent: no dampening at the first update."""
    change = g + weight_decay * p
    if not buffers:
        return (p - lr * change,)
    total = momentum * buffers[0] + torch.where(step == 1, 1.0, 1.0 - dampening).to(p.dtype) * change
    return p - lr * (change + momentum * total if nesterov else total), total


def muon(
    p: Tensor, g: Tensor, buffer: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    momentum: float, nesterov: bool, ns_steps: int, match_rms: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update a matrix by its momentum with all singular values near 1."""
    buffer = buffer + (1 - momentum) * (g - buffer)
    direction = _orthogonal(g + momentum * (buffer - g) if nesterov else buffer, ns_steps)
    rows, columns = p.shape
    ratio = 0.2 * sqrt(max(rows, columns)) if match_rms else sqrt(max(1, rows / columns))
    return p - lr * weight_decay * p - lr * ratio * direction.to(p.dtype), buffer


def adafactor(
    p: Tensor, g: Tensor, row: Tensor | None, column: Tensor | None, square: Tensor | None, *,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    beta2_decay: float, eps: tuple[float | None, float], d: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Update by Adam without a mean, its squares kept as sums of rows and of columns."""
    share, squared = step**beta2_decay, g * g
    least = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
    if row is None or column is None:
        assert square is not None
        square = estimate = square + share * (squared - square)
    else:
        row = row + share * (squared.mean(-1, keepdim=True) - row)
        column = column + share * (squared.mean(-2, keepdim=True) - column)
        estimate = row * column / row.mean(-2, keepdim=True).clamp(min=least)
    direction = estimate.clamp(min=least**2).rsqrt() * g
    direction = direction / (_norm(direction) / (sqrt(max(1, p.numel())) * d)).clamp(min=1.0)
    size = (_norm(p) / sqrt(max(1, p.numel()))).clamp(min=eps[1])
    rate = torch.minimum(torch.as_tensor(lr, dtype=p.dtype, device=p.device), step.rsqrt())
    return p - lr * weight_decay * p - size * rate * direction, row, column, square


def _adam(
    g: Tensor, mean: Tensor, square: Tensor, step: Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both moments, and the direction of the update."""
    mean = mean + (1 - betas[0]) * (g - mean)
    square = betas[1] * square + (1 - betas[1]) * g * g
    root = _root(square) / (1 - betas[1] ** step).sqrt()
    return mean, square, mean / (1 - betas[0] ** step) / (root + eps)


def _root(x: Tensor) -> Tensor:
    """Take the square root, whose derivative is finite where ``x`` is 0."""
    none = x == 0
    return torch.where(none, x, torch.where(none, 1.0, x).sqrt())


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x)


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a matrix near 1, by steps of Newton and Schulz.

    float64 stays; the other dtypes compute in bfloat16, which suffices, as torch does.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    wide = matrix.shape[0] <= matrix.shape[1]
    x = x if wide else x.T
    x = x / _norm(x).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
