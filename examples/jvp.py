"""Forward mode: how fast does the loss fall along a direction? One forward pipeline tells, without any
backward.

    python examples/jvp.py

Every stage is turned into one that carries, beside each value, its derivative along the direction:
twice the messages, the same schedule.
"""

from __future__ import annotations

import optree
import torch
from small import MICROBATCHES, STAGES, batch, disagreement, loss_fn, parameters, stage, total_loss

import ppfunc as pp


def main() -> float:
    torch.set_num_threads(1)
    params, (inputs, targets) = parameters(), batch()
    stages, schedule = [stage] * STAGES, pp.inference(ranks=STAGES, microbatches=MICROBATCHES)

    # The direction of steepest descent, from an ordinary training step ...
    training = pp.one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    _, grads = pp.value_and_grad(stages, loss_fn, training)(params, inputs, targets)
    down = optree.tree_map(torch.neg, grads)

    # ... along which one forward pass gives the loss and its slope.
    loss, slope = pp.jvp(stages, loss_fn, schedule)(params, down, inputs, targets)
    print(f"loss {loss:.4f}, slope along the negative gradient {slope:.4f}")

    evaluate = pp.evaluate(stages, loss_fn, schedule)
    for length in (0.01, 0.1, 1.0):
        moved = optree.tree_map(lambda p, d: p + length * d, params, down)  # noqa: B023
        print(
            f"a step of {length:<4}: predicted {loss + length * slope:.4f}, measured"
            f" {evaluate(moved, inputs, targets):.4f}"
        )

    # Without a loss, the outputs are differentiated; here, in the inputs: params stay where they are.
    y, ty = pp.jvp(stages, None, schedule)(
        params, dict.fromkeys(params), inputs, input_tangents=torch.ones_like(inputs)
    )
    print(f"outputs {list(y.shape)} and their derivatives {list(ty.shape)}")

    want = torch.func.jvp(total_loss(inputs, targets), (params,), (down,))
    error = disagreement((loss, slope), want)
    print(f"largest disagreement with torch.func.jvp of the whole model: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
