"""Attention in slices, against attention in one piece."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ppfunc as pp

HEADS, GROUPS, TOKENS, WIDTH = 4, 2, 12, 4
CUTS = [[12], [6, 6], [4, 4, 4], [1, 1, 1, 2, 1, 2, 1, 3], [5, 1, 6]]
KINDS = {
    "all": {},
    "scaled": {"scale": 0.3},
    "itself alone": {"window": 1},
    "a window": {"window": 3},
    "a window of more than a slice": {"window": 7},
    "a window of more than all": {"window": 40},
    "wide values": {"wide": 6},
}
every = pytest.mark.parametrize("kind", KINDS)
cuts = pytest.mark.parametrize("cut", CUTS, ids=str)


def drawn(wide=WIDTH, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, HEADS, TOKENS, WIDTH), (2, GROUPS, TOKENS, WIDTH), (2, GROUPS, TOKENS, wide)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def sliced(cut, given, **options):
    options.pop("wide", None)
    carry, results = None, []
    for q, k, v in zip(*(t.split(cut, 2) for t in given), strict=True):
        y, carry = pp.carried_attention(q, k, v, carry, **options)
        results.append(y)
    return torch.cat(results, 2)


def whole(given, window=None, scale=None, wide=None):
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask = mask if window is None else mask.triu(1 - window)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*given, attn_mask=mask, scale=scale, enable_gqa=True)


def sides(kind, cut):
    """The function in slices, and in one piece; each to a scalar of some curvature."""
    options = KINDS[kind]
    given = drawn(options.get("wide", WIDTH))
    weight = drawn(HEADS, seed=1)[0].mean(-1, keepdim=True)
    return (
        given,
        lambda *given: (sliced(cut, given, **options).tanh() * weight).sum(),
        lambda *given: (whole(given, **options).tanh() * weight).sum(),
    )


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@every
@cuts
def test_slices_give_values_and_gradients_of_one_piece(kind, cut):
    given, f, wanted = sides(kind, cut)
    close(sliced(cut, given, **KINDS[kind]), whole(given, **KINDS[kind]))
    close(grad(f, (0, 1, 2))(*given), grad(wanted, (0, 1, 2))(*given))


def by_autograd(f, given, tangents):
    given = [t.clone().requires_grad_() for t in given]
    grads = torch.autograd.grad(f(*given), given, create_graph=True)
    return torch.autograd.grad([(g * t).sum() for g, t in zip(grads, tangents, strict=True)], given)


ORDERS = {
    "forward": lambda f, x, t: jvp(f, x, t),
    "forward over reverse": lambda f, x, t: jvp(grad(f, (0, 1, 2)), x, t),
    "reverse over reverse": lambda f, x, t: vjp(grad(f, (0, 1, 2)), *x)[1](t),
    "reverse over forward": lambda f, x, t: grad(lambda *x: jvp(f, x, t)[1], (0, 1, 2))(*x),
    "forward over forward": lambda f, x, t: jvp(lambda *x: jvp(f, x, t)[1], x, t),
    "autograd, twice": by_autograd,
    "the Hessian": lambda f, x, t: hessian(lambda s: f(*(a + s * b for a, b in zip(x, t, strict=True))))(
        x[0].new_ones(2, 1, 1, 1)
    ),
    "reverse, three times": lambda f, x, t: grad(
        lambda s: jacrev(jacrev(lambda r: f(*(a + r * b for a, b in zip(x, t, strict=True)))))(s)
    )(x[0].new_ones(())),
    "mapped": lambda f, x, t: vmap(grad(f, (0, 1, 2)), (0, None, 1))(
        torch.stack((x[0], t[0])), x[1], torch.stack((x[2], t[2]), 1)
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@every
@cuts
def test_derivatives_of_every_order_are_those_of_one_piece(order, kind, cut):
    given, f, wanted = sides(kind, cut)
    tangents = drawn(KINDS[kind].get("wide", WIDTH), seed=2)
    close(*(ORDERS[order](g, given, tangents) for g in (f, wanted)), atol=1e-11)


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (2, None, 4, 1), (None, 1, None, 2)], ids=str)
def test_any_axis_may_be_mapped(dims):
    given = [(*t.split([5, 7], 2),) for t in drawn()]
    past = given[1][0], given[2][0]
    three = [
        t if dim is None else torch.stack((t, 2 * t, 3 * t), dim)
        for t, dim in zip((*(last for _, last in given), past[0]), dims, strict=True)
    ]

    def attend(q, k, v, before):
        return pp.carried_attention(q, k, v, ((before, past[1]),))[0]

    found = vmap(attend, dims)(*three)
    for n in range(3):
        one = (t if dim is None else t.select(dim, n) for t, dim in zip(three, dims, strict=True))
        close(found[n], attend(*one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_numbers_are_as_near_as_one_piece(dtype):
    given, few = drawn(), [t.to(dtype) for t in drawn()]
    exact = whole(given)
    off = (scaled_dot_product_attention(*few, is_causal=True, enable_gqa=True) - exact).abs().max()
    found = sliced([3, 3, 3, 3], few)
    assert found.dtype == dtype and (found - exact).abs().max() <= 2 * off


def test_views_with_gaps_are_read_as_they_are():
    """The kernels of some versions of torch take the last axis for dense, and compute something else."""
    given, f, wanted = sides("all", [5, 1, 6])
    gaps = [torch.stack((t, 2 * t), -1)[..., 0] for t in given]
    assert gaps[0].stride(-1) == 2
    close(grad(f, (0, 1, 2))(*gaps), grad(wanted, (0, 1, 2))(*given))


class Largest(TorchDispatchMode):
    """Notes the most numbers of a result."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            self.most = max(self.most, t.numel() if isinstance(t, torch.Tensor) else 0)
        return result


