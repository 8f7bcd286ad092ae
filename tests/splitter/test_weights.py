"""Weights of a split: read by stage from files, for a model on meta too; given back under the model's
names.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ppfunc as pp
from ppfunc.stage import StageError
from ppfunc.stage.layout import layout_of, whole as uncut
from tests.splitter import modules as m

AT = ["encoder.1", "decoder.0", "decoder.1"]


def inputs():
    return {"ids": torch.randint(0, 11, (2, 5)), "decoder_ids": torch.randint(0, 11, (2, 4))}


def model_on_meta():
    with torch.device("meta"):
        return m.EncoderDecoder().double().eval()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return m.EncoderDecoder().double().eval()


def unwritten(state):
    """Return a state dict as transformers saves it: one of the tied names."""
    return {name: t.contiguous() for name, t in state.items() if name != "head.weight"}


@pytest.fixture(params=["dict", "file", "folder", "index"])
def weights(request, model, tmp_path):
    held = unwritten(model.state_dict())
    if request.param == "dict":
        return held
    save_file = pytest.importorskip("safetensors.torch").save_file
    if request.param != "index":
        save_file(held, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors" if request.param == "file" else str(tmp_path)
    names, where = list(held), {}
    for n, part in enumerate((names[::2], names[1::2])):
        file = f"model-{n}.safetensors"
        save_file({name: held[name] for name in part}, tmp_path / file)
        where |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tmp_path


def test_a_model_on_meta_is_split_and_loaded(model, weights):
    parts = pp.split(model_on_meta(), kwargs=inputs(), at=AT)
    assert all(t.is_meta for tree in parts.params.values() for t in tree.values())
    loaded = parts.load(weights)
    assert all(t.is_meta for tree in parts.params.values() for t in tree.values())
    assert loaded.tied == parts.tied == pp.split(model, kwargs=inputs(), at=AT).tied
    x = inputs()
    torch.testing.assert_close(m.in_turn(loaded, x)[0], model(**x), rtol=1e-12, atol=1e-12)


def test_stages_of_other_processes_are_not_read(model, weights):
    parts = pp.split(model_on_meta(), kwargs=inputs(), at=AT)
    loaded = parts.load(weights, stages=[3, 1])
    assert list(loaded.params) == [1, 3]
    want = pp.split(model, kwargs=inputs(), at=AT).params
    torch.testing.assert_close(loaded.params, {s: want[s] for s in (1, 3)}, rtol=0, atol=0)


def test_a_tied_parameter_is_one_tensor(model, weights):
    loaded = pp.split(model, kwargs=inputs(), at=AT).load(weights)
    ((first, _), *_, (last, _)) = loaded.tied["embed.weight"]
    assert loaded.params[first]["embed.weight"] is loaded.params[last]["embed.weight"]


def test_buffers_without_values_are_named(model):
    weights = {name: t for name, t in model.state_dict().items() if name != "frequency"}
    loaded = pp.split(model_on_meta(), kwargs=inputs(), at=AT).load(weights)
    with pytest.raises(StageError, match="stage 0: the buffer frequency of the model is on the device meta"):
        m.in_turn(loaded, inputs())


def test_buffers_assigned_to_the_model_later_are_read(model):
    empty = model_on_meta()
    loaded = pp.split(empty, kwargs=inputs(), at=AT).load(
        {n: t for n, t in model.state_dict().items() if n != "frequency"}
    )
    empty.frequency = model.frequency
    x = inputs()
    torch.testing.assert_close(m.in_turn(loaded, x)[0], model(**x), rtol=1e-12, atol=1e-12)


def test_what_is_not_there_or_does_not_fit_is_named(model, tmp_path):
    parts = pp.split(model, kwargs=inputs(), at=AT)
    held = dict(model.state_dict())
    with pytest.raises(
        KeyError,
        match="decoder.0.linear1.bias is not among .* the nearest names are: .*decoder.1.linear1.bias",
    ):
        parts.load({n: t for n, t in held.items() if n != "decoder.0.linear1.bias"})
    with pytest.raises(
        ValueError, match=r"bias.weight: the weights have the shape \[3\], the model has \[16, 1\]"
    ):
        parts.load(held | {"bias.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="stages: got 4, expected a number from 0 to 3"):
        parts.load(held, stages=[4])
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match="with 0 files"):
        parts.load(tmp_path)


def test_names_that_are_one_tensor_in_the_weights_become_two(model):
    weights = dict(model.state_dict())
    weights["decoder.1.linear1.weight"] = weights["decoder.0.linear1.weight"]
    params = pp.split(model, kwargs=inputs(), at=AT).load(weights).params
    one, other = params[2]["decoder.0.linear1.weight"], params[3]["decoder.1.linear1.weight"]
    assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


def test_numbers_for_integers_are_refused_and_others_converted(model, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = m.BatchNorms()
    weights = source.state_dict() | {"first.num_batches_tracked": torch.tensor(1.5)}
    save_file(weights, tmp_path / "model.safetensors")
    for given in (weights, tmp_path):
        with pytest.raises(
            ValueError,
            match="num_batches_tracked: the weights have the dtype torch.float32, the model has torch.int64",
        ):
            pp.split(source, torch.randn(5, m.D), at=["b"]).load(given)


def test_the_state_is_loaded(model):
    torch.manual_seed(1)
    source, empty = m.BatchNorms(), m.BatchNorms()
    for _ in range(3):
        source(torch.randn(5, m.D))
    loaded = pp.split(empty, torch.randn(5, m.D), at=["b"]).load(source.state_dict())
    assert {n: t for tree in loaded.state.values() for n, t in tree.items()}.keys() == {
        n for n, _ in source.named_buffers()
    }
    assert loaded.state[0]["first.num_batches_tracked"] == 3


def test_dtypes_are_those_of_the_model(model, tmp_path):
    weights = {n: t.float() for n, t in unwritten(model.state_dict()).items()}
    pytest.importorskip("safetensors.torch").save_file(weights, tmp_path / "model.safetensors")
    for given in (weights, tmp_path):
        parts = pp.split(model, kwargs=inputs(), at=AT).load(given)
        for name, t in (item for tree in parts.params.values() for item in tree.items()):
            assert t.dtype is torch.float64 and torch.equal(t, weights[name].double())


def test_weights_go_back_under_the_names_of_the_model(model):
    parts = pp.split(model, kwargs=inputs(), at=AT)
    new = {name: t + 1 for tree in parts.params.values() for name, t in tree.items()}
    params = {s: {name: new[name] for name in tree} for s, tree in parts.params.items()}
    state = parts.state_dict(params)
    assert list(state) == list(model.state_dict())
    assert state["head.weight"] is state["embed.weight"] is new["embed.weight"]
    other = m.EncoderDecoder().double()
    other.load_state_dict(state)
    parts.put_back(params, other)
    parts.put_back(params)
    torch.testing.assert_close(model.state_dict(), other.state_dict())
    torch.testing.assert_close(model.embed.weight.detach(), new["embed.weight"])
    some = parts.state_dict({1: params[1]})
    assert set(some) == set(params[1]) | ({"head.weight"} if "embed.weight" in params[1] else set())


def test_places_of_a_tied_parameter_that_differ_are_refused(model):
    parts = pp.split(model, kwargs=inputs(), at=AT)
    params = {s: {name: t + s for name, t in tree.items()} for s, tree in parts.params.items()}
    for use in (parts.state_dict, parts.put_back):
        with pytest.raises(ValueError, match="embed.weight is tied, and its places in the stages .* differ"):
            use(params)


def test_unused_parameters_are_in_the_whole_state_dict():
    model = m.Frozen().double()
    parts = pp.split(model, m.rows(), at=["b"])
    assert parts.state_dict(parts.params).keys() == model.state_dict().keys()
    assert "unused.weight" not in parts.state_dict({0: parts.params[0]})


def test_a_state_is_not_forgotten():
    model = m.BatchNorms().double()
    parts = pp.split(model, m.rows(), at=["b"])
    for use in (parts.state_dict, parts.put_back):
        with pytest.raises(ValueError, match="state: stage 0 is missing, whose buffers the model writes"):
            use(parts.params)
    with pytest.raises(TypeError, match=r"save split.state_dict\(split.params, split.state\) or"):
        copy.copy(parts)
    assert parts.state_dict(parts.params, parts.state).keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="a.weight: the model has none"):
        parts.put_back(parts.params, nn.Linear(2, 2), parts.state)
    with torch.device("meta"):
        empty = m.BatchNorms().double()
    with pytest.raises(ValueError, match="a.weight of the model is on the device meta"):
        parts.put_back(parts.params, empty, parts.state)


def test_a_split_is_shown_short_and_takes_back_its_own_names_only():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    split = pp.split(model, torch.zeros(2, 4), at=["2"])
    assert repr(split) == "<split of Sequential into 2 stages, cut at 2; parameters 40, 40>"
    for call in (split.put_back, split.state_dict):
        with pytest.raises(
            TypeError,
            match=r"params: got NoneType, expected \{stage: \{name: tensor\}\}, such as split.params",
        ):
            call(None)
        with pytest.raises(ValueError, match=r"params: got the stage 9, the split has 2"):
            call({9: {}})
        with pytest.raises(
            ValueError, match=r"params\[0\] lacks '0.bias'; give all names of split.params\[0\]"
        ):
            call({0: {}})
        with pytest.raises(ValueError, match=r"params\[0\] does not know 'x'"):
            call({0: split.params[0] | {"x": torch.zeros(1)}})


def test_weights_of_a_wrong_type_are_refused_by_name(tmp_path):
    parts = pp.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(1, 2), at=["1"])
    (tmp_path / "no.safetensors").write_text("no")
    for weights, kind, message in [
        (
            3,
            TypeError,
            "weights: got 3 of type int, expected a safetensors file, a folder of them, or a state dict",
        ),
        ({0: torch.zeros(1)}, TypeError, "the name 0: got 0 of type int"),
        ({"0.bias": [0.0]}, TypeError, r"0.bias: got \[0.0\] of type list, expected a tensor"),
        (tmp_path / "no.safetensors", ValueError, "no.safetensors is no safetensors file: "),
    ]:
        with pytest.raises(kind, match=message):
            parts.load(weights)
    with pytest.raises(ValueError, match="stages: got 'ab', expected a number from 0 to 1"):
        parts.load({}, ["ab"])
    with pytest.raises(TypeError, match="model: got str, expected a torch.nn.Module"):
        parts.put_back(parts.params, "model")
    with pytest.raises(
        TypeError, match="kwargs: got 3 of type int, expected a dictionary of keyword arguments"
    ):
        pp.split(parts.model, torch.zeros(1, 2), 3, at=["1"])


def cuts_elsewhere(rank, ranks, trains):
    """Each rank splits the same model, whose layers are alike, at another one."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))), torch.ones(8, 8)
    split, schedule = pp.split(model, x[:4], at=["32"[rank]]), pp.one_f_one_b(2, 2)
    with pp.P2P(timeout=60) as transport:
        if trains:
            trainer = pp.Trainer(split, nn.functional.mse_loss, schedule, pp.optim.sgd(0.1), transport)
            params = {rank: split.params[rank]}
            with pytest.raises(pp.AgreementError, match="Sequential cut at [23] .*Sequential cut at [23] "):
                trainer.step(trainer.init(params), x, x)
            return
        step = pp.value_and_grad(split, nn.functional.mse_loss, schedule, transport)
        with pytest.raises(pp.AgreementError, match="Sequential cut at [23] .*Sequential cut at [23] "):
            step({rank: split.params[rank]}, x, x)


