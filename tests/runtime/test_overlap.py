"""Pairs of a forward and a backward run as one."""

from __future__ import annotations

import optree
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.engines.tracing.emit import TracedFunction, interleave
from ppfunc.stage.engines.tracing.graph import is_post
from tests.models import same_bits, squared
from tests.sharded_models import expert_params, experts, products_beside, random

D = 6
engines = pytest.mark.parametrize(
    "engine", [pp.engines.graph, pp.engines.graph(remat="full")], ids=["graph", "remat"]
)
SCHEDULES = {"dualpipev": lambda: pp.dualpipev(2, 6), "dualpipe": lambda: pp.dualpipe(2, 6)}
every = pytest.mark.parametrize("name", SCHEDULES)


def block(params, x):
    h = torch.nn.functional.layer_norm(x["h"], (D,), params["scale"])
    h = torch.nn.functional.gelu(h @ params["w"]) + torch.full_like(h, 0.5) * torch.tensor(2.0)
    return {"h": h + x["h"], "seen": x["seen"] + 1}


def loss_fn(y, target):
    return (y["h"] - target).square().mean()


def problem(schedule):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64
    params = {
        s: {
            "w": torch.randn(D, D, generator=generator, dtype=dtype),
            "scale": torch.rand(D, generator=generator, dtype=dtype),
        }
        for s in set(schedule.model_stages)
    }
    rows = schedule.microbatches * 3
    h, targets = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return params, {"h": h, "seen": torch.zeros(rows, dtype=torch.int64)}, targets


def run(schedule, engine, overlapped, device="cpu"):
    stages = [block] * len(schedule.flows[0].stages)
    arguments = optree.tree_map(lambda t: t.to(device), problem(schedule))
    return pp.value_and_grad(stages, loss_fn, schedule, engine=engine, overlapped=overlapped)(*arguments)


@engines
@every
def test_interleaved_gives_the_same_bits(engine, name):
    schedule = SCHEDULES[name]()
    assert same_bits(run(schedule, engine, pp.interleaved()), run(schedule, engine, None))


@pytest.mark.compiler
def test_interleaved_compiled_agrees():
    """With the two programs, plain and one after the other."""
    w, x, gy = (random((D, D), n) for n in range(3))
    plain, compiled = (
        pp.engines.graph(lambda w, x: (x @ w).sin(), (w, x), compile=c).flat for c in (False, True)
    )
    arguments = (w,), (x,), ()
    wanted, residuals = plain.forward(*arguments)
    (outputs, _), gradients = pp.interleaved()(
        compiled.forward, arguments, compiled.backward, (compiled.forward(*arguments)[1], (gy,))
    )
    torch.testing.assert_close(outputs, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients, plain.backward(residuals, (gy,)), rtol=1e-12, atol=1e-14)


def test_operators_of_both_stand_in_turn():
    """Seen in the source of the merged program: products of the forward among those of the backward."""
    params = tuple(torch.randn(D, D) for _ in range(4))

    def deep(params, x):
        for w in params:
            x = (x @ w).sin()
        return x

    flat = pp.engines.graph(deep, (params, torch.randn(3, D))).flat
    x, gy = torch.randn(3, D), torch.randn(3, D)
    with torch.no_grad():
        _, residuals = flat.forward(params, (x,), ())
        (outputs, kept), gradients = pp.interleaved()(
            flat.forward, (params, (x,), ()), flat.backward, (residuals, (gy,))
        )
        assert same_bits(outputs, flat.forward(params, (x,), ())[0])
        assert same_bits(gradients, flat.backward(kept, (gy,)))
    lines = TracedFunction(interleave(flat.forward.recipe, flat.backward.recipe)).__doc__.splitlines()
    sines = [n for n, line in enumerate(lines) if "aten_sin(" in line]
    cosines = [n for n, line in enumerate(lines) if "aten_cos(" in line]
    assert len(sines) == len(cosines) == 4
    assert cosines[0] < sines[-1]
    assert sines[0] < cosines[-1]


def beside(rank, size):
    """Products of either program stand between each collective of the other and its wait."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]
    params, x = expert_params(0), random((4, 3, 4), rank)

    def stage(p, x):  # ranks whose stages differ in what does not communicate
        for _ in range(10 * rank):
            x = x.sin()
        return experts(mesh)(p, x)

    flat = pp.engines.graph(stage, (params, x)).flat
    arguments = tuple(params.values()), (x,), ()
    outputs, residuals = flat.forward(*arguments)
    backward = residuals, outputs
    together = pp.interleaved()(flat.forward, arguments, flat.backward, backward)
    apart = flat.forward(*arguments), flat.backward(*backward)
    assert same_bits(together, apart)
    merged = interleave(flat.forward.recipe, flat.backward.recipe).block.body
    return products_beside(merged), [node.name for node in merged if is_post(node)]


def test_operators_of_one_stand_beside_the_collectives_of_the_other(two):
    (products, posts), (others, order) = two(beside)
    assert posts == order
    assert min(products + others) >= 2, (products, others)


def same_with_experts(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    schedule = pp.dualpipev(2, 6)
    params = {s: expert_params(s) for s in schedule.stages_of(mesh.get_local_rank("pp"))}
    inputs, targets = random((24, 3, 4), rank % 2), random((24, 3, 4), 2 + rank % 2)
    results = []
    for overlapped in (None, pp.interleaved()):
        stages = [experts(mesh["ep"])] * schedule.stages
        with pp.P2P(timeout=60, mesh=mesh, axes=pp.Axes("pp", "ep", experts="ep")) as transport:
            step = pp.value_and_grad(stages, squared, schedule, transport, overlapped=overlapped)
            results.append([step(params, inputs, targets) for _ in range(2)])
    assert same_bits(*results)


def test_interleaved_experts_give_the_same_bits(four):
    four(same_with_experts)


@pytest.mark.parametrize("engine", [pp.engines.functional, pp.engines.eager], ids=["functional", "eager"])
def test_interleaved_refuses_what_is_not_traced(engine):
    with pytest.raises(pp.PipelineError, match=r"not traced: use the graph engine"):
        run(pp.dualpipev(2, 6), engine, pp.interleaved())


def test_two_streams_are_refused_on_the_cpu():
    there = torch.cuda.is_available()
    with pytest.raises(
        pp.PipelineError if there else ValueError,
        match=r"compute on cpu; leave|is for an accelerator, such as CUDA, and there is none",
    ):
        run(pp.dualpipev(2, 6), pp.engines.graph, pp.two_streams())


@pytest.mark.cuda
@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional], ids=["graph", "functional"])
@every
def test_two_streams_give_the_same_bits(engine, name):
    schedule = SCHEDULES[name]()
    wanted = run(schedule, engine, None, "cuda")
    for _ in range(3):
        assert same_bits(run(schedule, engine, pp.two_streams(), "cuda"), wanted)
