"""Gradients of the inputs: what a prediction depends on, and how little it takes to spoil it.

    python examples/saliency.py

``argnums=1`` asks a pipeline for the gradient of the loss with respect to the batch; the last
message of every microbatch brings it to the rank of the first stage.
"""

from __future__ import annotations

import torch
from small import MICROBATCHES, STAGES, batch, disagreement, loss_fn, parameters, stage, total_loss

import ppfunc as pp


def main() -> float:
    torch.set_num_threads(1)
    params, (inputs, targets) = parameters(), batch()
    schedule = pp.one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    step = pp.value_and_grad([stage] * STAGES, loss_fn, schedule, argnums=1)

    loss, saliency = step(params, inputs, targets)  # saliency: [m b, d], as the inputs
    strongest = saliency.abs().mean(0).topk(3).indices.tolist()
    print(f"loss {loss:.4f}; the features that it depends on most: {strongest}")

    # A step of the same small size in every feature, in the direction that hurts (Goodfellow et al., 2015).
    evaluate = pp.evaluate([stage] * STAGES, loss_fn, schedule)
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1), dtype=inputs.dtype)
    for size in (0.01, 0.1, 0.3):
        hurt, shaken = (evaluate(params, inputs + size * d.sign(), targets) for d in (saliency, noise))
        print(
            f"inputs changed by {size:<4}: loss {hurt:.4f} along the gradient's signs, {shaken:.4f} at random"
        )

    # Both gradients in one step, as adversarial training wants them.
    both = pp.value_and_grad([stage] * STAGES, loss_fn, schedule, argnums=(0, 1))
    result = both(params, inputs, targets)
    grads, again = result.grads, result.input_grads

    want = torch.func.grad(lambda p, x: total_loss(x, targets)(p), (0, 1))(params, inputs)
    error = max(disagreement((grads, again), want), disagreement(saliency, want[1]))
    print(f"largest disagreement with torch.func.grad of the whole model: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
