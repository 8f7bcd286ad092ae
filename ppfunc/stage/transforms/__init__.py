"""Transforms: functions from stages to stages, and from losses to losses.

What they return is run by the same schedules, interpreter and transports as any stage.
"""

from .dual import dual, dual_loss
from .ensemble import ensemble
from .gauss_newton import gauss_newton_loss, held_dual
from .hessian import hessian_loss, sloping
from .samples import clipped_sum, for_samples, per_sample, per_sample_loss, square_norms

__all__ = [
    "clipped_sum",
    "dual",
    "dual_loss",
    "ensemble",
    "for_samples",
    "gauss_newton_loss",
    "held_dual",
    "hessian_loss",
    "per_sample",
    "per_sample_loss",
    "sloping",
    "square_norms",
]
