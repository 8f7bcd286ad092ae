"""Differentially private training: the gradient of every sample, clipped by its norm over all stages.

    python examples/per_sample.py

A bound on the norm of each sample's gradient, and noise of that size, hide whether a sample was
there (Abadi et al., 2016). The norm is one over the whole model, so where the ranks of a pipeline are
processes they have to add up their parts of its square, and each has to draw noise of its own.
"""

from __future__ import annotations

import optree
import torch
import torch.distributed as dist
from small import BATCH, MICROBATCHES, STAGES, batch, disagreement, loss_fn, model, parameters, stage

import ppfunc as pp

BOUND, NOISE, RATE, STEPS = 4.0, 0.3, 0.05, 40


def main() -> float:
    torch.set_num_threads(1)
    params, (inputs, targets) = parameters(), batch()
    schedule = pp.one_f_one_b(ranks=STAGES, microbatches=MICROBATCHES)
    step = pp.per_sample_grad([stage] * STAGES, loss_fn, schedule, samples=BATCH)
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)

    def noisy(gradient: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        return (gradient + NOISE * BOUND * noise) / (MICROBATCHES * BATCH)

    for number in range(STEPS):
        loss, grads = step(params, inputs, targets)  # grads: [m, b, ...] for every parameter
        square = pp.transforms.square_norms(grads)  # [m, b]: over the stages of this process ...
        if dist.is_initialized():
            dist.all_reduce(square)  # ... and over those of the others
        clipped = pp.transforms.clipped_sum(grads, square, BOUND)
        params = optree.tree_map(lambda p, g: p - RATE * noisy(g), params, clipped)
        if number % 10 == 0:
            over = (square.sqrt() > BOUND).double().mean()
            print(f"step {number:2}  loss {loss:.4f}  samples clipped {over:.0%}")

    def of_sample(params: dict, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(model(params, x[None]), target[None])

    _, grads = step(params, inputs, targets)
    want = torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(params, inputs, targets)
    error = disagreement(optree.tree_map(lambda g: g.flatten(0, 1), grads), want)
    print(f"largest disagreement with torch.func.vmap of torch.func.grad of the whole model: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
