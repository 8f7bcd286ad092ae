"""Norms are those of one vector, however it is cut; clipping is torch's."""

from math import inf

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.training.optim import chain, clip_by_global_norm, global_norm, sgd
from ppfunc.training.optim.norms import clip_coefficient, leaf_norms, norm_of, norm_sum, powers

NORMS = [2, 2.0, 1, 3, 0.5, 2.5, inf]


def leaf_sums(leaves, norm_type=2.0):
    """The sum of ``|x|**p`` over each leaf."""
    return powers(leaf_norms(leaves, norm_type), norm_type)


def grads(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (), (0, 3), (1, 5), (7,)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("p", NORMS)
@given(st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_parts_combine_to_the_norm_of_the_whole(p, ranks):
    leaves = grads()
    whole = torch.cat([leaf.flatten() for leaf in leaves]).norm(p)
    parts = torch.stack(
        [
            norm_sum(leaf_sums([leaf for leaf, r in zip(leaves, ranks, strict=True) if r == rank], p), p)
            for rank in range(3)
        ]
    )
    got = norm_of(parts.max() if p == inf else parts.sum(), p)
    torch.testing.assert_close(got, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(global_norm(leaves, p), whole, rtol=1e-13, atol=0)


@pytest.mark.parametrize("p", NORMS)
def test_clipping_is_that_of_torch(p):
    for max_norm in (0.0, 0.3, 1.0, 1e6, inf):
        own = [torch.zeros_like(g, requires_grad=True) for g in grads()]
        for parameter, g in zip(own, grads(), strict=True):
            parameter.grad = g if g.numel() else None
        norm = torch.nn.utils.clip_grad_norm_(own, max_norm, p)
        clip = clip_by_global_norm(max_norm, p)
        got = clip(grads())
        torch.testing.assert_close(global_norm(grads(), p), norm, rtol=1e-13, atol=0)
        torch.testing.assert_close(
            got,
            [
                g if parameter.grad is None else parameter.grad
                for parameter, g in zip(own, grads(), strict=True)
            ],
            rtol=1e-13,
            atol=0,
        )


def test_halves_are_squared_in_float32_and_large_sums_in_float64():
    assert global_norm([torch.full((4,), 300.0, dtype=torch.float16)]).item() == 600
    assert global_norm([torch.full((4,), 4e18)] * 64).item() == pytest.approx(6.4e19)
    assert leaf_sums([torch.ones(2)]).dtype == torch.float64


@pytest.mark.parametrize("shape", [(1000, 1000), (65_537,), (300, 301)])
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, inf])
def test_norms_of_long_leaves_are_those_of_float64(shape, p):
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1
    expected = torch.linalg.vector_norm(leaf.double(), p).item()
    for view in (leaf, leaf.T if leaf.ndim == 2 else leaf.flip(0)):
        assert global_norm([view], p).item() == pytest.approx(expected, rel=1e-6)
    halves = leaf.chunk(2)
    parts = sum(leaf_sums(halves, p)) if p != inf else max(leaf_sums(halves, p))
    assert norm_of(parts, p).item() == pytest.approx(expected, rel=1e-6)


def test_leaves_of_other_kinds():
    leaves = [
        torch.arange(5),
        torch.tensor([3 + 4j]),
        torch.tensor([True]),
        torch.ones(0),
        torch.tensor(12.0, dtype=torch.bfloat16),
    ]
    assert leaf_sums(leaves).tolist() == [0, 25, 0, 0, 144]
    assert (
        global_norm(leaves).item() == 13
        and global_norm(leaves, inf).item() == 12
        and global_norm(leaves, 1).item() == 17
    )
    assert (
        global_norm([]).item() == global_norm([torch.ones(0)], inf).item() == global_norm({}, 3).item() == 0
    )
    clip = clip_by_global_norm(6.5)
    got = clip(leaves)
    assert got[0] is leaves[0] and got[1].dtype == torch.complex64
    torch.testing.assert_close(got[1], torch.tensor([1.5 + 2j]))


@pytest.mark.parametrize("bad", [inf, -inf, float("nan")])
def test_what_is_not_finite_shows_in_the_norm(bad):
    leaves = [torch.ones(3), torch.tensor([1.0, bad])]
    for p in NORMS:
        assert not torch.isfinite(global_norm(leaves, p))
    assert clip_coefficient(global_norm(leaves), inf) is None


def test_a_chain_that_clips_can_be_taken_apart():
    clip, ending = clip_by_global_norm(2.0, inf), sgd(0.1)
    assert chain(clip, ending).clipped[0] is clip and ending.clipped is None
    params = [torch.zeros(2)]
    rest = chain(clip, ending).clipped[1]
    assert (
        rest.update([torch.ones(2)], rest.init(params), params)[0][0].tolist()
        == ending.update([torch.ones(2)], ending.init(params), params)[0][0].tolist()
    )


@pytest.mark.parametrize(
    ("clip", "optimizer", "error", "words"),
    [
        (
            sgd(0.1),
            sgd(0.1),
            TypeError,
            "clip: got Optimizer.*, expected a clip, then an optimizer: chain",
        ),
        (clip_by_global_norm(1.0), 3, TypeError, "optimizer: got 3 .*, expected init and update"),
        (
            clip_by_global_norm(1.0),
            clip_by_global_norm(1.0),
            TypeError,
            "optimizer: got Clip.*, expected init and update",
        ),
        (
            clip_by_global_norm(2.0),
            chain(clip_by_global_norm(1.0), sgd(0.1)),
            ValueError,
            r"optimizer: got chain\(clip_by_global_norm\(1.0, 2.0\), sgd.*, which clips already",
        ),
    ],
)
def test_chains_that_make_no_sense(clip, optimizer, error, words):
    with pytest.raises(error, match=words):
        chain(clip, optimizer)
