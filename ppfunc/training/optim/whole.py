"""Make optimizers that work on whole leaves: by norms, sums of rows, or singular values."""

from functools import partial
from math import inf, sqrt

import torch
from torch import Tensor

from ppfunc._checks import (
    naming_arguments,
    require_counts,
    require_number,
    require_positive,
    require_real,
    shown,
)
from ppfunc.stage.modules.frozen import Mask, ParameterKind

from .groups import divided
from .optimizers import adam_direction
from .protocols import Optimizer, require_pair, skipping, text_of
from .rates import LearningRate
from .updates import optimizer_of, require_betas

_norm = torch.linalg.vector_norm


@naming_arguments
def muon(
    lr: LearningRate,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    ns_steps: int = 5,
    match_rms: bool = False,
    rest: Optimizer | None = None,
) -> Optimizer:
    """Make an optimizer of matrices: momentum with all its singular values near 1.

    Equivalent to, for every matrix of ``rows`` and ``columns``:
        mean = momentum * mean + (1 - momentum) * g
        direction = newton_schulz((1 - momentum) * g + momentum * mean if nesterov else mean)
        p = p - lr * weight_decay * p - lr * sqrt(max(1, rows / columns)) * direction

    Its state is that of :func:`by_name` with the matrices as ``group0``, which has their ``mean``, the others
    as ``group1``.

    Args:
        lr: as in :func:`adamw`.
        momentum: decay of the mean.
        weight_decay: share of each matrix removed per update, times ``lr``.
        nesterov: look ahead along the momentum.
        ns_steps: steps of the iteration of Newton and Schulz, in bfloat16; in float64 for float64.
        match_rms: multiply by ``0.2 * sqrt(max(rows, columns))`` instead, which makes updates as long as
            those of :func:`adamw`, so that both can have one rate.
        rest: updates parameters that are no matrices. Embeddings and heads are matrices: give them to another
            optimizer with :func:`by_name`.

    Raises:
        ValueError, TypeError: numbers out of range. At ``init``: a parameter that is no real matrix, without
            ``rest``.

    References:
        Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025 (``match_rms``). The
        numbers are those of ``torch.optim.Muon``.

    >>> import torch
    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.zeros(2, 2)}
    >>> optimizer.update({"w": torch.eye(2)}, optimizer.init(params), params)[0]["w"].round(decimals=1)
    tensor([[-0.1000,  0.0000],
            [ 0.0000, -0.1000]])
    """
    require_number("momentum", momentum, below=1.0)
    require_counts(ns_steps=ns_steps)
    if nesterov and not momentum:
        raise ValueError("nesterov needs momentum > 0, got momentum=0; pass nesterov=False")
    if rest is not None:
        require_pair("rest", rest)
    numbers = f"momentum {momentum}, nesterov {nesterov}, {ns_steps} steps, match_rms {match_rms}"
    formula = partial(_muon, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, match_rms=match_rms)
    matrices = optimizer_of("muon", numbers, formula, ("mean",), lr, weight_decay, None)

    def group_of(name: str, parameter: ParameterKind) -> int:
        if parameter.ndim == 2 and parameter.dtype.is_floating_point:
            return 0
        if rest is None:
            raise ValueError(
                f"muon: got the parameter {name!r} of {parameter.ndim} dimensions in {parameter.dtype},"
                " expected real matrices; pass an optimizer of the others, such as rest=adamw(1e-3)"
            )
        return 1

    if rest is None:
        return divided(group_of, {"matrices": matrices}, lambda: text_of(matrices))
    every = {"matrices": matrices, "rest": skipping(rest)}
    return divided(group_of, every, lambda: f"{text_of(matrices)}, the rest by {text_of(rest)}")


