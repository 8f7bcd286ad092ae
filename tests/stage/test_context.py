"""Attention over a sequence that is cut over ranks is that over the whole, with its derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import ppfunc as pp
from ppfunc.stage import eager, functional, graph
from tests.models import normal
from tests.sharded_models import largest_difference

B, T, D, WIDE, TOLERANCE = 2, 8, 4, 6, 1e-12


def derivatives(attend, tensors, directions):
    """Value, gradients, and of the gradients the product with second derivatives along directions."""
    with sdpa_kernel(SDPBackend.MATH):
        tensors = [t.clone().requires_grad_() for t in tensors]
        y = attend(*tensors)
        first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
        slope = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        second = torch.autograd.grad(slope, tensors)
    return [y.detach(), *(g.detach() for g in first), *second]


def exact(rank, size, heads, groups, causal):
    axis = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    shapes = (B, heads, T, D), (B, groups, T, D), (B, groups, T, WIDE)
    whole = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    directions = [normal(*shape, seed=5 + n) for n, shape in enumerate(shapes)]
    expected = derivatives(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        whole, directions,
    )  # fmt: skip
    cut = lambda trees: [t.chunk(size, 2)[rank] for t in trees]  # noqa: E731
    attend = lambda q, k, v: pp.context_attention(q, k, v, axis, causal)  # noqa: E731
    found = [largest_difference(derivatives(attend, cut(whole), cut(directions)), cut(expected))]
    for engine in (graph, functional, eager) if causal and groups < heads else (graph,):
        program = engine(lambda p, x: attend(*p) + 0 * x.sum(), (cut(whole), torch.zeros(1).double()))
        y, residuals = program.forward(cut(whole), torch.zeros(1).double())
        gradients, _ = program.backward(residuals, y.cos())
        found.append(largest_difference([y, *gradients], cut(expected[:4])))
    return max(found)


@pytest.mark.parametrize("heads, groups, causal", [(4, 4, True), (4, 4, False), (8, 2, True), (4, 1, False)])
def test_it_is_that_over_the_whole(four, heads, groups, causal):
    found = four(exact, heads, groups, causal)
    assert max(found) < TOLERANCE, found


def refused(rank, size):
    axis = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    q = torch.zeros(B, 4, T, D)
    for odd in (
        (q[:, :3], q[:, :3], q[:, :3]),
        (q, q[:, :3], q[:, :3]),
        (q[0], q[0], q[0]),
        (q, q, q[:, :, 1:]),
        (q, q[:, :, 1:], q[:, :, 1:]),
        (q, q[:1], q[:1]),
        (q, q[..., 1:], q),
        (q[:, :0], q[:, :0], q[:, :0]),
        (q, q[:, :0], q[:, :0]),
    ):
        with pytest.raises(
            ValueError, match=r"got q, k, v of the shapes \[.*\], expected \[b, heads, t, d\], of one b"
        ):
            pp.context_attention(*odd, axis)
    for odd in ((q, q.double(), q), (q.long(), q.long(), q.long()), (q, q, None)):
        with pytest.raises(TypeError, match="of torch.*, expected floating point, of one dtype"):
            pp.context_attention(*odd, axis)
    assert pp.context_attention(q, q[:, :, 1:], q[:, :, 1:], axis, causal=False).shape == q.shape
    with pytest.raises(TypeError, match="context_attention: got str as the mesh"):
        pp.context_attention(q, q, q, "cp")
    return True


def test_shapes_that_do_not_go_together_are_refused(two):
    assert two(refused) == [True] * 2
