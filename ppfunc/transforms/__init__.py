"""Make step functions of other derivatives; each transforms the stages and runs them by an ordinary step."""

from ppfunc.stage.transforms import (
    clipped_sum as clipped_sum,
    dual as dual,
    square_norms as square_norms,
)

from .derivatives import hvp as hvp, jvp as jvp, per_sample_grad as per_sample_grad
