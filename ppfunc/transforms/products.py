"""Make pipelines that differentiate along a direction: slopes, and products of curvature with a vector."""

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ppfunc.runtime import Microbatches, StepFunction, StepResult, StepSpec, Transport
from ppfunc.runtime.lowering.ties import Tied, TiedPlaces
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, Seed, by_stage, named_step
from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Loss, graph
from ppfunc.stage.signature import differentiable
from ppfunc.stage.transforms import dual, dual_loss, flatten_tangents
from ppfunc.stage.tree import tree_flatten, tree_map
from ppfunc.steps import Stages, make_step, map_stages, reports_mistakes, unpacked

__all__ = ["hvp", "jvp"]

_PAIR = ("0", "1")  # the parameters of a transformed stage: a tree, and its tangents


@reports_mistakes
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
        leaves or trees that do not move, such as integers. ``input_tangents`` is the same for ``inputs``,
        None by default. The step returns ``(loss, slope)`` on every rank. Without a loss function it returns
        ``(outputs, tangents of the outputs)`` on the rank of the last stage, ``(None, None)`` elsewhere. With
        ``has_aux`` it returns a :class:`ppfunc.StepResult` with ``loss`` and ``slope``, or ``outputs`` and
        ``output_tangents``, and ``aux``.

    >>> from ppfunc import gpipe
    >>> step = jvp([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> step(params, tangents, torch.tensor([5.0]))
    (tensor([30.]), tensor([15.]))
    """

    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, _PAIR, loss_wanted=False)

    spec = _spec("jvp", "outputs" if loss_fn is None else "loss", has_aux=has_aux, ties=ties)
    forward_alone = torch.no_grad()
    losses, returned = (
        (None, _output_tangents) if loss_fn is None else (forward_alone(dual_loss(loss_fn)), _loss_and_slope)
    )
    duals = map_stages(stages, lambda fn: forward_alone(dual(fn)))
    return make_step(
        duals, losses, schedule, transport, engine, spec, _read_jvp,
        returned, loss_weights, training=False,
    )  # fmt: skip


@reports_mistakes
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
) -> StepFunction[..., StepResult]:
    """Make a function that multiplies the Hessian of the loss by a vector, in one pass.

    The Hessian is that in the parameters of all stages.

    Equivalent to, with ``loss`` as in :func:`ppfunc.value_and_grad`::

        loss, slope     = torch.func.jvp(loss, (params,), (tangents,))
        grads, products = torch.func.jvp(torch.func.grad(loss), (params,), (tangents,))

    Args:
        stages, loss_fn, schedule, transport, engine, loss_weights, has_aux, tied: as in
            :func:`ppfunc.value_and_grad`.

    Returns:
        ``step(params, tangents, inputs, targets, ...) -> StepResult``, the keywords as in
        :func:`ppfunc.value_and_grad`. ``tangents`` is the vector, ``{stage: tree}`` like ``params``, with
        None for zeros. The result has ``loss``, ``slope``, ``grads`` and ``products``, which both have the
        structure of ``params``, and ``aux`` with ``has_aux``.

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, 1994.

    >>> from ppfunc import gpipe
    >>> step = hvp([lambda w, x: w * x] * 2, lambda y, target: (y**2).sum(), gpipe(ranks=2, microbatches=1))
    >>> params, tangents = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}, {0: torch.tensor(1.0), 1: None}
    >>> result = step(params, tangents, torch.ones(1), torch.ones(1))
    >>> result.grads, result.products
    ({0: tensor(36.), 1: tensor(24.)}, {0: tensor(18.), 1: tensor(24.)})
    """

    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, _PAIR)

    spec = _spec("hvp", "loss", "grads", has_aux=has_aux, ties=ties)
    return make_step(
        map_stages(stages, partial(dual, slope_alone=True)), dual_loss(loss_fn, slope_alone=True), schedule,
        transport, engine, spec, _read_products, _hessian_products, loss_weights,
    )  # fmt: skip


def _spec(name: str, *wants: str, has_aux: bool, ties: Tied) -> StepSpec:
    """Describe a step on parameters with tangents, whose loss comes with its derivative along them."""
    wants = (*wants, "aux") if has_aux else wants
    return StepSpec(name, wants, loss_shape=(2,), tied=ties, primal="0")


def _loss_and_slope(result: StepResult) -> Any:
    loss, slope = result.loss.unbind()
    return (loss, slope) if result.aux is None else result._replace(loss=loss, slope=slope)


def _output_tangents(result: StepResult) -> Any:
    """Take apart outputs and their tangents; of microbatches where those are apart."""
    pairs = result.outputs
    if isinstance(pairs, Microbatches):
        pairs = [pairs.map(itemgetter(n)) for n in (0, 1)]
    outputs, tangents = (None, None) if pairs is None else pairs
    return (
        (outputs, tangents)
        if result.aux is None
        else result._replace(outputs=outputs, output_tangents=tangents)
    )


def _hessian_products(result: StepResult) -> StepResult:
    loss, slope = result.loss.unbind()
    products, gradients = ({stage: pair[n] for stage, pair in result.grads.items()} for n in (0, 1))
    grads = {  # zeros for the leaves that have no gradient
        stage: tree_map(lambda p, g: torch.zeros_like(p) if g is None else g, product, gradients[stage])
        for stage, product in products.items()
    }
    return result._replace(loss=loss, slope=slope, grads=grads, products=products)


@named_step
def _read_jvp(
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
    """Read the arguments of a step with tangents of parameters and inputs, as the caller writes them."""
    batch = _moving(inputs, input_tangents)
    return RawArguments(_paired(params, tangents), batch, targets, extras, state, loss_weights, seed)


@named_step
def _read_products(
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
    """Read the arguments of a step with tangents of the parameters alone, as the caller writes them."""
    return RawArguments(
        _paired(params, tangents), _unmoved(inputs), targets, extras, state, loss_weights, seed
    )


def _paired(params: Any, tangents: Any) -> dict[int, tuple[Any, Any]]:
    """Pair trees of parameters with their tangents.

    Zeros stand for None: other leaves may move in the next step without a new trace.
    """
    params, tangents = by_stage(params, "params"), by_stage(tangents, "tangents")
    if set(params) != set(tangents):
        raise ValueError(
            f"tangents: got the stages {list(tangents)} for parameters of the stages {list(params)}; give a"
            " tree, or None, for each"
        )
    return {stage: _with_zeros(tree, tangents[stage], f"params[{stage}]") for stage, tree in params.items()}


def _moving(inputs: Any, tangents: Any) -> Any:
    """Pair a batch with its tangents, microbatch by microbatch if these are apart."""
    if not isinstance(inputs, Microbatches):
        return None if inputs is None else _with_zeros(inputs, tangents, "inputs")
    rows = [None] * len(inputs) if tangents is None else tangents
    if not isinstance(rows, list | Microbatches) or len(rows) != len(inputs):
        got = f"{len(rows)} microbatches" if isinstance(rows, Microbatches) else type(rows).__name__
        raise ValueError(f"input_tangents: got {got}, expected {len(inputs)} microbatches, as the inputs are")
    return Microbatches(
        _with_zeros(x, row, f"inputs[{i}]") for i, (x, row) in enumerate(zip(inputs, rows, strict=True))
    )


def _unmoved(inputs: Any) -> Any:
    """Pair the batch with None for tangents, in the form of the batch."""
    if isinstance(inputs, Microbatches):
        return inputs.map(lambda x: (x, None))
    return None if inputs is None else (inputs, None)


def _with_zeros(primal: Any, tangents: Any, name: str) -> tuple[Any, Any]:
    """Pair a tree with its tangents, with zeros for None where there could be a tangent."""
    leaves, treedef = tree_flatten(primal)
    return primal, treedef.unflatten(
        torch.zeros_like(leaf) if tangent is None and differentiable(leaf.dtype) else tangent
        for leaf, tangent in zip(leaves, flatten_tangents(primal, tangents, name), strict=True)
    )
