"""Collectives among all processes of a test."""

import torch
import torch.distributed as dist

from ppfunc.stage.signature import differentiable
from ppfunc.training.update.sharding import shard_dim


def shard_dims(leaves, ranks, taken=()):
    """Of every leaf that is trained, the dimension that is cut."""
    return tuple(
        shard_dim(leaf.shape, ranks, taken) if differentiable(leaf.dtype) else None for leaf in leaves
    )


class World:
    """All ranks, in the form that training takes."""

    def __init__(self):
        self.size, self.index = dist.get_world_size(), dist.get_rank()

    def all_reduce(self, tensor, op="sum"):
        return dist.all_reduce(
            tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], async_op=True
        ).wait

    def reduce_scatter(self, tensor, part):
        return dist.reduce_scatter_tensor(part, tensor, async_op=True).wait

    def all_gather(self, part):
        whole = torch.empty(part.numel() * self.size, dtype=part.dtype)
        return whole, dist.all_gather_into_tensor(whole, part, async_op=True).wait
