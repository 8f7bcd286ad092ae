"""Collectives among all processes of a test."""

import torch.distributed as dist

from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.signature import differentiable
from ppfunc.training.update.buckets import shard_dim


def shard_dims(leaves, ranks, taken=()):
    """Of every leaf that is trained, the dimension that is cut."""
    return tuple(
        shard_dim(leaf.shape, ranks, taken) if differentiable(leaf.dtype) else None for leaf in leaves
    )


class World(Collective):
    """All ranks, in the form that training takes."""

    def __init__(self):
        super().__init__(dist.get_world_size(), dist.get_rank())
        self.group = dist.group.WORLD
