"""Layouts as values, trees of DTensors taken apart and put together, and programs traced for any rank of a
mesh by one process.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppfunc as pp
from ppfunc.runtime.values.arguments import form_of, same_form
from ppfunc.stage import LeafSignature, Signature, graph, stage_from_module
from ppfunc.stage._torch import part_of
from ppfunc.stage.layout import (
    MeshLayout,
    cut_by,
    distributed,
    layout_of,
    local,
    placements_of,
    same_placement,
)
from ppfunc.stage.tree import tree_flatten
from tests.sharded_models import MODELS, B, D, T

RANKS = 8


@pytest.fixture
def rank_of():
    """Makes this process one rank of eight, whose collectives do nothing."""

    def begin(rank, size=RANKS):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh(
            "cpu", (size,), mesh_dim_names=("tp",)
        )

    yield begin
    dist.destroy_process_group()


# -- values
# --------------------------------------------------------------------------------------------------------


def test_a_tensor_lies_on_its_own_mesh_not_on_an_equal_one(rank_of):
    """A mesh that is made again after a failure equals the one before, whose groups have ended."""
    meshes = [rank_of(3)[1] for _ in range(2)]
    assert meshes[0] == meshes[1]
    for mesh in meshes:
        t = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
        assert distributed(local(t), layout_of(t)).device_mesh is mesh


def test_the_part_of_a_tensor_that_is_under_way_has_come(rank_of):
    _, tp = rank_of(0)
    t = DTensor.from_local(torch.zeros(2), tp, [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    assert type(part_of(t)) is not torch.Tensor and type(local(t)) is torch.Tensor


def test_a_layout_is_a_value(rank_of):
    grid, tp = rank_of(3)
    t = DTensor.from_local(torch.zeros(2, 3), grid, [Replicate(), Shard(1)])
    layout = layout_of(t)
    assert layout == MeshLayout(("dp", "tp"), (4, 2), ("R", "S(1)"), (2, 6)) and layout.mesh is grid
    assert hash(layout) == hash(MeshLayout(("dp", "tp"), (4, 2), ("R", "S(1)"), (2, 6)))
    assert (
        MeshLayout.from_json(layout.to_json()) == layout
        and str(layout) == "of [2,6] R over dp=4, S(1) over tp=2"
    )
    assert (
        layout.stacked(5) == MeshLayout(("dp", "tp"), (4, 2), ("R", "S(2)"), (5, 2, 6))
        and layout.stacked(5).without(1) == layout
    )
    assert layout_of(torch.zeros(2)) is None
    different = [
        MeshLayout(("a", "tp"), (4, 2), ("R", "S(1)"), (2, 6)),
        MeshLayout(("dp", "tp"), (2, 4), ("R", "S(1)"), (2, 6)),
        MeshLayout(("dp", "tp"), (4, 2), ("S(1)", "R"), (2, 6)),
        MeshLayout(("dp", "tp"), (4, 2), ("R", "S(1)"), (3, 6)),
    ]
    assert layout not in different and not any(same_placement(layout, other) for other in different[:3])
    assert same_placement(layout, different[3]) and not same_placement(layout, None)
    whole = MeshLayout(("tp",), (8,), ("R",), (2,))
    assert same_placement(whole, None) and same_placement(None, None) and not whole.sharded
    for wrong in ([["tp"], [2], ["R"]], [["tp"], [2, 3], ["R"], [1]], [["tp"], ["2"], ["R"], [1]], 3):
        with pytest.raises((ValueError, TypeError)):
            MeshLayout.from_json(wrong)
    with pytest.raises(ValueError, match="knows no mesh"):
        distributed(torch.zeros(2, 3), MeshLayout.from_json(layout.to_json()))
    with pytest.raises(ValueError, match="got the placement 'P"):
        placements_of(("P(sum)",))
    assert cut_by(tp, [Shard(-1)], (2, 3)).placements == ("S(1)",) and cut_by(
        tp, [Shard(-1)], (2, 3)
    ).shape == (2, 24)
    with pytest.raises(ValueError, match=r"the placement S\(2\) for a tensor of shape \[2, 3\]"):
        cut_by(tp, [Shard(2)], (2, 3))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4, 3), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_a_tensor_taken_apart_and_put_together_is_the_same(rank_of, shape, dtype):
    _, tp = rank_of(2)
    part = torch.ones(shape, dtype=dtype)
    for placement in [Replicate(), *(Shard(axis) for axis in range(len(shape)))]:
        for strides in (part, part.mT.contiguous().mT if part.ndim > 1 else part):
            t = DTensor.from_local(strides, tp, [placement])
            again = distributed(local(t), layout_of(t))
            assert again.shape == t.shape and again.placements == t.placements and again.dtype == dtype
            assert again.stride() == t.stride() or 0 in t.shape or 1 in t.shape
            assert local(again) is not t and local(again).data_ptr() == strides.data_ptr()


def test_a_leaf_of_one_row_has_an_empty_part_elsewhere(rank_of):
    _, tp = rank_of(5)
    layout = MeshLayout.of(tp, [Shard(0)], (1, 3))
    t = distributed(torch.zeros(0, 3), layout)
    assert (
        t.shape == (1, 3)
        and local(t).shape == (0, 3)
        and LeafSignature.of(t) == LeafSignature((0, 3), torch.float32, True, layout)
    )


def test_signatures_have_layouts(rank_of):
    grid, tp = rank_of(1)
    tree = {"w": DTensor.from_local(torch.zeros(2, 3), tp, [Shard(0)]), "b": torch.zeros(3)}
    signature = Signature.of(tree)
    assert str(signature) == "{'w': float32[2,3] of [16,3] S(0) over tp=8, 'b': float32[3]}"
    assert Signature.from_json(signature.to_json()) == signature and signature.nbytes == 36
    assert signature.local == Signature.of({"w": torch.zeros(2, 3), "b": torch.zeros(3)}) != signature
    wrapped = signature.wrap([torch.ones(2, 3), torch.ones(3)])
    assert wrapped["w"].shape == (16, 3) and type(wrapped["b"]) is torch.Tensor
    assert [type(t) for t in signature.require(tree, "params")] == [torch.Tensor] * 2
    for other in (
        torch.zeros(2, 3),
        DTensor.from_local(torch.zeros(2, 3), tp, [Shard(1)]),
        DTensor.from_local(torch.zeros(2, 3), grid, [Shard(0)] * 2),
    ):
        with pytest.raises(
            ValueError,
            match=r"params\['w'\]: got float32.*, expected float32\[2,3\] of \[16,3\] S\(0\) over tp=8",
        ):
            signature.require(tree | {"w": other}, "params")
    with pytest.raises(TypeError, match="w'\\]: got a DTensor whose ranks hold parts of a sum.*redistribute"):
        Signature.of({"w": DTensor.from_local(torch.zeros(2), tp, [Partial()])})


def test_another_placement_is_another_form(rank_of):
    _, tp = rank_of(1)
    square = torch.zeros(8, 8)
    trees = [{"w": DTensor.from_local(square, tp, [p])} for p in (Shard(0), Shard(1), Replicate())] + [
        {"w": square}
    ]
    forms = [form_of(*tree_flatten(tree)) for tree in trees]
    for n, form in enumerate(forms):
        for k, tree in enumerate(trees):
            same = same_form(tree, form)
            assert (same is not None) == (n == k)
            assert same is None or (type(same[0]) is torch.Tensor and same[0].data_ptr() == square.data_ptr())
    other = {
        "w": DTensor.from_local(square, init_device_mesh("cpu", (8,), mesh_dim_names=("cp",)), [Shard(0)])
    }
    assert same_form(other, forms[0]) is None


def test_batches_of_dtensors_are_cut_on_every_rank(rank_of):
    _, tp = rank_of(1)
    batch = {"x": DTensor.from_local(torch.arange(12.0).view(6, 2), tp, [Shard(1)])}
    rows = pp.microbatch(batch, 3)
    assert rows[1]["x"].shape == (2, 16) and torch.equal(
        rows[1]["x"].to_local(), torch.tensor([[4.0, 5.0], [6.0, 7.0]])
    )
    joined, stacked = rows.join()["x"], rows.stack()["x"]
    assert joined.shape == (6, 16) and torch.equal(joined.to_local(), batch["x"].to_local())
    assert stacked.placements == (Shard(2),) and stacked.shape == (3, 2, 16)
    assert pp.microbatch({"x": DTensor.from_local(torch.zeros(6, 2), tp, [Shard(0)])}, 3)[0]["x"].shape == (
        16,
        2,
    )
    with pytest.raises(ValueError, match="got 6 rows .* which 4 microbatches do not divide"):
        pp.microbatch(batch, 4)


# -- tracing for any rank
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows and columns", "sequence", "vocabulary"])
def test_one_process_traces_the_programs_of_eight_ranks(rank_of, name):
    """Each has the same collectives, and the shapes of its own parts."""
    model = MODELS[name]._replace(
        shapes={n: tuple(8 * s for s in shape) for n, shape in MODELS[name].shapes.items()}
    )
    programs = []
    for rank in range(RANKS):
        _, tp = rank_of(rank)
        params = pp.stage.shard(model.params(0), tp, lambda name, leaf: model.placements[name])
        x = torch.zeros(B, 8 * T, 8 * D, dtype=torch.float64)
        x = x if model.x is None else x.chunk(RANKS, model.x)[rank]
        program = graph(model.cut(tp), (params, x))
        y, residuals = program.forward(params, x)
        gparams, gx = program.backward(residuals, y)
        assert all(
            gparams[n].placements == t.placements and gparams[n].shape == t.shape for n, t in params.items()
        )
        assert gx.shape == x.shape and program.y == Signature.of(y)
        programs.append([p.__doc__.count("wait_tensor") for p in program.flat])
    assert all(p == programs[0] for p in programs) and sum(programs[0]) > 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def test_one_process_traces_a_module_under_a_plan_for_eight_ranks(rank_of):
    for rank in (0, 5):
        _, tp = rank_of(rank)
        fn, params, state = pp.parallelize(Block(), tp, PLAN)
        program = graph(fn, (params, torch.zeros(2, 8)))
        assert state == {} and {n: t.placements[0] for n, t in params.items()} == {
            "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate(),
        }  # fmt: skip
        assert [
            p.__doc__.count("all_reduce = ") + p.__doc__.count("all_reduce_1 = ") for p in program.flat
        ] == [1, 1, 1, 0]
        assert "DTensor" not in "".join(p.__doc__ for p in program.flat)


# -- parallelize, shard, declared layouts
# --------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_one_parameter_in_two_places_stays_one(rank_of):
    _, tp = rank_of(0)
    one = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    module = Tied()
    _, params, _ = pp.parallelize(module, tp, one)
    assert list(params) == ["embed.weight"] and module.head.weight is module.embed.weight
    for plan in ({"embed": ColwiseParallel(), "head": ColwiseParallel()}, {"embed": RowwiseParallel()}):
        with pytest.raises(
            ValueError,
            match=(
                "one parameter in two places is laid out in two ways, 'embed.weight' is .* and"
                " 'head.weight' is"
            ),
        ):
            pp.parallelize(Tied(), tp, plan)


def test_what_cannot_be_laid_out_is_named(rank_of):
    grid, tp = rank_of(0)
    with pytest.raises(ValueError, match="'upp' is the name of no submodule; the names are up, down"):
        pp.parallelize(Block(), tp, {"upp": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"parallelize: got a mesh with the axes \('dp', 'tp'\)"):
        pp.parallelize(Block(), grid, PLAN)
    with pytest.raises(TypeError, match="parallelize: got function, expected a torch.nn.Module"):
        pp.parallelize(lambda x: x, tp, PLAN)
    tree = {"a": {"w": torch.zeros(8, 3)}, "b": torch.zeros(())}
    laid = pp.stage.shard(tree, grid, lambda name, leaf: [Replicate(), Shard(0)] if name == "a.w" else None)
    assert laid["a"]["w"].placements == (Replicate(), Shard(0)) and laid["b"] is tree["b"]
    for rule, words in (
        (lambda n, t: Shard(0), "a.w: the rule gave Shard.*expected 2 of"),
        (lambda n, t: [Partial(), Shard(0)], "expected 2 of Replicate"),
        (lambda n, t: "S(0)", "expected 2 of"),
        (lambda n, t: [Replicate(), Shard(2)], r"for a tensor of shape \[8, 3\], which lacks that axis"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            pp.stage.shard(tree, grid, rule)
    with pytest.raises(TypeError, match="inputs: got 'S', expected Replicate"):
        pp.with_layouts(lambda p, x: x, tp, inputs="S")


def test_parameters_of_another_placement_than_a_stage_was_made_for_are_refused(rank_of):
    _, tp = rank_of(0)
    module = Block()
    plain = stage_from_module(copy.deepcopy(module)).params
    fn, params, _ = pp.parallelize(module, tp, PLAN)
    step = pp.value_and_grad([fn], lambda y, t: y.sum(), pp.one_f_one_b(1, 1))
    for wrong in (
        plain["up.weight"],
        pp.stage.shard(plain["up.weight"], tp, lambda *_: Shard(1)),
        params["up.weight"].to_local(),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"params\[0\] 'up.weight': got float32.*, the stage was made for a DTensor of \[32,8\] S\(0\)"
            ),
        ):
            step({0: params | {"up.weight": wrong}}, torch.zeros(2, 8), torch.zeros(2))


def test_frozen_parameters_and_integers_come_back_as_zeros_of_their_placement(rank_of):
    _, tp = rank_of(0)
    params = pp.stage.shard({"w": torch.ones(8, 2), "n": torch.arange(16)}, tp, lambda *_: Shard(0))
    step = pp.value_and_grad(
        [lambda p, x: x * p["w"].sum() + p["n"].sum()], lambda y, t: y.sum(), pp.one_f_one_b(1, 1)
    )
    _, grads = step({0: params}, torch.ones(2), torch.ones(2))
    assert (
        grads[0]["n"].dtype == torch.int64
        and grads[0]["n"].shape == (16,)
        and grads[0]["n"].placements == (Shard(0),)
    )
    assert grads[0]["w"].shape == (8, 2)


def test_declared_layouts_follow_a_stage_through_transforms(rank_of):
    _, tp = rank_of(0)
    stage = pp.with_layouts(lambda w, x: x * w, tp, inputs=Shard(1), outputs=Shard(-1))
    dual, (ensemble,) = pp.transforms.dual(stage), pp.ensemble([stage], lambda y, t: y)[0]
    assert dual.boundary.inputs == (Shard(1), Shard(1)) and dual.boundary.mesh is tp
    assert ensemble.boundary.outputs == Shard(-1) and ensemble.boundary.inputs == Shard(
        1
    )  # the batch has no axis of models
    later = pp.ensemble([stage, stage], lambda y, t: y)[0][1]
    assert later.boundary.inputs == Shard(2)


@pytest.mark.xfail(torch.__version__ < "2.12", reason="the history of a DTensor made there says not its own")
def test_a_stage_that_returns_dtensors_says_how_they_lie(rank_of):
    _, tp = rank_of(0)
    for engine in (pp.engines.graph, pp.engines.eager):
        program = engine(
            lambda w, x: DTensor.from_local(x, tp, [Shard(0)]) * DTensor.from_local(w, tp, [Replicate()]),
            (torch.ones(3), torch.ones(2, 3)),
        )
        assert str(program.y) == "float32[2,3] of [16,3] S(0) over tp=8"
        y, residuals = program.forward(torch.ones(3), torch.ones(2, 3))
        assert y.shape == (16, 3) and type(program.backward(residuals, y)[1]) is torch.Tensor
    with pytest.raises(TypeError, match="got a DTensor whose ranks hold parts of a sum"):
        pp.engines.eager(
            lambda w, x: DTensor.from_local(x * w, tp, [Partial()]), (torch.ones(3), torch.ones(2, 3))
        )


def test_dtensors_under_a_transform_of_torch_are_refused(rank_of):
    _, tp = rank_of(0)
    w = pp.stage.shard(torch.ones(8, 2), tp, lambda *_: Shard(0))
    step = pp.value_and_grad([lambda w, x: x * w.sum()], lambda y, t: y.sum(), pp.one_f_one_b(1, 1))
    x = torch.ones(2)
    for run in (
        lambda: torch.func.grad(lambda w: step({0: w}, x, x)[0])(w),
        lambda: torch.func.vmap(lambda x: step({0: w}, x, x)[0])(x[None]),
    ):
        with pytest.raises(ValueError, match=r"params\[0\]: got a DTensor under a torch.func transform"):
            run()


def test_tied_leaves_lie_alike(rank_of):
    _, tp = rank_of(0)
    w = torch.ones(8, 8)
    stages, tied = [lambda w, x: x * w.sum()] * 2, {"w": [(0, ""), (1, "")]}
    step = pp.value_and_grad(stages, lambda y, t: y.sum(), pp.one_f_one_b(2, 1), tied=tied)
    laid = [pp.stage.shard(w, tp, lambda *_, p=p: p) for p in (Shard(0), Shard(0), Replicate())]
    with pytest.raises(
        ValueError,
        match=r"tied\['w'\]: '' of stage 0 is .* S\(0\) over tp=8, '' of stage 1 is .* R over tp=8",
    ):
        step({0: laid[0], 1: laid[2]}, torch.ones(2, 8), torch.ones(2))


def test_a_step_is_lowered_for_signatures_with_layouts(rank_of):
    _, tp = rank_of(0)
    params = {0: pp.stage.shard({"w": torch.ones(8, 2)}, tp, lambda *_: Shard(0))}
    step = pp.value_and_grad([lambda p, x: x * p["w"].sum()], lambda y, t: y.sum(), pp.one_f_one_b(1, 1))
    signatures = {s: Signature.of(tree) for s, tree in params.items()}
    assert (
        str(step.lower(signatures, torch.ones(2), torch.ones(2)).step.form.params[0])
        == "{'w': float32[1,2] of [8,2] S(0) over tp=8}"
    )


def test_a_state_that_lies_otherwise_than_the_one_before_is_refused(rank_of):
    _, tp = rank_of(0)

    def stage(w, x, state):
        return pp.Output(x * w, state=DTensor.from_local(state.clone(), tp, [Replicate()]))

    step = pp.value_and_grad([stage], lambda y, t: y.sum(), pp.one_f_one_b(1, 1), has_aux=True)
    with pytest.raises(
        ValueError,
        match=(
            r"returns the state float32\[1\] of \[1\] R over tp=8.*, it was given float32\[1\] of \[8\]"
            r" S\(0\)"
        ),
    ):
        step(
            {0: torch.ones(2)},
            torch.ones(2),
            torch.ones(2),
            state={0: pp.stage.shard(torch.ones(8), tp, lambda *_: Shard(0))},
        )
