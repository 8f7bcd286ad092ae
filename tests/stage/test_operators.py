"""Operators of a transformer count as torch counts them, and none of them as nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ppfunc as pp
from ppfunc.stage.operators import flop_counter, flops_of, own_formulas

aten = torch.ops.aten
B, H, T, D = 2, 3, 5, 4


def counted(fn, *shapes, device="meta", known=False):
    inputs = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
    counts = []
    for backward in (False, True):
        with FlopCounterMode(display=False) if known else flop_counter() as counter:
            y = fn(*inputs)
            if backward:
                y.sum().backward()
        counts.append(counter.get_total_flops())
    return counts[0], counts[1] - counts[0]


HEADS = (B, H, T, D)
# What a call does, its arguments, multiplications and additions of its forward, and times as many backward.
CALLS = {
    "linear": (F.linear, [(T, D), (H, D)], 2 * T * D * H, 2),
    "batched": (torch.matmul, [(B, T, D), (B, D, H)], 2 * B * T * D * H, 2),
    "vector": (torch.mv, [(T, D), (D,)], 2 * T * D, None),
    "addmv": (torch.addmv, [(T,), (T, D), (D,)], 2 * T * D, None),
    "dot": (torch.dot, [(D,), (D,)], 2 * D, None),
    "addbmm": (torch.addbmm, [(T, H), (B, T, D), (B, D, H)], 2 * B * T * D * H, None),
    "einsum": (lambda q, k: torch.einsum("bhtd,bhsd->bhts", q, k), [HEADS, HEADS], 2 * B * H * T * T * D, 2),
    "convolution": (F.conv1d, [(B, D, T), (H, D, 1)], 2 * B * T * D * H, 2),
    "attention": (F.scaled_dot_product_attention, [HEADS] * 3, 4 * B * H * T * T * D, None),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_transformer_count(name, device):
    fn, shapes, forward, times = CALLS[name]
    ours = counted(fn, *shapes, device=device)
    assert ours[0] == forward
    assert (
        ours[1] == times * forward if times else name in ("dot", "vector", "addmv") or ours[1] >= 2 * forward
    )


def test_what_torch_counts_is_counted_alike():
    for name, (fn, shapes, _, _) in CALLS.items():
        known = counted(fn, *shapes, device="cpu", known=True)
        assert not known[0] or counted(fn, *shapes, device="cpu")[0] == known[0], name
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).train()

    def layer(x):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return model(x)

    assert counted(layer, (B, T, 8), device="cpu") == counted(layer, (B, T, 8), device="cpu", known=True)


ATTENTION = [
    getattr(aten, name)
    for name in dir(aten)
    if name.startswith("_scaled_dot_product") and not name.endswith(("math", "compute_mask"))
]


@pytest.mark.parametrize("packet", ATTENTION, ids=str)
def test_attention_of_every_backend_counts(packet):
    """By arguments of its schema: an operator that a later torch adds is asked for here."""
    backward = "backward" in str(packet)
    qkv = [torch.empty(HEADS, device="meta")] * (4 if backward else 3)
    count = flops_of(packet, qkv, {}, qkv[0])
    assert count == (10 if backward else 4) * B * H * T * T * D


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [((6, D), (B, D, H), (6, H)), ((T, 6), (6, H), (B, T, H)), ((B, T, D), (B, D, H), (B, T, H))],
)
def test_products_of_groups_count(a, b, out):
    """Of two matrices the groups share the axis that is summed over."""
    tensors = [torch.empty(shape, device="meta") for shape in (a, b, out)]
    rows = a[0] if len(a) == 2 else a[0] * a[1]
    assert flops_of(aten._grouped_mm, tensors[:2], {}, tensors[2]) == 2 * rows * a[-1] * out[-1]


def test_formulas_of_ours_are_those_that_torch_lacks():
    """A later torch counts some of these itself; its formulas are taken then."""
    assert aten.addbmm in own_formulas() or aten.addbmm in flop_registry
    assert not own_formulas().keys() & flop_registry.keys()


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_split_of_attention_and_perceptrons_is_balanced():
    """Attention over a long time is as dear as a perceptron of the same count of operations."""
    t, d = 512, 32
    attention = 2 * d * 3 * d + 4 * t * d
    width = attention // (4 * d)
    blocks = [Attention(d) for _ in range(4)]
    blocks += [nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, d)) for _ in range(4)]
    x = torch.ones(2, t, d)
    split = pp.split(nn.Sequential(*blocks), (x,), at=4)
    lowered = pp.value_and_grad(split, lambda y, target: y.sum(), pp.gpipe(4, 1)).lower(
        split.params, torch.ones(2, t, d), torch.ones(2, t, d)
    )
    costs = [cost.forward for cost in lowered.cost_analysis().values()]
    assert max(costs) < 1.1 * sum(costs) / 4
