"""Second derivatives: the sharpness of a minimum, and a Newton step, by Hessian-vector products in one pass
each.

    python examples/hessian_vector.py

``pp.hvp`` differentiates in reverse what forward mode computes: the loss along a direction. One
pipelined step, here under a zero-bubble schedule, gives the loss, its slope, the gradient, and the
Hessian of the parameters of all stages times the direction.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from small import MICROBATCHES, STAGES, batch, disagreement, loss_fn, parameters, stage, total_loss
from torch import Tensor

import ppfunc as pp


def inner(a: Any, b: Any) -> Tensor:
    return sum((x * y).sum() for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


def scaled(tree: Any, factor: Tensor) -> Any:
    return optree.tree_map(lambda t: t * factor, tree)


def plus(a: Any, b: Any) -> Any:
    return optree.tree_map(torch.add, a, b)


def main() -> float:
    torch.set_num_threads(1)
    params, (inputs, targets) = parameters(), batch()
    schedule = pp.zb_h1(ranks=STAGES, microbatches=MICROBATCHES)
    hvp = pp.hvp([stage] * STAGES, loss_fn, schedule)

    # Power iteration: the direction turns to the one of largest curvature.
    direction = parameters(seed=1)
    for _ in range(20):
        direction = scaled(direction, inner(direction, direction).rsqrt())
        result = hvp(params, direction, inputs, targets)
        sharpness, direction = inner(direction, result.products), result.products
    print(f"loss {result.loss:.4f}, largest curvature {sharpness:.3f}")

    # A damped Newton step by conjugate gradients: the damping outweighs what curvature is negative.
    newton, residual = scaled(params, 0), scaled(result.grads, -1)
    search = residual
    for _ in range(15):
        product = hvp(params, search, inputs, targets).products
        product = plus(product, scaled(search, sharpness / 10))
        length = inner(residual, residual) / inner(search, product)
        newton, left = plus(newton, scaled(search, length)), plus(residual, scaled(product, -length))
        search, residual = plus(left, scaled(search, inner(left, left) / inner(residual, residual))), left
    moved = plus(params, newton)
    print(
        "loss after one Newton step"
        f" {pp.evaluate([stage] * STAGES, loss_fn, schedule)(moved, inputs, targets):.4f}"
    )

    vector = parameters(seed=2)
    result = hvp(params, vector, inputs, targets)
    slope, grads, products = result.slope, result.grads, result.products
    gradient = torch.func.grad(total_loss(inputs, targets))
    want = torch.func.jvp(gradient, (params,), (vector,))
    error = disagreement((grads, products, slope), (*want, inner(want[0], vector)))
    print(f"largest disagreement with torch.func.jvp of torch.func.grad of the whole model: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
