"""Numbers follow from the seed and the name, wherever and beside whatever they are made."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ppfunc as pp
from ppfunc.schedule import dualpipe, interleaved_1f1b, one_f_one_b
from ppfunc.splitter.materialize import materialize


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).tanh())


def on_meta(make, n=4):
    with torch.device("meta"):
        return [make() for _ in range(n)]


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(x, b[name]) for name, x in a.items())


def test_numbers_do_not_depend_on_what_else_is_made():
    blocks = on_meta(Block)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    params = materialize(blocks, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.is_meta for block in blocks for p in block.parameters())
    for stage in range(4):
        alone = materialize([block if n == stage else None for n, block in enumerate(blocks)], seed=7)
        assert list(alone) == [stage] and same(alone[stage], params[stage])
    assert not torch.equal(params[0]["up.weight"], params[1]["up.weight"])
    assert not torch.equal(params[0]["up.weight"], materialize(blocks, seed=8)[0]["up.weight"])
    assert params[0]["norm.weight"].eq(1).all() and 0 < params[0]["up.weight"].std() < 0.5
    assert not any(p.requires_grad for tree in params.values() for p in tree.values())


def test_names_of_the_model_make_cuts_agree():
    """Four stages of one layer, two of two: the same layers."""
    layers = on_meta(Block)
    two = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    first = materialize(layers, names=lambda stage, name: f"{stage}.{name}")

    def name_of(stage, name):
        layer, _, rest = name.partition(".")
        return f"{2 * stage + int(layer)}.{rest}"

    second = materialize(two, names=name_of)
    flat = {name_of(stage, name): p for stage, tree in second.items() for name, p in tree.items()}
    assert same(flat, {f"{stage}.{name}": p for stage, tree in first.items() for name, p in tree.items()})


def test_a_split_knows_the_names_of_its_model():
    def model():
        return nn.Sequential(nn.Embedding(5, 4), Block(), Block(), nn.Linear(4, 5))

    with torch.device("meta"):
        made = model()
    made[3].weight = made[0].weight
    x = torch.zeros(2, 3, dtype=torch.int64)
    trees = [materialize(pp.split(made, x, at=at), seed=1) for at in (["1", "2"], ["2"], ["1", "2", "3"])]
    flat = [{name: p for tree in params.values() for name, p in tree.items()} for params in trees]
    assert same(flat[0], flat[1]) and same(flat[1], flat[2])
    assert torch.equal(
        trees[0][0]["0.weight"], trees[0][2]["0.weight"]
    )  # tied, and each place in memory of its own
    assert trees[0][0]["0.weight"].data_ptr() != trees[0][2]["0.weight"].data_ptr()


def test_tied_places_of_modules_hold_the_same():
    stages = [*on_meta(lambda: nn.Embedding(5, 4), 1), *on_meta(lambda: nn.Linear(4, 5), 1)]
    tied = {"shared": ((0, "weight"), (1, "weight"))}
    params = materialize(stages, tied=tied)
    assert torch.equal(params[0]["weight"], params[1]["weight"])
    assert torch.equal(params[1]["bias"], materialize(stages)[1]["bias"])
    with pytest.raises(
        ValueError, match="weight of stage 0 is tied to a place on this rank.*give the module of stage 0"
    ):
        materialize([None, stages[1]], tied=tied)


def test_functions_of_the_caller():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    stages = on_meta(Scale, 2)
    with pytest.raises(
        ValueError, match=r"nothing gives 0.gain its values: Scale has no reset_parameters\(\)"
    ):
        materialize(stages)

    def init(name, tensor, generator):
        if name.endswith("gain"):
            tensor.normal_(generator=generator)

    params = materialize(stages, init=init)
    assert not torch.equal(params[0]["gain"], params[1]["gain"])
    with torch.no_grad():
        again = materialize(stages, init=init)
    assert torch.equal(again[1]["linear.weight"], params[1]["linear.weight"])


def test_models_that_initialise_their_modules():
    """As those of transformers, and nanoGPT."""

    class Model(nn.Sequential):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.5)

    with torch.device("meta"):
        model = Model(nn.Linear(2, 2), nn.LayerNorm(2))
    params = materialize([model])
    assert (
        params[0]["0.weight"].eq(0.5).all()
        and params[0]["1.weight"].eq(1).all()
        and params[0]["0.bias"].isfinite().all()
    )


def test_a_module_that_has_none_in_the_place_of_its_function_has_another():
    class Private(nn.Module):
        reset_parameters = None

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.empty(3))

        def _reset_parameters(self):
            nn.init.ones_(self.gain)

    assert materialize(on_meta(Private, 1))[0]["gain"].eq(1).all()


def test_odd_leaves():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing, self.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(()))
            self.z, self.none = nn.Parameter(torch.empty(2, dtype=torch.complex64)), None
            self.register_parameter("left_out", None)

        def reset_parameters(self):
            nn.init.normal_(self.scalar)
            nn.init.normal_(self.z)

    (stage,) = on_meta(Odd, 1)
    assert {k: (v.shape, v.dtype) for k, v in materialize([stage])[0].items()} == {
        "nothing": ((0, 3), torch.float32),
        "scalar": ((), torch.float32),
        "z": ((2,), torch.complex64),
    }
    own = nn.Linear(2, 2)
    assert materialize([own])[0]["weight"].data_ptr() == own.weight.data_ptr()
    with torch.device("meta"):
        normed = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match=r"stages\[0\]: its buffer running_mean is on meta"):
        materialize([normed])
    with pytest.raises(TypeError, match=r"stages\[1\]: got 'x' of type str, expected a torch.nn.Mod"):
        materialize([own, "x"])


def of_a_mesh(rank, size, build):
    blocks = on_meta(Block, {"one_f_one_b": 2}.get(build, 4))
    schedule = {"one_f_one_b": one_f_one_b, "interleaved": interleaved_1f1b, "dualpipe": dualpipe}[build](
        2, 4
    )
    blocks = blocks[: len(set(schedule.model_stages))]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    whole, own = materialize(blocks, seed=3), materialize(blocks, schedule, mesh, seed=3)
    with pytest.raises(ValueError, match="no axis 'pipe': its axes are pp, dp"):
        materialize(blocks, schedule, mesh, pipe="pipe")
    with pytest.raises(ValueError, match="the axis 'dp' has 1 ranks, expected 2"):
        materialize(blocks, schedule, mesh, pipe="dp")
    with pytest.raises(ValueError, match="stages: got 1, expected"):
        materialize(blocks[:1], schedule, mesh)
    with pytest.raises(ValueError, match="mesh needs a schedule"):
        materialize(blocks, mesh=mesh)
    return sorted(own), all(same(own[stage], whole[stage]) for stage in own)


@pytest.mark.parametrize(
    ("build", "expected"),
    [("one_f_one_b", ([0], [1])), ("interleaved", ([0, 2], [1, 3])), ("dualpipe", ([0, 1], [0, 1]))],
)
def test_a_rank_of_a_mesh_makes_its_own_stages(two, build, expected):
    assert two(of_a_mesh, build) == [(stages, True) for stages in expected]


def in_the_order_of_the_mesh(rank, size):
    schedule, mesh = pp.gpipe(2, 2), DeviceMesh("cpu", [1, 0], mesh_dim_names=("pp",))
    here = [*materialize(on_meta(Block, 2), schedule, mesh)]
    with pp.P2P(mesh=mesh, timeout=60) as transport:
        return here == [*schedule.model_stages_of(transport.local_ranks(2)[0])]


def test_ranks_are_counted_as_a_pipeline_counts_them(two):
    assert two(in_the_order_of_the_mesh) == [True, True]


def of_a_plan(rank, size):
    (block,), (plain,) = on_meta(Block, 1), on_meta(Block, 1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded, whole = materialize([block], seed=2)[0], materialize([plain], seed=2)[0]
    for name, leaf in sharded.items():
        if isinstance(leaf, DTensor):
            assert torch.equal(leaf.full_tensor(), whole[name])
            assert leaf.to_local().untyped_storage().nbytes() == leaf.to_local().nbytes
        else:
            assert torch.equal(leaf, whole[name])
    return sorted(name for name, leaf in sharded.items() if isinstance(leaf, DTensor))


def of_a_stage(rank, size):
    """A stage of a parallel module: what its plan leaves out is a DTensor too."""
    (block,), (plain,) = on_meta(Block, 1), on_meta(Block, 1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    stage = pp.parallelize(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    params, whole = materialize([block], seed=2, like={0: stage.params})[0], materialize([plain], seed=2)[0]
    with pytest.raises(ValueError, match="like: up.weight has the shape"):
        materialize([plain], like={0: {name: torch.empty(1) for name in whole}})
    alike = all(
        isinstance(p, DTensor) and p.placements == stage.params[name].placements for name, p in params.items()
    )
    return alike and all(torch.equal(p.full_tensor(), whole[name]) for name, p in params.items())


def test_layouts_of_a_stage(two):
    assert two(of_a_stage) == [True, True]


def test_shards_are_slices_of_the_whole(two):
    assert two(of_a_plan) == [["down.bias", "down.weight", "up.bias", "up.weight"]] * 2
