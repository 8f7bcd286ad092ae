"""Make step functions of other derivatives: forward mode, curvature products, gradients of every sample.

Each transforms the stages and runs them by an ordinary step.
"""

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ppfunc.runtime import Microbatches, StepFunction, StepResult, StepSpec, Transport
from ppfunc.runtime.lowering.ties import Tied, TiedPlaces
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, Seed, by_stage, named_step
from ppfunc.schedule import Schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, graph
from ppfunc.stage.signature import differentiable, flatten
from ppfunc.stage.transforms import (
    Dual,
    clipped_sum as clipped_sum,
    dual as dual,
    dual_loss,
    flatten_tangents,
    for_samples,
    per_sample,
    per_sample_loss,
    square_norms as square_norms,
)
from ppfunc.stage.tree import tree_flatten, tree_map, tree_paths
from ppfunc.steps import Stages, make_step, map_stages, reports_mistakes, unpacked

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
        stages, schedule, transport, engine, loss_weights, has_aux, tied: the arguments of
            :func:`ppfunc.evaluate`.
        loss_fn: ``loss(y, target) -> scalar``; None to differentiate the outputs.

    Returns:
        ``step(params, tangents, inputs, targets=None, *, input_tangents=None, ...)``, the other keywords as
        in :func:`ppfunc.evaluate`. ``tangents`` is ``{stage: tree}`` like ``params``, with None for leaves or
        trees that do not move, such as integers. ``input_tangents`` is the same for ``inputs``, None by
        default. First carries do not move. The step returns ``(loss, slope)`` on every rank. Without a loss
        function it returns ``(outputs, tangents of the outputs)`` on the rank of the last stage, ``(None,
        None)`` elsewhere. With ``has_aux`` it returns a :class:`ppfunc.StepResult` with ``loss`` and
        ``slope``, or ``outputs`` and ``output_tangents``, and ``aux``.

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
    duals = map_stages(stages, lambda fn: forward_alone(dual(fn, carry=bool(schedule.slices))))
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
        stages, loss_fn, schedule, transport, engine, loss_weights, has_aux, tied: the arguments of
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
        map_stages(stages, partial(dual, slope_alone=True, carry=bool(schedule.slices))),
        dual_loss(loss_fn, slope_alone=True), schedule, transport, engine, spec, _read_products,
        _hessian_products, loss_weights,
    )  # fmt: skip


def _spec(name: str, *wants: str, has_aux: bool, ties: Tied) -> StepSpec:
    """Describe a step on parameters with tangents, whose loss comes with its derivative along them."""
    wants = (*wants, "aux") if has_aux else wants
    return StepSpec(name, wants, loss_shape=(2,), tied=ties, primal="0")


def _loss_and_slope(result: StepResult) -> Any:
    loss, slope = result.loss.unbind()
    return (loss, slope) if result.aux is None else result._replace(loss=loss, slope=slope)


def _output_tangents(result: StepResult) -> Any:
    """Take apart outputs and their tangents, microbatch by microbatch where microbatches are apart."""
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
    carry: Mapping[int, Any] | None = None,
) -> RawArguments:
    """Read the arguments of a step with tangents of parameters and inputs, as the caller writes them."""
    batch = _moving(inputs, input_tangents)
    return RawArguments(
        _paired(params, tangents), batch, targets, extras, state, loss_weights, seed, carry=_still(carry)
    )


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
    carry: Mapping[int, Any] | None = None,
) -> RawArguments:
    """Read the arguments of a step with tangents of the parameters alone, as the caller writes them."""
    return RawArguments(
        _paired(params, tangents), _unmoved(inputs), targets, extras, state, loss_weights, seed,
        carry=_still(carry),
    )  # fmt: skip


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
        return None if inputs is None else Dual(*_with_zeros(inputs, tangents, "inputs"))
    rows = [None] * len(inputs) if tangents is None else tangents
    if not isinstance(rows, list | Microbatches) or len(rows) != len(inputs):
        got = f"{len(rows)} microbatches" if isinstance(rows, Microbatches) else type(rows).__name__
        raise ValueError(f"input_tangents: got {got}, expected {len(inputs)} microbatches, as the inputs are")
    return Microbatches(
        Dual(*_with_zeros(x, row, f"inputs[{i}]"))
        for i, (x, row) in enumerate(zip(inputs, rows, strict=True))
    )


def _unmoved(inputs: Any) -> Any:
    """Pair the batch with empty tangents, in the form of the batch."""
    if isinstance(inputs, Microbatches):
        return inputs.map(lambda x: Dual(x, None))
    return None if inputs is None else Dual(inputs, None)


def _still(carry: Mapping[int, Any] | None) -> Mapping[int, Any]:
    """Pair first carries with empty tangents."""
    return {
        stage: tree.map(lambda x: (x, None)) if isinstance(tree, Microbatches) else tree
        for stage, tree in by_stage(carry or {}, "carry").items()
    }


def _with_zeros(primal: Any, tangents: Any, name: str) -> tuple[Any, Any]:
    """Pair a tree with its tangents; leaves that could have a tangent and have no such tensor get zeros."""
    leaves, treedef = tree_flatten(primal)
    return primal, treedef.unflatten(
        torch.zeros_like(leaf) if tangent is None and differentiable(leaf.dtype) else tangent
        for leaf, tangent in zip(leaves, flatten_tangents(primal, tangents, name), strict=True)
    )


