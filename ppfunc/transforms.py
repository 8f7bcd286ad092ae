"""Make pipelines that compute other derivatives than the gradient of one loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ppfunc.making import Stages, make_step, named_step, told_to_peers, unpacked
from ppfunc.runtime import Microbatches, StepFunction, StepResult, StepSpec, Transport
from ppfunc.runtime.arguments import LossWeights, RawArguments, Seed
from ppfunc.runtime.ties import TiedPlaces
from ppfunc.schedule import Schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, Stage, graph
from ppfunc.stage.signature import flatten
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
from ppfunc.stage.tree import tree_flatten, tree_paths
from ppfunc.tangents import by_stage, completed, moving, paired, unmoved

__all__ = ["gnvp", "hvp", "jvp", "per_sample_grad"]

Transform = Callable[[Stage], Stage]

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
    default = loss_weights

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

    def finish(result: StepResult, raw: RawArguments) -> Any:
        made = result.outputs
        if loss_fn is not None:
            made = tuple(result.loss.unbind())
        elif isinstance(made, Microbatches):
            made = made.map(lambda pair: pair[0]), made.map(lambda pair: pair[1])
        elif made is None:
            made = None, None
        return (made, result.aux) if has_aux else made

    wants = {"outputs" if loss_fn is None else "loss", *(["aux"] if has_aux else [])}
    spec = StepSpec("jvp", frozenset(wants), loss_shape=(2,), tied=ties, primal="0")
    losses = None if loss_fn is None else dual_loss(loss_fn)
    return make_step(_each(stages, dual), losses, schedule, transport, engine, spec, named_step(step), finish, loss_weights, training=False)


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

    wants = frozenset({"loss", "grads", *(["aux"] if has_aux else [])})
    spec = StepSpec("hvp", wants, loss_shape=(2,), tied=ties, primal="0")
    prepare = _along_tangents(loss_weights)
    return make_step(_each(stages, sloping), hessian_loss(loss_fn), schedule, transport, engine, spec, prepare, finish, loss_weights)


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

    wants = frozenset({"loss", "grads", *(["aux"] if has_aux else [])})
    spec = StepSpec("gnvp", wants, loss_shape=(2,), tied=ties, primal="0")
    prepare = _along_tangents(loss_weights)
    return make_step(_each(stages, held_dual), gauss_newton_loss(loss_fn), schedule, transport, engine, spec, prepare, finish, loss_weights)


@told_to_peers
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
    """Make a function that computes the gradient of the loss of every sample, in the parameters of all stages.

    Equivalent to ``torch.func.vmap(torch.func.grad(loss), (None, 0, 0))`` over samples, each a batch of one.

    Args:
        stages: as in :func:`ppfunc.value_and_grad`; every leaf that they take or return beside the
            parameters has a leading batch axis b, along which samples do not depend on each other. A split is traced
            for a batch of one; it has no state.
        loss_fn: ``loss(y, target) -> scalar``, here called with batches of one.
        schedule, transport, engine, tied: as in :func:`ppfunc.value_and_grad`.
        samples: b, the number of samples in a microbatch.
        randomness: ``"different"`` for stages that draw random numbers, or ``"same"``.

    Returns:
        ``step(params, inputs, targets, *, seed=None, extras=None) -> (loss, grads)``: the mean loss of the samples
        (they have no weights, and their stages no state), and the gradients ``{stage: tree}`` with leading axes
        [m, b]. Their norms over all stages, and the sum of clipped ones: :func:`ppfunc.square_norms`,
        :func:`ppfunc.clipped_sum`.

    >>> from ppfunc import gpipe
    >>> step = per_sample_grad([lambda w, x: w * x] * 2, lambda y, target: y.sum(), gpipe(2, 1), samples=3)
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> step(params, torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    (tensor(12.), {0: tensor([[3., 6., 9.]]), 1: tensor([[2., 4., 6.]])})
    """
    whole = isinstance(stages, Split)  # what its stages pass on need not have a batch axis
    _require_per_sample(stages, samples)
    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
    losses = per_sample_loss(loss_fn, joined=not whole)
    m = schedule.microbatches

    def step(
        params: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> RawArguments:
        further = {f"extras[{s}]": batch for s, batch in by_stage(extras or {}, "extras").items()}
        for name, batch in {"inputs": inputs, "targets": targets, **further}.items():
            _require_samples(batch, samples, m, name)
        for stage, tree in by_stage(params, "params").items():
            flatten(tree, f"params[{stage}]")  # refuses other leaves than tensors
        copies = {stage: for_samples(tree, samples) for stage, tree in params.items()}
        return RawArguments(copies, inputs, targets, extras, None, [1.0] * m, seed)

    def finish(result: StepResult, raw: RawArguments) -> tuple[torch.Tensor, dict[int, Any]]:
        return result.loss / (samples * m), result.grads

    def loss(y: Any, target: Any) -> torch.Tensor:
        return losses(y, target).sum()

    name = f"per_sample_grad of {samples} samples"
    spec = StepSpec(name, frozenset({"loss", "grads"}), per_microbatch=True, tied=ties)
    transform = partial(per_sample, randomness=randomness, joined=not whole)
    each = _each(stages[:1], transform) + _each(stages[1:], partial(transform, alone=not whole)) if whole else _each(stages, transform)
    return make_step(each, loss, schedule, transport, engine, spec, named_step(step), finish)


def _each(stages: Sequence[Stage | None], transform: Transform) -> list[Stage | None]:
    """The stages transformed; equal ones stay equal, so that they share their programs."""
    made = {id(fn): transform(fn) for fn in stages if callable(fn)}
    return [made.get(id(fn), fn) for fn in stages]


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


def _require_per_sample(stages: Stages, samples: Any) -> None:
    """Raise where stages have a state, of which there is none per sample, and for a number of samples that is none."""
    if isinstance(stages, Split) and stages.state:
        (name, *_) = next(iter(stages.state.values()))
        raise ValueError(f"stages: got a split that writes into the buffer {name}, and there is none per sample; split in evaluation")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples: got {samples!r}, expected the number of samples in a microbatch, an integer of at least 1")


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
                    f"{place}: got the shape {list(leaf.shape)}, expected {wanted} rows in axis 0, {samples} samples in each microbatch, "
                    f"as samples={samples} says; every leaf has them"
                )
