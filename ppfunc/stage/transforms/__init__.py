"""Transform stages into stages, and losses into losses.

What they return is run by the same schedules, interpreter and transports as any stage.
"""

from .mapped import (
    clipped_sum as clipped_sum,
    ensemble as ensemble,
    for_samples as for_samples,
    per_sample as per_sample,
    per_sample_loss as per_sample_loss,
    square_norms as square_norms,
)
from .tangents import (
    dual as dual,
    dual_loss as dual_loss,
)
