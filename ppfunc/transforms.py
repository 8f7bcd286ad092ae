"""The front door of the transforms: pipelines that compute other derivatives than the gradient of one loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from ppfunc.pipeline import Loss, Stage, evaluate, value_and_grad
from ppfunc.runtime import Transport
from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, graph
from ppfunc.stage.signature import differentiable
from ppfunc.stage.transforms import (
    dual,
    dual_loss,
    for_samples,
    gauss_newton_loss,
    held_dual,
    hessian_loss,
    per_sample,
    per_sample_loss,
    sloping,
)

__all__ = ["gnvp", "hvp", "jvp", "per_sample_grad"]


def jvp(
    stages: Sequence[Stage],
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """A function that runs the stages forward and differentiates along a direction on the way.

    Equivalent to, with ``loss`` as in :func:`ppfunc.value_and_grad`::

        torch.func.jvp(loss, (params,), (tangents,))

    Args:
        stages, schedule, transport, engine, weights: as in :func:`ppfunc.evaluate`.
        loss_fn: ``loss(y, target) -> scalar``; None to differentiate the outputs.

    Returns:
        ``step(params, tangents, inputs, targets=None, *, input_tangents=None, ...)``, the other keywords
        as in :func:`ppfunc.evaluate`. ``tangents`` is ``{stage: tree}`` like ``params``, with None for
        leaves or trees that do not move, integers among them; likewise ``input_tangents``, wanted where
        ``inputs`` are. It returns ``(loss, slope)`` on every rank; without a loss function
        ``(outputs, tangents of the outputs)`` on the rank of the last stage, ``(None, None)`` elsewhere.

    >>> from ppfunc import gpipe
    >>> step = jvp([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> step(params, tangents, torch.tensor([5.0]))
    (tensor([30.]), tensor([15.]))
    """
    duals = [dual(fn) for fn in stages]
    given = {"engine": engine, "weights": weights}
    if loss_fn is None:
        run = evaluate(duals, None, schedule, transport, return_outputs=True, **given)
    else:
        run = evaluate(duals, dual_loss(loss_fn), schedule, transport, loss_shape=(2,), **given)

    def step(
        params: Mapping[int, Any],
        tangents: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        input_tangents: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        made = run(_pairs(params, tangents), _moving(inputs, input_tangents), targets, **options)
        if loss_fn is not None:
            return tuple(made.unbind())
        if isinstance(made, list):
            return [y for y, _ in made], [ty for _, ty in made]
        return (None, None) if made is None else made

    return step


def hvp(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], tuple[dict[int, Any], dict[int, Any]]]]:
    """A function that multiplies the Hessian of the loss, in the parameters of all stages, by a vector: in one pass.

    Equivalent to, with ``loss`` as in :func:`ppfunc.value_and_grad`::

        loss, slope     = torch.func.jvp(loss, (params,), (tangents,))
        grads, products = torch.func.jvp(torch.func.grad(loss), (params,), (tangents,))

    Args:
        stages, loss_fn, schedule, transport, engine, weights: as in :func:`ppfunc.value_and_grad`.

    Returns:
        ``step(params, tangents, inputs, targets, ...) -> ((loss, slope), (grads, products))``, the keywords
        as in :func:`ppfunc.value_and_grad`. ``tangents`` is the vector, ``{stage: tree}`` like ``params``,
        with None for zeros; ``grads`` and ``products`` have the structure of ``params``.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> from ppfunc import gpipe
    >>> step = hvp([lambda w, x: w * x] * 2, lambda y, target: y**2, gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> _, (grads, products) = step(params, tangents, torch.ones(1), torch.ones(1))
    >>> grads, products
    ({0: tensor(36.), 1: tensor(24.)}, {0: tensor(18.), 1: tensor(24.)})
    """
    run = value_and_grad(
        [sloping(fn) for fn in stages], hessian_loss(loss_fn), schedule, transport, engine=engine, weights=weights, loss_shape=(2,)
    )

    def step(
        params: Mapping[int, Any], tangents: Mapping[int, Any], inputs: Any, targets: Any = None, **options: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[dict[int, Any], dict[int, Any]]]:
        moved = {stage: _with_zeros(params[stage], tangent) for stage, tangent in tangents.items()}
        values, made = run(_pairs(params, moved), _moving(inputs, None), targets, **options)
        grads = {stage: _complete(gradient, params[stage]) for stage, (_, gradient) in made.items()}
        return tuple(values.unbind()), (grads, {stage: product for stage, (product, _) in made.items()})

    return step


def gnvp(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], dict[int, Any]]]:
    """A function that multiplies the Gauss-Newton matrix of the loss, in the parameters of all stages, by a vector: in one pass.

    The matrix is the weighted sum over microbatches of ``J' H J``, with ``J`` the Jacobian of the outputs
    in the parameters and ``H`` the Hessian of the loss in the outputs. Equivalent to, for one microbatch::

        y, ty    = torch.func.jvp(model, (params,), (tangents,))
        _, h     = torch.func.jvp(torch.func.grad(loss_fn), (y,), (ty,))
        products = torch.func.vjp(model, params)[1](h)

    Args:
        stages, loss_fn, schedule, transport, engine, weights: as in :func:`ppfunc.value_and_grad`.

    Returns:
        ``step(params, tangents, inputs, targets, ...) -> ((loss, curvature), products)``; arguments as of
        :func:`hvp`. The curvature is that along the vector, the inner product of it with ``products``.

    References:
        Schraudolph, Fast curvature matrix-vector products for second-order gradient descent, 2002.

    >>> from ppfunc import gpipe
    >>> step = gnvp([lambda w, x: w * x] * 2, lambda y, target: y**2, gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> step(params, tangents, torch.ones(1), torch.ones(1))[1]
    {0: tensor(18.), 1: tensor(12.)}
    """
    run = value_and_grad(
        [held_dual(fn) for fn in stages], gauss_newton_loss(loss_fn), schedule, transport, engine=engine, weights=weights, loss_shape=(2,)
    )

    def step(
        params: Mapping[int, Any], tangents: Mapping[int, Any], inputs: Any, targets: Any = None, **options: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[int, Any]]:
        values, made = run(_pairs(params, tangents), _moving(inputs, None), targets, **options)
        return tuple(values.unbind()), {stage: product for stage, (product, _) in made.items()}

    return step


def per_sample_grad(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    samples: int,
    engine: Engine = graph,
    randomness: str = "error",
) -> Callable[..., tuple[torch.Tensor, dict[int, Any]]]:
    """A function that computes the gradient of the loss of every sample, in the parameters of all stages.

    Equivalent to ``torch.func.vmap(torch.func.grad(loss), (None, 0, 0))`` over samples, each a batch of one.

    Args:
        stages: as in :func:`ppfunc.value_and_grad`; every leaf that they take or return beside the
            parameters has a leading batch axis b, along which samples do not depend on each other.
        loss_fn: ``loss(y, target) -> scalar``, here called with batches of one.
        schedule, transport, engine: as in :func:`ppfunc.value_and_grad`.
        samples: b, the number of samples in a microbatch.
        randomness: ``"different"`` for stages that draw random numbers, or ``"same"``.

    Returns:
        ``step(params, inputs, targets, ...) -> (loss, grads)``: the mean loss of the samples, and the
        gradients ``{stage: tree}`` with leading axes [m, b]. Their norms over all stages, and the sum
        of clipped ones: :func:`ppfunc.square_norms`, :func:`ppfunc.clipped_sum`.

    >>> from ppfunc import gpipe
    >>> step = per_sample_grad([lambda w, x: w * x] * 2, lambda y, target: y.sum(), gpipe(2, 1), samples=3)
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> step(params, torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3))
    (tensor(12.), {0: tensor([[3., 6., 9.]]), 1: tensor([[2., 4., 6.]])})
    """
    losses = per_sample_loss(loss_fn)
    run = value_and_grad(
        [per_sample(fn, randomness=randomness) for fn in stages],
        lambda y, target: losses(y, target).sum(),
        schedule,
        transport,
        engine=engine,
        weights=[1.0] * schedule.microbatches,
        per_microbatch=True,
    )

    def step(params: Mapping[int, Any], inputs: Any, targets: Any = None, **options: Any) -> tuple[torch.Tensor, dict[int, Any]]:
        loss, grads = run({stage: for_samples(tree, samples) for stage, tree in params.items()}, inputs, targets, **options)
        return loss / (samples * schedule.microbatches), grads

    return step


def _pairs(params: Mapping[int, Any], tangents: Mapping[int, Any]) -> dict[int, tuple[Any, Any]]:
    if set(params) != set(tangents):
        raise ValueError(f"got tangents of the stages {sorted(tangents)} for parameters of the stages {sorted(params)}; give a tree, or None, for each")
    return {stage: (tree, tangents[stage]) for stage, tree in params.items()}


def _moving(inputs: Any, tangents: Any) -> Any:
    """The batch with its tangents, in the form of the batch."""
    if inputs is None:
        return None
    if not isinstance(inputs, list):
        return inputs, tangents
    rows = [None] * len(inputs) if tangents is None else tangents
    return list(zip(inputs, rows, strict=True))


def _with_zeros(params: Any, tangents: Any) -> Any:
    """The tangents with zeros for None where there could be a tangent: their gradient is wanted."""
    def fill(leaf: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return torch.zeros_like(leaf) if tangent is None and differentiable(leaf.dtype) else tangent

    leaves, treedef = optree.tree_flatten(params)
    given = (None,) * len(leaves) if tangents is None else treedef.flatten_up_to(tangents)
    return treedef.unflatten(map(fill, leaves, given))


def _complete(gradients: Any, params: Any) -> Any:
    """The gradients with zeros for the leaves that have none."""
    leaves, treedef = optree.tree_flatten(params)
    given = treedef.flatten_up_to(gradients)
    return treedef.unflatten(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, given, strict=True))