@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_cut_a_model_elsewhere_do_not_train_another_model(two, trains):
    """The stages fitted, and a layer was computed twice, or never."""
    two(cuts_elsewhere, trains)


def put_back_whole(rank, ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    parts = pp.split(model, torch.zeros(2, 4), at=["2"])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    x, target = torch.randn(8, 4).chunk(2)[rank], torch.randn(8, 2).chunk(2)[rank]
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", "dp"), shard="params", timeout=60) as transport:
        trainer = pp.Trainer(parts, nn.functional.mse_loss, pp.zbv(1, 2), pp.optim.sgd(0.1), transport)
        state, _ = trainer.step(trainer.init(parts.params), x, target)
        parts.put_back(state.params)
        whole = {name: uncut(t) for tree in state.params.values() for name, t in tree.items()}
    assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    assert any(layout_of(t) for tree in state.params.values() for t in tree.values()), state.params
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_what_is_cut_over_data_ranks_goes_back_whole(two):
    first, second = two(put_back_whole)
    assert all(torch.equal(t, second[name]) for name, t in first.items()) and first


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).tanh())


def split_on_meta(make, at):
    with torch.device("meta"):
        model = make()
        return pp.split(model, torch.zeros(2, 4), at=at)


def test_numbers_depend_on_the_seed_and_the_names_alone():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4))
        model[3].weight = model[0].weight
        return model

    torch.manual_seed(3)
    generator = torch.get_rng_state()
    cuts = [split_on_meta(make, at) for at in (["1", "2"], ["2"], ["1", "2", "2.norm", "3"])]
    flat = [
        {n: p for tree in pp.materialize(parts, seed=1).values() for n, p in tree.items()} for parts in cuts
    ]
    assert torch.equal(generator, torch.get_rng_state())
    for other in flat[1:]:
        torch.testing.assert_close(other, flat[0], rtol=0, atol=0)
    whole, alone = pp.materialize(cuts[0], seed=1), pp.materialize(cuts[0], [2], seed=1)
    assert [*alone] == [2] and torch.equal(alone[2]["0.weight"], whole[0]["0.weight"])  # tied
    assert all(p.is_meta for p in cuts[0].model.parameters())
    one, other = whole[1]["1.up.weight"], whole[2]["2.up.weight"]
    assert not torch.equal(one, other) and 0 < one.std() < 0.5 and whole[1]["1.norm.weight"].eq(1).all()
    assert not torch.equal(one, pp.materialize(cuts[0], seed=2)[1]["1.up.weight"]) and not one.requires_grad


