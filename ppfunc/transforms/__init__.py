"""Make step functions of other derivatives: forward mode, curvature products, gradients of every sample.

Each transforms the stages and runs them by an ordinary step::

    products.py          jvp, hvp
    sample_gradients.py  per_sample_grad
"""

from ppfunc.stage.transforms import (
    clipped_sum as clipped_sum,
    dual as dual,
    square_norms as square_norms,
)

from .products import hvp as hvp, jvp as jvp
from .sample_gradients import per_sample_grad as per_sample_grad
