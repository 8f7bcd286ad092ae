"""Weigh the losses of a step."""

import torch

from .buffers import Buffers
from .lowered import LoweredStep


def loss_dtype(lowered: LoweredStep, stage: int) -> torch.dtype:
    """The dtype in which a stage makes its losses, and their gradients begin."""
    made = (low.loss.leaves[0].dtype for (s, _), low in lowered.stages.items() if s == stage and low.loss is not None)
    return next(made)


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """The losses of every stage of this process that has some, each times the weight of its microbatch, of all passes so far.

    A loss of weight 0 counts as 0, also where it is NaN, as the mean over no tokens is.
    """
    made: dict[int, torch.Tensor] = {}
    for stage, part in lowered.losses.items():
        chain = next(chain for chain in lowered.schedule.chains if stage in chain.stages)
        own = [m for m in chain.microbatches if lowered.stages[stage, m].loss is not None]
        kept = [buffers.kept[stage, m][0] for m in own]
        kept = [torch.zeros_like(loss) if m in buffers.left_out else loss for m, loss in zip(own, kept, strict=True)]
        losses = torch.stack(kept).to(part.leaf.dtype)
        weights = torch.stack([buffers.weights[stage][m] for m in own])
        weights = weights.view(-1, *(1,) * (losses.ndim - 1))
        losses = torch.where(weights == 0, torch.zeros_like(losses), losses * weights)
        made[stage] = torch.cat([*buffers.losses[stage], losses]) if stage in buffers.losses else losses
    return made
