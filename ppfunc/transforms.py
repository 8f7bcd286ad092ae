"""Make pipelines that differentiate along a direction: slopes, and products of curvature with a vector."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ppfunc.making import Stages, make_step, map_stages, named_step, told_to_peers, unpacked
from ppfunc.runtime import Microbatches, StepFunction, StepResult, StepSpec, Transport
from ppfunc.runtime.arguments import LossWeights, RawArguments, Seed
from ppfunc.runtime.ties import Tied, TiedPlaces
from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Loss, graph
from ppfunc.stage.transforms import dual, dual_loss, gauss_newton_loss, held_dual, hessian_loss, sloping
from ppfunc.tangents import completed, moving, paired, unmoved

__all__ = ["gnvp", "hvp", "jvp"]

_PAIR = ("0", "1")  # the parameters of a transformed stage: a tree, and its tangents


@told_to_peers
def jvp(
    stages: Stages,
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    loss_weights: LossWeights = None,
    has_aux: bool = False,
    tied: TiedPlaces = None,
) -> StepFunction[..., tuple[Any, Any]]:
    """Make a function that runs the stages forward and differentiates along a direction on the way.

    Equivalent to, with ``loss`` as in :func:`ppfunc.value_and_grad`::

        torch.func.jvp(loss, (params,), (tangents,))

    Args:
        stages, schedule, transport, engine, loss_weights, has_aux, tied: as in :func:`ppfunc.evaluate`.
        loss_fn: ``loss(y, target) -> scalar``; None to differentiate the outputs.

    Returns:
        ``step(params, tangents, inputs, targets=None, *, input_tangents=None, ...)``, the other keywords
        as in :func:`ppfunc.evaluate`. ``tangents`` is ``{stage: tree}`` like ``params``, with None for
        leaves or trees that do not move, integers among them; likewise ``input_tangents``, wanted where
        ``inputs`` are. It returns ``(loss, slope)`` on every rank; without a loss function
        ``(outputs, tangents of the outputs)`` on the rank of the last stage, ``(None, None)`` elsewhere;
        with ``has_aux``, the pair of this and ``aux``.

    >>> from ppfunc import gpipe
    >>> step = jvp([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> step(params, tangents, torch.tensor([5.0]))
    (tensor([30.]), tensor([15.]))
    """

    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, _PAIR, loss_wanted=False)

    def finish(result: StepResult, raw: RawArguments) -> Any:
        made = _of_outputs(result.outputs) if loss_fn is None else tuple(result.loss.unbind())
        return (made, result.aux) if has_aux else made

    spec = _spec("jvp", {"outputs" if loss_fn is None else "loss"}, has_aux, ties)
    losses = None if loss_fn is None else dual_loss(loss_fn)
    prepare = _along_all_tangents(loss_weights)
    return make_step(map_stages(stages, dual), losses, schedule, transport, engine, spec, prepare, finish, loss_weights, training=False)


@told_to_peers
def hvp(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    loss_weights: LossWeights = None,
    has_aux: bool = False,
    tied: TiedPlaces = None,
) -> StepFunction[..., tuple[tuple[torch.Tensor, torch.Tensor, dict[int, Any]], dict[int, Any]]]:
    """Make a function that multiplies the Hessian of the loss, in the parameters of all stages, by a vector: in one pass.

    Equivalent to, with ``loss`` as in :func:`ppfunc.value_and_grad`::

        loss, slope     = torch.func.jvp(loss, (params,), (tangents,))
        grads, products = torch.func.jvp(torch.func.grad(loss), (params,), (tangents,))

    Args:
        stages, loss_fn, schedule, transport, engine, loss_weights, has_aux, tied: as in :func:`ppfunc.value_and_grad`.

    Returns:
        ``step(params, tangents, inputs, targets, ...) -> (values, products)``, the keywords as in
        :func:`ppfunc.value_and_grad`. ``tangents`` is the vector, ``{stage: tree}`` like ``params``, with None
        for zeros. ``values`` is what comes with the products, ``(loss, slope, grads)``: ``grads`` and ``products``
        have the structure of ``params``. With ``has_aux``, ``(values, aux)`` comes in the place of ``values``.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> from ppfunc import gpipe
    >>> step = hvp([lambda w, x: w * x] * 2, lambda y, target: (y**2).sum(), gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> (loss, slope, grads), products = step(params, tangents, torch.ones(1), torch.ones(1))
    >>> grads, products
    ({0: tensor(36.), 1: tensor(24.)}, {0: tensor(18.), 1: tensor(24.)})
    """

    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, _PAIR)

    def finish(result: StepResult, raw: RawArguments) -> Any:
        grads = {stage: completed(gradient, raw.params[stage][0]) for stage, (_, gradient) in result.grads.items()}
        products = {stage: product for stage, (product, _) in result.grads.items()}
        values = (*result.loss.unbind(), grads)
        return (values, result.aux) if has_aux else values, products

    spec = _spec("hvp", {"loss", "grads"}, has_aux, ties)
    prepare = _along_tangents(loss_weights)
    return make_step(map_stages(stages, sloping), hessian_loss(loss_fn), schedule, transport, engine, spec, prepare, finish, loss_weights)


@told_to_peers
def gnvp(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    loss_weights: LossWeights = None,
    has_aux: bool = False,
    tied: TiedPlaces = None,
) -> StepFunction[..., tuple[tuple[torch.Tensor, torch.Tensor], dict[int, Any]]]:
    """Make a function that multiplies the Gauss-Newton matrix of the loss, in the parameters of all stages, by a vector: in one pass.

    The matrix is the weighted sum over microbatches of ``J' H J``, with ``J`` the Jacobian of the outputs
    in the parameters and ``H`` the Hessian of the loss in the outputs. Equivalent to, for one microbatch::

        y, ty    = torch.func.jvp(model, (params,), (tangents,))
        _, h     = torch.func.jvp(torch.func.grad(loss_fn), (y,), (ty,))
        products = torch.func.vjp(model, params)[1](h)

    Args:
        stages, loss_fn, schedule, transport, engine, loss_weights, has_aux, tied: as in :func:`ppfunc.value_and_grad`.

    Returns:
        ``step(params, tangents, inputs, targets, ...) -> (values, products)``, as :func:`hvp`. ``values`` is
        ``(loss, curvature)``; the curvature is that along the vector, the inner product of it with ``products``.
        A stage with an auxiliary loss is refused: there is no Gauss-Newton matrix of a sum of such losses.

    References:
        Schraudolph, Fast curvature matrix-vector products for second-order gradient descent, 2002.

    >>> from ppfunc import gpipe
    >>> step = gnvp([lambda w, x: w * x] * 2, lambda y, target: (y**2).sum(), gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> step(params, tangents, torch.ones(1), torch.ones(1))[1]
    {0: tensor(18.), 1: tensor(12.)}
    """

    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, _PAIR)

    def finish(result: StepResult, raw: RawArguments) -> Any:
        values = tuple(result.loss.unbind())
        return (values, result.aux) if has_aux else values, {stage: product for stage, (product, _) in result.grads.items()}

    spec = _spec("gnvp", {"loss", "grads"}, has_aux, ties)
    prepare = _along_tangents(loss_weights)
    return make_step(
        map_stages(stages, held_dual), gauss_newton_loss(loss_fn), schedule, transport, engine, spec, prepare, finish, loss_weights
    )


def _spec(name: str, wants: set[str], has_aux: bool, ties: Tied) -> StepSpec:
    """A step on parameters beside their tangents, whose loss comes with its derivative along them."""
    return StepSpec(name, frozenset(wants | ({"aux"} if has_aux else set())), loss_shape=(2,), tied=ties, primal="0")


def _of_outputs(made: Any) -> tuple[Any, Any]:
    """Outputs and their tangents, out of pairs; of microbatches where those are apart."""
    if isinstance(made, Microbatches):
        return made.map(lambda pair: pair[0]), made.map(lambda pair: pair[1])
    return (None, None) if made is None else made


def _along_all_tangents(default: LossWeights) -> Callable[..., RawArguments]:
    """The arguments of a step with tangents of parameters and inputs, as the caller writes them."""

    def step(
        params: Mapping[int, Any],
        tangents: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        input_tangents: Any = None,
        loss_weights: LossWeights = None,
        seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
        state: Mapping[int, Any] | None = None,
    ) -> RawArguments:
        weights = default if loss_weights is None else loss_weights
        return RawArguments(paired(params, tangents), moving(inputs, input_tangents), targets, extras, state, weights, seed)

    return named_step(step)


def _along_tangents(default: LossWeights) -> Callable[..., RawArguments]:
    """The arguments of a step with tangents of the parameters alone, as the caller writes them."""

    def step(
        params: Mapping[int, Any],
        tangents: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        loss_weights: LossWeights = None,
        seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
        state: Mapping[int, Any] | None = None,
    ) -> RawArguments:
        weights = default if loss_weights is None else loss_weights
        return RawArguments(paired(params, tangents), unmoved(inputs), targets, extras, state, weights, seed)

    return named_step(step)