def test_the_carry_is_not_copied_and_no_mask_is_made():
    q, k, v = (torch.randn(1, 2, 96, 4, requires_grad=True) for _ in range(3))
    before = tuple(tuple(torch.randn(1, 2, 512, 4) for _ in "kv") for _ in range(3))
    with Largest() as seen:
        y, carry = pp.carried_attention(q, k, v, before)
        y.sum().backward()
    assert seen.most <= 512 * 2 * 4 < 96 * 96
    assert [
        pair[0] is t[0] and pair[1] is t[1] for pair, t in zip(carry, (*before, (k, v)), strict=True)
    ] == [True] * 4


def test_a_window_keeps_what_a_later_slice_sees():
    given = drawn()
    _, carry = pp.carried_attention(*given, None, window=5)
    close(carry, tuple([tuple(t[:, :, -4:] for t in given[1:])]))
    assert pp.carried_attention(*given, None, window=1)[1] == ()


def test_pairs_may_be_joined():
    q, k, v = drawn()
    pairs = tuple(zip(k.split(4, 2), v.split(4, 2), strict=True))[:2]
    last = [t[:, :, 8:] for t in (q, k, v)]
    joined = (tuple(torch.cat(parts, 2) for parts in zip(*pairs, strict=True)),)
    close(pp.carried_attention(*last, pairs)[0], pp.carried_attention(*last, joined)[0])


Q, K, V = drawn()
MISTAKES = {
    "a scale that turns all around": (
        lambda: pp.carried_attention(Q, K, V, None, scale=-1.0),
        "scale: got -1.0 of type float, expected a number above 0",
    ),
    "no tensor": (lambda: pp.carried_attention(Q, None, V, None), "k: got NoneType, expected floating point"),
    "integers": (lambda: pp.carried_attention(Q.long(), K, V, None), "q: got torch.int64, expected floating"),
    "two dtypes": (
        lambda: pp.carried_attention(Q, K, V.float(), None),
        "v: got torch.float32, expected floating point, the same dtype for q, k and v",
    ),
    "no heads": (
        lambda: pp.carried_attention(Q[0], K[0], V[0], None),
        "q, k, v: got the shapes [4, 12, 4], [2, 12, 4], [2, 12, 4], expected [b, heads, t, d] of one slice",
    ),
    "heads that do not divide": (
        lambda: pp.carried_attention(Q[:, :3], K, V, None),
        "[2, 3, 12, 4], [2, 2, 12, 4], [2, 2, 12, 4], expected [b, heads, t, d] of one slice, at least one"
        " token, and heads of k and v in a number that divides the heads of q",
    ),
    "keys of the past": (
        lambda: pp.carried_attention(Q[:, :, :4], K, V, None),
        "got the shapes [2, 4, 4, 4]",
    ),
    "another width": (lambda: pp.carried_attention(Q[..., :3], K, V, None), "got the shapes [2, 4, 12, 3]"),
    "values of other heads": (lambda: pp.carried_attention(Q, K, V[:, :1], None), "[2, 1, 12, 4], expected"),
    "no token": (
        lambda: pp.carried_attention(*(t[:, :, :0] for t in (Q, K, V)), None),
        "got the shapes [2, 4, 0, 4], [2, 2, 0, 4], [2, 2, 0, 4], expected [b, heads, t, d] of one slice, at",
    ),
    "a carry of one pair": (
        lambda: pp.carried_attention(Q, K, V, (K, V)),
        "expected the carry of the slice before, pairs (keys, values) of torch.float64[2, 2, tokens, 4 and"
        " 4], or None for the first slice",
    ),
    "a carry that is a tensor": (lambda: pp.carried_attention(Q, K, V, torch.stack((K, V))), "carry: got"),
    "a carry that is a number": (
        lambda: pp.carried_attention(Q, K, V, 3),
        "carry: got 3 of type int, expected",
    ),
    "a carry of other rows": (lambda: pp.carried_attention(Q, K, V, [(K[:1], V[:1])]), "carry: got"),
    "a carry of another dtype": (lambda: pp.carried_attention(Q, K, V, [(K.float(), V)]), "carry: got"),
    "a carry of unlike tokens": (lambda: pp.carried_attention(Q, K, V, [(K, V[:, :, 1:])]), "carry: got"),
    "a carry without tokens": (
        lambda: pp.carried_attention(Q, K, V, [(K[:, :, :0], V[:, :, :0])]),
        "carry: got",
    ),
    "no window": (lambda: pp.carried_attention(Q, K, V, None, window=0), "window = 0, expected an integer"),
    "half a window": (lambda: pp.carried_attention(Q, K, V, None, window=1.5), "window = 1.5, expected an"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake):
    run, told = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError)) as error:
        run()
    assert told in str(error.value)
