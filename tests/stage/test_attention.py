"""Attention with dropout on a GPU: the kernels of torch keep the seed of their forward for their backward."""

from __future__ import annotations

from functools import cache

import optree
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ppfunc as pp
from tests.models import same_bits, squared

KERNELS = {
    SDPBackend.MATH: torch.float32,
    SDPBackend.EFFICIENT_ATTENTION: torch.float32,
    SDPBackend.FLASH_ATTENTION: torch.bfloat16,
    SDPBackend.CUDNN_ATTENTION: torch.bfloat16,
}
ENGINES = {
    "graph": pp.engines.graph,
    "again": pp.engines.graph(remat="full"),
}


def step_of(kernel, engine, schedule):
    """Take two steps of two stages of attention; returns loss and gradients of the second, on the host."""

    def stage(params, x):
        q, k, v = (x @ params["w"]).unflatten(-1, (3, 2, 32)).movedim(2, 0).transpose(2, 3)
        with sdpa_kernel(kernel):
            y = scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)

    generator = torch.Generator().manual_seed(0)
    w = {s: {"w": torch.randn(64, 192, generator=generator) / 8} for s in range(2)}
    params = {s: {"w": tree["w"].to("cuda", KERNELS[kernel])} for s, tree in w.items()}
    x, y = torch.randn(2, 8, 64, 64, generator=generator).to("cuda", KERNELS[kernel])
    step = pp.value_and_grad([stage] * 2, squared, schedule, engine=engine)
    for n in range(2):
        result = step(params, x, y, seed=(0, n))
    return optree.tree_map(torch.Tensor.cpu, result)


@cache
def wanted(kernel):
    return step_of(kernel, pp.engines.eager, pp.gpipe(2, 4))


@pytest.mark.cuda
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_dropout_of_attention_is_that_of_autograd(kernel, engine):
    for schedule in (pp.one_f_one_b(2, 4), pp.zb_h1(2, 4)):
        assert same_bits(step_of(kernel, ENGINES[engine], schedule), wanted(kernel))
