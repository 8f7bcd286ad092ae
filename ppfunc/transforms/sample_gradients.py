"""Make pipelines that compute the gradients of every sample apart."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ppfunc.runtime import Microbatches, StepFunction, StepSpec, Transport
from ppfunc.runtime.lowering.ties import TiedPlaces
from ppfunc.runtime.values.arguments import RawArguments, Seed, by_stage, named_step
from ppfunc.schedule import Schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, graph
from ppfunc.stage.signature import flatten
from ppfunc.stage.transforms import for_samples, per_sample, per_sample_loss
from ppfunc.stage.tree import tree_flatten, tree_paths
from ppfunc.steps import Stages, make_step, map_stages, reports_mistakes, unpacked

__all__ = ["per_sample_grad"]


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
        stages: as in :func:`ppfunc.value_and_grad`. Every leaf that they take or return, except the
            parameters, has a leading batch axis b. Samples do not depend on each other. A split is traced for
            a batch of one, and has no state.
        loss_fn: ``loss(y, target) -> scalar``, called with batches of one.
        schedule, transport, engine, tied: as in :func:`ppfunc.value_and_grad`.
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
    """Read the arguments of a step for so many samples in each of m microbatches."""
    further = {f"extras[{s}]": batch for s, batch in by_stage(extras or {}, "extras").items()}
    for name, batch in {"inputs": inputs, "targets": targets, **further}.items():
        _require_samples(batch, samples, m, name)
    for stage, tree in by_stage(params, "params").items():
        flatten(tree, f"params[{stage}]")  # refuses other leaves than tensors
    copies = {stage: for_samples(tree, samples) for stage, tree in params.items()}
    return RawArguments(copies, inputs, targets, extras, None, [1.0] * m, seed)


def _require_per_sample(stages: Stages, samples: Any) -> None:
    """Raise for stages with a state, of which there is none per sample, or an invalid number of samples."""
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
