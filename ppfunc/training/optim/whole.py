"""Make an optimizer of whole matrices, of which a trainer's ranks may hold parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ppfunc._checks import naming_arguments, require_counts, require_number, require_real
from ppfunc.stage.frozen import ParameterKind
from ppfunc.stage.tree import filled, tree_leaves, tree_map

from .elementwise import LeafPlan, optimizer_of, values
from .optimizer import Leaves, Optimizer, Tree, divided, require_pair, selected, skipping, text_of
from .rates import LearningRate, on_device

OnMatrices = Callable[[Callable[[Tensor], Tensor], Tree], Tree]
"""``on_matrices(fn, tree)``: apply a function to whole matrices, of the last two dimensions, of which a rank
has the parts in a tree like the parameters; return its parts of the results, of the same shapes.
"""

_on_matrices: ContextVar[OnMatrices] = ContextVar("on_matrices", default=tree_map)


@contextmanager
def matrices_by(on_matrices: OnMatrices) -> Iterator[None]:
    """Let optimizers apply functions to matrices in this way; by default a tree has whole matrices."""
    token = _on_matrices.set(on_matrices)
    try:
        yield
    finally:
        _on_matrices.reset(token)


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

    Equivalent to, for every matrix of ``rows`` and ``columns``, and every matrix of a stack of three
    dimensions, such as the weights of experts::

        mean = momentum * mean + (1 - momentum) * g
        direction = newton_schulz((1 - momentum) * g + momentum * mean if nesterov else mean)
        p = p - lr * weight_decay * p - lr * sqrt(max(1, rows / columns)) * direction

    Its state is that of :func:`by_name` with the matrices as ``group0``, which has their ``mean``, the others
    as ``group1``. Where ranks hold parts of a matrix, over data or tensor parallel ranks, the mean lies as
    the matrix does. In a step the parts of a direction go to one rank, which iterates, and come back;
    matrices are dealt to these ranks by size.

    Args:
        lr: the learning rate, as in :func:`adamw`.
        momentum: decay of the mean.
        weight_decay: share of each matrix removed per update, times ``lr``.
        nesterov: look ahead along the momentum.
        ns_steps: steps of the iteration of Newton and Schulz, in bfloat16; in float64 for float64.
        match_rms: multiply by ``0.2 * sqrt(max(rows, columns))`` instead, which makes updates as long as
            those of :func:`adamw`, so that both can have one rate.
        rest: updates parameters that are no matrices. Embeddings and heads are matrices: give them to another
            optimizer with :func:`by_name`.

    Raises:
        ValueError, TypeError: numbers out of range. At ``init``: a parameter that is no real matrix, nor a
            stack of them, without ``rest``.

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
    require_real("momentum", momentum, "; the optimizer of parameters that are no matrices is given as rest=")
    require_number("momentum", momentum, below=1.0)
    require_counts(ns_steps=ns_steps)
    if nesterov and not momentum:
        raise ValueError("nesterov needs momentum > 0, got momentum=0; pass nesterov=False")
    if rest is not None:
        require_pair("rest", rest)
    numbers = f"momentum {momentum}, nesterov {nesterov}, {ns_steps} steps, match_rms {match_rms}"
    of_matrix = partial(_direction, steps=ns_steps, match_rms=match_rms)
    pure = partial(_muon, momentum=momentum, nesterov=nesterov, of_matrix=of_matrix)
    matrices = optimizer_of("muon", numbers, pure, ("mean",), lr, weight_decay, None)

    def group_of(name: str, parameter: ParameterKind) -> int:
        if parameter.ndim in (2, 3) and parameter.dtype.is_floating_point:
            return 0
        if rest is None:
            raise ValueError(
                f"muon: got the parameter {name!r} of {parameter.ndim} dimensions in {parameter.dtype},"
                " expected real matrices, or stacks of them of 3 dimensions; pass an optimizer of the others,"
                " such as rest=adamw(1e-3)"
            )
        return 1

    if rest is None:
        return divided(group_of, {"matrices": matrices}, lambda: text_of(matrices))
    every = {"matrices": matrices, "rest": skipping(rest)}
    return divided(group_of, every, lambda: f"{text_of(matrices)}, the rest by {text_of(rest)}")


def _muon(
    plan: LeafPlan, params: Leaves, grads: Leaves, columns: Sequence[Leaves],
    found_inf: Tensor | None, step: Tensor, rate: Any, *,
    momentum: float, nesterov: bool, of_matrix: Callable[[Tensor], Tensor],
) -> list[Leaves]:  # fmt: skip
    """Update matrices by their momentum with all singular values near 1, in float32 or wider.

    All of it but ``of_matrix`` works element by element.
    """
    old, (before,) = values(params), columns
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    means = [torch.lerp(mean.to(g.dtype), g, 1 - momentum) for mean, g in zip(before, wide, strict=True)]
    ahead = [torch.lerp(g, m, momentum) if nesterov else m for g, m in zip(wide, means, strict=True)]
    structure = plan.structures[0]
    tree = structure.unflatten(filled([None] * structure.num_leaves, plan.trained, ahead))
    directions, new = tree_leaves(_on_matrices.get()(of_matrix, tree)), list[Tensor]()
    for n, p, direction in zip(plan.trained, old, directions, strict=True):
        lr = on_device(rate, p.device)
        kept = p.to(direction.dtype) * (1 - lr * plan.decays[n])
        new.append((kept - lr * direction).to(p.dtype))
    after = [mean.to(m.dtype) for mean, m in zip(means, before, strict=True)]
    new, after = selected(found_inf, (old, [*before]), (new, after))
    return [new, after]


def _direction(matrix: Tensor, steps: int, match_rms: bool) -> Tensor:
    """Bring the singular values of a matrix, or of each matrix of a stack, near 1, and scale it."""
    rows, columns = matrix.shape[-2:]
    ratio = 0.2 * sqrt(max(rows, columns)) if match_rms else sqrt(max(1, rows / columns))
    return ratio * _orthogonal(matrix, steps).to(matrix.dtype)


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of matrices near 1, by steps of Newton and Schulz.

    float64 stays; the other dtypes compute in bfloat16, which suffices, as torch does.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
