"""An encoder as the last stage of a split, of which copies on all ranks take their share of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ppfunc as pp
from ppfunc import spread
from tests.models import same_bits

V, D, T, P = 19, 8, 6, 2  # vocabulary, width, tokens and patches of an image
IMAGE = V - 1


class Captioner(nn.Module):
    """Tokens and patches; the features of an image take the places of its tokens."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(V, D)
        self.scale = nn.Parameter(torch.ones(D))
        tower = nn.Sequential(nn.Linear(4, D), nn.GELU(), nn.LayerNorm(D))
        self.tower = tower.requires_grad_(not frozen)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, pixels: Tensor | None = None) -> Tensor:
        h = self.wte(ids) * self.scale
        if pixels is not None:
            h = h.masked_scatter((ids == IMAGE).unsqueeze(-1), self.tower(pixels * 2))
        for layer in self.layers:
            h = h + layer(h)
        return self.lm_head(h)


def batch(rows: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(V - 1, (2, rows, T), generator=generator)
    ids[:, 1 : 1 + P] = IMAGE
    pixels = torch.randn(rows, P, 4, generator=generator, dtype=torch.float64)
    return {"ids": ids, "pixels": pixels}, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_name(split: pp.Split, grads: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: g for tree in grads.values() for name, g in tree.items()}


def near_whole(model: nn.Module, split: pp.Split, loss: Tensor, grads: dict, wanted: Tensor) -> None:
    """Compare with the loss of the model in one piece."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = dict(
        zip(params, torch.autograd.grad(wanted, [*params.values()], materialize_grads=True), strict=True)
    )
    torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-12)
    got = by_name(split, grads)
    assert {*got} == {n for n, _ in model.named_parameters()} - {*split.unused}
    for name, grad in got.items():
        assert name in expected or not grad.any(), name
        torch.testing.assert_close(
            grad, expected.get(name, torch.zeros_like(grad)), rtol=0, atol=1e-12, msg=name
        )


SCHEDULE = pp.one_f_one_b(2, 4)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "at", [["layers.2"], 2, pp.parallel.partition_uniform(4, 2)], ids=["names", "number", "layers"]
)
def test_an_encoder_is_the_last_stage_and_reads_the_batch(frozen, at):
    model = Captioner(frozen).double()
    x, labels = batch(8)
    split = pp.split(model, {n: t[:2] for n, t in x.items()}, at=at, encoder="tower")
    assert split.at == pp.split(model, x["ids"], at=at).at and split.skips == ((2, 0),)
    assert [*split.params[2]] == [n for n, _ in model.named_parameters() if n.startswith("tower.")]
    step = pp.value_and_grad(split, loss_of, spread(SCHEDULE))
    loss, grads = step(split.params, x, labels)
    near_whole(model, split, loss, grads, loss_of(model(**x), labels))
    split.put_back(pp.stage.tree.tree_map(lambda p: p + 1, split.params))
    step = pp.value_and_grad(split, loss_of, spread(SCHEDULE))
    torch.testing.assert_close(step(split.params, x, labels)[0], loss_of(model(**x), labels))


def test_a_split_says_its_encoder():
    text = repr(pp.split(Captioner().double(), batch(2)[0], at=["layers.2"], encoder="tower"))
    assert text.startswith("<split of Captioner into 2 stages, cut at layers.2, and the encoder tower;")


def test_microbatches_without_an_image_skip_the_encoder():
    model, (x, labels) = Captioner().double(), batch(8)
    x["ids"][2:6] %= IMAGE  # no tokens of images
    parts = [{n: t[m : m + 2] for n, t in x.items() if n == "ids" or m in (0, 6)} for m in range(0, 8, 2)]
    split = pp.split(model, pp.Microbatches([parts[1], parts[0]]), at=["layers.2"], encoder="tower")
    for microbatches in ([0, 3], None):
        step = pp.value_and_grad(split, loss_of, spread(SCHEDULE, microbatches=microbatches))
        loss, grads = step(split.params, pp.Microbatches(parts), pp.microbatch(labels, 4))
        wanted = sum(loss_of(model(**p), y) for p, y in zip(parts, labels.split(2), strict=True)) / 4
        near_whole(model, split, loss, grads, wanted)
    step = pp.value_and_grad(split, loss_of, spread(SCHEDULE, microbatches=[0, 1]))
    with pytest.raises(pp.StageError, match="reads what tower gives, in a microbatch without the encoder"):
        step(split.params, pp.Microbatches(parts), pp.microbatch(labels, 4))


def in_parts(split: pp.Split, parts: int, microbatches: int = 4) -> tuple:
    """The model with its output layer in parts, and its step arguments."""
    model = pp.vocabulary_parallel(split, parts)
    schedule = spread(pp.with_parts(pp.one_f_one_b(2, microbatches), ranks=range(parts)))
    return model, (model, model.loss_fn, schedule)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("at", [["layers.2"], 2, pp.parallel.partition_uniform(4, 2)])
def test_an_encoder_beside_an_output_layer_in_parts(at, parts):
    model = Captioner().double()
    x, labels = batch(8)
    few = {n: t[:2] for n, t in x.items()}
    split = pp.split(model, few, at=at, output="lm_head", encoder="tower")
    assert split.at == ("layers.2", "lm_head") and split.skips == ((3, 0),)
    assert split.at == pp.split(model, x["ids"], at=at, output="lm_head").at
    whole, arguments = in_parts(split, parts)
    assert whole.skips == ((3 + parts, 0),) and len(whole.stages) == 4 + parts
    loss, grads = pp.value_and_grad(*arguments)(whole.cut(split.params), x, labels)
    near_whole(model, split, loss, whole.join(grads), loss_of(model(**x), labels))
    again = whole.join(whole.cut(split.params))
    assert again.keys() == split.params.keys()
    assert all(same_bits(again[stage], split.params[stage]) for stage in again)
    half = whole.cut({3: split.params[3]})
    assert half.keys() == {3 + parts} and whole.join(half).keys() == {3}


class Listing(Captioner):
    """It returns the features of its images beside logits, as LLaVA does."""

    def forward(self, ids: Tensor, pixels: Tensor) -> dict[str, Tensor]:
        return {"features": self.tower(pixels), "logits": super().forward(ids, pixels)}


def test_a_split_with_an_output_layer_has_its_results_alone():
    x, labels = batch(8)
    split = pp.split(Listing().double(), x, at=2, output="lm_head")
    assert split.skips == () and len(pp.vocabulary_parallel(split, 2).stages) == 5
    plain = pp.split(Listing().double(), x, at=[*split.at])
    assert plain.skips == ((0, 2),)
    with pytest.raises(pp.StageError, match='it takes other values.* output="lm_head"'):
        pp.vocabulary_parallel(plain, 2)
    step = pp.value_and_grad(split, lambda y, _: y["features"].sum(), pp.one_f_one_b(3, 4))
    with pytest.raises(pp.StageError, match="the model returned a Tensor, which a split does not keep"):
        step(split.params, x, labels)


def by_process(rank, size):
    (x, labels), model = batch(8), Captioner().double()
    split = pp.split(model, {n: t[:2] for n, t in x.items()}, at=["layers.2"], encoder="tower")
    schedule = spread(SCHEDULE)
    with pp.P2P(mapped=False) as transport:
        step = pp.value_and_grad(split, loss_of, schedule, transport)
        params = {k: split.params[k] for k in schedule.model_stages_of(rank)}
        return step(params, x, labels if rank else None)


def test_two_processes_give_the_same_bits(two):
    (x, labels), model = batch(8), Captioner().double()
    split = pp.split(model, {n: t[:2] for n, t in x.items()}, at=["layers.2"], encoder="tower")
    loss, grads = pp.value_and_grad(split, loss_of, spread(SCHEDULE))(split.params, x, labels)
    for rank, (mine, theirs) in enumerate(two(by_process)):
        assert same_bits(mine, loss) and {*theirs} == {rank, 2}
        assert all(same_bits(theirs[k], grads[k]) for k in theirs)


def parts_by_process(rank, size):
    (x, labels), model = batch(8), Captioner().double()
    few = {n: t[:2] for n, t in x.items()}
    split = pp.split(model, few, at=2, output="lm_head", encoder="tower")
    whole, (stages, loss_fn, schedule) = in_parts(split, 2)
    cut = whole.cut(split.params)
    with pp.P2P(mapped=False) as transport:
        step = pp.value_and_grad(stages, loss_fn, schedule, transport)
        return step({k: cut[k] for k in schedule.model_stages_of(rank)}, x, labels)


def test_two_processes_with_parts_give_the_same_bits(two):
    (x, labels), model = batch(8), Captioner().double()
    few = {n: t[:2] for n, t in x.items()}
    split = pp.split(model, few, at=2, output="lm_head", encoder="tower")
    whole, arguments = in_parts(split, 2)
    loss, grads = pp.value_and_grad(*arguments)(whole.cut(split.params), x, labels)
    for rank, (mine, theirs) in enumerate(two(parts_by_process)):
        assert same_bits(mine, loss) and {*theirs} == ({0, 2, 5}, {1, 3, 4, 5})[rank]
        assert all(same_bits(theirs[k], grads[k]) for k in theirs)


MISTAKES = {
    "output: got 'head', which is no module of the model; the nearest are lm_head": {"output": "head"},
    "output: got 3": {"output": 3},
    "at: the module layers.1 begins at the same operator as layers.1": {
        "at": ["layers.1"],
        "output": "layers.1",
    },
    "encoder: got 'towr', which is no module of the model; the nearest are tower": {"encoder": "towr"},
    "encoder: the module tower is not called": {"encoder": "tower", "args": batch(2)[0]["ids"]},
    "encoder: got 3": {"encoder": 3},
    "encoder: got a name and slices": {"encoder": "tower", "slices": 2},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(words):
    given = {"args": batch(2)[0], "at": ["layers.2"]} | MISTAKES[words]
    with pytest.raises((TypeError, ValueError), match=words):
        pp.split(Captioner().double(), **given)


class Counting(Captioner):
    """Its tower reads a buffer into which a later stage writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        y = super().forward(ids, pixels + self.seen)
        self.seen.add_(1)
        return y


def test_an_encoder_that_reads_what_another_stage_writes_is_refused():
    with pytest.raises(pp.StageError, match="its encoder reads a buffer that another stage writes into"):
        pp.split(Counting().double(), batch(2)[0], at=["layers.2"], encoder="tower")


def test_what_knows_no_encoder_refuses_it_and_measure_knows_it():
    x, labels = batch(2)
    split = pp.split(Captioner().double(), x, at=["lm_head"], encoder="tower")
    for ranks in (2, 3):
        with pytest.raises(ValueError, match="a split with the encoder tower and the schedule '1f1b'"):
            pp.value_and_grad(split, loss_of, pp.one_f_one_b(ranks, 4))
    plain = pp.split(Captioner().double(), x, at=["layers.2", "lm_head"])
    with pytest.raises(ValueError, match="a split with no encoder and the schedule '1f1b .spread.'"):
        pp.value_and_grad(plain, loss_of, spread(SCHEDULE))
    with pytest.raises(ValueError, match="with the encoder tower, whose values have no axis of samples"):
        pp.per_sample_grad(split, loss_of, spread(SCHEDULE), samples=2)
    with pytest.raises(ValueError, match="model: got a split with the encoder tower"):
        pp.tune(split, x, loss_of, labels, ranks=2, optimizer=pp.optim.sgd(0.1))
    costs = pp.measure(split, split.params, x, loss_of, labels, repeats=1)
    schedule = spread(SCHEDULE, costs=costs)
    assert len(costs.forward) == 3
    assert pp.simulate(schedule, costs.of_stages(schedule.model_stages)).makespan > 0


def llava(transformers):
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8,
        patch_size=4, projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=36)
    ids = torch.randint(36, (4, 9))
    ids[:, 2:6] = 36
    return transformers.LlavaForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": torch.randn(4, 3, 8, 8, dtype=torch.float64),
        "attention_mask": torch.ones_like(ids),
    }, []  # fmt: skip


