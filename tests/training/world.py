"""Collectives among all processes of a test, and what the host reads."""

import traceback

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

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


class Reads(TorchDispatchMode):
    """Notes the operators that give the host a value of a tensor, where modules of a folder call them."""

    def __init__(self, folder=""):
        super().__init__()
        self.found, self.seen, self.inside = [], 0, folder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        reads = "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item", "masked_select"
        frames = traceback.extract_stack() if func.overloadpacket.__name__ in reads else []
        if any(self.inside in frame.filename for frame in frames):
            self.found.append(func)
        return func(*args, **kwargs or {})
