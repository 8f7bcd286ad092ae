"""Compiled programs: the same results within rounding, the same random numbers, no guards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ppfunc.stage import graph

pytestmark = pytest.mark.filterwarnings("ignore")


def stage(p, x, scale):
    h = F.layer_norm(x @ p["w"], (8,), p["g"])
    return F.dropout(F.gelu(h) * scale, 0.5) @ p["w"].T, x, p["g"]


def test_compiled_programs_agree_with_plain_ones():
    torch.manual_seed(0)
    args = ({"w": torch.randn(4, 8), "g": torch.randn(8)}, torch.randn(3, 4), torch.randn(8))
    results = []
    for engine in (graph, graph(compile=True), graph(compile=True, remat="full")):
        program = engine(stage, args)
        torch.manual_seed(1)
        y, residuals = program.forward(*args)
        gy = (torch.ones(3, 4), torch.ones(3, 4), torch.ones(8))
        whole = program.backward(residuals, gy)
        gx, rest = program.backward_input(residuals, gy)
        results.append((y, whole, (program.backward_weight(rest), gx)))
    assert program.residual_bytes < graph(stage, args).residual_bytes
    for result in results:
        torch.testing.assert_close(result, results[0])
        torch.testing.assert_close(result[1], result[2])
