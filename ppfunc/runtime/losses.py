"""Weigh the losses of a step."""

import torch

from .buffers import Buffers
from .lowered import LoweredStep


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """The losses of every stage of this process that has some, each times the weight of its microbatch, of all passes so far."""
    made: dict[int, torch.Tensor] = {}
    for stage in lowered.losses:
        chain = next(chain for chain in lowered.schedule.chains if stage in chain.stages)
        own = [m for m in chain.microbatches if lowered.stages[stage, m].loss is not None]
        losses = torch.stack([buffers.kept[stage, m][0] for m in own])
        weights = torch.stack([buffers.weights[stage][m] for m in own])
        losses = losses * weights.view(-1, *(1,) * (losses.ndim - 1))
        made[stage] = torch.cat([*buffers.losses[stage], losses]) if stage in buffers.losses else losses
    return made