@reports_mistakes
def per_sample_grad(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    samples: int,
    engine: Engine = graph,
    randomness: str = "error",
    tied: TiedPlaces = None,
) -> StepFunction[..., tuple[torch.Tensor, dict[int, Any]]]:
    """Make a function that computes the gradient of each sample's loss in the parameters of all stages.

    Equivalent to ``torch.func.vmap(torch.func.grad(loss), (None, 0, 0))`` over samples, each a batch of one.

    Args:
        stages: the stages of :func:`ppfunc.value_and_grad`. Every leaf that they take or return, except the
            parameters, has a leading batch axis b. Samples do not depend on each other. A split is traced for
            a batch of one, and has no state.
        loss_fn: ``loss(y, target) -> scalar``, called with batches of one.
        schedule, transport, engine, tied: the arguments of :func:`ppfunc.value_and_grad`.
        samples: b, the number of samples in a microbatch.
        randomness: random numbers of a stage that draws some: ``"different"`` for each sample, or ``"same"``
            for all; by default such a stage raises.

    Returns:
        ``step(params, inputs, targets, *, seed=None, extras=None) -> (loss, grads)``: the mean loss of the
        samples, and the gradients ``{stage: tree}`` with leading axes [m, b]. Samples have no weights, and
        stages no state. :func:`ppfunc.transforms.square_norms` gives the norms of the gradients over all
        stages, :func:`ppfunc.transforms.clipped_sum` the sum of clipped ones.

    >>> from ppfunc import gpipe
    >>> step = per_sample_grad([lambda w, x: w * x] * 2, lambda y, target: y.sum(), gpipe(2, 1), samples=3)
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> step(params, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    (tensor(12.), {0: tensor([[3., 6., 9.]]), 1: tensor([[2., 4., 6.]])})
    """
    whole = isinstance(stages, Split)  # values between its stages need not have a batch axis
    _require_per_sample(stages, samples)
    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
    losses = per_sample_loss(loss_fn, joined=not whole)

    def loss(y: Any, target: Any) -> torch.Tensor:
        return losses(y, target).sum()

    name = f"per_sample_grad of {samples} samples"
    spec = StepSpec(name, ("loss", "grads"), per_microbatch=True, tied=ties)
    transform = partial(per_sample, randomness=randomness, joined=not whole)
    transformed = (
        map_stages(stages[:1], transform) + map_stages(stages[1:], partial(transform, alone=False))
        if whole
        else map_stages(stages, transform)
    )
    m = schedule.microbatches
    return make_step(
        transformed, loss, schedule, transport, engine, spec, partial(_read, samples, m),
        lambda result: (result.loss / (samples * m), result.grads),
    )  # fmt: skip


@named_step
def _read(
    samples: int,
    m: int,
    params: Mapping[int, Any],
    inputs: Any,
    targets: Any = None,
    *,
    seed: Seed = None,
    extras: Mapping[int, Any] | None = None,
) -> RawArguments:
    """Read the arguments of a step of m microbatches, each of this number of samples."""
    further = {f"extras[{s}]": batch for s, batch in by_stage(extras or {}, "extras").items()}
    for name, batch in {"inputs": inputs, "targets": targets, **further}.items():
        _require_samples(batch, samples, m, name)
    for stage, tree in by_stage(params, "params").items():
        flatten(tree, f"params[{stage}]")  # refuses other leaves than tensors
    copies = {stage: for_samples(tree, samples) for stage, tree in params.items()}
    return RawArguments(copies, inputs, targets, extras, None, [1.0] * m, seed)


def _require_per_sample(stages: Stages, samples: Any) -> None:
    """Raise for stages with a state, which no sample has for itself, or an invalid number of samples."""
    if isinstance(stages, Split) and stages.encoder:
        raise ValueError(
            f"stages: got a split with the encoder {stages.encoder}, whose values have no axis of samples;"
            " split without encoder="
        )
    if isinstance(stages, Split) and stages.state:
        name, *_ = next(iter(stages.state.values()))
        raise ValueError(
            f"stages: got a split that writes into the buffer {name}, and there is none per sample; split in"
            " evaluation"
        )
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(
            f"samples: got {samples!r}, expected the number of samples in a microbatch, an integer of at"
            " least 1"
        )


def _require_samples(batch: Any, samples: int, microbatches: int, name: str) -> None:
    """Raise where a leaf of a batch has not ``samples`` rows in every microbatch."""
    trees = enumerate(batch) if isinstance(batch, Microbatches) else [(None, batch)]
    for index, tree in trees:
        wanted = samples * microbatches if index is None else samples
        leaves, treedef = tree_flatten(tree, name)
        for path, leaf in zip(tree_paths(treedef), leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] != wanted):
                place = f"{name}{'' if index is None else f'[{index}]'}{path}"
                raise ValueError(
                    f"{place}: got the shape {list(leaf.shape)}, expected {wanted} rows in axis 0, {samples}"
                    f" samples in each microbatch, as samples={samples} says; every leaf has them"
                )