@naming_arguments
def lamb(
    lr: LearningRate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    *,
    mask: Mask | None = None,
) -> Optimizer:
    """Make an optimizer for large batches: Adam, whose steps are shares of the norm of each leaf.

    Equivalent to, with ``direction`` as in Adam:
        direction = direction + weight_decay * p
        p = p - lr * (norm(p) / norm(direction), or 1 where one of them is 0) * direction

    Args as of :func:`adamw`. The moments in its state have names of their own, ``lamb_mean`` and
    ``lamb_square``, so that neither optimizer goes on with the state of the other.

    References:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020,
        algorithm 2.
    """
    require_betas(betas)
    require_number("eps", eps)
    numbers = f"betas ({betas[0]}, {betas[1]}), eps {eps}"
    formula = partial(_lamb, betas=(betas[0], betas[1]), eps=eps)
    return optimizer_of("lamb", numbers, formula, ("lamb_mean", "lamb_square"), lr, weight_decay, mask)


@naming_arguments
def adafactor(
    lr: LearningRate,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    *,
    mask: Mask | None = None,
) -> Optimizer:
    """Make an optimizer that keeps one number per row and per column of a matrix.

    Its state is a dictionary: ``updates``, ``row`` and ``column``, means of the squares of gradients along
    the last two dimensions, and ``square`` for leaves of fewer.

    Args:
        lr: largest rate, as in :func:`adamw`; from update ``t`` on it is at most ``1 / sqrt(t)``. Steps are
            shares of the root mean square of a leaf.
        beta2_decay: power of ``t`` that new squares count with; at most 0.
        eps: the least root of the squares, None for that of the dtype, and the least size of a leaf.
        d: largest root mean square of an update before it is scaled.
        weight_decay: share of each parameter removed per update, times ``lr``.
        mask: as in :func:`adamw`.

    Raises:
        ValueError, TypeError: numbers out of range, or no numbers.

    References:
        Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. The numbers
        are those of ``torch.optim.Adafactor``.
    """
    require_real("beta2_decay", beta2_decay)
    if not -inf < beta2_decay <= 0:
        raise ValueError(f"beta2_decay is {beta2_decay}, expected a finite number of at most 0, such as -0.8")
    require_positive(d=d)
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(
            f"eps is {shown(eps)}, expected two numbers, of which the first may be None, such as (None, 1e-3)"
        )
    least, size = eps
    if least is not None:
        require_number("eps[0]", least)
    require_number("eps[1]", size)
    numbers = f"beta2_decay {beta2_decay}, eps {eps}, d {d}"
    shapes = {
        "row": lambda shape: (*shape[:-1], 1) if len(shape) > 1 else None,
        "column": lambda shape: (*shape[:-2], 1, shape[-1]) if len(shape) > 1 else None,
        "square": lambda shape: None if len(shape) > 1 else shape,
    }
    formula = partial(_adafactor, beta2_decay=beta2_decay, eps=(least, size), d=d)
    return optimizer_of("adafactor", numbers, formula, shapes, lr, weight_decay, mask)


def _lamb(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update along Adam's direction, as far as a share ``lr`` of the norm of the leaf."""
    mean, square, direction = adam_direction(g, mean, square, step, betas, eps)
    direction = direction + weight_decay * p
    of_leaf, of_direction = _norm(p), _norm(direction)
    trusted = (of_leaf > 0) & (of_direction > 0)
    ratio = torch.where(trusted, of_leaf / torch.where(trusted, of_direction, 1.0), 1.0)
    return p - lr * ratio * direction, mean, square


def _muon(
    p: Tensor, g: Tensor, mean: Tensor, *,
    step: Tensor, lr: Tensor | float, weight_decay: float,
    momentum: float, nesterov: bool, ns_steps: int, match_rms: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Update a matrix by its momentum with all singular values near 1."""
    mean = torch.lerp(mean, g, 1 - momentum)
    direction = _orthogonal(torch.lerp(g, mean, momentum) if nesterov else mean, ns_steps)
    rows, columns = p.shape
    ratio = 0.2 * sqrt(max(rows, columns)) if match_rms else sqrt(max(1, rows / columns))
    return p * (1 - lr * weight_decay) - lr * ratio * direction.to(p.dtype), mean


def _adafactor(
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
