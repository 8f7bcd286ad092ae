"""Conclude from the sums over all ranks whether an update is made, by what its gradients are multiplied, and
what its metrics are.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from ppfunc.runtime.ports.protocols import Collective, Wait
from ppfunc.stage.tree import tree_map

from ..optim.norms import Clip, clip_coefficient, norm_of, norm_sum, powers
from ..optim.protocols import Optimizer
from .precision import overflow
from .ranks import TrainingRanks
from .train_state import Metrics, TrainState


class Conclusion(NamedTuple):
    """Hold what follows from the sums over all ranks.

    Args:
        loss, norm, scale: see :class:`Metrics`.
        found_inf, skipped: 1 where loss or gradients are not finite, and where the update is left out for it,
            float32[].
        step: the number of updates with this one.
        factor: of the gradients, None for 1.
    """

    loss: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor
    found_inf: torch.Tensor
    skipped: torch.Tensor
    step: torch.Tensor
    factor: torch.Tensor | None = None


def shares(
    norms: Mapping[int, torch.Tensor],
    losses: Sequence[torch.Tensor],
    norm_type: float,
    stages: int,
    device: torch.device,
) -> torch.Tensor:
    """Stack this rank's shares in the loss and in the norm of every stage: float64[1 + stages].

    Summed over the ranks, and then over the stages in order, they give the same bits in any number of
    processes.

    Args:
        norms: by stage of the model, the results of :func:`leaf_norms`.
        losses: weighted, of last stages.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [zero] * stages
    for stage, leaves in norms.items():
        sums[stage] = norm_sum(powers(leaves, norm_type), norm_type)
    return torch.stack([reduce(torch.add, (value.sum().to(zero) for value in losses), zero), *sums])


def conclude(
    sums: torch.Tensor, step: torch.Tensor, loss_scale: torch.Tensor | None, clip: Clip, skips: bool
) -> Conclusion:
    """Conclude from the sum of the shares of all ranks.

    Args:
        step: the number of updates so far.
        loss_scale: None for 1.
        skips: an update is left out where a number is not finite.
    """
    loss = sums[0]
    one = torch.ones((), dtype=loss.dtype, device=loss.device)
    scale = one if loss_scale is None else loss_scale.to(one)
    norm = unscaled_norm(norm_sum(sums[1:], clip.norm_type), clip, None if loss_scale is None else scale)
    found_inf = overflow(loss, norm)
    skipped = found_inf if skips else torch.zeros_like(found_inf)
    factor = clip_coefficient(norm, clip.max_norm)
    if loss_scale is not None:
        factor = (1 if factor is None else factor) / scale
    return Conclusion(loss, norm, scale, found_inf, skipped, step + (skipped <= 0), factor)


def unscaled_norm(sums: torch.Tensor, clip: Clip, scale: torch.Tensor | None) -> torch.Tensor:
    """Compute norms of gradients from the sums of those that the loss scale has multiplied."""
    norm = norm_of(sums, clip.norm_type)
    return norm if scale is None else norm / scale


def start_largest(ranks: Collective, norms: torch.Tensor) -> Wait:
    """Begin to replace norms by the largest of all ranks, NaN if one of them is.

    The maximum of a backend may leave NaN out; a sum does not.
    """
    total = norms.clone()
    waits = ranks.all_reduce(norms, "max"), ranks.all_reduce(total)

    def wait() -> None:
        for each in waits:
            each()
        norms.copy_(torch.where(total.isnan(), total, norms))

    return wait


# -- metrics beside loss and norm


def losses_of_all(
    ranks: TrainingRanks, each: Mapping[int, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Put the losses of this process in their places among those of all data ranks: float64[ranks * m].

    Args:
        each: the losses, by microbatch; their sum over all ranks completes the others.
    """
    m = ranks.schedule.microbatches
    rows = torch.zeros(ranks.data.size * m, dtype=torch.float64, device=device)
    for n, loss in each.items() if ranks.model.index == 0 else ():
        rows[ranks.data.index * m + n] = loss
    return rows


def learning_rate(optimizer: Optimizer, initial: TrainState, step: torch.Tensor, like: torch.Tensor) -> Any:
    """Compute the learning rate of an update, from the state before the call and the updates since.

    Args:
        step: the number of updates before this one.
        like: has the dtype and the device of the rates.

    Returns:
        As ``lr`` of :class:`Metrics`.
    """
    if optimizer.rate is None:
        return None
    values = optimizer.rate(next(iter(initial.optimizer.values())), step - initial.step)
    return tree_map(lambda v: v.to(like) if isinstance(v, torch.Tensor) else torch.full_like(like, v), values)


def with_norms(
    metrics: Metrics,
    stages: torch.Tensor,
    leaves: Mapping[int, Mapping[str, torch.Tensor]],
    norm: Callable[[torch.Tensor], torch.Tensor],
) -> Metrics:
    """Add the norms by stage and by leaf, which ``norm`` makes of their sums over all ranks."""
    by_leaf = {stage: {name: norm(s) for name, s in sums.items()} for stage, sums in leaves.items()}
    return metrics._replace(stage_norms=norm(stages), leaf_norms=by_leaf)
