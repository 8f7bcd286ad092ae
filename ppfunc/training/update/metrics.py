"""Compute the metrics of an update beside loss and norm."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ppfunc.stage.tree import tree_map

from ..optim.protocols import Optimizer
from .ranks import TrainingRanks
from .train_state import Metrics, TrainState


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
    if isinstance(values, float):
        return torch.full_like(like, values)
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
