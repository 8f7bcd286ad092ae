"""Ensembles: one pipeline trains several models at once, each as if it were alone.

    python examples/ensemble.py

Every stage becomes one over stacked parameters, so that small models make large operations, and k of
them share the bubbles and the messages of one pipeline.
"""

from __future__ import annotations

import optree
import torch
from small import MICROBATCHES, STAGES, batch, disagreement, loss_fn, parameters, stage, total_loss

import ppfunc as pp

MODELS, STEPS, RATE = 5, 40, 0.5


def main() -> float:
    torch.set_num_threads(1)
    inputs, targets = batch()
    members = [parameters(seed) for seed in range(MODELS)]
    params = optree.tree_map(lambda *leaves: torch.stack(leaves), *members)  # [k, ...]

    stages, losses_fn = pp.ensemble([stage] * STAGES, loss_fn)
    schedule = pp.one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    step = pp.value_and_grad(stages, losses_fn, schedule, loss_shape=(MODELS,))

    for number in range(STEPS):
        losses, grads = step(params, inputs, targets)  # losses: [k]
        params = optree.tree_map(lambda p, g: p - RATE * g, params, grads)
        if number % 10 == 0:
            print(f"step {number:2}  losses {' '.join(f'{loss:.4f}' for loss in losses)}")

    # The same trainings one after the other, without a pipeline.
    gradient = torch.func.grad(total_loss(inputs, targets))
    for _ in range(STEPS):
        members = [optree.tree_map(lambda p, g: p - RATE * g, own, gradient(own)) for own in members]
    error = disagreement(params, optree.tree_map(lambda *leaves: torch.stack(leaves), *members))
    print(f"largest disagreement with {MODELS} trainings of the whole model after {STEPS} steps: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
