"""The shared reference agrees with a chain of stage programs, so that both can be trusted."""

from __future__ import annotations

import pytest
import torch

from ppfunc.stage import eager, functional, graph
from tests.models import attention_block, attention_params, mlp, mlp_params, normal, reference, squared


@pytest.mark.parametrize("engine", [graph, functional, eager], ids=lambda e: e.__name__)
def test_the_reference_is_what_stages_one_after_the_other_compute(engine):
    params = {0: attention_params(4), 1: mlp_params(4)}
    stages = [attention_block, lambda p, x: mlp(p, x)]
    batches = [(normal(2, 3, 4, seed=n), normal(2, 3, 4, seed=n + 9)) for n in range(3)]
    loss, grads = reference(stages, squared, params, batches, weights=[0.5, 0.25, 0.125])
    total, sums = torch.zeros((), dtype=torch.float64), {}
    for (x, target), weight in zip(batches, [0.5, 0.25, 0.125], strict=True):
        kept = []
        for n, stage in enumerate(stages):
            program = engine(stage, (params[n], x))
            x, residuals = program.forward(params[n], x)
            kept.append((n, program, residuals))
        g, value = torch.func.grad_and_value(squared)(x, target)
        total, g = total + weight * value, weight * g
        for n, program, residuals in reversed(kept):
            gparams, g = program.backward(residuals, g)
            sums[n] = {k: t + sums[n][k] if n in sums else t for k, t in gparams.items()}
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, sums, rtol=1e-12, atol=1e-12)
