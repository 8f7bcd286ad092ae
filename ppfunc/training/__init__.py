"""Train with gradients: optimizers as pairs of pure functions."""

from .optimizers import AdamWState, Optimizer, SGDState, adamw, sgd

__all__ = ["AdamWState", "Optimizer", "SGDState", "adamw", "sgd"]
