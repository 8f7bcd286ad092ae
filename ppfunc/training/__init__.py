"""Train with gradients: optimizers as pairs of pure functions."""

from .optimizers import AdamWState, Optimizer, SGDState, adamw, sgd
from .parallelize import parallelize, shard

__all__ = ["AdamWState", "Optimizer", "SGDState", "adamw", "parallelize", "sgd", "shard"]
