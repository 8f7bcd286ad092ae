"""Collectives inside stages: transposes, derivatives of any order, every engine, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as of_torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import ppfunc as pp
from ppfunc.stage import StageError, eager, functional, graph
from ppfunc.stage.abstract.purity import collective_fault as fault_of
from tests.models import normal
from tests.sharded_models import MODELS, B, D, T, W, largest_difference, part, random

TOLERANCE = 1e-12


def axis_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]


def summed(value):
    """The sum of a number over all ranks."""
    total = torch.tensor(float(value), dtype=W)
    dist.all_reduce(total)
    return float(total)


# -- transposes
# ----------------------------------------------------------------------------------------------------

# The collective, and whether what it is given, and what it gives, is the same on all ranks, and so counts
# once.
MAPS = {
    "psum": (lambda x, m: pp.collectives.psum(x, m), False, True),
    "pvary": (lambda x, m: pp.collectives.pvary(x, m), True, False),
    "all_gather": (lambda x, m: pp.collectives.all_gather(x, m), False, False),
    "all_gather along the last axis": (lambda x, m: pp.collectives.all_gather(x, m, -1), False, False),
    "all_gather for all alike": (
        lambda x, m: pp.collectives.all_gather(x, m, 1, replicated=True),
        False,
        True,
    ),
    "psum_scatter": (lambda x, m: pp.collectives.psum_scatter(x, m), False, False),
    "psum_scatter along another axis": (lambda x, m: pp.collectives.psum_scatter(x, m, 1), False, False),
    "all_to_all": (lambda x, m: pp.collectives.all_to_all(x, m, 0, 1), False, False),
    "all_to_all backwards": (lambda x, m: pp.collectives.all_to_all(x, m, 2, -3), False, False),
    "all_to_all of one axis": (lambda x, m: pp.collectives.all_to_all(x, m, 1, 1), False, False),
}


def transposes(rank, size, dtype):
    """``<y, A x>`` over all ranks is ``<A' y, x>``, and the same of ``A'``, which is the derivative of the
    derivative.
    """
    mesh = axis_of(size)

    def dot(a, b):
        return torch.vdot(a.flatten().to(torch.complex128), b.flatten().to(torch.complex128)).real.item()

    for name, (fn, same_x, same_y) in MAPS.items():
        draw = lambda shape, seed, same: torch.randn(  # noqa: E731
            shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + (0 if same else rank))
        )
        x = draw((4, 6, 8), 0, same_x).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        y = fn(x, mesh)
        cotangent = draw(y.shape, 10, same_y).requires_grad_()
        (back,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
        again = draw(x.shape, 20, same_x)
        (forth,) = torch.autograd.grad(back, cotangent, again)
        assert torch.equal(forth, fn(again, mesh)), name
        share = lambda same, value: summed(value / size if same else value)  # noqa: E731
        left, right = share(same_y, dot(cotangent, y)), share(same_x, dot(back, x))
        assert abs(left - right) < TOLERANCE * max(1, abs(left)), (name, left, right)


@pytest.mark.parametrize("dtype", [W, torch.complex128])
def test_each_is_the_transpose_of_the_other(two, dtype):
    two(transposes, dtype)


def test_transposes_of_four_ranks(four):
    four(transposes_of_four)


def transposes_of_four(rank, size):
    mesh = axis_of(size)
    x = random((8, 4, 8), rank).requires_grad_()
    for fn in (
        lambda: pp.collectives.psum_scatter(x, mesh),
        lambda: pp.collectives.all_gather(x, mesh, 2),
        lambda: pp.collectives.all_to_all(x, mesh, 0, 2),
    ):
        y = fn()
        g = random(tuple(y.shape), 10 + rank)
        (back,) = torch.autograd.grad(y, x, g)
        assert abs(summed((y * g).sum()) - summed((back * x).sum())) < 1e-10


def values(rank, size):
    """What each gives, beside what is computed of the tensors of all ranks."""
    mesh = axis_of(size)
    given = [torch.arange(24).reshape(2, 3, 4) + 100 * r for r in range(size)]
    for dtype in (torch.int64, torch.float32, torch.complex64):
        xs = [x.to(dtype) for x in given]
        x = xs[rank]
        assert torch.equal(pp.collectives.psum(x, mesh), sum(xs))
        assert torch.equal(pp.collectives.pvary(x, mesh), x)
        assert torch.equal(pp.collectives.all_gather(x, mesh, 1), torch.cat(xs, 1))
        assert torch.equal(pp.collectives.psum_scatter(x, mesh, 2), sum(xs).chunk(size, 2)[rank])
        assert torch.equal(
            pp.collectives.all_to_all(x, mesh, 0, 2), torch.cat([t.chunk(size, 0)[rank] for t in xs], 2)
        )
        assert torch.equal(
            pp.collectives.all_to_all(x, mesh, 2, 0), torch.cat([t.chunk(size, 2)[rank] for t in xs], 0)
        )
        assert torch.equal(pp.collectives.psum(x[0, 0, 0], mesh), sum(t[0, 0, 0] for t in xs))
        assert pp.collectives.psum(x[:, :0], mesh).shape == (2, 0, 4) and pp.collectives.all_gather(
            x[:0], mesh
        ).shape == (0, 3, 4)
    assert torch.equal(pp.collectives.psum(xs[rank].conj(), mesh), sum(xs).conj())


def test_values(two):
    two(values)


# -- derivatives
# ---------------------------------------------------------------------------------------------------


def scalars(model, mesh, rank, size):
    """A scalar of the whole stage, and of the stage cut, each of ``(params, x)``; and the parts of whole
    arguments.
    """
    cut = model.cut(mesh)

    def of_whole(p, x):
        return model.whole(p, x).sin().sum()

    def of_parts(p, x):
        total = cut(p, x).sin().sum()
        return total if model.y is None else pp.collectives.psum(total, mesh)

    return of_whole, of_parts, lambda p, x: (model.parts(p, rank, size), part(x, model.x, rank, size))


def inner(model, mesh, pairs):
    """The inner product of whole trees, of the parts that a rank has."""
    (p, x), (tp, tx) = pairs
    terms = [((p[name] * tp[name]).sum(), model.placements[name].is_shard()) for name in p] + [
        ((x * tx).sum(), model.x is not None)
    ]
    return sum(pp.collectives.psum(term, mesh) if mesh is not None and cut else term for term, cut in terms)


def derivatives(rank, size, name):
    model, mesh = MODELS[name], axis_of(size)
    of_whole, of_parts, parts = scalars(model, mesh, rank, size)
    primals, tangents = ((model.params(seed), random((B, T, D), seed)) for seed in (0, 5))
    both = (0, 1)

    def compare(what, transform):
        """The same transform of both, whose results are trees like the arguments, or a number."""
        want = transform(of_whole, primals, tangents, None)
        got = transform(of_parts, parts(*primals), parts(*tangents), mesh)
        want = parts(*want) if isinstance(want, tuple) else want
        assert largest_difference(got, want) < TOLERANCE, (name, what, largest_difference(got, want))

    compare("grad", lambda f, p, t, m: grad(f, both)(*p))
    compare("jvp", lambda f, p, t, m: jvp(f, p, t)[1])
    compare("forward over reverse", lambda f, p, t, m: jvp(grad(f, both), p, t)[1])
    compare("reverse over forward", lambda f, p, t, m: grad(lambda *q: jvp(f, q, t)[1], both)(*p))
    compare(
        "reverse over reverse",
        lambda f, p, t, m: grad(lambda *q: inner(model, m, (grad(f, both)(*q), t)), both)(*p),
    )
    compare("forward over forward", lambda f, p, t, m: jvp(lambda *q: jvp(f, q, t)[1], p, t)[1])
    third = lambda f, p, t, m: jvp(lambda *q: jvp(grad(f, both), q, t)[1], p, t)[1]  # noqa: E731
    compare("third", third)

    # Samples: the axis of the batch by itself, in another place than in front.
    one = lambda f: lambda p, x: f(p, x[None])  # noqa: E731
    along = primals[1].movedim(0, 1)
    got = vmap(grad(one(of_parts), both), (None, 1))(
        parts(*primals)[0], part(along, None if model.x is None else 0, rank, size)
    )
    want = vmap(grad(one(of_whole), both), (None, 1))(primals[0], along)
    axes = {n: p.dim + 1 if p.is_shard() else None for n, p in model.placements.items()}
    want_parts = (
        {n: part(t, axes[n], rank, size) for n, t in want[0].items()},
        part(want[1], model.x, rank, size),
    )
    assert largest_difference(got, want_parts) < TOLERANCE
    if model.x is None:
        x = primals[1][:1]
        p = parts(*primals)[0]
        assert (
            largest_difference(
                hessian(lambda x: of_parts(p, x))(x), hessian(lambda x: of_whole(primals[0], x))(x)
            )
            < TOLERANCE
        )


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_of_any_order_are_those_of_the_whole(two, name):
    two(derivatives, name)


# -- engines
# -------------------------------------------------------------------------------------------------------

ENGINES = {
    "graph": graph,
    "remat full": graph(remat="full"),
    "remat of all but collectives": graph(remat=lambda op, _: "c10d" not in str(op)),
    "remat of collectives": graph(remat=lambda op, _: "c10d" in str(op)),
    "functional": functional,
    "eager": eager,
}


def engines(rank, size, name, which, parts=(True, False)):
    """Compare an engine with the whole: its backward as one program, and I and W apart."""
    model, mesh = MODELS[name], axis_of(size)
    engine = graph(compile=True) if which == "compiled" else ENGINES[which]
    params, x, gy = model.params(0), random((B, T, D), 1), None
    y, pull = torch.func.vjp(model.whole, params, x)
    gy = random(tuple(y.shape), 2)
    gparams, gx = pull(gy)
    p, a = model.parts(params, rank, size), part(x, model.x, rank, size)
    program = engine(model.cut(mesh), (p, a))
    for whole in parts:
        got, residuals = program.forward(p, a)
        g = part(gy, model.y, rank, size)
        if whole:
            gp, ga = program.backward(residuals, g)
        else:
            ga, rest = program.backward_input(residuals, g)
            gp = program.backward_weight(rest)
        want = part(y, model.y, rank, size), model.parts(gparams, rank, size), part(gx, model.x, rank, size)
        assert largest_difference((got, gp, ga), want) < TOLERANCE
        assert type(got) is type(ga) is torch.Tensor
    return [p.__doc__ for p in program.flat] if "remat" in which or which == "graph" else None


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_every_engine_gives_the_gradients_of_the_whole(two, name, which):
    sources = two(engines, name, which)
    called = [
        [
            re.findall(r"(all_reduce|all_gather|reduce_scatter|all_to_all)\w* =", source)
            for source in found or ()
        ]
        for found in sources
    ]
    assert called[0] == called[1]  # in the same order
    if which == "remat of collectives" and name == "rows and columns":
        forward = sources[0][0]
        assert "wait_tensor" in forward and not re.search(
            r"return .*all_reduce", forward
        )  # nothing is kept before it has arrived


@pytest.mark.compiler
@pytest.mark.parametrize(
    "parts", [(True,), pytest.param((False,), marks=pytest.mark.large)], ids=["one backward", "I and W apart"]
)
def test_compiled_programs_give_the_gradients_of_the_whole(two, parts):
    two(engines, "sequence", "compiled", parts, timeout=300)


def test_the_weight_gradient_waits_for_nobody(two):
    """The collective of the forward is in F, that of the input gradient in I, none in W."""
    forward, _, inputs, weights = two(engines, "rows and columns", "graph")[0]
    assert [
        source.count("all_reduce = ") + source.count("all_reduce_1 = ")
        for source in (forward, inputs, weights)
    ] == [1, 1, 0]


def kept(rank, size):
    """A collective whose result one rank alone uses, and two that look alike on one rank alone: all run
    them.
    """
    mesh = axis_of(size)

    def stage(w, x):
        y = pp.collectives.psum(x * w, mesh)
        a, b = x * 2, (x * 2 if rank else x * 3)
        return (y if rank else x) + pp.collectives.psum(a, mesh) + pp.collectives.psum(b, mesh)

    program = graph(stage, (torch.ones(3), torch.ones(3)))
    y, _ = program.forward(torch.ones(3), torch.ones(3))
    assert torch.equal(y, torch.full((3,), (2.0 if rank else 1.0) + 4.0 + 5.0))


def test_collectives_run_on_every_rank_whoever_uses_them(two):
    two(kept)


# -- refusals
# ------------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_named(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        mesh, x = grid["tp"], torch.ones(3, 2)
        with pytest.raises(TypeError, match="psum: got int, expected a tensor"):
            pp.collectives.psum(3, mesh)
        with pytest.raises(TypeError, match="psum: got a tensor of booleans"):
            pp.collectives.psum(x > 0, mesh)
        with pytest.raises(TypeError, match="pvary: got str as the mesh, .* such as mesh"):
            pp.collectives.pvary(x, "tp")
        with pytest.raises(ValueError, match=r"all_gather: got a mesh with the axes \('dp', 'tp'\)"):
            pp.collectives.all_gather(x, grid)
        with pytest.raises(ValueError, match="all_gather: got the axis 2 of a tensor of shape"):
            pp.collectives.all_gather(x, mesh, 2)
        with pytest.raises(ValueError, match="all_gather: got the axis 0 of a tensor of shape"):
            pp.collectives.all_gather(x.sum(), mesh)
    finally:
        dist.destroy_process_group()


def indivisible(rank, size):
    mesh = axis_of(size)
    with pytest.raises(
        ValueError, match=r"psum_scatter: got the shape \[3, 2\], axis 0 of which 2 ranks do not divide"
    ):
        pp.collectives.psum_scatter(torch.ones(3, 2), mesh)
    with pytest.raises(
        StageError,
        match=r"all_to_all: got the shape \[2, 3\], axis -1 of which 2 ranks do not divide.*params = ",
    ):
        graph(
            lambda w, x: pp.collectives.all_to_all(x @ w, mesh, -1, 0), (torch.ones(2, 3), torch.ones(2, 2))
        )


def test_axes_that_ranks_do_not_divide_are_named(two):
    two(indivisible)


def test_a_refusal_names_the_collective_to_use():
    ops = torch.ops
    needs = [torch.ones(2, requires_grad=True)]
    for op, words in (
        (ops._c10d_functional.all_reduce.default, "use ppfunc.collectives.psum"),
        (ops._c10d_functional.broadcast.default, "zero on all ranks but one"),
        (ops.c10d.allgather_.default, "writes in place.*use ppfunc.collectives.all_gather"),
        (ops.c10d.reduce_scatter_.default, "use ppfunc.collectives.psum_scatter"),
        (ops.c10d.alltoall_.default, "use ppfunc.collectives.all_to_all"),
        (ops.c10d.send.default, "use ppfunc.collectives.psum, pvary"),
    ):
        fault = fault_of(op, needs, False)
        assert fault is not None and re.search(words, ". ".join(fault)), (op, fault)
        assert (
            fault_of(op, [torch.ones(2)], False) is None and fault_of(op, [torch.ones(2)], True) is not None
        )
    assert fault_of(ops._c10d_functional.all_gather_into_tensor.default, needs, True) is None
    scatter = ops._c10d_functional.reduce_scatter_tensor.default
    assert (
        fault_of(scatter, needs, True, "sum") is None
        and fault_of(scatter, [torch.ones(2)], False, "avg") is None
    )
    for reduction, words in (
        ("avg", "psum_scatter.* divided by the number of ranks"),
        ("max", "psum_scatter.*gathered values"),
    ):
        fault = fault_of(scatter, needs, False, reduction)
        assert fault is not None and re.search(words, ". ".join(fault)) and "sums alone" in fault[0]


def coalesced(rank, size, engine):
    """Torch's collectives of several tensors, which end in one wait where torch has a wait for several."""
    group, width = axis_of(size).get_group(), 3
    forms = ("single", "into_tensor"), ("single", "tensor")  # the new name, and that before torch 2.15
    gather, reduce_scatter = (
        next(f for form in names if (f := getattr(of_torch, f"{name}_{form}_coalesced", None)))
        for name, names in zip(("all_gather", "reduce_scatter"), forms, strict=True)
    )

    def whole(p, x):
        return (x * p["a"]).sin() + (x @ p["b"]).cos()

    def cut(p, x):
        a, b = gather([x * p["a"], x @ p["b"]], group)
        c, d = reduce_scatter([a.sin(), b.cos()], "sum", [0, 0], group)
        return (c + d) / size

    params = {"a": random((width,), 0), "b": random((width, width), 1)}
    x, gy = random((2 * size, width), 2), random((2 * size, width), 3)
    y, pull = torch.func.vjp(whole, params, x)
    gparams, gx = pull(gy)
    mine = slice(2 * rank, 2 * rank + 2)
    program = engine(cut, (params, x[mine]))
    got, residuals = program.forward(params, x[mine])
    gp, ga = program.backward(residuals, gy[mine])
    for part_of_it in gp.values():
        dist.all_reduce(part_of_it)
    assert largest_difference((got, gp, ga), (y[mine], gparams, gx[mine])) < TOLERANCE