def qwen(transformers):
    text = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
        "temporal_patch_size": 1, "out_hidden_size": 16, "fullatt_block_indexes": [1], "window_size": 8,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=36, video_token_id=35, vision_start_token_id=34
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    ids, kinds = torch.randint(34, (4, 9)), torch.zeros(4, 9, dtype=torch.int32)
    ids[:, 2:6], kinds[:, 2:6] = 36, 1
    grids = torch.tensor([[1, 4, 4], [1, 4, 4], [1, 8, 2], [1, 4, 4]])
    return model, {
        "input_ids": ids,
        "pixel_values": torch.randn(4 * 16, 3 * 2 * 2, dtype=torch.float64),
        "image_grid_thw": grids,
        # The model would read values of tensors to make them; of rows first, as the other inputs.
        "position_ids": model.model.get_rope_index(ids, kinds, grids)[0].transpose(0, 1),
    }, ["image_grid_thw"]  # fmt: skip


MODELS = {"llava": (llava, "model.vision_tower"), "qwen": (qwen, "model.visual")}


@pytest.mark.parametrize(("frozen", "parts"), [(False, 0), (True, 0), (False, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_vision_language_models_of_transformers(name, frozen, parts):
    transformers = pytest.importorskip("transformers")
    make, tower = MODELS[name]
    torch.manual_seed(0)
    model, x, constants = make(transformers)
    model = model.double()
    model.get_submodule(tower).requires_grad_(not frozen)
    each = [dict(zip(x, rows, strict=True)) for rows in zip(*(t.chunk(4) for t in x.values()), strict=True)]
    for part in [x, *each]:
        part |= {n: t.transpose(0, 1).contiguous() for n, t in part.items() if n == "position_ids"}
    head = "lm_head" if parts else None
    split = pp.split(model, each[0], at=2, output=head, encoder=tower, constants=constants)
    assert all("vis" in n for n in split.params[max(split.params)])
    labels = x["input_ids"].roll(-1, 1)

    def loss_fn(output, labels):
        return loss_of(output.logits, labels)

    data = pp.Microbatches(each), pp.microbatch(labels, 4)
    if parts:
        whole, arguments = in_parts(split, parts)
        step = pp.value_and_grad(*arguments)
        loss, grads = step(whole.cut(split.params), *data)
        grads = whole.join(grads)
    else:
        loss, grads = pp.value_and_grad(split, loss_fn, spread(SCHEDULE))(split.params, *data)
    near_whole(model, split, loss, grads, loss_fn(model(**x), labels))