class Own(nn.Module):
    """Parameters of its own, beside the odd ones: empty, without axes, of complex numbers, and left out."""

    reset_parameters = None

    def __init__(self):
        super().__init__()
        self.gain, self.nothing = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(0, 3))
        self.scalar, self.z = (nn.Parameter(torch.empty(n, dtype=torch.complex64)) for n in ((), 2))
        self.register_parameter("left_out", None)

    def _reset_parameters(self):
        nn.init.ones_(self.scalar)
        nn.init.ones_(self.z)

    def forward(self, x):
        return x * self.gain * (self.scalar * self.z.sum()).real + self.nothing.sum()


class Initialising(nn.Sequential):
    """As models of transformers, and nanoGPT."""

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)


def test_modules_the_model_and_the_caller_give_values():
    parts = split_on_meta(lambda: Initialising(Own(), nn.Linear(4, 4)), ["1"])
    with pytest.raises(ValueError, match=r"nothing gives 0.gain its values: Own has no reset_parameters\(\)"):
        pp.materialize(parts)

    def init(name, tensor, generator):
        if name.endswith("gain"):
            tensor.normal_(generator=generator)

    params = pp.materialize(parts, init=init)
    assert torch.equal(params[0]["0.gain"], pp.materialize(parts, [0], init=init)[0]["0.gain"])
    assert params[1]["1.weight"].eq(0.5).all() and params[1]["1.bias"].abs().max() <= 0.5
    assert {n: p.shape for n, p in params[0].items()} == {n: p.shape for n, p in parts.params[0].items()}
    own = pp.split(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), at=1)
    assert pp.materialize(own)[0]["0.weight"].data_ptr() == own.params[0]["0.weight"].data_ptr()
    with pytest.raises(TypeError, match="split: got .*Linear.*, expected a split, as ppfunc.split"):
        pp.materialize([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="stages: got 1 of type int, expected stages, such as"):
        pp.materialize(own, 1)


def laid_out(rank, size):
    def make():
        return nn.Sequential(nn.Linear(4, 4), Block())

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = make()
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model[1].norm = nn.Identity()
    parts = pp.split(model, torch.zeros(2, 4, device="meta"), at=["1"])
    plain = pp.materialize(split_on_meta(make, ["1"]), seed=2)
    leaves = {n: p for tree in pp.materialize(parts, seed=2).values() for n, p in tree.items()}
    cut = {n: p for n, p in leaves.items() if isinstance(p, DTensor)}
    whole = {n: plain[int(n[0])][n] for n in cut}
    assert all(torch.equal(p.full_tensor(), whole[n]) for n, p in cut.items())
    assert all(p.to_local().untyped_storage().nbytes() == p.to_local().nbytes for p in cut.values())
    return sorted(cut)


def test_of_a_dtensor_each_rank_gets_its_slice_of_the_whole(two):
    assert two(laid_out) == [["1.down.bias", "1.down.weight", "1.up.bias", "1.up.weight"]] * 2