@pytest.mark.parametrize("engine", [graph, eager])
def test_collectives_of_several_tensors(two, engine):
    two(coalesced, engine)


# -- attention over a sequence that is cut over ranks


def derivatives_of(attend, tensors, directions):
    """Value, gradients, and of the gradients the product with second derivatives along directions."""
    with sdpa_kernel(SDPBackend.MATH):
        tensors = [t.clone().requires_grad_() for t in tensors]
        y = attend(*tensors)
        first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
        slope = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
        second = torch.autograd.grad(slope, tensors)
    return [y.detach(), *(g.detach() for g in first), *second]


def exact(rank, size, heads, groups, causal):
    axis = axis_of(size)
    shapes = (2, heads, 8, 4), (2, groups, 8, 4), (2, groups, 8, 6)
    whole = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    directions = [normal(*shape, seed=5 + n) for n, shape in enumerate(shapes)]
    expected = derivatives_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        whole, directions,
    )  # fmt: skip
    cut = lambda trees: [t.chunk(size, 2)[rank] for t in trees]  # noqa: E731
    attend = lambda q, k, v: pp.context_attention(q, k, v, axis, causal)  # noqa: E731
    found = [largest_difference(derivatives_of(attend, cut(whole), cut(directions)), cut(expected))]
    for engine in (graph, functional, eager) if causal and groups < heads else (graph,):
        program = engine(lambda p, x: attend(*p) + 0 * x.sum(), (cut(whole), torch.zeros(1).double()))
        y, residuals = program.forward(cut(whole), torch.zeros(1).double())
        gradients, _ = program.backward(residuals, y.cos())
        found.append(largest_difference([y, *gradients], cut(expected[:4])))
    return max(found)


@pytest.mark.parametrize("heads, groups, causal", [(4, 4, True), (4, 4, False), (8, 2, True), (4, 1, False)])
def test_attention_over_a_cut_sequence_is_that_over_the_whole(four, heads, groups, causal):
    found = four(exact, heads, groups, causal)
    assert max(found) < TOLERANCE, found


def unfit(rank, size):
    axis = axis_of(size)
    q = torch.zeros(2, 4, 8, 4)
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
    assert two(unfit) == [True] * 2
